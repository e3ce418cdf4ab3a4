"""Sparse weights in ONNX graphs: nonzero numbers and their places, where that takes less space."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ..errors import SmartpruneError
from .onnx_graph import outputs_of, session_of
from .onnx_inputs import Batch
from .onnx_read import need

PLACES = "_indices"  # appended to the name of a weight


def store_sparse(graph: Any, weights: Collection[str]) -> list[str]:
    """Moves weights of a graph to its ``sparse_initializer`` if that makes the file smaller, and returns their names.

    A place is one 64-bit number in row-major order, the shortest form that the format has.
    """
    onnx, taken = need("onnx"), {tensor.name for tensor in graph.graph.initializer}
    moved = []
    for tensor in list(graph.graph.initializer):
        if tensor.name not in weights or tensor.name + PLACES in taken:
            continue
        array = onnx.numpy_helper.to_array(tensor)
        places = np.flatnonzero(_bits(array)).astype(np.int64)  # -0.0 is stored, too: the values stay bit for bit
        values = onnx.numpy_helper.from_array(array.reshape(-1)[places], tensor.name)
        indices = onnx.numpy_helper.from_array(places, tensor.name + PLACES)
        sparse = onnx.helper.make_sparse_tensor(values, indices, list(array.shape))
        if sparse.ByteSize() < tensor.ByteSize():
            graph.graph.sparse_initializer.append(sparse)
            graph.graph.initializer.remove(tensor)
            moved.append(tensor.name)
    return moved


def check_same_outputs(dense: bytes, sparse: bytes, batches: Sequence[Batch]) -> None:
    """Raises unless both graphs return the same bits. onnxruntime makes sparse weights dense when it loads a file."""
    before, after = session_of(dense), session_of(sparse)
    for batch in batches:
        for a, b in zip(outputs_of(before, batch), outputs_of(after, batch), strict=True):
            if a.numpy().tobytes() != b.numpy().tobytes():
                raise SmartpruneError(
                    "export_onnx: onnxruntime computes other outputs with sparse weights, so no file was written; leave out "
                    "sparse=True"
                )


def _bits(array: Any) -> Any:
    """The same bits as integers, which are zero for +0.0 alone."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
