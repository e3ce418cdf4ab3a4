"""What a model computes, recorded as a graph."""
