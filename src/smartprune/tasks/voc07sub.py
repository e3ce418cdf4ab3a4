"""2,215 photographs of PASCAL VOC2007 with boxes of 14 classes, 320 pixels a side, from a folder or ``voc07sub.tar``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..recipe import Recipe
from .detection import Detection


@dataclass(frozen=True)
class Voc07sub(Detection):
    """Where are animals, vehicles and persons? Results are those of ``val``; there is no other split to choose by.

    They are not results of VOC2007: pictures, classes and split are others.
    """

    size: int = 320

    name: ClassVar[str] = "voc07sub"
    known: ClassVar[str] = "voc07sub"
    # As for ``bccd``; sparsity is the middle one of the paper's, since this set is the harder one.
    recipe: ClassVar[Recipe] = replace(
        Detection.recipe,
        sparsity=0.5,
        dense_epochs=200,
        search_epochs=30,
        finetune_epochs=100,
        batch=32,
        accumulate=1,
        lr=0.005,
        search_lr=0.0025,
        finetune_lr=0.0025,
        score_lr=0.0025,
        ema=0.998,
    )
