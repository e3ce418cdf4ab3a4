"""Distillation: the pruned model is to answer as the dense one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Distance = Callable[[Any, Any, float], Tensor]  # of outputs: the student's, the teacher's, at a temperature


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


def soft_distance(out: Any, wanted: Any, temperature: float) -> Tensor:
    """``T^2 KL(softmax(wanted / T), softmax(out / T))``, averaged over samples and pixels (Hinton et al. 2015).

    Classes are the second axis. Of a model with several heads, the first is compared.
    """
    out, wanted = (logits[0] if isinstance(logits, (tuple, list)) else logits for logits in (out, wanted))
    student, teacher = (F.log_softmax(logits.float() / temperature, 1) for logits in (out, wanted))
    each = F.kl_div(student, teacher, reduction="none", log_target=True).sum(1)
    return temperature**2 * each.mean()
