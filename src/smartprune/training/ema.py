"""A moving average of the weights. It is often better than the last weights, so the run evaluates and saves it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..core import sharding


def decay_at(decay: float, step: int) -> float:
    """The decay after so many steps. It starts low, so that the first weights are soon forgotten."""
    return min(decay, (1 + step) / (10 + step))


class Ema:
    """The average of every parameter and of every floating-point buffer, such as batch-norm statistics.

    It holds tensors, not a second model: to use the average, it is copied into the model. Removed blocks of a frozen
    model are zero at every step, so they are zero in the average.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]  # of the model
        self.average = [sharding.local_tensor(tensor).detach().clone() for tensor in self.tensors]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Updates the average after a step; the first step is number 1. Does not synchronize with the GPU."""
        torch._foreach_lerp_(self.average, self._parts(), 1 - decay_at(self.decay, step))

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Replaces the weights of the model by the average."""
        for tensor, average in zip(self.tensors, self.average, strict=True):
            sharding.local_tensor(tensor).copy_(average)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """A context in which the model has the averaged weights. Its own weights are restored bit for bit."""
        weights = [part.clone() for part in self._parts()]
        self.copy_to_model()
        try:
            yield
        finally:
            self.average, weights = weights, self.average
            self.copy_to_model()
            self.average = weights

    def state(self) -> list[Tensor]:
        """The averages as whole tensors, also where the model is sharded."""
        return [sharding.full_tensor(sharding.from_local(a, tensor)) for a, tensor in zip(self.average, self.tensors, strict=True)]

    def load_state(self, state: Sequence[Tensor]) -> None:
        for tensor, average, saved in zip(self.tensors, self.average, state, strict=True):
            if saved.shape != tensor.shape:
                raise ValueError(f"the average has shape {tuple(saved.shape)} for a tensor of shape {tuple(tensor.shape)}")
            average.copy_(sharding.local_tensor(sharding.shard_like(saved, tensor)))

    def _parts(self) -> list[Tensor]:
        return [sharding.local_tensor(tensor).detach() for tensor in self.tensors]
