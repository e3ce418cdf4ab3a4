"""Inference time of pruned models in several engines."""
