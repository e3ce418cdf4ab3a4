"""Distillation: the pruned model is to answer as the dense one does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..tasks.distance import Distance


class Teacher:
    """The dense model. It sees what the student sees, in evaluation mode, and the distance of their outputs joins the loss."""

    def __init__(self, model: nn.Module, distance: Distance, weight: float, temperature: float) -> None:
        self.model = model.eval().requires_grad_(False)
        self.distance, self.weight, self.temperature = distance, weight, temperature
        self._heard: tuple[Any, Any, Any] | None = None
        self._hook: Any = None

    def watch(self, student: nn.Module) -> None:
        """From now on this is the student."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = student.register_forward_hook(self._hear, with_kwargs=True)

    def _hear(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if torch.is_grad_enabled():
            self._heard = (args, kwargs, out)

    def loss(self) -> Tensor:
        """Of the student's last forward pass."""
        assert self._heard is not None, "the student has not been asked yet"
        (args, kwargs, out), self._heard = self._heard, None
        with torch.no_grad():
            wanted = self.model(*args, **kwargs)
        return self.weight * self.distance(out, wanted, self.temperature)
