"""The packed file and the ONNX file of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import smartprune as sp
from helpers.training_jobs import small_config
from smartprune import SmartpruneError, cli, run_files
from smartprune.training import outputs
from smartprune.training.config import make_task
from smartprune.training.result import Result
from smartprune.training.train import train

REAL = outputs.missing_packages  # before conftest.py takes it away, so that other tests need no ONNX


needs_onnx = pytest.mark.skipif(bool(REAL()), reason=f"not installed: {', '.join(REAL())}")


def test_run_writes_a_packed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "missing_packages", lambda: ["onnxscript"])
    result = train(small_config(tmp_path / "run", onnx="auto"))
    assert list(result.files) == ["packed", "page"]
    assert (tmp_path / "run" / "report.html").exists()
    plain = load_file(tmp_path / "run" / "model.safetensors")
    unpacked = sp.unpack(tmp_path / "run" / run_files.PACKED)
    assert plain.keys() == unpacked.keys()
    assert all(plain[name].numpy().tobytes() == unpacked[name].numpy().tobytes() for name in plain)
    assert sp.verify(tmp_path / "run" / run_files.PACKED).ok
    assert not (tmp_path / "run" / run_files.ONNX).exists()


@needs_onnx
def test_run_writes_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import onnxruntime  # type: ignore[import-untyped, unused-ignore]

    monkeypatch.setattr(outputs, "missing_packages", REAL)
    config = small_config(tmp_path / "run", onnx="on")
    result = train(config)
    assert "compared with the model: largest difference" in result.files["onnx"]
    assert result == Result.load(tmp_path / "run")
    assert sp.verify(tmp_path / "run" / run_files.ONNX).ok
    task = make_task(config.task, config.task_settings)
    model = task.model(config.model).eval()
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    x = torch.randn(5, *task.example().shape[1:])
    session = onnxruntime.InferenceSession(str(tmp_path / "run" / run_files.ONNX), providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(output), model(x), atol=1e-4)
    assert cli.main(["train", "--resume", "--out", str(tmp_path / "run")]) == 0
    assert "onnx     model.onnx, " in capsys.readouterr().out


def test_failed_onnx_export_does_not_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise SmartpruneError("export_onnx: no such operator")

    monkeypatch.setattr(outputs, "missing_packages", list)
    monkeypatch.setattr(outputs, "export_onnx", fails)
    result = train(small_config(tmp_path / "run", onnx="auto"))
    assert result.verified
    assert result.files["onnx"] == "not written: export_onnx: no such operator"


def test_missing_onnx_packages_are_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "missing_packages", lambda: ["onnx"])
    with pytest.raises(SmartpruneError, match=r"onnx='on' needs onnx; run: pip install onnx"):
        train(small_config(tmp_path / "run", onnx="on"))
    assert not (tmp_path / "run").exists()
