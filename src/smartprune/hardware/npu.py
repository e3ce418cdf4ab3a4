"""NPU: how long a pruned model takes on a MAC array that skips zero blocks, and a budget in its cycles.

A model of a machine, not a machine: generic, checked against two public simulators (``records/npu-check``), and blind to
what ``docs/npu.md`` lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from .. import text
from ..artifacts.counts import Count
from ..artifacts.source import Model, check_not_masked, read_source
from ..core.block import Block
from ..core.budget import as_share
from ..core.layers import Layer, Skipped, candidates, find_layers
from ..core.occupancy import occupied
from ..core.transforms import zeros_survive
from ..core.usage import Call, find_calls
from ..errors import SmartpruneError
from ..files import parse_json, read_limited
from .cycles import Latency
from .work import Cost, Work, dense, line, pruned

WIDTH = 80
MOST_BYTES = 1 << 16
Dataflow = Literal["output_stationary", "weight_stationary"]


class UnmetError(SmartpruneError):
    """No choice of blocks takes as few cycles as were asked for."""


@dataclass(frozen=True)
class NPU:
    """A MAC array that skips zero blocks. ``print`` shows it; :meth:`estimate` runs a model on it, on paper.

    Every cycle a lane multiplies ``columns`` inputs with ``rows`` x ``columns`` weights for ``rows`` outputs. Bandwidths
    are in bytes per cycle; ``math.inf`` is a memory that is never waited for.

    >>> NPU(rows=16, columns=8).macs_per_cycle
    128
    """

    rows: int = 16  # output channels of a lane
    columns: int = 8  # input channels of a lane
    lanes: int = 1  # arrays side by side; each takes whole rows of output blocks
    dataflow: Dataflow = "output_stationary"
    clock_mhz: float = 1000.0
    weight_bandwidth: float = 16.0  # bytes per cycle
    activation_bandwidth: float = 16.0  # bytes per cycle
    buffer_bytes: int = 1 << 20  # on chip, for the input of a layer
    weight_bits: int = 8
    activation_bits: int = 8
    index_bytes: int = 2  # stored with every block of a layer that skips any

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "dataflow":
                if value not in get_args(Dataflow):
                    raise SmartpruneError(f"NPU: dataflow={value!r}; it is one of: {', '.join(get_args(Dataflow))}")
            elif field.type == "int":
                least = 0 if field.name == "index_bytes" else 1
                if type(value) is not int or value < least:
                    raise SmartpruneError(f"NPU: {field.name}={value!r} must be an integer, {least} or more")
            else:
                good = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
                if not good or (field.name == "clock_mhz" and math.isinf(value)):
                    more = "" if field.name == "clock_mhz" else ", in bytes per cycle (math.inf: never waited for)"
                    raise SmartpruneError(f"NPU: {field.name}={value!r} must be a number above 0{more}")

    @staticmethod
    def small() -> NPU:
        """A microcontroller's accelerator, in size: 64 MACs at 200 MHz, narrow memory. Generic; no vendor's part."""
        return NPU(rows=8, columns=8, clock_mhz=200, weight_bandwidth=4, activation_bandwidth=4, buffer_bytes=256 << 10)

    @staticmethod
    def edge() -> NPU:
        """A camera's accelerator, in size: 128 MACs at 1 GHz, 16 GB/s for weights and as much for activations. Generic;
        no vendor's part."""
        return NPU()

    @staticmethod
    def server() -> NPU:
        """A data centre's accelerator, in size: four systolic arrays of 32x32 at 1 GHz. Generic; no vendor's part."""
        return NPU(
            rows=32,
            columns=32,
            lanes=4,
            dataflow="weight_stationary",
            weight_bandwidth=256,
            activation_bandwidth=256,
            buffer_bytes=8 << 20,
        )

    @property
    def macs_per_cycle(self) -> int:
        return self.rows * self.columns * self.lanes

    @property
    def fold(self) -> int:
        """Cycles to load a tile of weights and to fill and drain the array around it; a systolic array alone has them."""
        return 2 * self.columns + self.rows - 2 if self.dataflow == "weight_stationary" else 0

    @property
    def tail(self) -> int:
        """Cycles after the last multiplication of a layer, in which the last outputs leave their accumulators."""
        return 1 if self.dataflow == "output_stationary" else 0

    @cached_property
    def weight_bits_per_cycle(self) -> Fraction | None:
        """None: never waited for."""
        return _bits(self.weight_bandwidth)

    @cached_property
    def activation_bits_per_cycle(self) -> Fraction | None:
        """None: never waited for."""
        return _bits(self.activation_bandwidth)

    def ms(self, cycles: int) -> float:
        return cycles / (self.clock_mhz * 1e3)

    def to_json(self) -> dict[str, object]:
        """Plain data; a bandwidth without end is None."""
        return {key: None if value == math.inf else value for key, value in asdict(self).items()}

    @staticmethod
    def from_json(data: object, where: str) -> NPU:
        """Reads what :meth:`to_json` wrote, or some of it, that nobody vouches for."""
        known = [field.name for field in fields(NPU)]
        if not isinstance(data, dict) or not set(data) <= set(known):
            wrong = f"has {sorted(set(data) - set(known))[0]!r}" if isinstance(data, dict) else f"is a {type(data).__name__}"
            raise SmartpruneError(f"{where}: {wrong}; it must be a JSON object with some of: {', '.join(known)}")
        try:
            return NPU(**{key: math.inf if value is None else value for key, value in data.items()})  # type: ignore[arg-type]
        except SmartpruneError as error:
            raise SmartpruneError(f"{where}: {error}") from None

    def __str__(self) -> str:
        lanes = f"{self.lanes} lanes of " if self.lanes > 1 else ""
        return (
            f"{lanes}{self.rows}x{self.columns} MACs, {self.dataflow.replace('_', ' ')}, {self.clock_mhz:g} MHz, "
            f"{self.weight_bandwidth:g}+{self.activation_bandwidth:g} B/cycle"
        )

    def estimate(
        self,
        model: nn.Module,
        example: Any,
        block: Block | str | Sequence[int | None] | None = None,
        weights: Model | None = None,
    ) -> Estimate:
        """Cycles of every layer of ``model`` for one sample of ``example``, dense and with its zero blocks skipped.

        ``weights`` are those of a file, a run folder or a state dict in place of the model's own. ``block`` is what the NPU
        skips: that of the file's receipt, else the array's own shape, unless given.

        >>> model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
        >>> with torch.no_grad():
        ...     _ = model[0].weight[:16].zero_()
        >>> found = NPU(weight_bandwidth=math.inf, activation_bandwidth=math.inf).estimate(model, torch.zeros(1, 32))
        >>> [(layer.dense.latency, layer.pruned.latency) for layer in found.layers]
        [(9, 5), (5, 5)]
        """
        if not isinstance(model, nn.Module):
            raise SmartpruneError(
                f"NPU.estimate: model is a {type(model).__name__}; give the torch.nn.Module, and its file as weights="
            )
        source = read_source(model if weights is None else weights)
        if block is None:
            block = (self.rows, self.columns) if source.receipt is None else source.receipt.block
        block = Block.of(block)
        check_not_masked(model.state_dict(), type(model).__name__)
        layers, skipped = find_layers(model, block, include="*") if next(candidates(model), None) else ((), ())
        calls = find_calls(model, layers, example)
        rows = []
        for layer in layers:
            tensor = source.get(layer.weight)
            if tensor is None or tuple(tensor.shape) != layer.grid.weight_shape:
                given = "nothing" if tensor is None else text.format_shape(tensor.shape)
                raise SmartpruneError(
                    f"NPU.estimate: {layer.weight} is {text.format_shape(layer.grid.weight_shape)} in the model and {given} in "
                    f"{source.where}; give the weights of this model"
                )
            try:
                live = occupied(layer.grid, tensor)
            except SmartpruneError as error:
                raise SmartpruneError(f"NPU.estimate: {layer.weight}: {error}") from None
            if not zeros_survive(model.get_submodule(layer.sites[0][0])):  # no block can be skipped
                live.fill_(True)
            rows.append(self._row(layer, calls[layer.name], live))
        if not any(row.calls for row in rows):
            raise SmartpruneError("NPU.estimate: the example reaches no convolution or linear layer; give an input of the model")
        return Estimate(self, block, source.where, tuple(rows), skipped)

    def _row(self, layer: Layer, calls: Sequence[Sequence[Call]], live: Tensor) -> LayerCycles:
        work = Work(layer.grid, layer.transposed)
        return LayerCycles(
            name=layer.name,
            weight=layer.weight,
            kind=layer.kind,
            shape=layer.grid.weight_shape,
            blocks=Count(layer.n, int(live.sum())),
            calls=len(calls),
            lanes=self.lanes,
            dense=Cost.sum([dense(self, work, call) for call in calls]),
            pruned=Cost.sum([pruned(self, work, call, live) for call in calls]),
        )

    def budget(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        share: Fraction,
        example: Any,
        of: Literal["layers", "model"] = "layers",
    ) -> tuple[Tensor, int, Latency]:
        """A cost per block, int64 [n], and a limit, for a search; and the latency itself, by which its hard mask is chosen.

        For :func:`smartprune.cycles`. The cost is the slope of a line near the latency (:func:`smartprune.npu_work.line`), and what
        the line starts at is taken off the limit.
        """
        every = layers if of == "layers" else find_layers(model, Block(1, None, None), include="*")[0]
        calls = find_calls(model, [*layers, *every], example)
        if not any(calls[layer.name] for layer in layers):
            raise SmartpruneError("cycles: the example reaches none of the layers to prune; give an input of the model")
        works = [Work(layer.grid, layer.transposed) for layer in layers]
        costs, whole, fixed, rest = [], 0, 0, 0
        for layer, work in zip(layers, works, strict=True):
            cost = torch.zeros(layer.n, dtype=torch.int64, device="cpu")
            for call in calls[layer.name]:
                base, slopes = line(self, work, call, share)
                fixed += base
                cost += slopes
                whole += dense(self, work, call).latency
            costs.append(cost)
        weights = {layer.weight for layer in layers}
        for layer in every:
            if layer.weight not in weights:
                rest += sum(dense(self, Work(layer.grid, layer.transposed), call).latency for call in calls[layer.name])
        whole += rest
        latency = Latency(
            npu=self,
            layers=tuple((work, tuple(calls[layer.name])) for layer, work in zip(layers, works, strict=True)),
            rest=rest,
            dense=whole,
            goal=math.floor((1 - share) * whole),
        )
        cost = torch.cat(costs)
        total = int(cost.sum())
        limit = total if share == 0 else min(total, latency.goal - rest - fixed)
        if limit < 0 or total == 0:
            name = f"cycles({float(share):g}{', of=' + repr(of) if of == 'model' else ''})"
            most = math.floor(10_000 * (1 - Fraction(fixed + rest, whole))) / 10_000
            raise UnmetError(
                f"{name} cannot be met: {fixed + rest:,} of {whole:,} cycles do not depend on the blocks (moved activations"
                f"{', layers that are not pruned' if of == 'model' else ''}); at most about {most:g} can be removed; ask for "
                "less, prune more layers (include=), or raise activation_bandwidth"
            )
        return cost, limit, latency


