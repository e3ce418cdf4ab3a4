"""Measures the table of a budget in time: first the layers of a network, then the whole network."""

from __future__ import annotations

import copy
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from fractions import Fraction
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from .. import text
from ..core.layers import Layer, plain_name
from ..errors import SmartpruneError
from . import accelerate
from .arguments import Call
from .cpu.program import Program
from .latency_table import Curve, LatencyTable, machine_name
from .latency_time import NetworkTime, block_costs
from .module import Accelerated, inference_copy

SHARES = (0.0, 0.02, 0.05, 0.1, 0.17, 0.25, 0.5, 0.75, 1.0)  # of the blocks that are kept, in every layer
TIMES = (0.1, 0.2, 0.35, 0.6)  # of the time that the layers take, in the networks that are timed as a whole
LEAST_ROUNDS, SECONDS = 10, 5.0  # of each of the two measurements; all networks take turns in a round
Mask = Sequence[Tensor]  # the kept blocks of every layer
CALLS, TURN = 5, 10_000_000  # of a network in each round: calls, and nanoseconds. The first calls bring its weights into the caches


def measure_latency(model: nn.Module, layers: Sequence[Layer], example: Any, threads: int) -> LatencyTable:
    """Times the runtime with the smallest blocks of the model removed.

    First every layer keeps the same share of its blocks, for several shares. Operations are timed where they run, one after the
    other in the whole network, so that caches are as they will be. Then the whole network is timed with masks as a budget chooses
    them, in turns with the dense one. Their ratios are stored, so a machine that slows down meanwhile changes little.
    """
    base = inference_copy(model)
    args, kwargs = _call(example)
    weights = dict(base.named_parameters(remove_duplicate=False))
    squares = [layer.grid.sum(weights[layer.weight].double().square()) for layer in layers]

    def networks(masks: Sequence[Mask], backend: str) -> list[_Network]:
        return [_Network(_pruned(base, layers, squares, mask), (args, kwargs), threads, backend) for mask in masks]

    masks: list[Mask] = [[_largest(rank, share) for rank in squares] for share in SHARES]
    curves = _layer_curves(layers, masks, networks(masks, "native"))
    if not any(curve.ps[-1] > curve.ps[0] for curve in curves):
        raise SmartpruneError(
            "latency: no layer to prune gets faster in the runtime on this machine, because torch runs them, or because only "
            "torch.export can trace the model; use a budget in MACs: smartprune.macs"
        )
    masks = [masks[-1], masks[0], *(mask for pair in _like_budgets(layers, curves, squares) for mask in pair)]
    curves, network = _fit(layers, curves, masks, _totals(networks(masks, "auto")))
    names = [plain_name(layer.weight) for layer in layers]
    grids = {name: tuple(layer.grid.shape) for name, layer in zip(names, layers, strict=True)}
    stored = dict(zip(names, curves, strict=True))
    return LatencyTable(machine_name(), threads, show_input(example), grids, stored, network)


def _largest(rank: Tensor, share: float) -> Tensor:
    """The highest ranked blocks of a layer, at least this share, bool [n]. Ties are broken at random, with a fixed seed."""
    mask = torch.zeros(len(rank), dtype=torch.bool, device="cpu")
    shuffled = torch.randperm(len(rank), generator=torch.Generator().manual_seed(0), device="cpu")
    mask[shuffled[rank[shuffled].sort(descending=True, stable=True).indices[: math.ceil(share * len(rank))]]] = True
    return mask


def _layer_curves(layers: Sequence[Layer], masks: Sequence[Mask], networks: Sequence[_Network]) -> list[Curve]:
    """The picoseconds of every layer by its kept elements. A layer that torch runs takes none: its zeros are not skipped."""
    _rounds(networks, lambda network: network.time_layers())
    times = [network.module_ps() for network in networks]
    curves = []
    for i, layer in enumerate(layers):
        kept = [int(layer.grid.sizes()[mask[i]].sum()) for mask in masks]
        modules = {site[0] for site in layer.sites}
        curves.append(Curve.through([(x, sum(ps[m] for m in modules)) for x, ps in zip(kept, times, strict=True)]))
    return curves


def _like_budgets(layers: Sequence[Layer], curves: Sequence[Curve], squares: Sequence[Tensor]) -> list[tuple[Mask, Mask]]:
    """Pairs of masks with the same sum over the layers: ranked by the squares of the weights for their time, and by their mean.

    The first ranking keeps blocks of large layers, the second one blocks of small layers.
    """
    sizes = tuple(layer.grid.sizes().cpu() for layer in layers)
    square, size, counts = torch.cat(list(squares)), torch.cat(sizes), [layer.n for layer in layers]
    least, most = (sum(curve.ps[i] for curve in curves) for i in (0, -1))
    out: list[tuple[Mask, Mask]] = []
    for part in TIMES:
        limit = least + math.floor(part * (most - least))
        time_of = NetworkTime(sizes, tuple(curves), Curve((0, most), (0, most)), limit)
        masks = [time_of.best(square / divisor) for divisor in (block_costs(curves, sizes, limit).clamp(min=1), size)]
        assert masks[0] is not None
        assert masks[1] is not None
        out.append((list(masks[0].split(counts)), list(masks[1].split(counts))))
    return out


