"""The result of a finished run."""

from __future__ import annotations

import platform
import shlex
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from ..errors import SmartpruneError
from ..fields import Fields
from ..files import parse_json, read_limited
from ..run_files import RESULT
from . import ranks
from .config import Config
from .evaluate import Metrics

MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Result:
    """The outcome of a run, stored as ``result.json``. Metrics are measured on the test split."""

    folder: str
    task: str
    model: str
    method: str
    measure: str
    dense: float | None  # None: not scored yet; ``smartprune eval`` scores it
    pruned: float | None
    verified: bool
    seconds: float
    stage_seconds: dict[str, float]
    versions: dict[str, str]
    also: dict[str, Metrics]  # metrics besides the measure, of "dense" and "pruned"
    files: dict[str, str]  # other files of the run, and what they hold
    samples: int  # of the test split
    finished: str  # date and time on the clock of the machine
    command: str  # starts a run with these settings

    def metrics_line(self, form: str) -> str:
        """The metric of ``"dense"`` or ``"pruned"`` in percent, other metrics, and the difference to the dense model."""
        value, baseline = {"dense": (self.dense, None), "pruned": (self.pruned, self.dense)}[form]
        if value is None:
            return (
                "not scored yet, because a package for scoring is not installed; score it with: "
                f"smartprune eval {shlex.quote(self.folder)}"
            )
        notes = [f"{100 * (value - baseline):+.2f} points"] if baseline is not None else []
        notes += [f"{name} {100 * other:.2f} %" for name, other in self.also.get(form, {}).items() if other is not None]
        return f"{100 * value:.2f} %" + (f" ({', '.join(notes)})" if notes else "")

    @staticmethod
    def load(folder: str | Path) -> Result:
        """Reads a ``result.json`` and checks the type of every value."""
        path = Path(folder) / RESULT
        data = read_limited(path, MAX_BYTES)
        try:
            values = Fields(parse_json(data, str(path)), str(path))
            stages, versions = values.nested("stage_seconds"), values.nested("versions")
            also, files = values.nested("also"), values.nested("files")
            return Result(
                folder=values.string("folder"),
                task=values.string("task"),
                model=values.string("model"),
                method=values.string("method"),
                measure=values.string("measure"),
                dense=_metric(values, "dense"),
                pruned=_metric(values, "pruned"),
                verified=values.boolean("verified"),
                seconds=values.number("seconds"),
                stage_seconds={name: stages.number(name) for name in stages.data},
                versions={name: versions.string(name) for name in versions.data},
                also={form: {name: _metric(also.nested(form), name) for name in also.nested(form).data} for form in also.data},
                files={name: files.string(name) for name in files.data},
                samples=values.integer("samples"),
                finished=values.string("finished"),
                command=values.string("command"),
            )
        except SmartpruneError as error:
            raise SmartpruneError(
                f"{error}. Delete {RESULT} and finish the run again from its last checkpoint with: "
                f"smartprune train --resume --out {shlex.quote(str(folder))}"
            ) from None


def _metric(values: Fields, name: str) -> float | None:
    """A number, or None if the value is null."""
    return None if values.raw(name) is None else values.number(name)


def versions(config: Config) -> dict[str, str]:
    """The software and hardware that produced the result."""
    try:
        smartprune = metadata.version("smartprune")
    except metadata.PackageNotFoundError:
        smartprune = "unknown"
    device = torch.cuda.get_device_name() if config.device == "cuda" else platform.processor() or platform.machine()
    return {
        "smartprune": smartprune,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": device,
        "threads": str(config.threads or torch.get_num_threads()),
        "processes": str(ranks.world_size()),
    }
