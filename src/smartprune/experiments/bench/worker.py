"""The child process of one engine: ``python -m smartprune.experiments.bench.worker NAME FOLDER THREADS TOLERANCE``.

It loads the model, compares the engine's outputs with torch's, and then answers requests: one line of JSON on standard
input, one on standard output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import SmartpruneError
from ...runtime.speed import fastest_call
from .adapters import load_engine
from .engines import is_int8
from .layers import time_layers

CASE = "case.pt"  # the model, an input and calibration inputs
# tolerances: share of the largest output; RMS as a share of the outputs' spread; share of the largest output
FLOAT_TOLERANCE, INT8_TOLERANCE, BF16_TOLERANCE = 1e-3, 0.5, 0.1


def serve(name: str, folder: Path, threads: int, tolerance: float | None) -> None:
    """Loads one engine and answers requests until standard input ends."""
    torch.set_num_threads(threads)
    try:
        model, x, calibration = torch.load(folder / CASE, weights_only=False)  # written by the parent process
        run = load_engine(name, model, x, calibration, threads, folder)
        reply: dict[str, Any] = {"error": output_error(name, run(), model, x, tolerance)}
    except Exception as error:  # an engine that cannot run the model is a result too
        reply = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    print(json.dumps(reply), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = (
                time_layers(name, model, x, threads, folder)
                if "layers" in request
                else {"ms": fastest_call(run, request["time"]) * 1e3}
            )
        except Exception as error:
            reply = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


def output_error(name: str, outputs: Any, model: nn.Module, x: Tensor, tolerance: float | None = None) -> float:
    """The error of an engine's outputs against torch in float32; raises where it is above the tolerance.

    For int8 it is the RMS error relative to the RMS of the outputs about their mean. For the others it is the largest error
    relative to the largest output. Infinity and NaN have to be where torch has them.
    """
    with torch.no_grad():
        expected = _tensors(model.cpu().float()(x))
    if not expected:
        raise SmartpruneError("the model returns no tensors to compare")
    worst = torch.zeros(())
    for actual, reference in zip(_tensors(outputs), expected, strict=True):
        finite = reference.isfinite()
        if not torch.equal(actual.isfinite(), finite):
            raise SmartpruneError("its outputs differ from torch's in their shape, or in where they are NaN or infinite")
        if not finite.any():
            continue
        actual, reference = actual[finite], reference[finite]
        if is_int8(name):
            error = (actual - reference).norm()
            scale = (reference - reference.mean() if reference.numel() > 1 else reference).norm()
        else:
            error, scale = (actual - reference).abs().max(), reference.abs().max()
        worst = worst.maximum(error / scale.clamp(min=1e-12))  # maximum keeps NaN
    if tolerance is None:
        tolerance = INT8_TOLERANCE if is_int8(name) else BF16_TOLERANCE if name.endswith("bf16") else FLOAT_TOLERANCE
    if not worst <= tolerance:
        raise SmartpruneError(f"its outputs are off by {float(worst):.3g}; {tolerance:g} is allowed")
    return float(worst)


def _tensors(result: Any) -> list[Tensor]:
    """All tensors and arrays in the outputs of an engine, on the CPU in float32."""
    if isinstance(result, np.ndarray):
        result = torch.tensor(result)
    if isinstance(result, Tensor):
        return [result.float().cpu()]
    if isinstance(result, Mapping):
        result = list(result.values())
    return [tensor for part in result for tensor in _tensors(part)] if isinstance(result, (list, tuple)) else []


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
