"""The contract of a method: settings, and pure functions from blocks and state to a mask."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor

from ..errors import SmartpruneError
from ..layers import Blocks

State = dict[str, Any]


class Method(Protocol):
    """A frozen dataclass whose fields are its settings, and these functions. All tensors in a state are per block, [n].

    - ``check(blocks, steps)`` raises where the settings cannot work; called once, by attach.
    - ``state(blocks)`` gives the state at the start: tensors [n] (those that require grad are trained by the
      user's optimizer), or floats.
    - ``scalars(blocks, state, progress)`` gives numbers that change with progress in [0, 1]; they appear in the
      state as 0-dim tensors on the device, so that :meth:`mask` never waits for the host.
    - ``mask(blocks, state, seed)`` gives the mask, [n] in [0, 1], at every forward pass; random methods draw from
      ``seed``, which is None in evaluation.
    - ``update(blocks, state, progress)``, optional, gives new values for tensors of the state, after every
      optimizer step.
    - ``rank(blocks, state)`` gives the numbers by which the hard mask is chosen at the end; highest are kept.
    """

    name: ClassVar[str]

    def check(self, blocks: Blocks, steps: int) -> None: ...
    def state(self, blocks: Blocks) -> State: ...
    def scalars(self, blocks: Blocks, state: State, progress: float) -> dict[str, float]: ...
    def mask(self, blocks: Blocks, state: State, seed: int | None) -> Tensor: ...
    def rank(self, blocks: Blocks, state: State) -> Tensor: ...


M = TypeVar("M")


def settings(method: Any) -> dict[str, Any]:
    """A method's settings as plain values."""
    return dataclasses.asdict(method)


def make(cls: type[M], values: dict[str, Any]) -> M:
    """A method from plain values; an unknown setting lists those there are."""
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise SmartpruneError(f"unknown setting {name!r} for {cls.__name__}; it has: {', '.join(known)}")
    return cls(**values)


def choose(where: str, value: Any, allowed: Any) -> None:
    """Raises unless a setting has one of the allowed values."""
    if value not in allowed:
        raise SmartpruneError(f"{where}={value!r} is not known; it can be: {', '.join(map(str, allowed))}")
