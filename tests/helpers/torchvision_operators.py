"""Lets torchvision import next to a CPU build of PyTorch.

The wheels of torchvision for Linux are CUDA builds. Next to a CPU build of PyTorch their compiled extension does not load, and then
``import torchvision`` raises because the operators ``nms`` and ``qnms`` do not exist. timm, transformers and others import
torchvision, so they fail as well. Models do not call these operators; declaring them is enough.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_LIBRARIES: list[torch.library.Library] = []  # the operators exist as long as this object does


def declare_operators() -> None:
    """Declares the operators, unless torchvision is missing or its own extension loads. Call it before the first import."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _LIBRARIES or _extension_loads(Path(spec.origin).parent):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)


def _extension_loads(folder: Path) -> bool:
    for path in [*folder.glob("_C*.so"), *folder.glob("_C*.pyd"), *folder.glob("_C*.dylib")]:
        try:
            torch.ops.load_library(path)
        except OSError:  # built for CUDA
            continue
        return True
    return False
