"""smartprune export: flags, runs, calibration and files that it does not overwrite."""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import smartprune as sp
from helpers.pruned_models import model_and_receipt
from helpers.training_jobs import run_cli
from smartprune.cli import main

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")


def test_export_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model, receipt = model_and_receipt("conv1d_net")
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    receipt.save(tmp_path / "receipt.json")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    (tmp_path / "own.py").write_text("from helpers import zoo\n\n\ndef build():\n    return zoo.conv1d_net()[0]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ("export", "own:build", "--weights", "w.safetensors", "--input", "2x32")
    assert run_cli(*command, "--out", "m.onnx") == 2
    assert "add --block" in capsys.readouterr().err
    assert run_cli("export", "own:build", "--block", "4x4", "--out", "m.onnx") == 2
    assert "add --input" in capsys.readouterr().err
    assert run_cli(*command, "--block", "4x4") == 2
    assert run_cli(*command, "--block", "4y4", "--out", "m.onnx") == 2
    assert run_cli(*command, "--block", "4x4", "--out", "m.onnx", "--int8") == 2
    assert "add --calibration" in capsys.readouterr().err
    assert run_cli("export", tmp_path) == 2
    assert "has no config.json" in capsys.readouterr().err
    np.save(tmp_path / "x.npy", torch.randn(40, 2, 32).numpy())
    flags = ("--receipt", "receipt.json", "--out", "m.onnx", "--int8", "--calibration", "x.npy", "--json")
    capsys.readouterr()
    assert run_cli(*command, *flags) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["size"] == (tmp_path / "m.onnx").stat().st_size
    assert data["int8_error"] < 0.1
    assert run_cli("verify", "m.onnx") == 0
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in model.state_dict().items()}}, "wrapped.pt")
    assert run_cli(*command[:2], "--weights", "wrapped.pt", *command[4:], "--receipt", "receipt.json", "--out", "n.onnx") == 0
    capsys.readouterr()
    assert run_cli("export", "--help") == 0
    assert "example:\n  smartprune export" in capsys.readouterr().out


