"""BCCD: 364 microscope images of blood smears with boxes of three cell types, from a folder or ``bccd.tar``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..recipe import Recipe
from .detection import Detection


@dataclass(frozen=True)
class Bccd(Detection):
    """Detection of red cells, white cells and platelets. ``val`` is the validation split and ``test`` the test split."""

    size: int = 320

    name: ClassVar[str] = "bccd"
    data_name: ClassVar[str] = "bccd"
    # Paper: BCCD is not in the paper. Optimizer, block and schedule are those of its YOLOv5m, and the sparsity is the highest of
    # its 30, 50 and 70 %. Epochs, batch size and learning rates are our choice for training from scratch at 320 pixels.
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
