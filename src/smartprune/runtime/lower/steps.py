"""Steps: the operations on whole tensors that the runtime has kernels for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import fx

Shape = tuple[int, ...]
Array = Any  # a numpy array of float32


@dataclass(frozen=True)
class Activation:
    """The function applied to a result: ``clamp`` between two bounds (ReLU, ReLU6), or another one by name."""

    name: str = "clamp"
    low: float = -math.inf
    high: float = math.inf
    slope: float = 0.0

    @property
    def is_identity(self) -> bool:
        return self == IDENTITY


IDENTITY = Activation()


@dataclass(eq=False)
class Step:
    """One operation on whole tensors with the axes (images, channels, rows, columns)."""

    kind: str
    node: fx.Node
    inputs: list[fx.Node]
    rows: bool = False  # the last axis holds the channels and all others are rows: linear layers on more than two axes
    weight: Array | None = None  # convolution: [out, in, kh, kw]; depthwise: [channels, kh, kw]
    bias: Array | None = None  # also of an affine step
    scale: Array | None = None  # of an affine step; of a bilinear step, input pixels per output pixel
    activation: Activation = IDENTITY
    addition: str = "none"  # the last input is added "before" or "after" the activation
    broadcast: bool = False  # the second of two inputs has one value per channel
    window: dict[str, int] = field(default_factory=dict)
    index: Array | None = None  # of a gather: the position of every number among those of the input, -1 for zero
    layer: str = ""  # the module of the network whose weight it has

    @property
    def rows_values(self) -> list[fx.Node]:
        """The values that are stored as rows, among the result and the inputs. A gather reads values of both kinds."""
        return [] if not self.rows else [self.node] if self.kind == "gather" else [self.node, *self.inputs]

    @property
    def is_foldable(self) -> bool:
        """Whether a scale per output channel can be folded into it."""
        return self.kind in ("conv", "depthwise", "affine") and self.activation.is_identity and self.addition == "none"
