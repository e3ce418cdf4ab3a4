"""Dense models of a sweep are kept as one file each."""

from __future__ import annotations

from pathlib import Path

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
