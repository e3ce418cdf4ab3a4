"""What blocks cost on an NPU."""
