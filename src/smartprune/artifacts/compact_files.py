"""A model as a program of ``torch.export``, which runs without the code of the model."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .. import text
from ..errors import SmartpruneError
from .compact_graph import call_arguments


def program_bytes(model: nn.Module, example: Any) -> bytes:
    """The content of a ``.pt2`` file. The program takes any batch size if the model does."""
    args, kwargs = call_arguments(example)
    tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() > 0]
    rows = tensors[0].shape[0] if tensors else 0

    def twice(x: Any) -> Any:  # the exporter treats an axis of size 1 as constant
        return torch.cat([x, x]) if isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == rows == 1 else x

    def axes(x: Any) -> Any:
        batched = isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == max(rows, 2 if rows == 1 else rows)
        return {0: torch.export.Dim.AUTO} if batched else None

    pair = (args, kwargs)
    double = torch.utils._pytree.tree_map(twice, pair)
    shapes = torch.utils._pytree.tree_map(axes, double)
    problem: Exception | None = None
    for inputs, dynamic in ((double, shapes), (pair, None)):
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                by_name = None if dynamic is None else (*dynamic[0], *dynamic[1].values())
                program = torch.export.export(model, inputs[0], inputs[1], dynamic_shapes=by_name, strict=False)
                buffer = io.BytesIO()
                torch.export.save(program, buffer)
                return buffer.getvalue()
        except Exception as error:  # torch.export raises many types of errors
            problem = error
    line = (str(problem).strip().splitlines() or [""])[0]
    raise SmartpruneError(
        f"compact: torch.export cannot store the model ({text.escape(line[:200])}); write an .onnx file"
    ) from problem
