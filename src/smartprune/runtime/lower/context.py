"""What handlers know about the network, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .steps import Array, Shape, Step


@dataclass
class Context:
    """What a handler needs to know about the network."""

    modules: Mapping[str, nn.Module]
    shapes: Mapping[fx.Node, Shape]
    rows: set[fx.Node]  # nodes whose value is stored as rows

    def shape(self, node: object) -> Shape | None:
        return self.shapes.get(node) if isinstance(node, fx.Node) else None

    def is_map(self, x: object) -> bool:
        """Whether a value is stored as a map, [images, channels] or [images, channels, rows, columns]."""
        return is_map(self.shape(x)) and x not in self.rows

    def is_spatial(self, x: object) -> bool:
        shape = self.shape(x)
        return shape is not None and len(shape) == 4 and all(shape) and x not in self.rows


Handler = Callable[..., Step | None]


def is_map(shape: Shape | None) -> bool:
    return shape is not None and len(shape) in (2, 4) and all(shape)


def numpy(tensor: Tensor) -> Array:
    return tensor.detach().to("cpu", torch.float32).contiguous().numpy()


def pair(value: Any) -> tuple[int, int]:
    a, b = value if isinstance(value, (tuple, list)) else (value, value)
    if not (isinstance(a, int) and isinstance(b, int)):
        raise TypeError(value)
    return a, b


def window(kernel: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1) -> dict[str, int]:
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = pair(kernel), pair(stride), pair(padding), pair(dilation)
    return {"kh": kh, "kw": kw, "sh": sh, "sw": sw, "ph": ph, "pw": pw, "dh": dh, "dw": dw}
