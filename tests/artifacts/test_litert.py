"""LiteRT: exported files match their models, in float32 and int8, and hold their zeros, receipt and sparse weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import smartprune as sp
from helpers import zoo
from helpers.litert_files import operations, randomize_statistics, run_litert
from helpers.pruned_models import model_and_receipt, randomly_pruned

pytest.importorskip("ai_edge_litert", reason="ai-edge-litert is not installed")


@pytest.mark.parametrize("name", ["mobilenet_block", "transformer_block", "unet", "cross_attention"])
def test_exported_outputs_and_zeros_match_the_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, receipt = model_and_receipt(name)
    randomize_statistics(model)
    x, path = zoo.SMALL[name]()[1], tmp_path / "m.tflite"
    before = copy.deepcopy(model.state_dict())
    exported = sp.export_litert(model, path, x, receipt=receipt)
    assert model.training  # export restores the mode
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    other = torch.randn_like(x)
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(other)
    (output,) = run_litert(path, other)
    assert (output - expected).abs().max() <= 1e-5 * expected.abs().max()
    result = sp.verify(path)
    assert result.ok, str(result)
    assert result.mask_hash == receipt.mask_hash
    assert result.zero == receipt.blocks.removed
    assert exported.size == path.stat().st_size
    assert exported.blocks is not None
    assert exported.blocks.removed == sp.verify(model, block=(4, 4)).zero
    assert json.loads(json.dumps(exported.to_json()))["blocks"]["removed"] == exported.blocks.removed
    assert "every zero of the model is zero in the file" in str(exported)


@pytest.mark.parametrize("name", ["plain_cnn", "transformer_block", "unet"])
def test_int8_outputs_and_zeros_match_the_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, receipt = model_and_receipt(name)
    randomize_statistics(model)
    x, path = zoo.SMALL[name]()[1], tmp_path / "m.tflite"
    batches = [torch.randn(7, *x.shape[1:]) for _ in range(4)]  # 4 of each 7 samples fill the batch of the file
    exported = sp.export_litert(model, path, x, receipt=receipt, int8=True, calibration=batches)
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(batches[0][:4])
    (output,) = run_litert(path, batches[0][:4])
    assert (output - expected).square().mean().sqrt() <= 0.05 * expected.square().mean().sqrt()
    assert exported.int8_error is not None
    assert 0 < exported.int8_error < 0.05
    assert sp.verify(path).ok
    assert operations(path)["QUANTIZE"] >= 1
    assert "% (root mean square)" in str(exported)


def network(name: str) -> tuple[nn.Module, torch.Tensor]:
    from smartprune.models import MODELS

    return randomly_pruned(MODELS[name](), 0.9), torch.randn(1, 1 if name == "resnet8" else 3, 64, 64)


def test_sparse_weights_make_the_file_smaller_and_change_no_output(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.Flatten(), nn.Linear(1024, 256), nn.Linear(256, 5)
    )
    randomly_pruned(model[2], 0.9)
    randomly_pruned(nn.Sequential(model[4]), 0.95, (4, 8))
    x = torch.randn(2, 3, 8, 8)
    sparse, dense = tmp_path / "sparse.tflite", tmp_path / "dense.tflite"
    exported = sp.export_litert(model, sparse, x)
    plain = sp.export_litert(model, dense, x, sparse=False)
    assert exported.sparse == ("2.weight", "4.weight")
    assert exported.dense_size == plain.size
    assert exported.size < 0.35 * plain.size
    assert operations(sparse)["DENSIFY"] == 1  # the linear layer is read as it is
    assert operations(dense)["DENSIFY"] == 0
    (a,), (b,) = run_litert(sparse, x), run_litert(dense, x)
    assert (a - b).abs().max() <= 1e-5 * b.abs().max()
    assert sp.verify(sparse, block=(4, 8)).zero == sp.verify(model, block=(4, 8)).zero


def test_layers_without_any_weight_left_are_in_the_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(256, 64), nn.Linear(64, 3))
    for i in (2, 4):
        nn.init.zeros_(model[i].weight)
    x = torch.randn(1, 3, 8, 8)
    for settings in ({}, {"int8": True, "calibration": [x]}):
        exported = sp.export_litert(model, tmp_path / "m.tflite", x, block=(8, 8), **settings)
        assert exported.missing == ()
        assert sp.verify(tmp_path / "m.tflite", block=(8, 8)).zero == sp.verify(model, block=(8, 8)).zero


def test_channels_last_takes_images_in_another_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = zoo.mobilenet_block()
    sp.export_litert(model.eval(), tmp_path / "m.tflite", x, channels_last=True)
    (output,) = run_litert(tmp_path / "m.tflite", x.permute(0, 2, 3, 1).contiguous())
    with torch.no_grad():
        assert (output - model(x)).abs().max() <= 1e-5


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor, double: bool = False) -> dict[str, torch.Tensor]:
        y = self.left(a) + self.right(b)
        return {"sum": y * (2 if double else 1), "left": self.left(a)}


def test_several_inputs_and_outputs(tmp_path: Path) -> None:
    model, path = TwoInputs().eval(), tmp_path / "m.tflite"
    a, b = torch.randn(2, 4), torch.randn(2, 5)
    sp.export_litert(model, path, {"b": b, "a": a, "double": True})
    outputs = run_litert(path, a, b)
    with torch.no_grad():
        expected = model(a, b, double=True)
    for out, wanted in zip(outputs, expected.values(), strict=True):
        assert torch.allclose(out, wanted, atol=1e-5)
    sp.export_litert(model, path, (a, b))
    assert len(run_litert(path, a, b)) == 2


def test_wrong_arguments_are_explained(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    path = tmp_path / "m.tflite"
    for message, call in {
        "must end in .tflite": lambda: sp.export_litert(model, tmp_path / "m.onnx", x),
        "give a torch.nn.Module": lambda: sp.export_litert("m", path, x),  # type: ignore[arg-type]
        "give a Receipt": lambda: sp.export_litert(model, path, x, receipt="r"),  # type: ignore[arg-type]
        "int8 needs calibration=": lambda: sp.export_litert(model, path, x, int8=True),
        "is for int8=True": lambda: sp.export_litert(model, path, x, calibration=[x]),
        "fewer samples than the example, which has 2": lambda: sp.export_litert(model, path, x, int8=True, calibration=[x[:1]]),
        "holds samples of 5": lambda: sp.export_litert(model, path, x, int8=True, calibration=[torch.randn(2, 5)]),
        "holds NaN": lambda: sp.export_litert(model, path, x, int8=True, calibration=[x * float("nan")]),
        "the model failed on inputs of 2x3": lambda: sp.export_litert(model, path, x[:, :3]),
        "computes in bfloat16|does not compute in bfloat16": lambda: sp.export_litert(
            nn.Linear(4, 3).bfloat16(), path, x.bfloat16()
        ),
        "no tensors|an example is a tensor": lambda: sp.export_litert(model, path, ()),
    }.items():
        with pytest.raises(sp.SmartpruneError, match=message):
            call()
    assert not path.exists()


def test_models_in_a_search_or_with_masks_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 3))
    sp.attach(model, sp.Magnitude(), block=(8, 8), sparsity=0.5, steps=2)
    with pytest.raises(sp.SmartpruneError, match="still being pruned"):
        sp.export_litert(model, tmp_path / "m.tflite", torch.randn(1, 32))
    masked = nn.Linear(4, 3)
    prune.l1_unstructured(masked, "weight", 0.5)
    with pytest.raises(sp.SmartpruneError, match=r"torch\.nn\.utils\.prune"):
        sp.export_litert(masked, tmp_path / "m.tflite", torch.randn(1, 4))


def test_random_outputs_are_refused(tmp_path: Path) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 3), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.layer(x) * self.calls

    with pytest.raises(sp.SmartpruneError, match="outputs differ from the model's"):
        sp.export_litert(Counter().eval(), tmp_path / "m.tflite", torch.randn(2, 4))
    assert not (tmp_path / "m.tflite").exists()


def test_a_wrong_receipt_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, receipt = model_and_receipt("plain_cnn")
    with torch.no_grad():
        model[3].weight.add_(1)
    with pytest.raises(sp.SmartpruneError, match="does not match its receipt"):
        sp.export_litert(model, tmp_path / "m.tflite", torch.randn(4, 3, 8, 8), receipt=receipt)


@pytest.mark.parametrize("name", ["resnet8", "mobilenetv2"])
def test_networks_agree_with_torch(name: str, tmp_path: Path) -> None:
    """The others are in bench/litert.py, because they take longer."""
    torch.manual_seed(0)
    model, x = network(name)
    exported = sp.export_litert(model, tmp_path / "m.tflite", x, block=(16, 8))
    assert exported.difference <= 1e-5 * exported.scale
    assert exported.size < 0.6 * exported.dense_size
