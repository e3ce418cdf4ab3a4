"""The contract of a method: settings, pure functions from blocks and state to a mask, and declared capabilities."""

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
    """The position of a search after an optimizer step: ``count`` of ``steps`` are done."""

    count: int
    steps: int

    @property
    def progress(self) -> float:
        return self.count / self.steps

    def enters(self, parts: int) -> int | None:
        """If the search is divided into ``parts`` equal parts: the index of the part that this step entered, else None.

        >>> [Clock(count, 10).enters(4) for count in range(1, 11)]
        [None, None, 1, None, 2, None, None, 3, None, None]
        """
        part = self.count * parts // self.steps
        return part if part != (self.count - 1) * parts // self.steps and part < parts else None


@dataclass(frozen=True)
class Change:
    """What a method changes after a step: values of its state, weights (multiplied in place by a mask [n]), and whether optimizers
    reset the momentum of the model's parameters."""

    state: State = field(default_factory=dict)
    multiply: Tensor | None = None
    forget: bool = False


@dataclass(frozen=True)
class Capabilities:
    """What the engine must know about a method. A method declares an attribute or property of the same name where it differs from
    the default, so a method that declares none of them works."""

    trains_weights: bool = True
    """The pruned weights train during the search."""
    needs_whole_weights: bool = False
    """Every forward pass reads all weights at once. FSDP, which splits them, is then refused."""
    straight_through: bool = False
    """A weight gets the gradient of the masked weight, without the mask."""
    plain_autograd: bool = False
    """Gradients of ``mask`` or ``amplify`` use PyTorch's own operations, whose graph allows one backward pass. The pruner then
    keeps the graph, so that more than one backward pass is possible."""
    needs_float64: bool = True
    """It computes in float64 on the device of the weights. A device without float64 numbers is then refused."""
    why_not_capturable: str | None = "the method decides on the host between steps"
    """Why a search step cannot be recorded as a CUDA graph. None: it can, since every step launches the same kernels on tensors
    that stay in place."""


def capabilities(method: Any) -> Capabilities:
    """The capabilities that a method declares, with defaults for the others.

    >>> capabilities(object()).trains_weights
    True
    """
    names = [f.name for f in dataclasses.fields(Capabilities)]
    return Capabilities(**{name: getattr(method, name) for name in names if hasattr(method, name)})


class Method(Protocol):
    """The contract of a method: a frozen dataclass of settings with pure functions. Tensors in a state have one entry per block,
    [n].

    Required functions:

    - ``check(blocks, steps)`` raises if the settings cannot work. ``attach`` calls it once.
    - ``state(blocks)`` returns the initial state: tensors and floats. The user's optimizer trains the tensors that require grad.
    - ``scalars(blocks, state, progress)`` returns numbers that depend on progress in [0, 1]. The state holds them as 0-dim
    tensors
      on the device, so ``mask`` never waits for the host.
    - ``mask(blocks, state, seed)`` returns the mask of a forward pass, [n] in [0, 1]. Random methods draw from ``seed``, which is
      None in evaluation.
    - ``rank(blocks, state)`` returns the numbers that decide the hard mask. Blocks with higher numbers are kept.

    Optional functions:

    - ``update(blocks, state, clock)`` returns a :class:`Change` after every optimizer step.
    - ``penalty(blocks, state)`` returns a scalar that the user adds to the loss through ``pruner.penalty()``.
    - ``calibrates(clock)`` is True while the method only observes gradients. No parameter of the model moves then, and
      ``state["watched"]`` holds the sum of ``|gradient * weight|`` over every block, [n], for ``update``.
    - ``amplify(blocks, mask)`` returns the factors that multiply the weights, if these are not the mask. A hard mask must be
      returned unchanged.
    - ``warmth(blocks, state)`` returns the distance of the soft mask to its hard form. ``freeze`` raises if it is too large.
    - ``with_order(state, order)`` returns the initial state with scores in the order of ``attach(start=order)``, [n].
    - ``floor(blocks)`` returns the fewest blocks that each layer keeps, [layers], in place of the floor of the budget.
    - ``final(blocks, state)`` returns the hard mask, bool [n], of a method that does not follow the budget.

    Optional attributes: the fields of :class:`Capabilities`.

    Attributes:
        name: The name on the command line and in receipts.

    Examples:
        >>> import smartprune as sp
        >>> method: sp.Method = sp.Gradual()
        >>> method.name
        'gradual'
    """

    name: ClassVar[str]

    def check(self, blocks: Blocks, steps: int) -> None: ...
    def state(self, blocks: Blocks) -> State: ...
    def scalars(self, blocks: Blocks, state: State, progress: float) -> dict[str, float]: ...
    def mask(self, blocks: Blocks, state: State, seed: int | None) -> Tensor: ...
    def rank(self, blocks: Blocks, state: State) -> Tensor: ...


M = TypeVar("M")


def settings(method: Any) -> dict[str, Any]:
    """The settings of a method as plain values."""
    return dataclasses.asdict(method)


def make(cls: type[M], values: dict[str, Any]) -> M:
    """Makes a method from plain values. The error for an unknown setting lists the known ones."""
    _require_known(cls, values)
    return cls(**values)


def lists_settings(cls: type[M]) -> type[M]:
    """Class decorator: an unknown setting raises the same error as in :func:`make`, in place of a TypeError."""
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
    """Raises unless the value is one of the allowed ones."""
    if value not in allowed:
        raise SmartpruneError(f"{where}={value!r} is not known; it can be: {', '.join(map(str, allowed))}")


def within(where: str, value: Any, low: float, high: float) -> None:
    """Raises unless the value is a number in [low, high]."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high:
        raise SmartpruneError(f"{where}={value!r} is outside [{low:g}, {high:.10g}]")


def count(where: str, value: Any) -> None:
    """Raises unless the value is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise SmartpruneError(f"{where}={value!r} must be an integer, at least 1")
