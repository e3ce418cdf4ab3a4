"""Comparisons, sweeps and benchmarks over many runs."""
