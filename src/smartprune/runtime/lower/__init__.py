"""A recorded graph as steps of the runtime."""
