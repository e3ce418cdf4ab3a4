"""The contract of a task. Only a task knows what a batch is; the training loop hands it from ``data`` to ``loss``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from ..recipe import Recipe


class Data(Protocol):
    """One split of the data.

    Optional: ``still()``, the same with every sample once, in order and as it is; to judge a model on the training split needs it.
    """

    def steps(self, size: int) -> int:
        """Batches of this size in one epoch."""
        ...

    def batches(self, size: int, seed: int, epoch: int, first: int = 0) -> Iterator[Any]:
        """The batches of an epoch from number ``first`` on.

        May take ``every: int = 1`` as well: only every so many-th of them. Several processes share an epoch that way, and
        without it each makes all batches ready to take its own.

        Order and augmentation depend on (seed, epoch) and a sample's place alone, never on what was drawn before: a
        run that is resumed in the middle of an epoch then sees the very same batches.
        """
        ...


class Task(Protocol):
    """A frozen dataclass whose fields are the task's settings, with these members.

    Optional: ``distance(out, wanted, temperature)``, a scalar that says how far the model's output is from the dense
    model's for the same input; ``--distill`` needs it. :func:`smartprune.distill.soft_distance` serves classifiers, of
    pictures or of pixels.
    """

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

    def metric(self, model: nn.Module, data: Data) -> float | None:
        """How good the model is on a split, higher is better. The caller sets eval mode and turns gradients off.

        None: what judges the model is not installed here. Such a task is also a :class:`Deferred` one.
        """
        ...


class Deferred(Task, Protocol):
    """A task whose models can be judged without them, later or elsewhere, by what they found."""

    needs: ClassVar[str]  # what judges, and how it is installed

    def predictions(self, model: nn.Module, data: Data) -> list[dict[str, Any]]:
        """What the model finds on a split, as plain data; it is kept beside a run."""
        ...

    def score(self, found: object, split: str) -> dict[str, float] | None:
        """Figures by name, the task's measure first; None if what judges is not installed here.

        ``found`` may come from a file, so it is checked.
        """
        ...


def generator(seed: int, epoch: int) -> torch.Generator:
    """Random numbers that depend on the seed and the epoch alone."""
    return torch.Generator().manual_seed((seed << 24) + epoch)


def every_batch(data: Data, size: int, seed: int, epoch: int, first: int, every: int) -> Iterator[Any]:
    """Every so many-th batch of an epoch from number ``first`` on, also of data that knows no ``every``."""
    if every == 1:
        return data.batches(size, seed, epoch, first)
    if "every" in inspect.signature(data.batches).parameters:
        return data.batches(size, seed, epoch, first, every=every)  # type: ignore[call-arg]
    return islice(data.batches(size, seed, epoch, first), 0, None, every)
