"""Tasks: what is trained, on what, and how it is judged. A new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable

from .camvid import Camvid
from .cifar10 import Cifar10
from .digits import Digits
from .imagefolder import ImageFolder
from .scenes import Scenes
from .segmentation import Segmentation
from .task import Data, Task, generator

TASKS: dict[str, Callable[..., Task]] = {
    "digits": Digits,
    "cifar10": Cifar10,
    "imagefolder": ImageFolder,
    "scenes": Scenes,
    "camvid": Camvid,
    "segmentation": Segmentation,
}

__all__ = ["TASKS", "Data", "Task", "generator"]
