"""Models of other packages, small and with random weights, and the stages that pruning takes each of them through."""
