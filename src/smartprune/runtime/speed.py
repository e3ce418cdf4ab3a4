"""The speed of a pruned model on a CPU: what to expect from its MACs, and a short measurement."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.kinds import is_masked
from ..errors import SmartpruneError

# The share of a dense float32 network's time that is left: its share of MACs, and a fixed part for everything else. The rows of
# five networks in records/runtime-cpu lie between the bounds, and the second number is typical of ResNet50 and YOLOv5m.
FIXED_TIME, TYPICAL_FIXED_TIME = 0.085, 0.025
LARGEST_GAIN = 1.1  # the speed-up, times the share of MACs left
SMALLEST_MACS = 50_000_000  # of the networks that were measured; smaller ones spend their time elsewhere
LEAST_CALLS = 5


@dataclass(frozen=True)
class Speed:
    """Milliseconds per call of a dense model and of the same model with its zero blocks skipped.

    ``engine`` is the fastest of the ways in which the dense model was run.
    """

    engine: str
    dense_ms: float
    ms: float
    threads: int

    @property
    def speedup(self) -> float:
        return self.dense_ms / self.ms


class Speedup(NamedTuple):
    """A speed-up that is expected, with its range."""

    low: float
    typical: float
    high: float


def expected_speedup(kept: int, total: int) -> Speedup | None:
    """The expected speed-up over the fastest dense engine on a CPU, if a model of ``total`` MACs keeps ``kept`` of them.

    Large layers gain most. Networks with many small layers are at the low end, because the time between their layers remains.
    None for models smaller than those that were measured.

    >>> speedup = expected_speedup(10**9, 4 * 10**9)
    >>> speedup.low < 3.7 < speedup.high, expected_speedup(10, 40)
    (True, None)
    """
    if not 0 <= kept <= total:
        raise SmartpruneError(f"expected_speedup: kept={kept} is outside [0, {total}]: it is the part of the MACs that is kept")
    if total < SMALLEST_MACS:
        return None
    left = kept / total
    high = LARGEST_GAIN / left if left else math.inf
    return Speedup(1 / (left + FIXED_TIME), min(high, 1 / (left + TYPICAL_FIXED_TIME)), high)


def macs_left_for(speedup: float) -> float | None:
    """The share of the model's MACs at which the typical speed-up is ``speedup``; None if it is too large.

    >>> round(macs_left_for(4), 3), macs_left_for(50)
    (0.225, None)
    """
    left = 1 / speedup - TYPICAL_FIXED_TIME
    return left if left > 0 else None


def fastest_call(run: Callable[[], Any], seconds: float) -> float:
    """The seconds of the fastest call. Runs for ``seconds``, and at least ``LEAST_CALLS`` times after one call to warm up."""
    run()
    best, calls, end = float("inf"), 0, time.perf_counter() + seconds
    while calls < LEAST_CALLS or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best, calls = min(best, time.perf_counter() - start), calls + 1
    return best


def measure_speed(dense: nn.Module, pruned: nn.Module, example: Any, seconds: float = 0.3) -> Speed:
    """Times one call of a dense model, and of the pruned model in the runtime. Takes a few seconds.

    The dense model runs in torch with both memory layouts, and in the runtime. ``smartprune bench`` also times other engines, each
    in a process of its own.
    """
    from . import accelerate

    if any(is_masked(module) for model in (dense, pruned) for module in model.modules()):
        raise SmartpruneError("measure_speed: the model is still being pruned; call smartprune.bake(model) first")
    inputs = example if isinstance(example, tuple) else (example,)
    if not all(isinstance(value, Tensor) for value in inputs):
        raise SmartpruneError("measure_speed: the example must be a tensor or a tuple of tensors")
    inputs = tuple(value.detach().cpu() for value in inputs)
    # a plain copy first, because accelerate() folds batch norms into a copy of its own
    plain = copy.deepcopy(dense).cpu().eval()
    engines: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {"torch": (plain, inputs)}
    if any(value.dim() == 4 for value in inputs):
        last: Any = {"memory_format": torch.channels_last}
        moved = tuple(value.contiguous(**last) if value.dim() == 4 else value for value in inputs)
        engines["torch channels-last"] = (copy.deepcopy(plain).to(**last), moved)
    engines["the same kernels without zeros"] = (accelerate(plain, example=inputs, backend="native"), inputs)
    fast = accelerate(copy.deepcopy(pruned).cpu().eval(), example=inputs)
    with torch.inference_mode():
        times = {name: fastest_call(lambda m=model, x=x: m(*x), seconds) for name, (model, x) in engines.items()}  # type: ignore[misc]
        ms = 1e3 * fastest_call(lambda: fast(*inputs), seconds)
    engine = min(times, key=times.__getitem__)
    return Speed(engine, 1e3 * times[engine], ms, torch.get_num_threads())
