"""Pruning without training: blocks are removed with the second moments of the layers' inputs, and the others are refitted."""
