"""Programs of ``torch.export`` in fewer kinds of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def decompose(program: Any) -> Any:
    """The program without in-place operations, and with simpler operations in place of ``einsum`` and ``glu``."""
    einsum = torch.ops.aten.einsum.default
    table: dict[Any, Callable[..., Any]] = {
        torch.ops.aten.glu.default: _glu,
        einsum: torch.export.default_decompositions()[einsum],
    }
    return program.run_decompositions(table)


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    value, gate = x.chunk(2, dim)
    return value * gate.sigmoid()
