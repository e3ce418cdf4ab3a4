"""Runs exported graphs in onnxruntime."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def run_onnx(path: Path, x: Tensor) -> Tensor:
    """The first output of a graph with one input."""
    import onnxruntime as runtime

    session = runtime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
