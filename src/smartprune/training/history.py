"""What a search records for its report: a sample of the mask over time, and the final scores.

Both are written at the end of an epoch, when the run waits for the device anyway. They do not change what the run computes.
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
    """The mask of a fixed sample of blocks, rounded for a row of metrics. All ranks must call it."""
    mask = pruner.mask
    blocks = torch.tensor(sampled_blocks(mask.numel()), device=mask.device)
    return [round(value, 4) for value in mask[blocks].float().tolist()]


def save_scores(pruner: Pruner, folder: Path) -> None:
    """Writes the scores [N] that ranked the blocks when the mask became hard, as float32, if the method has scores."""
    scores: Tensor | None = pruner.ranked
    if scores is not None:
        values = scores.detach().float().cpu().reshape(-1).clone()
        ranks.on_first(lambda: write_atomic(folder / SCORES, save({"scores": values})))