# One line per preset: its name on the command line, and the machine.
PRESETS = {"small": NPU.small(), "edge": NPU.edge(), "server": NPU.server()}


def read_npu(name: str) -> NPU:
    """A preset by its name, or the NPU of a ``.json`` file with its settings (a bandwidth of null is never waited for).

    >>> read_npu("edge") == NPU.edge()
    True
    """
    if name in PRESETS:
        return PRESETS[name]
    if not name.endswith(".json"):
        raise SmartpruneError(f"npu {name!r} is not known; there are: {', '.join(PRESETS)}; or give a .json file of its settings")
    return NPU.from_json(parse_json(read_limited(name, MOST_BYTES), name), name)


@dataclass(frozen=True)
class LayerCycles:
    """One layer: what it takes dense, and with its zero blocks skipped. ``calls`` counts its runs in one forward pass."""

    name: str
    weight: str
    kind: str
    shape: tuple[int, ...]
    blocks: Count
    calls: int
    lanes: int
    dense: Cost
    pruned: Cost

    @property
    def speedup(self) -> float:
        return _times(self.dense.latency, self.pruned.latency)

    @property
    def mac_speedup(self) -> float:
        """Of the multiplications alone. ``speedup`` is no larger where the dense layer waits for nothing and its lanes are even."""
        return _times(self.dense.mac, self.pruned.mac)

    @property
    def imbalance(self) -> float:
        """Cycles of the slowest lane over those of the mean lane; 1 is even."""
        return self.pruned.compute * self.lanes / self.pruned.busy if self.pruned.busy else 1.0

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "weight": self.weight,
            "kind": self.kind,
            "shape": list(self.shape),
            "blocks": self.blocks.to_json(),
            "calls": self.calls,
            "imbalance": self.imbalance,
            "dense": self.dense.to_json(),
            "pruned": self.pruned.to_json(),
        }


