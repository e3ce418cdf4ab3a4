"""Measured times of a network in the CPU runtime: of every layer and of the whole, with different shares of its blocks."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import platform
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__, text
from ..core.layers import Layer, plain_name
from ..errors import SmartpruneError
from ..fields import Fields
from ..files import parse_json, read_limited, write_atomic
from . import accelerate
from .module import Accelerated, inference_copy

SHARES = (0.0, 0.02, 0.05, 0.1, 0.17, 0.25, 0.5, 1.0)  # of the blocks that are kept, in every layer
LEAST_ROUNDS, SECONDS = 10, 6.0  # all shares take turns in each round
CALLS = 3  # of a network in each round; the first one brings its weights into the cache
SEED = 0
FORMAT = 1
MAX_BYTES, MAX_LAYERS, MAX_KNOTS = 1 << 24, 100_000, 100
MOST_PS = 10**16  # almost three hours


@dataclass(frozen=True)
class Curve:
    """A time in picoseconds that does not decrease: straight lines between measured points. All numbers are integers."""

    x: tuple[int, ...]  # increasing
    ps: tuple[int, ...]  # not decreasing

    @staticmethod
    def through(points: Sequence[tuple[int, int]]) -> Curve:
        """The curve through points in any order. Where it would fall, it stays: one more block cannot save time."""
        best: dict[int, int] = {}
        for x, ps in points:
            best[x] = min(ps, best.get(x, ps))
        xs, out, most = sorted(best), [], 0
        for x in xs:
            most = max(most, best[x])
            out.append(most)
        return Curve(tuple(xs), tuple(out))

    def at(self, x: int) -> int:
        """The time at ``x``. Before the first point and after the last one it is constant."""
        i = bisect_right(self.x, x)
        if i in (0, len(self.x)):
            return self.ps[max(0, i - 1)]
        x0, x1, y0, y1 = self.x[i - 1], self.x[i], self.ps[i - 1], self.ps[i]
        return y0 + (y1 - y0) * (x - x0) // (x1 - x0)


@dataclass(frozen=True)
class LatencyTable:
    """The measured times of a network in the CPU runtime. The time of the network depends on the sum over its layers.

    ``layers`` has a curve for each weight: picoseconds by kept elements. ``network`` is the time of a call of the whole network,
    by the sum of the times of its layers.
    """

    machine: str
    threads: int
    input: str
    grids: Mapping[str, tuple[int, ...]] = field(repr=False)  # the blocks of each weight that were measured
    layers: Mapping[str, Curve] = field(repr=False)
    network: Curve = field(repr=False)
    version: str = __version__

    @property
    def dense_ps(self) -> int:
        return self.network.ps[-1]

    @property
    def digest(self) -> str:
        """SHA-256 of everything in the table."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def curves(self, layers: Sequence[Layer]) -> list[Curve]:
        """The curve of every layer, or an error if the table belongs to another model, block or choice of layers."""
        out = []
        for layer in layers:
            name = plain_name(layer.weight)
            if self.grids.get(name) == layer.grid.shape and self.layers[name].x[-1] == layer.params:
                out.append(self.layers[name])
        if len(out) != len(layers) or len(layers) != len(self.layers):
            raise SmartpruneError(
                f"latency: the table has {len(self.layers)} layers, and {len(out)} of them have the shape and the blocks of the "
                f"{len(layers)} layers to prune; measure again: leave table= out, or give a new file"
            )
        return out

    def to_json(self) -> dict[str, object]:
        values = {name: value for name, value in asdict(self).items() if name not in ("grids", "layers", "network")}
        layers = [
            {"weight": name, "grid": list(self.grids[name]), "x": list(curve.x), "ps": list(curve.ps)}
            for name, curve in self.layers.items()
        ]
        return {"format": FORMAT, **values, "layers": layers, "network": {"x": list(self.network.x), "ps": list(self.network.ps)}}

    def save(self, path: Path) -> None:
        write_atomic(path, json.dumps(self.to_json(), indent=1).encode())

    @staticmethod
    def load(path: Path) -> LatencyTable:
        """Reads a file that :meth:`save` wrote. Files are not trusted."""
        fields = Fields(parse_json(read_limited(path, MAX_BYTES), str(path)), str(path))
        fields.integer("format", FORMAT, FORMAT)
        layers, grids = {}, {}
        for entry in fields.items("layers", MAX_LAYERS):
            name = entry.text("weight")
            layers[name], grids[name] = _read_curve(entry), entry.integers("grid", 1, 8)
            entry.reject_unknown_keys()
        table = LatencyTable(
            machine=fields.text("machine", 100),
            threads=fields.integer("threads", 1, 256),
            input=fields.text("input", 100),
            grids=grids,
            layers=layers,
            network=_read_curve(fields.nested("network")),
            version=fields.text("version", 100),
        )
        fields.reject_unknown_keys()
        least, most = (sum(curve.ps[i] for curve in layers.values()) for i in (0, -1))
        if (table.network.x[0], table.network.x[-1]) != (least, most):
            raise SmartpruneError(
                f"{path}: network goes from {table.network.x[0]}; it must go from {least} to {most}, like the layers"
            )
        return table


def _read_curve(fields: Fields) -> Curve:
    x, ps = (fields.integers(name, 0, MAX_KNOTS) for name in ("x", "ps"))
    rising = all(a < b for a, b in pairwise(x)) and all(a <= b for a, b in pairwise(ps))
    if not x or len(x) != len(ps) or not rising or max(x[-1], ps[-1]) > MOST_PS:
        raise SmartpruneError(
            f"{fields.where}: x and ps are not a curve; they must be equally long, x must increase and ps must not decrease"
        )
    return Curve(x, ps)