def _fit(
    layers: Sequence[Layer], curves: Sequence[Curve], masks: Sequence[Mask], totals: Sequence[int]
) -> tuple[list[Curve], Curve]:
    """Curves of the layers and of the network that agree with the times of whole networks: dense, empty, and pairs of masks.

    A layer is faster in a smaller network, whose weights leave it more of the caches. So of two networks with the same sum over
    the layers, the one with fewer weights is faster. The difference is divided among the weights, and added to their layers.
    """
    kept = [[int(layer.grid.sizes()[m].sum()) for layer, m in zip(layers, mask, strict=True)] for mask in masks]
    sums = [sum(curve.at(x) for curve, x in zip(curves, xs, strict=True)) for xs in kept]
    elements = [sum(xs) for xs in kept]
    slope = max(1.0, (totals[0] - totals[1]) / (sums[0] - sums[1]))
    products = squares = 0.0
    for i in range(2, len(masks), 2):
        difference = (totals[i] - totals[i + 1]) / slope - (sums[i] - sums[i + 1])
        weights = elements[i] - elements[i + 1]
        products += weights * difference / totals[i] ** 2  # relative errors of long and short times count the same
        squares += (weights / totals[i]) ** 2
    extra = Fraction(max(0.0, products / squares if squares else 0.0)).limit_denominator(1000)
    curves = [
        Curve(curve.x, tuple(ps + math.floor(extra * x) for x, ps in zip(curve.x, curve.ps, strict=True))) for curve in curves
    ]
    sums = [sum(curve.at(x) for curve, x in zip(curves, xs, strict=True)) for xs in kept]
    points = list(zip(sums, totals, strict=True))
    pairs = [tuple((a + b) // 2 for a, b in zip(*points[i : i + 2], strict=True)) for i in range(2, len(points), 2)]
    return curves, Curve.through([(x, min(ps, totals[0])) for x, ps in [*points[:2], *pairs]])


def _totals(networks: Sequence[_Network]) -> list[int]:
    """The picoseconds of every network: its ratio to the first one in the same round, times the median of that one."""
    _rounds(networks, lambda network: network.time())
    dense = networks[0].totals
    scale = 1000 * median(dense)
    return [round(scale * median(a / b for a, b in zip(network.totals, dense, strict=True))) for network in networks]


def _rounds(networks: Sequence[_Network], run: Callable[[_Network], None]) -> None:
    """Networks take turns, so that noise of the machine affects all of them."""
    rounds, end = 0, time.perf_counter() + SECONDS
    while rounds < LEAST_ROUNDS or time.perf_counter() < end:
        for network in networks:
            run(network)
        rounds += 1


def _pruned(base: nn.Module, layers: Sequence[Layer], squares: Sequence[Tensor], mask: Mask) -> nn.Module:
    """A copy with these blocks alone. The sum of the squares of a layer stays, so that no activation becomes tiny."""
    model = copy.deepcopy(base)
    weights = dict(model.named_parameters(remove_duplicate=False))
    for layer, kept, square in zip(layers, mask, squares, strict=True):
        left = float(square[kept].sum())
        scale = math.sqrt(float(square.sum()) / left) if left else 0.0
        weights[layer.weight].mul_(layer.grid.expand(kept.float() * scale))
    return model


class _Network:
    """A network in the runtime, and the times of its calls."""

    def __init__(self, model: nn.Module, call: Call, threads: int, backend: str) -> None:
        self.args, self.kwargs = call
        self.fast = accelerate(model, example=self.kwargs or self.args, threads=threads, backend=backend)
        self.clock = clock_of(threads)
        self.totals: list[int] = []  # the fastest call of every round
        self.programs: Sequence[Program] = ()
        if backend == "native":
            if not isinstance(self.fast, Accelerated):
                raise SmartpruneError("latency: the runtime cannot trace the model; use a budget in MACs: smartprune.macs")
            self.programs = self.fast.plan(*self.args, **self.kwargs).programs
        self.rounds: list[list[list[int]]] = [[] for _ in self.programs]  # the fastest run of every operation, by round

    def time(self) -> None:
        """Times the whole network."""
        calls: list[int] = []
        while len(calls) < CALLS or sum(calls) < TURN:
            start = self.clock()
            self.fast(*self.args, **self.kwargs)
            calls.append(self.clock() - start)
        self.totals.append(min(calls))

    def time_layers(self) -> None:
        """Times the operations of the network one by one."""
        with ExitStack() as stack:
            times = [stack.enter_context(program.timer()) for program in self.programs]
            for _ in range(CALLS):
                self.fast(*self.args, **self.kwargs)
        for rounds, fastest in zip(self.rounds, times, strict=True):
            rounds.append(fastest)

    def module_ps(self) -> Mapping[str, int]:
        """The picoseconds of every module that a program runs; 0 for others."""
        out: dict[str, int] = defaultdict(int)
        for program, rounds in zip(self.programs, self.rounds, strict=True):
            times = [median(values) for values in zip(*rounds, strict=True)]
            for number, module in program.layers.items():
                out[module] += round(1000 * times[number])
        return out


def clock_of(threads: int) -> Callable[[], int]:
    """CPU nanoseconds of this thread if it does all the work, so that other programs do not count; else the wall clock."""
    return time.thread_time_ns if threads == torch.get_num_threads() == 1 else time.perf_counter_ns


def show_input(example: Any) -> str:
    """The shapes of an input, such as ``1x3x224x224``."""
    shapes = [text.format_shape(x.shape) for x in torch.utils._pytree.tree_leaves(example) if isinstance(x, Tensor)]
    return text.shorten(", ".join(shapes), 100)


def _call(example: Any) -> Call:
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
