"""Promise 8: masked, baked and packed models agree bit for bit; accelerated and ONNX models agree to rounding."""

import shutil
from pathlib import Path

import pytest
import torch

import smartprune as sp
from helpers.litert_files import run_litert
from helpers.training_cases import Case


def trained(case: Case) -> tuple[torch.Tensor, sp.Receipt]:
    """The output of the masked model after training, and the receipt of its bake."""
    pruner = case.attach(steps=2)
    case.train(pruner, case.optimizer(), 3)
    case.model.eval()
    with torch.no_grad():
        masked = case.model(case.x)
    return masked, sp.bake(case.model)


def test_masked_baked_and_packed_agree_bit_for_bit(case: Case, tmp_path: Path) -> None:
    masked, receipt = trained(case)
    sp.pack(case.model, tmp_path / "packed", receipt=receipt)
    fresh = Case(case.name).model.eval()
    sp.unpack(tmp_path / "packed", fresh)
    with torch.no_grad():
        assert torch.equal(case.model(case.x), masked)
        assert torch.equal(fresh(case.x), masked)
    for name, tensor in case.model.state_dict().items():
        assert fresh.state_dict()[name].numpy().tobytes() == tensor.numpy().tobytes(), name
    result = sp.verify(tmp_path / "packed")
    assert result.ok
    assert result.mask_hash == receipt.mask_hash == sp.verify(fresh, receipt=receipt).mask_hash


def test_packing_twice_gives_the_same_file(case: Case, tmp_path: Path) -> None:
    _, receipt = trained(case)
    sp.pack(case.model, tmp_path / "a", receipt=receipt)
    fresh = Case(case.name).model
    sp.unpack(tmp_path / "a", fresh)
    sp.pack(fresh, tmp_path / "b", receipt=receipt)
    sp.pack(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()


needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")


@needs_compiler
def test_accelerated_agrees_to_float_rounding(case: Case) -> None:
    masked, _ = trained(case)
    fast = sp.accelerate(case.model)
    assert (fast(case.x) - masked).abs().max() <= 1e-5 * masked.abs().max()


@needs_compiler
@pytest.mark.parametrize("name", ["plain_cnn", "resnet18"])
def test_exported_c_agrees_to_rounding(name: str, tmp_path: Path) -> None:
    case = Case(name)
    _, receipt = trained(case)
    exported = sp.export_c(case.model.eval(), tmp_path / "net.c", case.x, receipt=receipt)
    assert exported.difference <= 1e-5 * exported.scale
    int8 = sp.export_c(case.model, tmp_path / "net8.c", case.x, int8=True, calibration=[case.x, torch.randn_like(case.x)])
    assert int8.int8_error is not None
    assert int8.int8_error <= 0.1


@needs_compiler
@pytest.mark.parametrize("name", ["plain_cnn", "resnet18"])
def test_accelerated_int8_agrees_to_int8_rounding(name: str) -> None:
    case = Case(name)
    masked, _ = trained(case)
    fast = sp.accelerate(case.model, dtype="int8", example=[case.x, torch.randn_like(case.x)])
    assert (fast(case.x) - masked).square().mean().sqrt() <= 0.1 * masked.square().mean().sqrt()


def export_and_run(case: Case, path: Path, int8: bool) -> tuple[torch.Tensor, torch.Tensor, sp.Receipt]:
    """The outputs of the masked model and of its ONNX file for the same input, and the receipt."""
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    masked, receipt = trained(case)
    batches = [case.x, torch.randn_like(case.x)] if int8 else None
    sp.export_onnx(case.model, path, case.x, receipt=receipt, int8=int8, calibration=batches)
    session = runtime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: case.x.numpy()})
    checked = sp.verify(path)
    assert checked.ok, str(checked)
    assert checked.receipt is not None
    assert checked.receipt.mask_hash == receipt.mask_hash
    return masked, torch.from_numpy(output), receipt


def test_onnx_agrees_to_float_rounding(case: Case, tmp_path: Path) -> None:
    masked, output, receipt = export_and_run(case, tmp_path / "model.onnx", int8=False)
    assert (output - masked).abs().max() <= 1e-5 * masked.abs().max()
    assert sp.verify(tmp_path / "model.onnx").mask_hash == receipt.mask_hash


@pytest.mark.parametrize("name", ["plain_cnn", "mobilenet_block", "cross_attention"])
def test_litert_agrees_to_rounding(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert", reason="ai-edge-litert is not installed")
    case = Case(name)
    masked, receipt = trained(case)
    for path, settings, allowed in (("a.tflite", {}, 1e-5), ("b.tflite", {"int8": True, "calibration": [case.x]}, 0.1)):
        sp.export_litert(case.model, tmp_path / path, case.x, receipt=receipt, **settings)
        (output,) = run_litert(tmp_path / path, case.x)
        assert (output - masked).square().mean().sqrt() <= allowed * masked.square().mean().sqrt()
        assert sp.verify(tmp_path / path).ok
    assert sp.verify(tmp_path / "a.tflite").mask_hash == receipt.mask_hash


@pytest.mark.parametrize("name", ["plain_cnn", "transformer_block"])
def test_int8_onnx_agrees_to_int8_rounding(name: str, tmp_path: Path) -> None:
    masked, output, _ = export_and_run(Case(name), tmp_path / "model.onnx", int8=True)
    assert (output - masked).square().mean().sqrt() <= 0.1 * masked.square().mean().sqrt()
