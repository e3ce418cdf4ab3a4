"""An export is compared with its model before a file is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import smartprune as sp

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")


class ExportsDifferently(nn.Module):
    """Computes something else while it is exported."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return self.conv(x) * 1.01
        return self.conv(x)


def test_integer_and_boolean_outputs_are_compared(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = self.a(x)
            return y, y > 0, y.argmax(1)

    torch.manual_seed(0)
    export = sp.export_onnx(Net().eval(), tmp_path / "m.onnx", torch.randn(2, 8), (4, 4))
    assert export.difference < 1e-5


def test_float64_errors_say_what_to_do(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3)).double().eval(), torch.randn(2, 8, 6, 6)
    for example in (x.double(), x):  # an operation that onnxruntime lacks, and an input of another dtype
        with pytest.raises(sp.SmartpruneError, match=r"float64.*give model\.float\(\), and a float32 example"):
            sp.export_onnx(model, tmp_path / "m.onnx", example, (4, 4))
    linear = nn.Sequential(nn.Linear(8, 8)).double().eval()
    assert sp.export_onnx(linear, tmp_path / "m.onnx", torch.randn(2, 8).double(), (4, 4)).difference < 1e-12


def test_a_graph_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sp.SmartpruneError, match="differ from the model's by"):
        sp.export_onnx(ExportsDifferently(), tmp_path / "m.onnx", torch.randn(2, 3, 8, 8), (4, 4))
    assert list(tmp_path.iterdir()) == []
