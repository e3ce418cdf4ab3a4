"""Inputs of an exported graph: their names, keyword arguments, several inputs, and calibration batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import smartprune as sp
from smartprune.artifacts.onnx_inputs import read_example
from smartprune.core.block import Block

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")


class TwoInputsAndOutputs(nn.Module):
    """Two inputs, one of them integers, two outputs, and a fixed batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16)
        self.inner = nn.Linear(16, 24, bias=False)
        self.outer = nn.Linear(24, 8)

    def forward(self, x: Tensor, kind: Tensor) -> dict[str, Tensor]:
        y = torch.relu(self.inner(x.reshape(2, 3, 16) + self.table(kind)))
        return {"a": self.outer(y), "b": y.mean(-1)}


def test_several_inputs_and_outputs_and_a_fixed_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TwoInputsAndOutputs()
    with torch.no_grad():
        model.inner.weight[:8] = 0
    inputs = (torch.randn(2, 3, 16), torch.randint(0, 10, (2, 3)))
    with pytest.raises(sp.SmartpruneError, match="give dynamic_batch=False"):
        sp.export_onnx(model, tmp_path / "m.onnx", inputs, (8, 8))
    export = sp.export_onnx(model, tmp_path / "m.onnx", inputs, (8, 8), dynamic_batch=False)
    assert (export.blocks.removed, export.blocks.total) == (2, 2 * 3 + 3 * 1)
    graph = onnx.load(tmp_path / "m.onnx").graph
    assert [entry.name for entry in graph.input] == ["x", "kind"]
    assert [entry.name for entry in graph.output] == ["output", "output2"]
    result = sp.verify(tmp_path / "m.onnx")
    assert result.block == Block(8, 8)  # stored in the file
    assert [(layer.name, layer.zero) for layer in result.layers] == [("inner", 2), ("outer", 0)]  # not the embedding


class Words(nn.Module):
    """Takes keyword arguments, like the models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.outer = nn.Embedding(10, 16), nn.Linear(16, 24), nn.Linear(24, 8)

    def forward(
        self,
        ids: Tensor | None = None,
        mask: Tensor | None = None,
        scale: float = 1.0,
        mode: str = "sum",
        embedded: Tensor | None = None,
    ) -> Tensor:
        y = self.table(ids) if embedded is None else embedded
        y = self.outer(torch.relu(self.inner(y * scale)))
        y = y if mask is None else y * mask[..., None]
        return y.sum(1) if mode == "sum" else y.mean(1)


def test_an_example_may_hold_keyword_arguments(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Words()
    with torch.no_grad():
        model.inner.weight[:8] = 0
    ids, mask = torch.randint(0, 10, (2, 5)), torch.ones(2, 5)
    example = {"mask": mask, "scale": 3.0, "ids": ids, "mode": "mean", "embedded": None}
    export = sp.export_onnx(model, tmp_path / "m.onnx", example, (8, 8))
    assert (export.blocks.removed, export.blocks.total) == (2, 3 * 2 + 3)
    session = runtime.InferenceSession((tmp_path / "m.onnx").read_bytes(), providers=["CPUExecutionProvider"])
    assert [(entry.name, entry.shape[1:]) for entry in session.get_inputs()] == [("mask", [5]), ("ids", [5])]
    more = torch.randint(0, 10, (3, 5))
    (output,) = session.run(None, {"ids": more.numpy(), "mask": np.ones((3, 5), np.float32)})
    with torch.no_grad():
        expected = model(more, torch.ones(3, 5), scale=3.0, mode="mean")
    assert np.allclose(output, expected.numpy(), atol=1e-5)
    floats = {"embedded": torch.randn(4, 5, 16), "mask": torch.ones(4, 5)}
    int8 = sp.export_onnx(model, tmp_path / "int8.onnx", floats, (8, 8), int8=True, calibration=[dict(reversed(floats.items()))])
    assert int8.int8_error is not None
    with pytest.raises(sp.SmartpruneError, match="calibration= holds the inputs ids, and the example has embedded, mask"):
        sp.export_onnx(model, tmp_path / "b.onnx", floats, (8, 8), int8=True, calibration=[{"ids": ids}])
    with pytest.raises(sp.SmartpruneError, match="in the example 'scale' is a list; a dictionary holds the keyword arguments"):
        sp.export_onnx(model, tmp_path / "b.onnx", {"ids": ids, "scale": [3.0]}, (8, 8))


def test_inputs_of_a_variadic_model_are_numbered(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.inner = nn.Linear(4, 4)

        def forward(self, *images: Tensor) -> Tensor:
            return self.inner(images[0] + images[1] * self.weight)  # type: ignore[no-any-return]

    class OfWeight(Sum):
        def forward(self, weight: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(weight, other)

    inputs = (torch.randn(2, 4), torch.randn(2, 4))
    for model, names in ((Sum(), ["images_0", "images_1"]), (OfWeight(), ["weight_input", "other"])):
        sp.export_onnx(model, tmp_path / "m.onnx", inputs, (2, 2))
        assert [entry.name for entry in onnx.load(tmp_path / "m.onnx").graph.input] == names


@pytest.mark.parametrize(
    ("example", "given"),
    [
        (5, "this one is 5"),
        ("x", "this one is 'x'"),
        ((), "this one is empty"),
        (torch.tensor(1.0), r"this one is a tensor of shape \(\)"),
        (torch.zeros(0, 4), r"this one is a tensor of shape \(0, 4\)"),
        ((torch.zeros(1, 4), None), "this one holds None"),
        ({"input": torch.tensor(1.0)}, r"this one holds a tensor of shape \(\)"),
    ],
)
def test_examples_of_other_kinds_are_refused(example: object, given: str) -> None:
    with pytest.raises(sp.SmartpruneError, match=f"export_onnx: an example is a tensor with a batch axis.*; {given}"):
        read_example(nn.Linear(4, 4), example)  # type: ignore[arg-type]
