"""What handlers know about the network, and what they share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .one_dimension import maps_of_three_axes as maps_of_three_axes
from .steps import Array, Shape, Step


@dataclass
class Context:
    """What a handler needs to know about the network."""

    modules: Mapping[str, nn.Module]
    shapes: Mapping[fx.Node, Shape]
    rows: set[fx.Node]  # nodes whose value is stored as rows
    maps: Set[fx.Node]  # nodes with three axes whose value is stored as a map with one row
    constants: Mapping[fx.Node, Tensor]  # parameters and buffers

    def shape(self, node: object) -> Shape | None:
        return self.shapes.get(node) if isinstance(node, fx.Node) else None

    def is_map(self, x: object) -> bool:
        """Whether a value is stored as a map: [images, channels], [images, channels, columns] or with rows and columns."""
        shape = self.shape(x)
        return x not in self.rows and (is_map(shape) or (x in self.maps and shape is not None and all(shape)))

    def is_spatial(self, x: object) -> bool:
        shape = self.shape(x)
        return shape is not None and (len(shape) == 4 or x in self.maps) and all(shape) and x not in self.rows


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


def on_rows(value: Any, first: int = 1) -> Any:
    """The setting of a layer for sequences, for maps with one row."""
    return (first, *value) if isinstance(value, (tuple, list)) and len(value) == 1 else value


def window(kernel: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1) -> dict[str, int]:
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = pair(kernel), pair(stride), pair(padding), pair(dilation)
    return {"kh": kh, "kw": kw, "sh": sh, "sw": sw, "ph": ph, "pw": pw, "dh": dh, "dw": dw}


def constants_of(traced: fx.GraphModule, shapes: Mapping[fx.Node, Shape]) -> dict[fx.Node, Tensor]:
    """The parameters and buffers that nodes read."""
    nodes = [node for node in traced.graph.nodes if node.op == "get_attr" and node in shapes]
    return {node: operator.attrgetter(str(node.target))(traced) for node in nodes}
