"""Sparse weights in ONNX files: what is stored, what onnxruntime computes, and what verify reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smartprune as sp
from helpers.onnx_files import run_onnx
from helpers.packed_files import zero_random_blocks
from smartprune.artifacts.onnx_sparse import check_same_outputs, store_sparse

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")

from onnx import numpy_helper  # noqa: E402


def dense_values(path: Path) -> dict[str, np.ndarray]:
    """All weights of a file, sparse or not, with loops over the stored places."""
    graph = onnx.load(path).graph
    out = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for sparse in graph.sparse_initializer:
        values, places = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
        array = np.zeros(list(sparse.dims), values.dtype)
        for value, place in zip(values, places, strict=True):
            array[np.unravel_index(place, array.shape)] = value
        out[sparse.values.name] = array
    return out


def test_sparse_files_hold_the_same_weights_in_fewer_bytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 32, 3),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 24, 2),
        nn.Conv2d(24, 24, 3, groups=3),
        nn.Flatten(),
        nn.Linear(600, 64),
    )
    pruner = sp.attach(model, "magnitude", block=(8, 8), sparsity=0.9, steps=1, include=["0", "2", "5"])
    pruner.freeze()
    receipt, x = sp.bake(model), torch.randn(2, 8, 8, 8)
    plain = sp.export_onnx(model, tmp_path / "plain.onnx", x, receipt=receipt)
    sparse = sp.export_onnx(model, tmp_path / "sparse.onnx", x, receipt=receipt, sparse=True)
    expected, stored = dense_values(tmp_path / "plain.onnx"), dense_values(tmp_path / "sparse.onnx")
    assert stored.keys() == expected.keys()
    assert all(stored[key].tobytes() == expected[key].tobytes() for key in expected)
    graph = onnx.load(tmp_path / "sparse.onnx").graph
    assert sorted(tensor.values.name for tensor in graph.sparse_initializer) == sorted(sparse.sparse)
    assert "5.weight" in sparse.sparse
    for key, array in expected.items():
        if np.count_nonzero(array) * 3 > array.size:
            assert key not in sparse.sparse
    assert sparse.size == (tmp_path / "sparse.onnx").stat().st_size < sparse.dense_size == plain.size == plain.dense_size
    assert plain.sparse == ()
    assert run_onnx(tmp_path / "sparse.onnx", x).equal(run_onnx(tmp_path / "plain.onnx", x))
    result = sp.verify(tmp_path / "sparse.onnx")
    assert result.ok, str(result)
    assert (result.mask_hash, result.zero) == (receipt.mask_hash, receipt.blocks.removed)
    assert sparse.blocks == plain.blocks
    assert Path(sparse.mask_path).read_text() == Path(plain.mask_path).read_text()
    assert json.loads(json.dumps(sparse.to_json()))["sparse"] == list(sparse.sparse)
    assert "onnxruntime makes sparse weights dense" in str(sparse)


def test_int8_weights_can_be_sparse(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    zero_random_blocks(model[0], (8, 8), keep=0.05)
    nn.init.zeros_(model[2].weight)  # a weight without a single number
    batches = [torch.randn(8, 64) for _ in range(3)]
    export = sp.export_onnx(model, tmp_path / "m.onnx", batches[0], block=(8, 8), int8=True, calibration=batches, sparse=True)
    assert sorted(export.sparse) == ["0.weight_quantized", "2.weight_quantized"]
    assert export.size < export.dense_size
    assert dense_values(tmp_path / "m.onnx")["0.weight_quantized"].dtype == np.int8
    assert sp.verify(tmp_path / "m.onnx", block=(8, 8)).zero == export.blocks.removed >= 64 + 40


def graph_of(array: np.ndarray) -> Any:
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    info = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("x", "y")]
    graph = onnx.helper.make_graph([node], "g", info[:1], info[1:], [numpy_helper.from_array(array, "w")])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)


def test_only_smaller_forms_are_stored_and_bits_are_kept() -> None:
    array = np.zeros((32, 32), np.float32)
    array[0, :4] = -0.0, np.nan, np.inf, 1.0
    model = graph_of(array)
    assert store_sparse(model, {"w"}) == ["w"]
    assert numpy_helper.to_array(model.graph.sparse_initializer[0].indices).tolist() == [0, 1, 2, 3]
    assert numpy_helper.to_array(model.graph.sparse_initializer[0].values).tobytes() == array[0, :4].tobytes()
    assert len(model.graph.initializer) == 0
    array[:20] = 1.0
    model = graph_of(array)
    assert store_sparse(model, {"w"}) == store_sparse(graph_of(array * 0), set()) == []
    assert len(model.graph.initializer) == 1


def test_other_outputs_are_refused() -> None:
    one, other = (graph_of(np.full((2, 2), value, np.float32)).SerializeToString() for value in (1.0, 2.0))
    check_same_outputs(one, one, [{"x": torch.ones(1, 2)}])
    with pytest.raises(sp.SmartpruneError, match="computes other outputs with sparse weights"):
        check_same_outputs(one, other, [{"x": torch.ones(1, 2)}])
