"""The metrics of a run for TensorBoard. ``metrics.jsonl`` is what counts; these files are made anew from it on resume."""

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

PLACE = ("stage", "epoch", "step")  # of a row, and no measurement


def require() -> Any:
    """TensorBoard's writer; an error says what to install."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        raise SmartpruneError(
            "tensorboard='on', but TensorBoard is not installed; run: pip install 'smartprune[track]', or use --tensorboard off"
        ) from None
    return SummaryWriter


class Events:
    """Every number of every row, at the step of the whole run that ``at(stage, step)`` gives."""

    def __init__(self, folder: Path, metrics: Path, at: Callable[[str, int], int]) -> None:
        writer = require()
        shutil.rmtree(folder / TENSORBOARD, ignore_errors=True)
        self.at, self.writer = at, writer(str(folder / TENSORBOARD))
        for line in metrics.read_text().splitlines() if metrics.exists() else []:
            self.add(json.loads(line))

    def add(self, row: Mapping[str, Any]) -> None:
        step = self.at(row["stage"], row["step"])
        for name, value in row.items():
            if name not in PLACE and isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def draw(self, folder: Path, step: int) -> None:
        """The figures of the run's page, as pictures; nothing where Pillow is not installed."""
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