def test_sparse_weights_are_a_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty_net.py").write_text(
        "from torch import nn\n\n\ndef build():\n    net = nn.Linear(64, 64)\n    nn.init.zeros_(net.weight)\n    return net\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "m.onnx"
    assert run_cli("export", "empty_net:build", "--input", "64", "--block", "8x8", "--out", path, "--sparse", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["sparse"] == ["weight"]
    assert path.stat().st_size == data["size"] < data["dense_size"] - 16_000


def test_export_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    from helpers.training_jobs import SMALL_FLAGS

    out = tmp_path / "run"
    assert run_cli("train", *SMALL_FLAGS, "--out", out) == 0
    capsys.readouterr()
    assert run_cli("export", out, "--int8") == 0
    assert "every zero block of the model is zero in the file" in capsys.readouterr().out
    assert run_cli("verify", out / "model.onnx") == 0
    entry = json.loads((out / "model.mask.json").read_text())["weights"][0]
    assert len(base64.b64decode(entry["bits"])) == -(-math.prod(entry["grid"]) // 8)


def test_export_command_does_not_overwrite_its_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    receipt = tmp_path / "m.mask.json"
    receipt.write_text("{}")
    common = ["export", "resnet18", "--input", "3x32x32", "--block", "16x8"]
    for arguments, message in (
        (["--out", str(tmp_path / "m.onnx"), "--receipt", str(receipt)], "the mask file of --out .* is the receipt itself"),
        (["--out", str(tmp_path / "no" / "m.onnx")], "--out .*the folder .* does not exist"),
        (["--out", str(tmp_path / "m.bin")], r"--out .* must end in one of: \.onnx, \.tflite, \.c"),
    ):
        with pytest.raises(SystemExit) as stop:
            main([*common, *arguments])
        assert stop.value.code == 2
        assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["m.mask.json"]


def test_a_litert_file_by_its_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ai_edge_litert", reason="ai-edge-litert is not installed")
    torch.manual_seed(0)
    model, receipt = model_and_receipt("plain_cnn")
    torch.save(model.state_dict(), tmp_path / "w.pt")
    receipt.save(tmp_path / "receipt.json")
    (tmp_path / "own_net.py").write_text("from helpers import zoo\n\n\ndef build():\n    return zoo.plain_cnn()[0]\n")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    command = ("export", "own_net:build", "--weights", "w.pt", "--input", "3x8x8", "--out")
    for flags, message in {
        ("m.tflite", "--sparse"): "--sparse is for ONNX files",
        ("m.tflite", "--no-fold"): "--no-fold is for ONNX files",
        ("m.onnx", "--channels-last", "--block", "4x4"): "--channels-last is for LiteRT files",
        ("m.pb",): "must end in one of: .onnx, .tflite",
    }.items():
        assert run_cli(*command, *flags) == 2
        assert message in capsys.readouterr().err
    assert run_cli(*command, "m.tflite", "--receipt", "receipt.json", "--channels-last", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["size"] == (tmp_path / "m.tflite").stat().st_size
    assert data["blocks"]["removed"] > 0
    np.save(tmp_path / "x.npy", torch.randn(40, 3, 8, 8).numpy())
    assert run_cli(*command, "n.tflite", "--int8", "--calibration", "x.npy") == 0
    assert "int8     outputs differ from float by" in capsys.readouterr().out
    assert run_cli("verify", "m.tflite", "--receipt", "receipt.json") == 0


def test_a_c_file_by_its_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model, receipt = model_and_receipt("plain_cnn")
    torch.save(model.state_dict(), tmp_path / "w.pt")
    receipt.save(tmp_path / "receipt.json")
    (tmp_path / "c_net.py").write_text("from helpers import zoo\n\n\ndef build():\n    return zoo.plain_cnn()[0]\n")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    command = ("export", "c_net:build", "--weights", "w.pt", "--input", "3x8x8", "--out")
    assert run_cli(*command, "m.onnx", "--block", "4x4", "--target", "neon") == 2
    assert "--target is for C files" in capsys.readouterr().err
    assert run_cli(*command, "m.c", "--sparse") == 2
    assert "--sparse is for ONNX files" in capsys.readouterr().err
    assert run_cli(*command, "m.c", "--target", "z80") == 1
    assert "target='z80' is not one of portable" in capsys.readouterr().err
    assert run_cli(*command, "m.c", "--receipt", "receipt.json", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (tmp_path / "m.c").stat().st_size == data["size"]
    assert receipt.mask_hash in (tmp_path / "m.c").read_text()
    assert "int m_run(const float *input, float *output);" in (tmp_path / "m.h").read_text()
    np.save(tmp_path / "x.npy", torch.randn(40, 3, 8, 8).numpy())
    assert run_cli(*command, "m8.c", "--c", "--int8", "--calibration", "x.npy", "--json") == 0
    assert 0 < json.loads(capsys.readouterr().out)["int8_error"] < 0.1
    assert run_cli(*command, "m16.c", "--c", "--fp16", "--target", "neon_fp16", "--json") == 0
    half = json.loads(capsys.readouterr().out)
    assert half["target"] == "neon_fp16"
    assert half["memory"] < 0.6 * data["memory"]
    assert run_cli(*command, "m.onnx", "--block", "4x4", "--fp16") == 2
    assert "--fp16 is for C files" in capsys.readouterr().err
    assert run_cli(*command, "m.c", "--fp16", "--int8", "--calibration", "x.npy") == 2
    assert "--int8 and --fp16 exclude each other" in capsys.readouterr().err
    assert run_cli(*command, "m.onnx", "--c") == 2
    assert "--c is for C files, and --out is m.onnx" in capsys.readouterr().err
    assert run_cli(*command[:-1], "--c") == 2
    assert "give the file to write, such as --out model.c" in capsys.readouterr().err
    sp.pack(model.eval(), "net.packed.safetensors", receipt=receipt)
    assert run_cli(*command, "p.c", "--weights", "net.packed.safetensors", "--json") == 0
    assert (tmp_path / "p.c").read_text().count("data0[") == (tmp_path / "m.c").read_text().count("data0[") > 0
    assert run_cli("export", "net.packed.safetensors", "--input", "3x8x8", "--out", "p.c") == 2
    assert "is a file, and weights alone do not say what the network computes" in capsys.readouterr().err
