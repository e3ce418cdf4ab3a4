"""Helpers that several test files use. Import them as ``from helpers.zoo import plain_cnn``."""
