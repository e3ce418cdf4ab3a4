"""The metrics of a run for TensorBoard. ``metrics.jsonl`` is the source: on resume these files are rebuilt from it."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SmartpruneError
from ..reports.figures import figures
from ..reports.view import gather
from ..run_files import TENSORBOARD

NOT_METRICS = ("stage", "epoch", "step")  # keys of a row


def import_writer() -> Any:
    """TensorBoard's ``SummaryWriter``. Raises with the install command if TensorBoard is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        raise SmartpruneError(
            "tensorboard='on', but TensorBoard is not installed; run: pip install 'smartprune[track]', or use --tensorboard off"
        ) from None
    return SummaryWriter


class TensorBoard:
    """Writes every number of every row. ``global_step(stage, step)`` gives the step within the whole run."""

    def __init__(self, folder: Path, metrics: Path, global_step: Callable[[str, int], int]) -> None:
        writer = import_writer()
        shutil.rmtree(folder / TENSORBOARD, ignore_errors=True)
        self.global_step, self.writer = global_step, writer(str(folder / TENSORBOARD))
        for line in metrics.read_text().splitlines() if metrics.exists() else []:
            self.add(json.loads(line))

    def add(self, row: Mapping[str, Any]) -> None:
        step = self.global_step(row["stage"], row["step"])
        for name, value in row.items():
            if name not in NOT_METRICS and isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def add_figures(self, folder: Path, step: int) -> None:
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