@dataclass(frozen=True)
class Estimate:
    """What :meth:`NPU.estimate` found. ``str`` is a table 80 columns wide."""

    npu: NPU
    block: Block
    where: str
    layers: tuple[LayerCycles, ...]
    skipped: tuple[Skipped, ...]  # weights that are not counted

    @property
    def dense(self) -> Cost:
        return Cost.sum([layer.dense for layer in self.layers])

    @property
    def pruned(self) -> Cost:
        return Cost.sum([layer.pruned for layer in self.layers])

    @property
    def latency(self) -> int:
        """Cycles of all layers, one after the other, with zero blocks skipped."""
        return self.pruned.latency

    @property
    def ms(self) -> float:
        return self.npu.ms(self.latency)

    @property
    def speedup(self) -> float:
        return _times(self.dense.latency, self.latency)

    @property
    def mac_speedup(self) -> float:
        """Of the multiplications alone, were nothing ever waited for and all lanes even. What the NPU gains may be less, or
        more: where the dense model waits for weights, pruning takes that wait away too."""
        return _times(self.dense.mac, self.pruned.mac)

    def share(self, ms: float) -> Fraction:
        """The share of the model's dense time to remove to come down to ``ms``; for ``cycles(..., of="model")``.

        >>> npu = NPU(clock_mhz=0.001, weight_bandwidth=math.inf, activation_bandwidth=math.inf)
        >>> float(npu.estimate(nn.Linear(32, 32), torch.zeros(1, 32)).share(ms=6))
        0.333333334
        """
        if not isinstance(ms, (int, float)) or isinstance(ms, bool) or not 0 < ms < math.inf:
            raise SmartpruneError(f"share: ms={ms!r} must be a number above 0: the milliseconds to come down to")
        left = Fraction(str(ms)) * Fraction(str(self.npu.clock_mhz)) * 1000 / self.dense.latency
        # up to nine digits, and never less than it takes
        return as_share(Fraction(math.ceil(max(Fraction(0), 1 - left) * 10**9), 10**9), "share")

    def to_json(self) -> dict[str, object]:
        """Plain data: numbers, strings, lists and dictionaries."""
        return {
            "where": self.where,
            "npu": self.npu.to_json(),
            "block": str(self.block),
            "dense": self.dense.to_json(),
            "pruned": self.pruned.to_json(),
            "dense_ms": self.npu.ms(self.dense.latency),
            "ms": self.ms,
            "speedup": self.speedup,
            "mac_speedup": self.mac_speedup,
            "layers": [layer.to_json() for layer in self.layers],
            "skipped": [{"name": s.name, "kind": s.kind, "shape": list(s.shape), "reason": s.reason} for s in self.skipped],
        }

    def __str__(self) -> str:
        rows = [
            (
                layer.name,
                text.percent(layer.blocks.kept, layer.blocks.total),
                f"{layer.dense.latency:,}",
                f"{layer.pruned.latency:,}",
                f"{layer.speedup:.2f}",
                f"{layer.mac_speedup:.2f}",
                f"{layer.imbalance:.2f}",
                layer.pruned.waits_for,
            )
            for layer in self.layers
        ]
        header = ("layer", "kept", "dense", "pruned", "times", "MAC-only", "uneven", "waits for")
        whole, left = self.dense, self.pruned
        totals = [
            ("latency, cycles", whole.latency, left.latency),
            ("MAC-only cycles", whole.mac, left.mac),
            ("bytes of weights moved", whole.weight_bytes, left.weight_bytes),
            ("bytes of activations moved", whole.activation_bytes, left.activation_bytes),
        ]
        lines = [
            f"{self.where}, blocks of {self.block}, one sample",
            str(self.npu),
            "",
            *text.table(header, rows, "<>>>>>><", WIDTH),
            "",
            *text.table(
                ("", "dense", "pruned", "times"),
                [(n, f"{a:,}", f"{b:,}", f"{_times(a, b):.2f}") for n, a, b in totals],
                "<>>>",
                WIDTH,
            ),
            "",
            f"time     {self.npu.ms(whole.latency):.4g} ms dense, {self.ms:.4g} ms pruned",
        ]
        if self.skipped:
            missing = [(s.name, text.format_shape(s.shape), s.reason) for s in self.skipped]
            lines += ["", *text.table(("not counted", "weight", "reason"), missing, "<<<", WIDTH, (0, 2))]
        return "\n".join(lines)


def _times(before: int, after: int) -> float:
    """How many times fewer; as good as none left counts as one."""
    return before / max(after, 1) if before else 1.0


def _bits(bandwidth: float) -> Fraction | None:
    return None if math.isinf(bandwidth) else 8 * Fraction(str(bandwidth))
