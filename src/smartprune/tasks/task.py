"""The contract of a task. Only a task knows what a batch is; the training loop hands it from ``data`` to ``loss``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from ..config import Recipe


class Data(Protocol):
    """One split of the data."""

    def steps(self, size: int) -> int:
        """Batches of this size in one epoch."""
        ...

    def batches(self, size: int, seed: int, epoch: int, first: int = 0) -> Iterator[Any]:
        """The batches of an epoch from number ``first`` on.

        Order and augmentation depend on (seed, epoch) and a sample's place alone, never on what was drawn before: a
        run that is resumed in the middle of an epoch then sees the very same batches.
        """
        ...


class Task(Protocol):
    """A frozen dataclass whose fields are the task's settings, with these members."""

    recipe: ClassVar[Recipe]
    models: ClassVar[tuple[str, ...]]  # names in MODELS that fit, and those of networks of the task's own
    measure: ClassVar[str]  # what the metric is called, such as "accuracy"

    def model(self, name: str) -> nn.Module:
        """A fresh network for this task, on the CPU."""
        ...

    def example(self) -> Any:
        """One input of the model (batch of one): for counting MACs and for export."""
        ...

    def data(self, split: str, device: torch.device) -> Data:
        """``"train"``, ``"validation"`` (to choose settings by; it may be empty) or ``"test"`` (for results only)."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The training loss of one batch, a scalar."""
        ...

    def metric(self, model: nn.Module, data: Data) -> float:
        """How good the model is on a split, higher is better. The caller sets eval mode and turns gradients off."""
        ...


def generator(seed: int, epoch: int) -> torch.Generator:
    """Random numbers that depend on the seed and the epoch alone."""
    return torch.Generator().manual_seed((seed << 24) + epoch)
