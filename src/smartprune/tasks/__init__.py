"""Tasks: a data set with its models, loss and metric. A new task is one file and one line in this table."""

from __future__ import annotations

from collections.abc import Callable

from .bccd import Bccd
from .camvid import Camvid
from .cifar10 import Cifar10
from .detection import Detection
from .digits import Digits
from .imagefolder import ImageFolder
from .sceneboxes import SceneBoxes
from .scenes import Scenes
from .segmentation import Segmentation
from .task import Data, Task, generator
from .voc07sub import Voc07sub

TASKS: dict[str, Callable[..., Task]] = {
    "digits": Digits,
    "cifar10": Cifar10,
    "imagefolder": ImageFolder,
    "scenes": Scenes,
    "camvid": Camvid,
    "segmentation": Segmentation,
    "sceneboxes": SceneBoxes,
    "bccd": Bccd,
    "voc07sub": Voc07sub,
    "detection": Detection,
}

__all__ = ["TASKS", "Data", "Task", "generator"]
