"""What is in the picture, and where? Pictures with boxes in COCO's form, judged by mean average precision."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import SmartpruneError
from ..models import build
from ..recipe import Recipe
from . import detection_files as on_disk
from .boxes import Fit, centres, corners, moved, nms
from .detection_files import Truth, checked_finds
from .detection_moves import Moves, draw, painted, placed
from .detection_score import MEASURE, NEEDS, evaluator, scored
from .pictures import Files, Shelf, find, slices
from .task import Data
from .yolo_loss import GAINS, Gains, yolo_distance, yolo_loss

Batch = tuple[
    Tensor, Tensor
]  # pictures [batch, 3, size, size] in 0 ... 1; class, centre, width, height [batch, n, 5], see yolo_loss

STRIDE = 32  # pixels per cell of the coarsest map
EVALUATE = 32  # pictures per step of an evaluation
CANDIDATES = 8192  # boxes of a picture, at most, of which the finds are chosen
DECIMALS = 3, 5  # of a box's pixels and of its score, as they are written and scored


@dataclass(frozen=True)
class Detection:
    """Pictures and boxes of your own or of COCO; see ``detection_files`` for the layouts.

    A set with a name of its own is a class like this one with other defaults: ``bccd``, ``voc07sub``.
    """

    folder: str = ""  # a folder or a tar; else the environment variable SMARTPRUNE_DATA says it
    size: int = 640  # pixels a side that the network sees
    mosaic: float = 1.0  # share of the training pictures that are put together from four
    scale: float = 0.5  # training pictures are scaled by up to this share, up or down ...
    shift: float = 0.1  # ... and moved by up to this share of a side
    flip: bool = True  # half of the training pictures are mirrored
    hue: float = 0.015  # how far colours change, as shares of a full turn ...
    saturation: float = 0.7  # ... of the saturation ...
    brightness: float = 0.4  # ... and of the brightness
    confidence: float = 0.001  # finds less sure than this are dropped
    overlap: float = 0.6  # of two finds of one class that overlap more, the less sure one is dropped
    most: int = 300  # finds in a picture
    lenient: bool = False  # leave out boxes of no size or beyond their picture in place of refusing them
    memory: float = 8.0  # GB; a split that needs more is read from disk in every epoch

    name: ClassVar[str] = "detection"
    known: ClassVar[str] = "coco"  # folder or tar that is looked for in the data folder
    # The paper: SGD with momentum 0.937 and weight decay 5e-4, 1e-4 linearly to 0 over 100 epochs of pruning, of which
    # the search takes 35,000 batches of 16 pictures (about 5 epochs of COCO). It began with a model that was trained
    # already (give yours with --dense); the dense stage here, warm-up and averaged weights are
    # after YOLOv5's recipe (one rate for all parameters in the warm-up), and so is gathering gradients up to 64 pictures.
    recipe: ClassVar[Recipe] = Recipe(
        model="yolov5m",
        block="16x8",
        sparsity=0.5,
        dense_epochs=300,
        search_epochs=5,
        finetune_epochs=95,
        batch=16,
        accumulate=4,
        lr=0.01,
        search_lr=1e-4,
        finetune_lr=1e-4,
        score_lr=1e-4,
        schedule="linear",
        schedule_over="pruning",
        momentum=0.937,
        weight_decay=5e-4,
        warmup_epochs=3.0,
        ema=0.9999,
        amp="auto",
        checkpoint_seconds=60.0,
    )
    models: ClassVar[tuple[str, ...]] = ("yolov5m",)
    measure: ClassVar[str] = MEASURE
    needs: ClassVar[str] = NEEDS
    distance = staticmethod(yolo_distance)

    def __post_init__(self) -> None:
        check(self)

    def model(self, name: str) -> nn.Module:
        return build(name, num_classes=len(self._truth("train").categories))

    def example(self) -> Tensor:
        return torch.zeros(1, 3, self.size, self.size)

    def data(self, split: str, device: torch.device) -> Data:
        files, name = self._files(), self._name(split)
        if name is None:
            return Split(Shelf(lambda number: torch.empty(0), None, device), Truth("", (), ()), self.size, None)
        truth = self._truth(split)
        truth.require_boxes("learn from" if split == "train" else "measure by")
        kept = None
        if len(truth.pictures) * self.size**2 * 3 <= self.memory * 1e9:
            kept = on_disk.everything(files.place, name, self.size, self.lenient)
        shelf = Shelf(lambda number: on_disk.load(files, truth.pictures[number], self.size), kept, device)
        return Split(shelf, truth, self.size, moves(self) if split == "train" else None)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, batch)

    def metric(self, model: nn.Module, data: Data) -> float | None:
        return metric(self, model, data)

    def predictions(self, model: nn.Module, data: Data) -> list[dict[str, Any]]:
        return predictions(model, data, self.confidence, self.overlap, self.most)

    def score(self, found: object, split: str) -> dict[str, float] | None:
        boxes = self._truth(split)
        return scored(boxes, checked_finds(found, boxes, "what was found"))

    def _files(self) -> Files:
        return find(self.name, self.folder, self.known, on_disk.WITHIN)

    def _name(self, split: str) -> str | None:
        if split not in ("train", "validation", "test"):
            raise SmartpruneError(f"{self.name}: split={split!r}; it is train, validation or test")
        return on_disk.part(self._files(), split)

    def _truth(self, split: str) -> Truth:
        name = self._name(split)
        if name is None:
            raise SmartpruneError(f"{self._files().place} holds no boxes for the split {split}")
        return on_disk.checked(self._files(), name, self.lenient)


class Split:
    """Pictures fitted into squares, with their boxes. Training data is shuffled and moved, and drops a short last batch."""

    def __init__(self, shelf: Shelf, truth: Truth, size: int, moves: Moves | None) -> None:
        self.shelf, self.truth, self.size, self.moves = shelf, truth, size, moves
        fits = [Fit(picture.width, picture.height, size) for picture in truth.pictures]
        self.start = torch.tensor([fit.start for fit in fits], dtype=torch.float32).reshape(-1, 2)
        self.scale = torch.tensor([fit.scale for fit in fits], dtype=torch.float32).reshape(-1, 2)
        inner = torch.tensor([fit.inner for fit in fits], dtype=torch.float32).reshape(-1, 2)
        self.frames = torch.cat([self.start, self.start + inner], 1).to(shelf.device)  # [n, 4] what is not border
        self.labels = self._labels().to(shelf.device)  # [n, most of a picture, 5] class and corners, class -1 for none

    def _labels(self) -> Tensor:
        learned = [
            [(label, *box) for box, label, crowd in zip(p.boxes, p.classes, p.crowd, strict=True) if not crowd]
            for p in self.truth.pictures
        ]
        out = torch.full((len(learned), max(map(len, learned), default=0) or 1, 5), -1.0)
        for own, objects, scale, start in zip(out, learned, self.scale, self.start, strict=True):
            if objects:
                own[: len(objects)] = torch.tensor(objects)
                own[: len(objects), 1:] = moved(own[: len(objects), 1:], scale, start)
        return out

    def steps(self, size: int) -> int:
        count = len(self.truth.pictures)
        return max(1, count // size) if self.moves else -(-count // size)

    def batches(self, size: int, seed: int, epoch: int, first: int = 0, every: int = 1) -> Iterator[Batch]:
        parts, count = slices(size, first, self.steps(size), every), len(self.truth.pictures)
        if self.moves is None:
            for part, taken in zip(parts, self.shelf.stream(torch.arange(count), parts), strict=True):
                pictures = (taken.float() / 255).permute(0, 3, 1, 2)
                yield pictures, as_targets(self.labels[part])
            return
        drawn, tiles = draw(self.moves, count, seed, epoch), self.moves.tiles
        order = drawn.order.flatten()
        drawn = drawn.to(self.shelf.device)
        wide = [slice(part.start * tiles, part.stop * tiles) for part in parts]
        for part, taken in zip(parts, self.shelf.stream(order, wide), strict=True):
            own = drawn[part]
            frames, labels = self.frames[own.order], self.labels[own.order]
            pictures = painted(taken.unflatten(0, (-1, tiles)), frames, own)
            yield pictures, as_targets(placed(labels, frames, own, self.size))

    def still(self) -> Split:
        out = copy(self)
        out.moves = None
        return out


def as_targets(labels: Tensor) -> Tensor:
    """Class and corners [..., 5] as the loss takes them: class, centre, width and height."""
    return torch.cat([labels[..., :1], centres(labels[..., 1:])], -1)


def moves(task: Detection) -> Moves:
    return Moves(task.mosaic, task.scale, task.shift, task.flip, task.hue, task.saturation, task.brightness)


def check(task: Detection) -> None:
    if task.size < STRIDE or task.size % STRIDE:
        raise SmartpruneError(f"{task.name}: size={task.size} should be a multiple of {STRIDE} pixels")
    for name in ("mosaic", "shift", "saturation", "brightness", "confidence", "overlap"):
        if not 0 <= getattr(task, name) <= 1:
            raise SmartpruneError(f"{task.name}: {name}={getattr(task, name)} should be 0 to 1")
    for name, limit in (("scale", 1.0), ("hue", 0.5)):
        if not 0 <= getattr(task, name) < limit:
            raise SmartpruneError(f"{task.name}: {name}={getattr(task, name)} should be at least 0 and below {limit:g}")
    if task.most < 1:
        raise SmartpruneError(f"{task.name}: most={task.most} should be at least 1")
    if task.memory < 0:
        raise SmartpruneError(f"{task.name}: memory={task.memory} should not be negative")


def loss(model: nn.Module, batch: Batch, gains: Gains = GAINS) -> Tensor:
    """``model`` gives raw maps and keeps the anchors as ``detect.anchors``, as ``models.yolov5m`` does."""
    pictures, targets = batch
    bare: Any = getattr(model, "module", model)  # within a data-parallel wrapper
    return yolo_loss(model(pictures), targets, bare.detect.anchors, pictures.shape[-1], gains)


def metric(task: Any, model: nn.Module, data: Data) -> float | None:
    """mAP; None without the work of looking for objects where no evaluator is installed."""
    if evaluator() is None:
        return None
    assert isinstance(data, Split)
    figures = scored(data.truth, task.predictions(model, data))
    return None if figures is None else figures[MEASURE]


def predictions(model: nn.Module, data: Data, confidence: float, overlap: float, most: int) -> list[dict[str, Any]]:
    """What a model finds on a split, in COCO's form: ids of the file, pixels of the original picture, best first."""
    assert isinstance(data, Split)
    bare: Any = model
    out: list[dict[str, Any]] = []
    done = 0
    for pictures, _ in data.batches(EVALUATE, seed=0, epoch=0):
        finds = chosen(bare.decode(bare(pictures)), confidence, overlap, most).cpu()
        for place, own in enumerate(finds, start=done):
            out += as_coco(own[own[:, 4] > 0], data, place)
        done += len(pictures)
    return out


