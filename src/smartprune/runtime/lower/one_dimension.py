"""Networks for sequences: which values with three axes are maps with one row, [images, channels, columns]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from .steps import Shape

LAYERS = (nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d)
FUNCTIONS = (F.max_pool1d, F.avg_pool1d, F.adaptive_avg_pool1d)
IMAGE_LAYERS = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
IMAGE_FUNCTIONS = (F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d)


def size_of_map(shape: Shape) -> Shape:
    """The size of a map as (images, channels, rows, columns)."""
    return (*shape[:2], 1, shape[2]) if len(shape) == 3 else (*shape, 1, 1)[:4]


def maps_of_three_axes(graph: fx.Graph, modules: Mapping[str, nn.Module], shapes: Mapping[fx.Node, Shape]) -> set[fx.Node]:
    """The nodes whose value a layer for sequences reads or writes, and those that elementwise operations connect with them.

    All other values with three axes are rows, as linear layers read them. If a layer for images reads or writes such a value, it
    is one image without an axis for the batch, and not a map.
    """
    maps: set[fx.Node] = set()
    images: set[fx.Node] = set()
    links: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        near = [n for n in (node, *node.all_input_nodes) if len(shapes.get(n, ())) == 3]
        function = node.target if node.op == "call_function" else None
        if isinstance(module, IMAGE_LAYERS) or function in IMAGE_FUNCTIONS:
            images.update(near)
        if isinstance(module, LAYERS) or function in FUNCTIONS:
            maps.update(near)
        elif is_elementwise(node, module) and node in near:
            for other in near[1:]:
                links.setdefault(node, []).append(other)
                links.setdefault(other, []).append(node)
    waiting = list(maps)
    while waiting:
        for other in links.get(waiting.pop(), []):
            if other not in maps:
                maps.add(other)
                waiting.append(other)
    return maps - images


def is_elementwise(node: fx.Node, module: Any) -> bool:
    """Whether the axes of a result mean what those of the inputs mean. Linear layers and reshaping end the search."""
    from .handlers import ELEMENTWISE  # imports this package

    return (type(module) if module is not None else node.target) in ELEMENTWISE
