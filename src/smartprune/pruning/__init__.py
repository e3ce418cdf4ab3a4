"""Attaching masks to a model, following its training, and hardening the mask."""
