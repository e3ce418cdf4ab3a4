"""The child process of one engine: ``python -m smartprune.experiments.bench.worker NAME FOLDER THREADS TOLERANCE``.

It loads the model, compares the engine's outputs with torch's, and then answers requests: one line of JSON on standard
input, one on standard output.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ... import text
from ...errors import SmartpruneError
from ...runtime import accelerate
from ...runtime.fallback import REPLACED
from .adapters import Run, load_engine
from .engines import OURS, is_int8

CASE = "case.pt"  # the model, an input and calibration inputs
# tolerances: share of the largest output; RMS as a share of the outputs' spread; share of the largest output
FLOAT_TOLERANCE, INT8_TOLERANCE, BF16_TOLERANCE = 1e-3, 0.5, 0.1
LEAST_CALLS = 5


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
            reply = time_layers(name, model, x) if "layers" in request else {"ms": fastest_call(run, request["time"]) * 1e3}
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


def fastest_call(run: Run, seconds: float) -> float:
    """The seconds of the fastest call."""
    run()
    best, calls, end = float("inf"), 0, time.perf_counter() + seconds
    while calls < LEAST_CALLS or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best, calls = min(best, time.perf_counter() - start), calls + 1
    return best


def time_layers(name: str, model: nn.Module, x: Tensor, seconds: float = 0.05) -> dict[str, tuple[str, float]]:
    """The kind and the time of every layer alone that can be accelerated alone, with the inputs it has in the network."""
    inputs: dict[str, Tensor] = {}

    def record(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.setdefault(path, (args[0] if args else kwargs["input"]).clone())

    hooks = [
        module.register_forward_pre_hook(partial(record, path), with_kwargs=True)
        for path, module in model.named_modules()
        if type(module) in REPLACED
    ]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    times = {}
    for path, layer_input in inputs.items():
        layer: nn.Module = model.get_submodule(path)
        kernel = getattr(layer, "kernel_size", None)
        if name == OURS:
            layer = accelerate(nn.Sequential(layer), example=layer_input, threads=torch.get_num_threads())
        with torch.inference_mode():
            duration = fastest_call(partial(layer, layer_input), seconds)
        times[path] = ("linear" if kernel is None else f"{text.format_shape(kernel)} conv", duration)
    return times


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
