"""Fixtures of the task tests."""

from helpers.task_folders import folder

__all__ = ["folder"]
