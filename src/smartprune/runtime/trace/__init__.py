"""Recording what a model computes as a graph."""
