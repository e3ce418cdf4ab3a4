"""The result of a benchmark: times per engine and per layer, as text, as JSON and as a bar chart."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ... import text
from ...errors import SmartpruneError
from ...files import write_atomic
from ...reports.draw import Drawing, text_width
from .engines import KINDS, is_ours, list_reasons

WIDTH = 80
CHART_WIDTH = 720
LEAST_MICROSECONDS = 0.5  # of a layer; shorter times are noise of the overhead that was subtracted


@dataclass(frozen=True)
class Timing:
    """One engine at one batch size. ``ms`` is the fastest call, ``rounds`` the fastest call of every round."""

    engine: str
    batch: int
    ms: float
    rounds: tuple[float, ...]
    error: float
    failed: str | None = None


@dataclass(frozen=True)
class LayerTiming:
    """One layer alone, in microseconds without the overhead of a call: in ``engine``, and in the runtime of smartprune.

    ``engine`` is the fastest dense engine of the whole network.
    """

    name: str
    kind: str
    batch: int
    kept: int
    blocks: int
    dense: float
    ours: float
    engine: str

    @property
    def faster(self) -> float | None:
        """How many times faster the runtime of smartprune is; None for times that are too short to compare."""
        return self.dense / self.ours if min(self.dense, self.ours) >= LEAST_MICROSECONDS else None


@dataclass(frozen=True)
class Bench:
    """What :func:`~smartprune.experiments.bench.run.bench` measured.

    ``sparsity`` is the share of blocks removed of the pruned layers, which a receipt lists, or the share of zero blocks of all
    layers; ``sparsity_of`` says which.
    """

    model: str
    block: str
    threads: int
    sparsity: float
    timings: tuple[Timing, ...]
    layers: tuple[LayerTiming, ...]
    left_out: Mapping[str, str]
    versions: Mapping[str, str]
    sparsity_of: str = "all layers"

    @property
    def batches(self) -> list[int]:
        return sorted({timing.batch for timing in self.timings})

    def best(self, batch: int, names: Sequence[str]) -> Timing | None:
        """The fastest of the named engines at a batch size; None where all of them failed."""
        timings = [t for t in self.timings if t.batch == batch and t.engine in names and t.failed is None]
        return min(timings, key=lambda t: t.ms, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain data. A failed engine has no ``ms``."""
        data = asdict(self)
        for row in data["timings"]:
            if row["failed"] is not None:
                row |= {"ms": None, "error": row["error"] or None}
        return data

    def __str__(self) -> str:
        lines = [f"{self.model}: {self._zeros(2)}; {self.threads} CPU thread{'' if self.threads == 1 else 's'}"]
        for batch in self.batches:
            for names in KINDS:
                lines += self._engine_table(batch, names)
        if self.layers:
            lines += ["", f"layers, float32, batch {self.layers[0].batch}, without the overhead of a call", *self._layer_table()]
        lines += ["", "vs: how many times faster than the fastest dense engine of the same kind"]
        if any(layer.faster is None for layer in self.layers):
            lines.append("-: too short to compare")
        if self.left_out:
            reasons = f"left out: {list_reasons(self.left_out)}"
            lines += textwrap.wrap(reasons, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        lines += [f"failed: {t.engine}, batch {t.batch}: {t.failed}" for t in self.timings if t.failed is not None]
        return "\n".join(lines)

    def _zeros(self, digits: int) -> str:
        share = f"{100 * self.sparsity:.{digits}f} %"
        if self.sparsity_of == "all layers":
            return f"{share} of the {self.block} blocks of all layers are zero"
        return f"sparsity {share} (of the {self.block} blocks of the {self.sparsity_of})"

    def _engine_table(self, batch: int, names: Sequence[str]) -> list[str]:
        """The engines of one kind, such as float32, with the fastest dense one in the header."""
        timings = [t for t in self.timings if t.batch == batch and t.engine in names]
        dense = self.best(batch, [name for name in names if not is_ours(name)])
        rows = []
        for timing in timings:
            if timing.failed is not None:
                rows.append((timing.engine, "-", "-", "failed"))
                continue
            speedup = "" if dense is None else f"{dense.ms / timing.ms:.2f}"
            rows.append((timing.engine, f"{timing.ms:.3f}", speedup, f"{timing.error:.1e}"))
        header = ("engine", "ms", "no dense engine" if dense is None else f"vs {dense.engine}", "error")
        return ["", f"batch {batch}", *text.table(header, rows, "<>>>", WIDTH)] if rows else []

    def _layer_table(self) -> list[str]:
        rows = [
            (
                layer.name,
                layer.kind,
                f"{layer.kept:,}/{layer.blocks:,}",
                f"{layer.dense:.1f}",
                f"{layer.ours:.1f}",
                "-" if layer.faster is None else f"{layer.faster:.1f}",
            )
            for layer in self.layers
        ]
        engine = self.layers[0].engine
        header = ("layer", "kind", "kept", f"{engine}, us", "smartprune, us", "faster")
        return text.table(header, rows, "<<>>>>", WIDTH)

    def drawing(self) -> Drawing:
        """Bars of milliseconds, one panel per batch size."""
        timings = [t for t in self.timings if t.failed is None]
        left = 24 + max((text_width(t.engine, 12) for t in timings), default=0)
        height = 44 + sum(34 + 22 * sum(t.batch == batch for t in timings) for batch in self.batches)
        drawing = Drawing(CHART_WIDTH, height, f"{self.model}: milliseconds per call, by engine")
        title = f"{self.model}, {self._zeros(2)}: ms per call"
        drawing.text("ink", 16, 24, title, bold=True, size=13)
        y = 44.0
        for batch in self.batches:
            panel = [t for t in timings if t.batch == batch]
            longest = max((t.ms for t in panel), default=0.0)
            drawing.text("quiet", 16, y + 16, f"batch {batch}")
            y += 28
            for timing in panel:
                right = left + (CHART_WIDTH - left - 90) * timing.ms / longest
                drawing.text("ink", left - 8, y + 12, timing.engine, anchor="end")
                drawing.box("accent" if is_ours(timing.engine) else "dim", left, y + 1, right, y + 16)
                drawing.text("quiet", right + 6, y + 12, f"{timing.ms:.3f}")
                y += 22
            y += 6
        return drawing

    def save(self, path: str | Path) -> None:
        """Writes the bars as .svg or .png."""
        path = Path(path)
        if path.suffix not in (".svg", ".png"):
            raise SmartpruneError(f"{path} must end in .svg or .png")
        write_atomic(path, self.drawing().svg().encode() if path.suffix == ".svg" else self.drawing().png())
