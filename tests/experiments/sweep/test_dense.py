"""Dense models of a sweep are kept as one file each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smartprune import SmartpruneError
from smartprune.experiments.sweep import dense
from smartprune.experiments.sweep.dense import DenseModels


def test_a_dense_model_is_copied_once_when_its_stage_is_over(tmp_path: Path) -> None:
    models = DenseModels(tmp_path)
    run = models.run_folder("digits-s0")
    assert run.name.startswith(".")  # hidden, so that it does not count as a run of the sweep
    assert not models.collect("digits-s0")
    run.mkdir()
    (run / "checkpoint.pt").write_bytes(b"unfinished")
    assert not models.collect("digits-s0")
    (run / "dense.safetensors").write_bytes(b"weights")
    assert models.collect("digits-s0")
    (run / "dense.safetensors").write_bytes(b"other")  # written by a resumed run
    assert models.collect("digits-s0")
    assert models.path("digits-s0").read_bytes() == b"weights"
    models.remove_run_folder("digits-s0")
    models.remove_run_folder("digits-s0")
    assert [path.name for path in tmp_path.iterdir()] == ["digits-s0.safetensors"]


def write_model(models: DenseModels, name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weights = {
        "weight": torch.randn(64, 32, 3, 3),
        "large": torch.full((2, 2), 1e6),  # too large for half precision
        "variance": torch.full((64,), 1e-9),  # zero in half precision
        "steps": torch.tensor(7),
    }
    models.run_folder(name).mkdir(parents=True)
    save_file(weights, models.run_folder(name) / "dense.safetensors")
    return weights


def test_a_dense_model_is_put_back_from_its_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dense, "PART_BYTES", 10_000)
    parts = tmp_path / "parts"
    here, there = DenseModels(tmp_path / "here", parts), DenseModels(tmp_path / "there", parts)
    weights = write_model(here, "net")
    there.folder.mkdir()
    assert here.collect("net")
    files = sorted(parts.iterdir())
    assert [path.name.split(".")[-1] for path in files] == [f"{i}-of-4" for i in range(1, 5)]
    assert max(path.stat().st_size for path in files) <= 10_000
    assert there.collect("net")
    assert not there.collect("ne")
    assert here.path("net").read_bytes() == there.path("net").read_bytes()  # runs start from equal weights on both machines
    stored = load_file(there.path("net"))
    assert torch.equal(stored["weight"], weights["weight"].half())
    assert all(torch.equal(stored[name], weights[name]) for name in ("large", "variance", "steps"))


def test_missing_and_damaged_parts_raise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dense, "PART_BYTES", 10_000)
    models = DenseModels(tmp_path / "here", tmp_path / "parts")
    write_model(models, "net")
    models.collect("net")
    first, second, *_ = sorted(models.parts.iterdir()) if models.parts else []
    data = second.read_bytes()
    second.write_bytes(data[:-1] + b"x")
    with pytest.raises(SmartpruneError, match="parts of net are damaged; copy them again"):
        DenseModels(tmp_path / "there", models.parts).collect("net")
    second.unlink()
    with pytest.raises(SmartpruneError, match="give all parts of one model"):
        DenseModels(tmp_path / "there", models.parts).collect("net")
    first.rename(first.with_name("other.0123456789abcdef.1-of-1"))
    with pytest.raises(SmartpruneError, match="parts of other are damaged"):
        DenseModels(tmp_path / "there", models.parts).collect("other")
