"""Distillation: the outputs of the pruned model are pulled towards the outputs of the dense model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..tasks.distance import Distance


class Teacher:
    """The dense model in evaluation mode. It gets the inputs of the student; the distance of the outputs is added to the loss."""

    def __init__(self, model: nn.Module, distance: Distance, weight: float, temperature: float) -> None:
        self.model = model.eval().requires_grad_(False)
        self.distance, self.weight, self.temperature = distance, weight, temperature
        self._call: tuple[Any, Any, Any] | None = None  # inputs and output of the student's last forward pass
        self._hook: Any = None

    def attach(self, student: nn.Module) -> None:
        """Records the forward passes of this student, in place of an earlier one."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = student.register_forward_hook(self._record, with_kwargs=True)

    def _record(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._call = (args, kwargs, output)

    def loss(self) -> Tensor:
        """The weighted distance for the student's last forward pass."""
        assert self._call is not None, "the student had no forward pass yet"
        (args, kwargs, output), self._call = self._call, None
        with torch.no_grad():
            target = self.model(*args, **kwargs)
        return self.weight * self.distance(output, target, self.temperature)
