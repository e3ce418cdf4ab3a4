"""Packed files: models to pack, and the reader and the example of docs/format.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import smartprune as sp
from smartprune.core.block import Block

FORMAT_PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def documented_reader() -> Callable[[Path], dict[str, np.ndarray]]:
    """The reader that docs/format.md shows."""
    scope: dict[str, object] = {}
    exec(next(text for text in re.findall(r"```python\n(.*?)```", FORMAT_PAGE, re.S) if "def read_model" in text), scope)
    return scope["read_model"]  # type: ignore[return-value]


def raw_bytes(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def zero_random_blocks(model: nn.Module, block: object, keep: float = 0.25) -> nn.Module:
    """Sets random blocks of every layer to +0.0."""
    from smartprune.artifacts.source import read_source

    with torch.no_grad():
        for cut in read_source(model).cuts(Block.of(block))[0]:  # type: ignore[arg-type]
            cut.tensor.masked_fill_(~cut.grid.expand(torch.rand(cut.grid.n) < keep), 0.0)
    return model


def documented_example() -> dict[str, Tensor]:
    """The worked example of docs/format.md."""
    weight = torch.zeros(3, 4, 1, 2)
    weight[0, 2, 0, 0], weight[1, 2, 0, 0], weight[0, 3, 0, 0], weight[1, 3, 0, 0] = 1, 2, 3, 4
    weight[1, 0, 0, 1], weight[2, 3, 0, 1] = 5, 6
    return {"conv.weight": weight, "conv.bias": torch.tensor([0.5, -0.5, 0.25])}


def equal_states(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether names, their order, shapes, dtypes and bits are equal."""
    return list(a) == list(b) and all(
        a[k].shape == b[k].shape and a[k].dtype == b[k].dtype and np.array_equal(raw_bytes(a[k]), raw_bytes(b[k])) for k in a
    )


def check_unpacks(state: dict[str, Tensor], path: Path) -> None:
    """Checks that our reader and the documented one restore the state."""
    assert equal_states(sp.unpack(path), state)
    read = documented_reader()(path)
    assert list(read) == list(state)
    for name, array in read.items():
        assert array.shape == tuple(state[name].shape), name
        assert array.tobytes() == state[name].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), name
