"""The contract of a method: settings, and pure functions from blocks and state to a mask."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor

from ..core.vector import Blocks
from ..errors import SmartpruneError

State = dict[str, Any]


@dataclass(frozen=True)
class Clock:
    """Where a search stands after an optimizer step: ``count`` steps of ``steps`` are done."""

    count: int
    steps: int

    @property
    def progress(self) -> float:
        return self.count / self.steps

    def enters(self, parts: int) -> int | None:
        """The number of the part of the search that this step entered, if ``parts`` equal ones divide it; else None.

        >>> [Clock(count, 10).enters(4) for count in range(1, 11)]
        [None, None, 1, None, 2, None, None, 3, None, None]
        """
        part = self.count * parts // self.steps
        return part if part != (self.count - 1) * parts // self.steps and part < parts else None


@dataclass(frozen=True)
class Change:
    """What a method wants changed after a step: values of its state; weights multiplied by a mask [n] in place;
    the momentum of the model's parameters forgotten."""

    state: State = field(default_factory=dict)
    multiply: Tensor | None = None
    forget: bool = False


class Method(Protocol):
    """A frozen dataclass whose fields are its settings, with these functions. Tensors in a state are [n], per block.

    - ``check(blocks, steps)`` raises where the settings cannot work; called once, by attach.
    - ``state(blocks)`` gives the state at the start: tensors (those that require grad are trained by the user's
      optimizer), or floats.
    - ``scalars(blocks, state, progress)`` gives numbers that change with progress in [0, 1]; they appear in the
      state as 0-dim tensors on the device, so that ``mask`` never waits for the host.
    - ``mask(blocks, state, seed)`` gives the mask, [n] in [0, 1], at every forward pass; random methods draw from
      ``seed``, which is None in evaluation.
    - ``rank(blocks, state)`` gives the numbers by which the hard mask is chosen at the end; highest are kept.

    Optional:

    - ``update(blocks, state, clock)`` gives a :class:`Change`, after every optimizer step.
    - ``penalty(blocks, state)`` gives a scalar that the user adds to the loss, by ``pruner.penalty()``.
    - ``calibrates(clock)``: True while the method only watches: no parameter of the model moves then, and ``update``
      finds in ``state["watched"]`` the sum of ``|gradient * weight|`` over every block, [n].
    - ``amplify(blocks, mask)`` gives what weights are multiplied by in place of the mask; a hard one must come back as it is.
    - ``plain``: True where gradients of the mask, or of ``amplify``, go through torch's own operations, which stand one backward
      pass; the pruner then keeps what more than one need.
    - ``warmth(blocks, state)``: how far the soft mask is from its hard form at the end; too far raises.
    - ``floor(blocks)``: the fewest blocks each layer keeps, [number of layers], where that is not the budget's own floor.
    - ``final(blocks, state)``: the hard mask itself, bool [n], of a method that does not keep to the budget.
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
    _require_known(cls, values)
    return cls(**values)


def lists_settings(cls: type[M]) -> type[M]:
    """The dataclass, which then says the same of an unknown setting wherever it is made."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: M, *args: Any, **values: Any) -> None:
        _require_known(cls, values)
        init(self, *args, **values)

    cls.__init__ = checked  # type: ignore[assignment, method-assign]
    return cls


def _require_known(cls: type[Any], values: dict[str, Any]) -> None:
    known = [f.name for f in dataclasses.fields(cls)]
    for name in values:
        if name not in known:
            raise SmartpruneError(f"unknown setting {name!r} for {cls.__name__}; it has: {', '.join(known)}")


def choose(where: str, value: Any, allowed: Any) -> None:
    """Raises unless a setting has one of the allowed values."""
    if value not in allowed:
        raise SmartpruneError(f"{where}={value!r} is not known; it can be: {', '.join(map(str, allowed))}")


def within(where: str, value: Any, low: float, high: float) -> None:
    """Raises unless a setting is a number in [low, high]."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high:
        raise SmartpruneError(f"{where}={value!r} is outside [{low:g}, {high:.10g}]")


def count(where: str, value: Any) -> None:
    """Raises unless a setting is an integer of at least one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise SmartpruneError(f"{where}={value!r} must be an integer, at least 1")
