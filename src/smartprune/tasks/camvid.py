"""CamVid: 701 road scenes of 480x360 pixels with masks of eleven classes, from a folder or ``camvid.tar``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..recipe import Recipe
from .segmentation import Segmentation


@dataclass(frozen=True)
class Camvid(Segmentation):
    """Segmentation into eleven classes. ``val`` is the validation split and ``test`` the test split."""

    height: int = 352
    width: int = 480

    name: ClassVar[str] = "camvid"
    data_name: ClassVar[str] = "camvid"
    recipe: ClassVar[Recipe] = replace(Segmentation.recipe, dense_epochs=240, search_epochs=60, finetune_epochs=180)
