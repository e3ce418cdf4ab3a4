"""The contract of a task, and functions that tasks share. The training loop passes batches from ``data`` to ``loss`` unread."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from ..errors import SmartpruneError
from ..recipe import Recipe

SPLITS = ("train", "validation", "test")


class Data(Protocol):
    """One split of the data.

    Optional: ``still()`` returns the split with every sample once, in order and without augmentation. It is needed to
    evaluate a model on the training split.
    """

    def steps(self, size: int) -> int:
        """Batches of this size in one epoch."""
        ...

    def batches(self, size: int, seed: int, epoch: int, first: int = 0) -> Iterator[Any]:
        """The batches of an epoch, starting with number ``first``.

        Optional parameter: ``every: int = 1`` yields only every n-th batch. Several processes share an epoch this way.
        Without it, each process prepares all batches and uses its own.

        Order and augmentation of a sample depend only on seed, epoch and its position in the epoch. A run that is
        resumed in the middle of an epoch then gets the same batches.
        """
        ...


class Task(Protocol):
    """A frozen dataclass whose fields are the settings of the task, with these members.

    Optional: ``distance(output, target, temperature)``, a scalar distance between the outputs of the model and of the
    dense model for the same input. ``--distill`` needs it. :func:`smartprune.tasks.distance.soft_distance` works for
    classifiers of images and of pixels.
    """

    recipe: ClassVar[Recipe]
    models: ClassVar[tuple[str, ...]]  # names from MODELS, and names of the task's own networks
    measure: ClassVar[str]  # name of the metric, such as "accuracy"

    def model(self, name: str) -> nn.Module:
        """A new network for this task, on the CPU."""
        ...

    def example(self) -> Any:
        """One input of the model with batch size one, to count MACs and to export."""
        ...

    def data(self, split: str, device: torch.device) -> Data:
        """``"train"``, ``"validation"`` (to choose settings; may be empty) or ``"test"`` (for results only)."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The training loss of one batch, a scalar."""
        ...

    def metric(self, model: nn.Module, data: Data) -> float | None:
        """The metric of the model on a split; higher is better. The caller sets eval mode and disables gradients.

        ``None`` means that the package that computes the metric is not installed. Such a task is a :class:`DeferredTask`.
        """
        ...


class DeferredTask(Task, Protocol):
    """A task whose predictions can be saved and scored later, or on another machine."""

    needs: ClassVar[str]  # the package that computes the metric, and how to install it

    def predictions(self, model: nn.Module, data: Data) -> list[dict[str, Any]]:
        """The predictions of the model on a split, as plain data. They are saved in the run folder."""
        ...

    def score(self, predictions: object, split: str) -> dict[str, float] | None:
        """Metrics by name, ``measure`` first, or ``None`` if the package that computes them is not installed.

        ``predictions`` may come from a file, so they are checked.
        """
        ...


def generator(seed: int, epoch: int) -> torch.Generator:
    """A random generator that depends only on seed and epoch."""
    return torch.Generator().manual_seed((seed << 24) + epoch)


def every_batch(data: Data, size: int, seed: int, epoch: int, first: int, every: int) -> Iterator[Any]:
    """Every n-th batch of an epoch from number ``first`` on, for data with and without the parameter ``every``."""
    if every == 1:
        return data.batches(size, seed, epoch, first)
    if "every" in inspect.signature(data.batches).parameters:
        return data.batches(size, seed, epoch, first, every=every)  # type: ignore[call-arg]
    return islice(data.batches(size, seed, epoch, first), 0, None, every)


def check_split(task: str, split: str) -> None:
    if split not in SPLITS:
        raise SmartpruneError(f"{task}: split={split!r} is unknown; use train, validation or test")


def step_count(samples: int, size: int, training: bool) -> int:
    """Batches per epoch. Training drops an incomplete last batch, but has at least one batch."""
    return max(1, samples // size) if training else -(-samples // size)


def accuracy(model: nn.Module, data: Data, size: int) -> float:
    """Share of correct predictions (top-1) of a classifier."""
    correct = torch.zeros((), dtype=torch.int64)
    total = 0
    for images, labels in data.batches(size, seed=0, epoch=0):
        correct = correct.to(labels.device) + (model(images).argmax(1) == labels).sum()
        total += len(labels)
    return int(correct) / total
