"""Compiling a part of a network into a program of C kernels for the CPU."""
