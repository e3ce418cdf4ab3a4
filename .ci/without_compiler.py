"""Runs the kernels of an installed wheel, and fails if there is a compiler or if they were compiled here."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn

import smartprune as sp
from smartprune.runtime import DTYPES
from smartprune.runtime.cpu import build, store

assert not any(map(shutil.which, ("cc", "gcc", "clang"))), "this check needs a PATH without compilers"
torch.manual_seed(0)
model, x = nn.Sequential(nn.Conv2d(8, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 8, 1)).eval(), torch.randn(2, 8, 9, 11)
with tempfile.TemporaryDirectory() as folder:
    store.shared_folder = lambda: Path(folder)  # type: ignore[assignment]
    for name in build.supported_sets():
        for dtype in DTYPES:
            code = build.load(dtype, name).code
            assert Path(code._name).parent == build.PREBUILT, f"{code._name} is not of the wheel"
    fast = sp.accelerate(model, example=x, backend="native", threads=2)
    half = sp.accelerate(model, example=x, dtype="float16")
    small = sp.accelerate(model, example=x, dtype="int8")
    with torch.no_grad():
        assert torch.allclose(fast(x), model(x), atol=1e-5)
        assert float((half(x) - model(x)).norm() / model(x).norm()) < 2e-3
        assert float((small(x) - model(x)).norm() / model(x).norm()) < 0.03
    assert not list(Path(folder).iterdir()), "the cache is not empty"
print(f"runs without a compiler: {', '.join(build.supported_sets())}")
