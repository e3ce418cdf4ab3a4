"""BCCD: 364 microscope pictures of blood smears with boxes of three kinds of cells, from a folder or ``bccd.tar``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..recipe import Recipe
from .detection import Detection


@dataclass(frozen=True)
class Bccd(Detection):
    """Where are red cells, white cells and platelets? ``val`` is to choose by, results are those of ``test``."""

    size: int = 320

    name: ClassVar[str] = "bccd"
    known: ClassVar[str] = "bccd"
    # The paper has no such set: optimizer, block and the kind of schedule are its own for YOLOv5m, sparsity is the highest
    # of its 30, 50 and 70 %. Lengths, batch and learning rates are ours, for training from random weights at 320 pixels.
    recipe: ClassVar[Recipe] = replace(
        Detection.recipe,
        sparsity=0.7,
        dense_epochs=300,
        search_epochs=100,
        finetune_epochs=200,
        batch=32,
        accumulate=1,
        lr=0.005,
        search_lr=0.0025,
        finetune_lr=0.0025,
        score_lr=0.0025,
        ema=0.998,
    )
