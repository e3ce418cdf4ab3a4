"""NVIDIA's Multi-Process Service."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from smartprune import SmartpruneError
from smartprune.experiments.sweep import mps


def test_the_service_runs_for_the_processes_of_the_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / mps.PROGRAM
    program.write_text('#!/bin/sh\n[ "$1" = -d ] || read word\necho "$1$word" "$CUDA_MPS_PIPE_DIRECTORY" >> "$0.log"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with mps.MultiProcessService():
        folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(folder).is_dir()
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert not Path(folder).exists()
    assert Path(f"{program}.log").read_text().splitlines() == [f"-d {folder}", f"quit {folder}"]


def test_without_the_program_an_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mps, "FOLDERS", ())
    with pytest.raises(SmartpruneError, match="--mps needs nvidia-cuda-mps-control, which was not found"):
        mps.find_program()
