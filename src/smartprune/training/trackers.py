"""The metrics of a run for TensorBoard, MLflow and Weights & Biases. ``metrics.jsonl`` is the source: on resume, a tracker gets
what it lacks."""

from __future__ import annotations

import importlib
import io
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import SmartpruneError
from ..files import parse_json, read_limited, write_atomic
from ..reports.figures import figures
from ..reports.view import gather
from ..run_files import METRICS, RECEIPT, RESULT, TENSORBOARD, TRACKERS
from .config import Config

NOT_METRICS = ("stage", "epoch", "step")  # keys of a row
PROJECT = "smartprune"  # of a tracker, unless the variables of the environment that it reads name another
MAX_FILE_BYTES = 1 << 16
GlobalStep = Callable[[str, int], int]  # the step within the whole run, of a stage and its step


class Tracker(Protocol):
    """Shows the metrics of a run somewhere else."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds a row of ``metrics.jsonl``."""

    def finish(self, folder: Path, step: int) -> None:
        """Adds what a finished run has beyond its metrics."""

    def close(self) -> None:
        """Ends the connection. The run may be resumed later."""


def tracker_names(config: Config) -> list[str]:
    """The trackers of a run. Raises if a name is unknown."""
    names = [name.strip() for name in config.track.split(",") if name.strip()]
    unknown = [name for name in names if name not in LIBRARIES]
    if unknown:
        raise SmartpruneError(f"track={config.track!r}: there is no tracker {unknown[0]!r}; give mlflow, wandb, or mlflow,wandb")
    return ["tensorboard"] * (config.tensorboard == "on") + list(dict.fromkeys(names))


def check_trackers(config: Config) -> None:
    """Raises before the training if a tracker is unknown or not installed."""
    for name in tracker_names(config):
        import_writer() if name == "tensorboard" else import_library(name)


def open_trackers(config: Config, folder: Path, global_step: GlobalStep) -> list[Tracker]:
    out: list[Tracker] = []
    for name in tracker_names(config):
        if name == "tensorboard":
            out.append(TensorBoard(folder, folder / METRICS, global_step))
        else:
            out.append((MLflow if name == "mlflow" else WandB)(config, folder, global_step))
    return out


LIBRARIES = {"mlflow": "mlflow", "wandb": "wandb"}


def import_library(name: str) -> Any:
    try:
        return importlib.import_module(LIBRARIES[name])
    except ImportError as error:
        raise SmartpruneError(
            f"track={name!r}, but {name} cannot be imported ({error}); run: pip install {name}, or leave out --track"
        ) from None


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name not in NOT_METRICS and isinstance(value, int | float)}


def stored_rows(metrics: Path) -> Iterator[dict[str, Any]]:
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        yield json.loads(line)


def import_writer() -> Any:
    """TensorBoard's ``SummaryWriter``. Raises with the install command if TensorBoard is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        raise SmartpruneError(
            "tensorboard='on', but TensorBoard is not installed; run: pip install tensorboard, or use --tensorboard off"
        ) from None
    return SummaryWriter


class TensorBoard:
    """Writes every number of every row. ``global_step(stage, step)`` gives the step within the whole run."""

    def __init__(self, folder: Path, metrics: Path, global_step: GlobalStep) -> None:
        writer = import_writer()
        shutil.rmtree(folder / TENSORBOARD, ignore_errors=True)
        self.global_step, self.writer = global_step, writer(str(folder / TENSORBOARD))
        for row in stored_rows(metrics):
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        step = self.global_step(row["stage"], row["step"])
        for name, value in numbers_of(row).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finish(self, folder: Path, step: int) -> None:
        """Adds the figures of the run's report as images, if Pillow is installed."""
        try:
            from PIL import Image
        except ImportError:
            return
        for figure in figures(gather(folder)):
            with Image.open(io.BytesIO(figure.drawing.png())) as picture:
                self.writer.add_image(figure.key, np.asarray(picture.convert("RGB")), step, dataformats="HWC")
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class MLflow:
    """A run of MLflow. Its address, experiment and credentials come from the variables ``MLFLOW_...`` of the environment."""

    def __init__(self, config: Config, folder: Path, global_step: GlobalStep) -> None:
        self.library, self.global_step = import_library("mlflow"), global_step
        self.client = self.library.MlflowClient()
        self.run = read_id(folder, "mlflow")
        if self.run is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = self.client.get_experiment_by_name(name)
            number = self.client.create_experiment(name) if experiment is None else experiment.experiment_id
            self.run = self.client.create_run(number, run_name=folder.absolute().name).info.run_id
            write_id(folder, "mlflow", self.run)
            for setting, value in asdict(config).items():
                self.client.log_param(self.run, setting, value)
        else:
            self.client.update_run(self.run, status="RUNNING")
        self.last = max((metric.step for metric in self.client.get_metric_history(self.run, "seconds")), default=-1)
        for row in stored_rows(folder / METRICS):
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        step, now = self.global_step(row["stage"], row["step"]), int(1000 * time.time())
        if step > self.last:
            metric = self.library.entities.Metric
            self.client.log_batch(self.run, metrics=[metric(name, value, now, step) for name, value in numbers_of(row).items()])
            self.last = step

    def finish(self, folder: Path, step: int) -> None:
        for name in (RESULT, RECEIPT):
            if (folder / name).exists():
                self.client.log_artifact(self.run, str(folder / name))

    def close(self) -> None:
        self.client.set_terminated(self.run)


class WandB:
    """A run of Weights & Biases. Its project, mode and credentials come from the variables ``WANDB_...`` of the environment."""

    def __init__(self, config: Config, folder: Path, global_step: GlobalStep) -> None:
        library, self.global_step = import_library("wandb"), global_step
        number = read_id(folder, "wandb")
        if number is None:
            number = secrets.token_hex(4)
            write_id(folder, "wandb", number)
        for old in (folder / "wandb").glob(f"offline-run-*-{number}"):
            shutil.rmtree(old)  # all rows are written again
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        name = folder.absolute().name
        self.run = library.init(
            project=project, id=number, name=name, resume="allow", dir=str(folder), config=asdict(config), reinit="create_new"
        )
        for row in stored_rows(folder / METRICS):
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        step = self.global_step(row["stage"], row["step"])
        if step >= self.run.step:  # the server has the earlier ones
            self.run.log(numbers_of(row), step=step)

    def finish(self, folder: Path, step: int) -> None:
        for name in (RESULT, RECEIPT):
            if (folder / name).exists():
                self.run.save(str(folder / name), base_path=str(folder), policy="now")

    def close(self) -> None:
        self.run.finish()


def read_id(folder: Path, tracker: str) -> str | None:
    """The name that a tracker gave to this run, if it was tracked before."""
    path = folder / TRACKERS
    stored = parse_json(read_limited(path, MAX_FILE_BYTES), str(path)) if path.exists() else {}
    value = stored.get(tracker) if isinstance(stored, dict) else None
    return value if isinstance(value, str) else None


def write_id(folder: Path, tracker: str, value: str) -> None:
    path = folder / TRACKERS
    stored = {name: known for name in LIBRARIES if (known := read_id(folder, name)) is not None}
    write_atomic(path, (json.dumps({**stored, tracker: value}, indent=1) + "\n").encode())
