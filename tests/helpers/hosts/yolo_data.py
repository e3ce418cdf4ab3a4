"""A tiny data set for the trainer of Ultralytics: bright rectangles on noise, as pictures with boxes or outlines."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from helpers.torchvision_operators import declare_operators

if importlib.util.find_spec("torchvision") is not None:
    declare_operators()

SIZE, CLASSES = 64, ("bright", "dark")


def write(folder: Path, outlines: bool, pictures: int = 8) -> Path:
    """Writes the pictures and their labels, and returns the path of the description that ``train(data=...)`` takes."""
    draw = np.random.default_rng(0)
    for part in ("train", "val"):
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True, exist_ok=True)
        for number in range(pictures):
            pixels = draw.integers(96, 160, (SIZE, SIZE, 3), dtype=np.uint8)
            left, top = draw.integers(0, SIZE // 2, 2)
            width, height = draw.integers(SIZE // 4, SIZE // 2, 2)
            pixels[top : top + height, left : left + width] = 255 * (1 - number % 2)
            Image.fromarray(pixels).save(folder / "images" / part / f"{number}.png")
            x0, y0, x1, y1 = (edge / SIZE for edge in (left, top, left + width, top + height))
            box = ((x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0)
            numbers = (x0, y0, x1, y0, x1, y1, x0, y1) if outlines else box
            label = f"{number % 2} " + " ".join(f"{value:.6f}" for value in numbers)
            (folder / "labels" / part / f"{number}.txt").write_text(label + "\n")
    names = "".join(f"  {i}: {name}\n" for i, name in enumerate(CLASSES))
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames:\n{names}")
    return folder / "data.yaml"


def provide_suppression() -> None:
    """Replaces the operator of torchvision where its compiled part does not load, as next to a CPU build of PyTorch."""
    import torchvision

    if not torchvision.extension._has_ops():
        torchvision.ops.nms = suppress


def suppress(boxes: Tensor, scores: Tensor, limit: float) -> Tensor:
    """Non-maximum suppression: boxes from the best to the worst, without those that overlap a better one by more than ``limit``."""
    order = scores.argsort(descending=True, stable=True)
    x0, y0, x1, y1 = boxes[order].unbind(1)
    areas, kept = (x1 - x0) * (y1 - y0), []
    alive = torch.ones(len(order), dtype=torch.bool)
    for i in range(len(order)):
        if not alive[i]:
            continue
        kept.append(i)
        width = (x1.minimum(x1[i]) - x0.maximum(x0[i])).clamp(min=0)
        shared = width * (y1.minimum(y1[i]) - y0.maximum(y0[i])).clamp(min=0)
        alive &= shared <= limit * (areas + areas[i] - shared)
    return order[torch.tensor(kept, dtype=torch.long)]
