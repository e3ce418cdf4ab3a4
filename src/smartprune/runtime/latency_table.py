"""Measured times of a network in the CPU runtime: of every layer and of the whole, with different shares of its blocks."""

from __future__ import annotations

import hashlib
import json
import platform
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from .. import __version__, text
from ..core.layers import Layer, plain_name
from ..errors import SmartpruneError
from ..fields import Fields
from ..files import parse_json, read_limited, write_atomic

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
            if name in layers:
                raise entry.error("weight", "the name of one layer only")
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
                f"{path}: network goes from {table.network.x[0]} to {table.network.x[-1]}; it must go from {least} to {most}, "
                "like the layers"
            )
        if not table.dense_ps:
            raise SmartpruneError(f"{path}: network takes 0 ps; it must take longer: delete the file, and measure again")
        return table


def _read_curve(fields: Fields) -> Curve:
    x, ps = (fields.integers(name, 0, MAX_KNOTS) for name in ("x", "ps"))
    rising = all(a < b for a, b in pairwise(x)) and all(a <= b for a, b in pairwise(ps))
    if not x or len(x) != len(ps) or not rising or max(x[-1], ps[-1]) > MOST_PS:
        raise SmartpruneError(
            f"{fields.where}: x and ps are not a curve; they must be equally long, x must increase and ps must not decrease"
        )
    return Curve(x, ps)


def machine_name() -> str:
    """The processor, as the system calls it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return text.shorten(text.escape(name or platform.processor() or platform.machine() or "unknown"), 100)
