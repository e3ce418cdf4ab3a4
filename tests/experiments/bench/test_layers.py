"""Single layers in an engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from smartprune import SmartpruneError
from smartprune.experiments.bench import layers as module
from smartprune.experiments.bench.layers import save_layer, time_layers


class KeywordInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(input=x)


def test_layers_with_a_keyword_input_are_timed(tmp_path: Path) -> None:
    for engine in ("torch", "smartprune"):
        assert time_layers(engine, KeywordInput().eval(), torch.randn(2, 8), 1, tmp_path, seconds=0.0)["fc"][0] == "linear"


def test_the_overhead_of_a_call_is_subtracted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A call of the layer with one weight takes 2 s, one of the smallest layer less, and one of the largest 5 s."""
    seconds = {1: 2.0, 3: 1.5, 16: 5.0}
    monkeypatch.setattr(module, "fastest_call", lambda run, _: seconds[run.func.weight.shape[0]])
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 16, 3))
    times = time_layers("torch", model, torch.zeros(1, 2, 8, 8), 1, tmp_path)
    assert times == {"0": ("1x1 conv", 0.0), "1": ("3x3 conv", 3.0)}


LAYERS = [
    (nn.Conv2d(4, 6, 3, stride=2, padding=(1, 2), dilation=(1, 2), groups=2, bias=False), (2, 4, 9, 11)),
    (nn.Conv2d(4, 6, (1, 3)), (1, 4, 5, 5)),
    (nn.Linear(5, 7), (3, 5)),
    (nn.Linear(5, 7, bias=False), (3, 5)),
]


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda value: str(value)[:40])
def test_a_layer_in_a_file_computes_what_it_does_in_torch(layer: nn.Module, shape: tuple[int, ...], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    reference = pytest.importorskip("onnx.reference")
    x = torch.randn(*shape)
    save_layer(layer, x, tmp_path / "layer.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "layer.onnx"), full_check=True)
    (y,) = reference.ReferenceEvaluator(str(tmp_path / "layer.onnx")).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(y, layer(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_layers_that_one_node_cannot_express_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding="same"), nn.Conv2d(3, 4, 1))
    times = time_layers("onnxruntime", model.eval(), torch.zeros(1, 2, 8, 8), 1, tmp_path, seconds=0.0)
    assert list(times) == ["1"]
    with pytest.raises(SmartpruneError, match="3 dimensions is not timed as a single layer"):
        save_layer(nn.Linear(2, 3), torch.zeros(1, 4, 2), tmp_path / "a.onnx")
