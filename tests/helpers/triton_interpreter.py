"""Runs tests of Triton kernels without a GPU: a child process repeats the test file with Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import smartprune

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # true in the child process

needs_triton = pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="triton is not installed, or this is the child process")
needs_interpreter = pytest.mark.skipif(not (HAS_TRITON and INTERPRETED), reason="runs in the interpreted child process")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a CUDA device")


def environment(**more: str) -> dict[str, str]:
    """Environment variables of a child process without a GPU."""
    paths = (str(Path(smartprune.__file__).parents[1]), str(Path(__file__).parents[1]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths), **more}


def run_interpreted(file: str) -> None:
    """Runs a test file in the interpreter. Triton chooses it at import, so this needs a new process."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file, "-m", "not gpu"]
    done = subprocess.run(command, env=environment(TRITON_INTERPRET="1"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "passed" in done.stdout


@pytest.fixture(autouse=True)
def loaded_loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the interpreter of Triton 3.6 loop up to a loaded number with NumPy 2. Triton 3.7 does this itself."""
    if not (HAS_TRITON and INTERPRETED):
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: object, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))  # type: ignore[attr-defined]

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