def chosen(boxes: Tensor, confidence: float, overlap: float, most: int) -> Tensor:
    """Finds [batch, most, 6] of decoded boxes [batch, n, 5 + classes]: corners, score (0: no find) and class.

    A box counts for every class of which it is sure enough; its score is that of the class times the objectness.
    """
    scores = (boxes[..., 4:5] * boxes[..., 5:]).flatten(1)  # [batch, n * classes]
    enough = scores > confidence
    count = min(CANDIDATES, int(enough.sum(1).max()))
    best, place = torch.where(enough, scores, 0).topk(count, 1)
    number, label = place // (boxes.shape[-1] - 5), place % (boxes.shape[-1] - 5)
    four = corners(boxes[..., :4]).gather(1, number[..., None].expand(-1, -1, 4))
    taken = nms(four, best, label, overlap, most)
    at = taken.clamp(min=0)
    if not count:
        return boxes.new_zeros(len(boxes), most, 6)
    out = torch.cat([four, best[..., None], label[..., None].to(four.dtype)], -1).gather(1, at[..., None].expand(-1, -1, 6))
    return torch.where((taken >= 0)[..., None], out, 0)


def as_coco(finds: Tensor, data: Split, place: int) -> list[dict[str, Any]]:
    """Finds [n, 6] in the square of picture number ``place``, in the pixels of its file."""
    picture, pixels, places = data.truth.pictures[place], *DECIMALS
    four = moved(finds[:, :4].double() - data.start[place].repeat(2), 1 / data.scale[place], torch.zeros(2)).clamp(min=0)
    four = four.minimum(torch.tensor([picture.width, picture.height] * 2))
    rows = torch.cat([four[:, :2], four[:, 2:] - four[:, :2], finds[:, 4:]], 1).tolist()
    return [
        {
            "image_id": picture.number,
            "category_id": data.truth.categories[int(label)][0],
            "bbox": [round(value, pixels) for value in box],
            "score": round(score, places),
        }
        for *box, score, label in rows
    ]
