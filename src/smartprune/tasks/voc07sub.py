"""A subset of PASCAL VOC2007: 2,215 images of 320 pixels with boxes of 14 classes, from a folder or ``voc07sub.tar``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..recipe import Recipe
from .detection import Detection


@dataclass(frozen=True)
class Voc07sub(Detection):
    """Detection of animals, vehicles and persons. ``val`` is the test split, and there is no validation split.

    Results cannot be compared with VOC2007, because images, classes and splits differ.
    """

    size: int = 320

    name: ClassVar[str] = "voc07sub"
    data_name: ClassVar[str] = "voc07sub"
    # Paper: as for ``bccd``, but with 50 % sparsity, because this data set is harder.
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
