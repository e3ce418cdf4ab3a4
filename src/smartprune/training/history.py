"""What a search leaves behind for its report: a sample of the mask over time, and the scores it ended with.

Both are written at moments when the run waits for the device anyway, the ends of epochs, and change nothing that it computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import Tensor

from ..files import write_atomic
from ..reports.runlog import sampled_blocks
from ..run_files import SCORES
from . import ranks

if TYPE_CHECKING:
    from ..pruning.pruner import Pruner


def mask_sample(pruner: Pruner) -> list[float]:
    """The mask of the same few blocks at every call, rounded for a row of metrics. All ranks must call it."""
    mask = pruner.mask
    places = torch.tensor(sampled_blocks(mask.numel()), device=mask.device)
    return [round(value, 4) for value in mask[places].float().tolist()]


def save_scores(pruner: Pruner, folder: Path) -> None:
    """Writes what the blocks were ranked by when the mask was made hard, if the method ranks them, as float32 [N]."""
    scores: Tensor | None = pruner.ranked
    if scores is not None:
        found = scores.detach().float().cpu().reshape(-1).clone()
        ranks.first(lambda: write_atomic(folder / SCORES, save({"scores": found})))
