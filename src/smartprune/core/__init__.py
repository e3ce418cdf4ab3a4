"""Blocks, layers, budgets and masks: the vocabulary that every other package uses."""
