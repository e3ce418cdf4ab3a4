"""Runs a grid of training runs on one machine, several at once. A sweep resumes after any interruption."""

from .sweep import Outcome, Sweep

__all__ = ["Outcome", "Sweep"]
