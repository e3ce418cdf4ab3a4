"""A network as C source: one file with its weights, its operations and the kernels that they need."""
