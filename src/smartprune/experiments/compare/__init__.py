"""Compares finished runs: a table of methods by sparsity, with mean, standard deviation and n.

Runs are grouped by task, model, block and protocol. Settings of a method that differ from its defaults become part of its
name. A folder that cannot be used is listed with the reason, and the other runs are still compared.
"""

from .comparison import Comparison, Row, compare

__all__ = ["Comparison", "Row", "compare"]
