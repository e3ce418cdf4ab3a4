"""ONNX files that take much time or memory for their size."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import smartprune as sp
from smartprune.artifacts import onnx_read

onnx = pytest.importorskip("onnx")
from onnx import helper, numpy_helper  # noqa: E402


def field(number: int, content: bytes) -> bytes:
    """A part of a protobuf message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


EMPTY_PARTS = {
    "nodes": lambda n: field(7, field(1, b"") * n),
    "attributes": lambda n: field(7, field(1, field(5, b"") * n)),
    "initializers": lambda n: field(7, field(5, b"") * n),
    "metadata": lambda n: field(14, b"") * n,
    "functions": lambda n: field(25, b"") * n,
}


@pytest.mark.parametrize("kind", EMPTY_PARTS)
def test_a_file_of_empty_parts_is_refused(kind: str) -> None:
    """An empty part takes two bytes in the file and a hundred in memory."""
    data = EMPTY_PARTS[kind](200_000)
    with pytest.raises(sp.SmartpruneError, match="tiny: has far more parts than a file of"):
        onnx_read.parse_onnx(data, "tiny")


def test_graphs_inside_graphs_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_read, "MAX_GRAPHS", 10)
    branches = [helper.make_node("If", ["c"], ["y"], then_branch=helper.make_graph([], "branch", [], [])) for _ in range(10)]
    model = helper.make_model(helper.make_graph(branches, "graph", [], []))
    with pytest.raises(sp.SmartpruneError, match="many: has more than 10 graphs"):
        onnx_read.parse_onnx(model.SerializeToString(), "many")


def quantized_nodes(count: int, side: int) -> Any:
    """Matrix products that all use one weight, each through a DequantizeLinear node of its own."""
    weight = numpy_helper.from_array(np.full((side, side), 3, np.uint8), "w")
    scale, point = numpy_helper.from_array(np.float32(1), "scale"), numpy_helper.from_array(np.uint8(3), "point")
    nodes = [helper.make_node("DequantizeLinear", ["w", "scale", "point"], [f"w{i}"]) for i in range(count)]
    nodes += [helper.make_node("MatMul", ["x", f"w{i}"], [f"y{i}"]) for i in range(count)]
    return helper.make_model(helper.make_graph(nodes, "graph", [], [], [weight, scale, point])).SerializeToString()


def test_a_weight_is_computed_once_however_many_nodes_use_it() -> None:
    def seconds(count: int) -> float:
        data, start = quantized_nodes(count, 1024), time.perf_counter()
        file = onnx_read.parse_onnx(data, "file")
        assert [int(weight.tensor.abs().sum()) for weight in file.weights.values()] == [0]
        return time.perf_counter() - start

    seconds(1)
    assert seconds(1000) < 100 * seconds(1)  # it was 1000 times as long
