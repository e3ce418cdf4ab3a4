"""Receipts, checks and files of pruned models."""