def measure_latency(model: nn.Module, layers: Sequence[Layer], example: Any, threads: int) -> LatencyTable:
    """Times the runtime with random blocks of every layer removed, for several shares of kept blocks.

    Operations are timed where they run, one after the other in the whole network, so that caches are as they will be.
    """
    base = inference_copy(model)
    args, kwargs = _call(example)
    variants = [_Variant(base, layers, share, args, kwargs, threads) for share in SHARES]
    rounds, end = 0, time.perf_counter() + SECONDS
    while rounds < LEAST_ROUNDS or time.perf_counter() < end:
        for variant in variants:
            variant.run()
        rounds += 1
    points: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for variant in variants:
        times = variant.layer_ps()
        for layer in layers:
            points[plain_name(layer.weight)].append((variant.kept[layer.name], times[layer.name]))
    curves = {name: Curve.through(entries) for name, entries in points.items()}
    if not any(curve.ps[-1] > curve.ps[0] for curve in curves.values()):
        raise SmartpruneError(
            "latency: no layer to prune gets faster in the runtime on this machine; use a budget in MACs: smartprune.macs"
        )
    sums = [sum(curves[plain_name(layer.weight)].at(v.kept[layer.name]) for layer in layers) for v in variants]
    network = _line(sums, [round(1000 * median(variant.totals)) for variant in variants])
    shown = ", ".join(text.format_shape(x.shape) for x in torch.utils._pytree.tree_leaves(example) if isinstance(x, Tensor))
    grids = {plain_name(layer.weight): tuple(layer.grid.shape) for layer in layers}
    return LatencyTable(machine_name(), threads, text.shorten(shown, 100), grids, curves, network)


def _line(sums: Sequence[int], totals: Sequence[int]) -> Curve:
    """The time of the network by the sum over its layers: a line from the point without blocks, with the median slope to others.

    Single totals are less reliable than the sums: a long call is disturbed more often than a short operation. They are medians over
    the rounds, because the fastest call of all is faster than what a user sees.
    """
    points = [(a - sums[0], b - totals[0]) for a, b in zip(sums, totals, strict=True) if a > sums[0]]
    slope = max(Fraction(1), median(Fraction(rise, run) for run, rise in points))
    return Curve((sums[0], sums[-1]), (totals[0], totals[0] + math.floor(slope * (sums[-1] - sums[0]))))


class _Variant:
    """The network with one share of the blocks of every layer, in the runtime."""

    def __init__(
        self, base: nn.Module, layers: Sequence[Layer], share: float, args: Any, kwargs: Mapping[str, Any], threads: int
    ) -> None:
        model, generator = copy.deepcopy(base), torch.Generator().manual_seed(SEED)
        weights = dict(model.named_parameters(remove_duplicate=False))
        self.layers, self.args, self.kwargs = layers, args, kwargs
        self.kept: dict[str, int] = {}  # elements
        for layer in layers:
            mask = torch.zeros(layer.n, device="cpu")
            mask[torch.randperm(layer.n, generator=generator, device="cpu")[: math.ceil(share * layer.n)]] = 1
            self.kept[layer.name] = int(layer.grid.sizes()[mask.bool()].sum())
            scale = 1 / math.sqrt(share) if share else 0.0  # activations stay as large, so that numbers do not become tiny
            weights[layer.weight].mul_(layer.grid.expand(mask * scale))
        self.fast = accelerate(model, threads=threads)
        if not isinstance(self.fast, Accelerated):
            raise SmartpruneError("latency: the runtime cannot trace the model; use a budget in MACs: smartprune.macs")
        self.programs = self.fast.plan(*args, **kwargs).programs
        self.clock = clock_of(threads)
        self.totals: list[int] = []  # the fastest call of every round
        self.best: list[list[int]] = [[] for _ in self.programs]

    def run(self) -> None:
        """Times the whole network, and its operations one by one."""
        calls = []
        for _ in range(CALLS):
            start = self.clock()
            self.fast(*self.args, **self.kwargs)
            calls.append(self.clock() - start)
        self.totals.append(min(calls))
        with ExitStack() as stack:
            times = [stack.enter_context(program.timer()) for program in self.programs]
            for _ in range(CALLS):
                self.fast(*self.args, **self.kwargs)
        self.best = [list(map(min, a, b)) if a else b for a, b in zip(self.best, times, strict=True)]

    def layer_ps(self) -> dict[str, int]:
        """The picoseconds of every layer; 0 for one that torch runs, because its zeros are not skipped."""
        by_module: dict[str, int] = defaultdict(int)
        for program, times in zip(self.programs, self.best, strict=True):
            for number, module in program.layers.items():
                by_module[module] += 1000 * times[number]
        return {layer.name: sum(by_module[module] for module in {site[0] for site in layer.sites}) for layer in self.layers}


def clock_of(threads: int) -> Callable[[], int]:
    """CPU nanoseconds of this thread if it does all the work, so that other programs do not count; else the wall clock."""
    return time.thread_time_ns if threads == torch.get_num_threads() == 1 else time.perf_counter_ns


def _call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, on the CPU in the precision of the runtime."""

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.detach().cpu()
        return x.float() if x.is_floating_point() else x

    moved = torch.utils._pytree.tree_map(move, example)
    if isinstance(moved, Mapping):
        return (), dict(moved)
    return (tuple(moved) if isinstance(moved, (tuple, list)) else (moved,)), {}


def machine_name() -> str:
    """The processor, as the system calls it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return text.shorten(text.escape(name or platform.processor() or platform.machine() or "unknown"), 100)
