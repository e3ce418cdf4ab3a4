"""The runtime on a GPU."""
