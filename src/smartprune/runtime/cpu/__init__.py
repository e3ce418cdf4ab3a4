"""The compiled CPU backend."""
