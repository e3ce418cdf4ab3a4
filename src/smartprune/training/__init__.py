"""The training job behind ``smartprune train``."""
