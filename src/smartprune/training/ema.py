"""A running average of the weights, which is often better than the last ones: judged and kept in their place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..core import sharding


def ramped(decay: float, step: int) -> float:
    """The decay after so many steps: short memory first, so that the beginning is soon forgotten."""
    return min(decay, (1 + step) / (10 + step))


class Ema:
    """Averages every parameter and every buffer of numbers, such as the statistics of batch norm; others are the model's.

    It holds numbers, not a second model: to use the average, it takes the place of the weights. Removed blocks of a
    frozen model are zero in every step's weights, so they are zero in the average.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
        self.own = tensors  # of the model
        self.average = [sharding.local_tensor(tensor).detach().clone() for tensor in tensors]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After step number ``step``, counted from 1. Nothing waits for a GPU."""
        torch._foreach_lerp_(self.average, self._parts(), 1 - ramped(self.decay, step))

    @torch.no_grad()
    def put_in(self) -> None:
        """The model has the averaged weights from now on."""
        for own, average in zip(self.own, self.average, strict=True):
            sharding.local_tensor(own).copy_(average)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averaged weights in here, and its own again afterwards, bit for bit."""
        kept = [own.clone() for own in self._parts()]
        self.put_in()
        try:
            yield
        finally:
            self.average, kept = kept, self.average
            self.put_in()
            self.average = kept

    def state(self) -> list[Tensor]:
        """The averages, in whole."""
        return [sharding.full_tensor(sharding.from_local(a, own)) for a, own in zip(self.average, self.own, strict=True)]

    def load(self, state: Sequence[Tensor]) -> None:
        for own, average, saved in zip(self.own, self.average, state, strict=True):
            if saved.shape != own.shape:
                raise ValueError(f"an average of {tuple(saved.shape)} for a tensor of {tuple(own.shape)}")
            average.copy_(sharding.local_tensor(sharding.shard_like(saved, own)))

    def _parts(self) -> list[Tensor]:
        return [sharding.local_tensor(tensor).detach() for tensor in self.own]
