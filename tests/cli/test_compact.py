"""smartprune compact: the files that it writes, its report, and what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from helpers.onnx_files import run_onnx
from helpers.training_jobs import run_cli
from smartprune import SmartpruneError
from smartprune.artifacts.compact_files import program_bytes

CODE = """
from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 5))
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model whose code is in mine.py and whose weights, with six empty channels, are in w.safetensors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(CODE)
    scope: dict[str, object] = {}
    exec(CODE, scope)
    torch.manual_seed(0)
    made: nn.Module = scope["build"]()  # type: ignore[operator]
    with torch.no_grad():
        made[0].weight[:6] = 0  # type: ignore[index]
    save_file(made.state_dict(), tmp_path / "w.safetensors")
    return made.eval()


COMMAND = ("compact", "mine:build", "--weights", "w.safetensors", "--input", "3x8x8")


def test_files_compute_what_the_model_computes(model: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(4, 3, 8, 8)
    assert run_cli(*COMMAND, "--out", "small.pt2") == 0
    printed = capsys.readouterr().out
    assert "16x3x3x3  10x3x3x3" in printed
    assert f"small.pt2, {(tmp_path / 'small.pt2').stat().st_size:,} bytes" in printed
    program = torch.export.load(tmp_path / "small.pt2").module()
    torch.testing.assert_close(program(x), model(x), rtol=1e-5, atol=1e-5)

    assert run_cli(*COMMAND, "--out", "even.pt2", "--multiple", "4") == 0
    assert "16x3x3x3  12x3x3x3" in capsys.readouterr().out

    assert run_cli(*COMMAND, "--out", "small.safetensors", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    state = load_file(tmp_path / "small.safetensors")
    assert data["parameters"][1] == sum(tensor.numel() for tensor in state.values())
    assert data["size"] == (tmp_path / "small.safetensors").stat().st_size
    assert {tuple(state["0.weight"].shape), tuple(state["2.weight"].shape)} == {(10, 3, 3, 3), (8, 10, 3, 3)}


def test_onnx_file(model: nn.Module, tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    assert run_cli(*COMMAND, "--out", "small.onnx") == 0
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(run_onnx(tmp_path / "small.onnx", x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file lies in the run folder unless --out says otherwise, and the files of the run are not replaced."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    from helpers.training_jobs import SMALL_FLAGS

    out = tmp_path / "run"
    assert run_cli("train", *SMALL_FLAGS, "--out", out) == 0
    capsys.readouterr()
    assert run_cli("compact", out) == 0
    assert (out / "compact.pt2").exists()
    assert "outputs    differ by at most" in capsys.readouterr().out
    assert run_cli("compact", out, "--out", out / "model.safetensors") == 2
    assert "the model.safetensors of the run" in capsys.readouterr().err


def test_wrong_arguments(model: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (("mine:build", "--input", "3x8x8"), "--out is missing"),
        (("mine:build", "--input", "3x8x8", "--out", "a.bin"), "must end in one of: .pt2, .onnx, .tflite, .safetensors"),
        (("mine:build", "--input", "3x8x8", "--out", "a.pt2", "--multiple", "0"), "--multiple 0 must be a positive number"),
        (("mine:build", "--out", "a.pt2"), "add --input"),
        (("mine:build", "--input", "3x8x8", "--weights", "w.safetensors", "--out", "w.safetensors"), "the file of --weights"),
        (("nothing", "--out", "a.pt2"), "unknown model 'nothing'"),
    ):
        assert run_cli("compact", *words) == 2
        assert message in capsys.readouterr().err
    assert run_cli("compact", "mine:build", "--input", "4x8x8", "--out", "a.pt2") == 1
    assert "the model does not run on it" in capsys.readouterr().err
    assert not (tmp_path / "a.pt2").exists()


def test_programs_take_dictionaries_and_any_batch_size() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor, scale: float, y: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x) * scale + y
            return out

    model = Two().eval()
    data = program_bytes(model, {"x": torch.randn(1, 3), "scale": 2.0, "y": torch.randn(1, 2)})
    program = torch.export.load(io.BytesIO(data)).module()
    inputs = {"x": torch.randn(5, 3), "scale": 2.0, "y": torch.randn(5, 2)}
    torch.testing.assert_close(program(**inputs), model(**inputs))


def test_a_model_that_cannot_be_stored_is_an_error() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(SmartpruneError, match=r"cannot store the model .*; write an \.onnx file"):
        program_bytes(Branch(), torch.ones(2, 3))
