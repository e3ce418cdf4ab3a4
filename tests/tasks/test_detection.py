"""Pictures with boxes: finds and metric against slow loops, pictures and boxes that move together, errors that name the entry."""

from __future__ import annotations

import colorsys
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.box_folders import CATEGORIES, COLOURS, COUNTS, edit_annotations, image_and_boxes, write_boxes
from helpers.image_folders import make_tar, save_image
from helpers.training_jobs import assert_same_run, metric_rows
from smartprune import SmartpruneError
from smartprune.cli import main
from smartprune.experiments.compare import compare
from smartprune.tasks import TASKS
from smartprune.tasks.bccd import Bccd
from smartprune.tasks.boxes import Fit, iou, nms
from smartprune.tasks.detection import Detection, Split, chosen
from smartprune.tasks.detection_files import Picture, Truth, checked_finds, read
from smartprune.tasks.detection_moves import Moves, coloured, draw
from smartprune.tasks.detection_score import evaluator, faster_coco_eval, pycocotools, scored
from smartprune.tasks.pictures import Shelf
from smartprune.tasks.sceneboxes import SceneBoxes, truth
from smartprune.tasks.scenes import SCENES, compose
from smartprune.training.config import configure
from smartprune.training.train import Result, resume, train

pytest.importorskip("PIL")
CPU = torch.device("cpu")
STILL = {"mosaic": 0.0, "scale": 0.0, "shift": 0.0, "flip": False, "hue": 0.0, "saturation": 0.0, "brightness": 0.0}
needs_evaluator = pytest.mark.skipif(evaluator() is None, reason="neither faster-coco-eval nor pycocotools is installed")


def task(place: Path, **changes: Any) -> Detection:
    return Detection(**{"folder": str(place), "size": 64, **changes})


# overlaps and finds


def slow_iou(a: list[float], b: list[float]) -> float:
    both = max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    either = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both
    return both / either if either else 0.0


def some_boxes(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    start = 30 * torch.rand(count, 2, generator=source)
    boxes = torch.cat([start, start + 2 + 20 * torch.rand(count, 2, generator=source)], 1)
    return boxes, torch.rand(count, generator=source), torch.randint(0, 3, (count,), generator=source)


def slow_nms(boxes: Tensor, scores: Tensor, classes: Tensor, overlap: float, most: int) -> list[int]:
    kept: list[int] = []
    for i in sorted(range(len(boxes)), key=lambda i: -float(scores[i])):
        if float(scores[i]) > 0 and len(kept) < most:
            rivals = [k for k in kept if classes[k] == classes[i]]
            if all(slow_iou(boxes[i].tolist(), boxes[k].tolist()) <= overlap for k in rivals):
                kept.append(i)
    return kept


@pytest.mark.parametrize(("overlap", "most"), [(0.6, 300), (0.3, 300), (0.6, 7), (0.0, 40), (1.0, 40)])
def test_finds_against_a_slow_loop(overlap: float, most: int) -> None:
    batch = [some_boxes(80, seed) for seed in range(4)]
    batch[3][1][5:] = 0  # a picture with few finds
    boxes, scores, classes = (torch.stack(parts) for parts in zip(*batch, strict=True))
    found = nms(boxes, scores, classes, overlap, most)
    for i, own in enumerate(batch):
        kept = [number for number in found[i].tolist() if number >= 0]
        assert kept == slow_nms(*own, overlap, most)
        assert found[i, len(kept) :].eq(-1).all()
    torch.testing.assert_close(iou(boxes[0, :40], boxes[0, 40:])[3].item(), slow_iou(boxes[0, 3].tolist(), boxes[0, 43].tolist()))


def test_finds_against_torchvision() -> None:
    ops = pytest.importorskip("torchvision.ops")
    boxes, scores, classes = some_boxes(300, 7)
    assert (
        nms(boxes[None], scores[None], classes[None], 0.5, 300)[0].tolist()[:20]
        == ops.batched_nms(boxes, scores, classes, 0.5)[:20].tolist()
    )


def test_no_candidates_and_boxes_of_no_size() -> None:
    assert nms(torch.zeros(2, 0, 4), torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.int64), 0.6, 5).eq(-1).all()
    flat = torch.tensor([[[3.0, 3, 3, 8], [3, 3, 3, 8]]])  # does not even overlap with itself
    assert nms(flat, torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int64), 0.6, 4).tolist() == [[0, 1, -1, -1]]
    assert not chosen(torch.zeros(2, 9, 8), 0.001, 0.6, 5).any()


def test_a_box_counts_for_every_class_it_is_sure_of() -> None:
    boxes = torch.tensor([[[10.0, 10, 4, 6, 0.5, 0.8, 0.001, 0.6], [30, 30, 4, 4, 0.9, 0.0, 0.0, 1.0]]])
    out = chosen(boxes, confidence=0.01, overlap=0.6, most=5)[0]
    torch.testing.assert_close(out[:3, 4], torch.tensor([0.9, 0.4, 0.3]))
    assert out[:3, 5].tolist() == [2, 0, 2]
    assert out[1, :4].tolist() == [8, 7, 12, 13]
    assert not out[3:].any()


# the metric


def slow_map(truth: Truth, finds: list[dict[str, Any]], levels: list[float]) -> float:
    """COCO's rules, one find after another: at most 100 finds a picture, boxes of a crowd count neither for nor against."""
    values = []
    for level in levels:
        for label, (category, _) in enumerate(truth.categories):
            marks: list[tuple[float, bool]] = []
            total = 0
            for picture in truth.pictures:
                own = [(b, c) for b, k, c in zip(picture.boxes, picture.classes, picture.crowd, strict=True) if k == label]
                own.sort(key=lambda pair: pair[1])  # real ones first
                total += sum(not crowd for _, crowd in own)
                mine = [f for f in finds if f["image_id"] == picture.number and f["category_id"] == category]
                taken: set[int] = set()
                for find in sorted(mine, key=lambda f: -f["score"])[:100]:
                    x, y, w, h = find["bbox"]
                    best, at = level - 1e-12, None
                    for i, (box, crowd) in enumerate(own):
                        if (i in taken and not crowd) or (at is not None and not own[at][1] and crowd):
                            continue
                        value = slow_iou([x, y, x + w, y + h], list(box))
                        if crowd:
                            both = max(0.0, min(x + w, box[2]) - max(x, box[0])) * max(0.0, min(y + h, box[3]) - max(y, box[1]))
                            value = both / (w * h)
                        if value >= best:
                            best, at = value, i
                    if at is None or not own[at][1]:
                        marks.append((find["score"], at is not None))
                    if at is not None:
                        taken.add(at)
            if total:
                marks.sort(key=lambda mark: -mark[0])
                hits, precision, recall = 0, [], []
                for count, (_, hit) in enumerate(marks, start=1):
                    hits += hit
                    precision.append(hits / count)
                    recall.append(hits / total)
                at_least = [
                    max((p for p, r in zip(precision, recall, strict=True) if r >= i / 100), default=0.0) for i in range(101)
                ]
                values.append(sum(at_least) / 101)
    return sum(values) / len(values)


def made_up(seed: int) -> tuple[Truth, list[dict[str, Any]]]:
    source = np.random.default_rng(seed)
    pictures, finds = [], []
    for number in range(6):
        boxes, classes, crowd = [], [], []
        for _ in range(int(source.integers(0, 6))):
            x, y, w, h = source.uniform(0, 60), source.uniform(0, 60), source.uniform(8, 40), source.uniform(8, 40)
            label = int(source.integers(3))
            boxes.append((x, y, x + w, y + h))
            classes.append(label)
            crowd.append(bool(source.random() < 0.2))
            for _ in range(int(source.integers(0, 4))):  # near the truth
                near = np.array([x, y, w, h]) * source.uniform(0.85, 1.15, 4)
                finds.append(
                    {
                        "image_id": 10 + number,
                        "category_id": CATEGORIES[label if source.random() < 0.8 else 0][0],
                        "bbox": near.tolist(),
                        "score": float(source.random()),
                    }
                )
        areas = tuple((x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in boxes)
        pictures.append(Picture(10 + number, str(number), 100, 100, tuple(boxes), tuple(classes), areas, tuple(crowd)))
    return Truth("made up", tuple(pictures), CATEGORIES), finds


@needs_evaluator
@pytest.mark.parametrize("seed", range(5))
def test_metric_against_slow_loops(seed: int) -> None:
    own, finds = made_up(seed)
    figures = scored(own, finds)
    assert figures is not None
    assert list(figures) == ["mAP", "mAP@.5"]
    assert figures["mAP@.5"] == pytest.approx(slow_map(own, finds, [0.5]), abs=1e-6)
    assert figures["mAP"] == pytest.approx(slow_map(own, finds, [0.5 + 0.05 * i for i in range(10)]), abs=1e-6)
    assert 0 < figures["mAP"] < figures["mAP@.5"] < 1
    assert "area" not in finds[0]  # what is given is left as it is


@pytest.mark.skipif(
    importlib.util.find_spec("faster_coco_eval") is None or importlib.util.find_spec("pycocotools") is None,
    reason="faster-coco-eval and pycocotools are not both installed",
)
def test_both_evaluators_agree(capsys: pytest.CaptureFixture[str]) -> None:
    own, finds = made_up(9)
    one, other = (make()(own.to_coco(), [{**f} for f in finds]) for make in (faster_coco_eval, pycocotools))
    assert list(one[:2]) == pytest.approx(list(other[:2]), abs=1e-9)
    capsys.readouterr()
    scored(own, finds)
    assert capsys.readouterr().out == ""


@needs_evaluator
def test_metric_of_nothing() -> None:
    own, _ = made_up(0)
    assert scored(own, []) == {"mAP": 0.0, "mAP@.5": 0.0}
    bare = Truth("boxes.json", tuple(Picture(p.number, p.name, 9, 9, (), (), (), ()) for p in own.pictures), CATEGORIES)
    with pytest.raises(SmartpruneError, match=r"boxes\.json holds no box that counts"):
        scored(bare, [])


class Knows(nn.Module):
    """Finds what is there: the boxes of the split in the square, in order."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data, self.done = data, 0

    def forward(self, pictures: Tensor) -> Tensor:
        labels = self.data.labels[self.done : self.done + len(pictures)]
        self.done += len(pictures)
        return labels  # type: ignore[no-any-return]

    def decode(self, labels: Tensor) -> Tensor:
        middle, sides = (labels[..., 1:3] + labels[..., 3:]) / 2, labels[..., 3:] - labels[..., 1:3]
        classes = (labels[..., :1] == torch.arange(3)).float()  # none of them where there is nothing
        return torch.cat([middle, sides, torch.full_like(labels[..., :1], 0.9), classes], -1)


def test_finds_are_in_pixels_and_ids_of_the_file(tmp_path: Path) -> None:
    own = task(write_boxes(tmp_path))
    data = own.data("test", CPU)
    found = own.predictions(Knows(data), data)
    wanted = []
    for number in range(COUNTS["test"]):
        wanted += [
            (100 + 3 * number, CATEGORIES[label][0], box) for label, box, crowd in image_and_boxes("test", number)[1] if not crowd
        ]
    assert len(found) == len(wanted)
    for find in found:
        assert find["score"] == 0.9
        assert min(
            max(abs(a - b) for a, b in zip(find["bbox"], box, strict=True))
            for image, category, box in wanted
            if (image, category) == (find["image_id"], find["category_id"])
        ) < 2e-3  # fmt: skip
    if evaluator() is not None:
        assert own.metric(Knows(data), data) == own.score(found, "test")["mAP"] == pytest.approx(1)  # type: ignore[index]


# training pictures


def test_a_fit_and_back() -> None:
    for width, height in ((640, 480), (31, 500), (7, 7), (3, 999)):
        fit = Fit(width, height, 64)
        assert max(fit.inner) == 64
        assert all(s >= 0 and s + i <= 64 for s, i in zip(fit.start, fit.inner, strict=True))
        assert fit.inner[0] * height == pytest.approx(fit.inner[1] * width, abs=max(width, height))


def test_without_moves_training_pictures_are_those_of_the_test(tmp_path: Path) -> None:
    own = task(write_boxes(tmp_path), **STILL)
    moved, kept = own.data("train", CPU), own.data("train", CPU).shelf.kept  # type: ignore[attr-defined]
    still = Split(Shelf(lambda i: kept[i], kept, CPU), moved.truth, 64, None)  # type: ignore[attr-defined]
    pictures, targets = next(iter(still.batches(6, seed=0, epoch=0)))
    order = draw(moved.moves, 6, 0, 0).order[:, 0]  # type: ignore[attr-defined]
    ((seen, boxes),) = moved.batches(6, seed=0, epoch=0)
    torch.testing.assert_close(seen, pictures[order], rtol=0, atol=1e-5)
    there = boxes[..., 0] >= 0
    torch.testing.assert_close(boxes[there], targets[order][there])
    assert torch.equal(there, targets[order][..., 0] >= 0)


@pytest.mark.parametrize("mosaic", [0.0, 0.5, 1.0])
def test_pictures_and_boxes_move_together(mosaic: float, tmp_path: Path) -> None:
    """The colour of a box tells its class: it fills what is left of the box, and is hardly anywhere else."""
    edit_annotations(write_boxes(tmp_path, train=24), lambda data: [entry.update(iscrowd=0) for entry in data["annotations"]])
    data = task(tmp_path, **{**STILL, "mosaic": mosaic, "scale": 0.5, "shift": 0.2, "flip": True}).data("train", CPU)
    boxes = most = 0
    for epoch in range(2):
        for pictures, targets in data.batches(8, seed=0, epoch=epoch):
            assert pictures.shape == (8, 3, 64, 64)
            colour = torch.tensor(COLOURS)[:, :, None, None] / 255
            near = ((pictures[:, None] - colour).abs().amax(2) < 0.35).float()  # [picture, class, y, x]
            for own, masks in zip(targets, near, strict=True):
                rest = masks.clone()
                for label, x, y, w, h in own[own[:, 0] >= 0].tolist():
                    top, bottom, left, right = (round(v) for v in (y - h / 2, y + h / 2, x - w / 2, x + w / 2))
                    if min(bottom - top, right - left) > 5:
                        inner = masks[int(label), top + 2 : bottom - 2, left + 2 : right - 2]
                        assert float(inner.mean()) > 0.95
                        boxes += 1
                    rest[int(label), max(0, top - 1) : bottom + 1, max(0, left - 1) : right + 1] = 0
                assert int(rest.sum()) < 60  # slivers that were dropped
                most = max(most, int((own[:, 0] >= 0).sum()))
    assert boxes > 40
    assert (most > 3) == (mosaic > 0)


def test_what_is_drawn() -> None:
    moves = Moves(mosaic=0.5, scale=0.3, shift=0.1, flip=True, hue=0.02, saturation=0.5, brightness=0.4)
    drawn = draw(moves, 4000, 1, 2)
    assert torch.equal(drawn.order[:, 0].sort().values, torch.arange(4000))
    assert 0.45 < float(drawn.alone.float().mean()) < 0.55
    assert 0.45 < float((drawn.mirror < 0).float().mean()) < 0.55
    for values, limit in ((drawn.scale - 1, 0.3), (drawn.shift, 0.1), (drawn.middle, 0.5), (drawn.colour[:, 2] - 1, 0.4)):
        assert 0.95 * limit < float(values.abs().max()) <= limit + 1e-6
    assert not torch.equal(drawn.order, draw(moves, 4000, 1, 3).order)
    assert bool(draw(Moves(0.0, 0.3, 0.1, flip=False), 50, 0, 0).alone.all())


def test_colours_are_those_of_hsv() -> None:
    pictures = torch.rand(5, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    still = torch.tensor([[0.0, 1.0, 1.0]]).expand(5, 3)
    torch.testing.assert_close(coloured(pictures, still), pictures)
    out = coloured(pictures, torch.tensor([[0.0, 0.7, 0.8]]).expand(5, 3))
    for before, after in zip(pictures.permute(0, 2, 3, 1).reshape(-1, 3), out.permute(0, 2, 3, 1).reshape(-1, 3), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*before.tolist())
        assert after.tolist() == pytest.approx(colorsys.hsv_to_rgb(hue, 0.7 * saturation, 0.8 * value), abs=1e-5)
    red = torch.tensor([0.8, 0.2, 0.2])[None, :, None, None]
    turned = coloured(red, torch.tensor([[2 * np.pi / 3, 1.0, 1.0]]))  # by a third: red becomes green or blue
    assert sorted(turned.flatten().tolist()) == pytest.approx([0.2, 0.2, 0.8], abs=1e-5)
    assert float(turned[0, 0]) == pytest.approx(0.2, abs=1e-5)
    grey = torch.full((1, 3, 2, 2), 0.4)
    torch.testing.assert_close(coloured(grey, torch.tensor([[0.3, 1.5, 1.0]])), grey)


def test_disk_and_memory_give_the_same_batches(tmp_path: Path) -> None:
    write_boxes(tmp_path)
    memory, disk = (task(tmp_path, memory=limit).data("train", CPU) for limit in (1.0, 0.0))
    assert disk.shelf.kept is None  # type: ignore[attr-defined]
    whole, late = list(memory.batches(2, seed=1, epoch=2)), list(disk.batches(2, seed=1, epoch=2, first=1))
    assert len(whole) == 3
    for a, b in zip(whole[1:], late, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# files


@pytest.mark.parametrize("year", ["", "2017"])
@pytest.mark.parametrize("packed", [False, True])
def test_layouts(packed: bool, year: str, tmp_path: Path) -> None:
    place = write_boxes(tmp_path / "set", test=not year, year=year)
    own = task(make_tar(place, tmp_path / "set.tar") if packed else place)
    for split, folder in (("train", "train"), ("validation", None if year else "val"), ("test", "val" if year else "test")):
        data = own.data(split, CPU)
        if folder is None:
            assert data.steps(4) == 0
            assert list(data.batches(4, seed=0, epoch=0)) == []
            continue
        pictures = [image_and_boxes(folder, number) for number in range(COUNTS[folder])]
        assert len(data.truth.pictures) == len(pictures)  # type: ignore[attr-defined]
        for (values, objects), found in zip(pictures, data.truth.pictures, strict=True):  # type: ignore[attr-defined]
            assert (found.height, found.width) == values.shape[:2]
            assert list(found.classes) == [label for label, _, _ in objects]
            assert [[x1, y1, x2 - x1, y2 - y1] for x1, y1, x2, y2 in found.boxes] == [box for _, box, _ in objects]
            assert list(found.crowd) == [bool(crowd) for _, _, crowd in objects]
        learned = int((data.labels[..., 0] >= 0).sum())  # type: ignore[attr-defined]
        assert learned == sum(not crowd for _, objects in pictures for _, _, crowd in objects)


def entry(key: str, value: Any, place: int = 2) -> Callable[[Path], None]:
    return lambda folder: edit_annotations(folder, lambda data: data["annotations"][place].update({key: value}))


def image(key: str, value: Any, place: int = 1) -> Callable[[Path], None]:
    return lambda folder: edit_annotations(folder, lambda data: data["images"][place].update({key: value}))


TRAIN = r"instances_train\.json"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no size": (
        entry("bbox", [3, 4, 0, 5]),
        TRAIN + r": annotations\[2\] \(id \d+\): the box has no size \(0 x 5\); correct or delete",
    ),
    "negative size": (entry("bbox", [3, 4, 5, -2]), r"annotations\[2\] .*has no size \(5 x -2\)"),
    "beyond": (entry("bbox", [3, 4, 500, 5]), r"annotations\[2\].* reaches beyond \d+\.png, which has \d+x\d+ pixels"),
    "before": (entry("bbox", [-3, 4, 5, 5]), r"annotations\[2\].* reaches beyond"),
    "outside": (entry("bbox", [-0.9, 4, 0.5, 5]), r"annotations\[2\].* lies outside of"),
    "three numbers": (entry("bbox", [3, 4, 5]), r"annotations\[2\].*bbox is \[3, 4, 5\]; it must be 4 finite numbers"),
    "a text": (entry("bbox", [3, 4, "5", 6]), r"annotations\[2\].*bbox is .*; it must be 4 finite numbers"),
    "not a number": (entry("bbox", [3, float("nan"), 5, 6]), r"not readable as JSON \(NaN is not a JSON number\)"),
    "area": (entry("area", True), r"annotations\[2\].*area is .*True.*; it must be 1 finite number"),
    "crowd": (entry("iscrowd", 2), r"annotations\[2\]: iscrowd is 2; it must be an integer from 0 to 1"),
    "category": (
        entry("category_id", 5),
        r"annotations\[2\] .*category_id 5 is unknown; there are 4 \(red\), 7 \(green\), 90 \(blue\)",
    ),
    "image": (entry("image_id", 5), r"annotations\[2\] .*image_id 5 is the id of none of the images"),
    "same id": (entry("id", 1000), r"annotations\[2\]: id 1000 comes twice among the annotations"),
    "same image id": (image("id", 100), r"images\[1\]: id 100 comes twice among the images"),
    "same file": (image("file_name", "000.png"), r"000\.png is listed twice, the second time with id 103"),
    "no such file": (image("file_name", "gone.png"), r"lists gone\.png \(id 103\), but there is no .*images/train/gone\.png"),
    "other size": (image("width", 77), r"images/train/001\.png has 30x44 pixels, but its entry \(id 103\) says 77x44"),
    "no width": (lambda p: edit_annotations(p, lambda data: data["images"][1].pop("width")), r"images\[1\]: width is missing"),
    "no box": (
        lambda p: edit_annotations(p, lambda data: data["annotations"][2].pop("bbox")),
        r"annotations\[2\]: bbox is missing",
    ),
    "no category": (
        lambda p: edit_annotations(p, lambda data: data["annotations"][2].pop("category_id")),
        r"annotations\[2\]: category_id is missing",
    ),
    "same category": (
        lambda p: edit_annotations(p, lambda data: data["categories"][1].update(id=4)),
        r"categories\[1\]: id 4 comes twice among the categories",
    ),
    "no images": (lambda p: edit_annotations(p, lambda data: data.update(images=[], annotations=[])), TRAIN + " lists no images"),
    "crowds only": (
        lambda p: edit_annotations(p, lambda data: [entry.update(iscrowd=1) for entry in data["annotations"]]),
        TRAIN + " holds no box that counts; there is nothing to learn from",
    ),
    "no list": (lambda p: (p / "annotations/instances_train.json").unlink(), TRAIN + " is missing; it holds the boxes"),
    "cut off": (lambda p: (p / "annotations/instances_train.json").write_text('{"images": ['), TRAIN + ": not readable as JSON"),
    "a list": (
        lambda p: (p / "annotations/instances_train.json").write_text("[]"),
        TRAIN + " is a list of 0; it must be a dictionary",
    ),
    "broken picture": (lambda p: (p / "images/train/002.png").write_bytes(b"no"), r"train/002\.png cannot be read as a picture"),
    "no picture": (lambda p: (p / "images/train/002.png").unlink(), r"lists 002\.png \(id 106\), but there is no .*002\.png"),
    "no pictures": (lambda p: shutil.rmtree(p / "images/train"), r"lists 000\.png \(id 100\), but there is no"),
    "no entry": (
        lambda p: save_image(p / "images/train/more.png", np.zeros((9, 9, 3), np.uint8)),
        r"images/train/more\.png has no entry in annotations/instances_train\.json",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    damage(write_boxes(tmp_path))
    with pytest.raises(SmartpruneError, match=message):
        task(tmp_path).data("train", CPU)


def test_other_classes_in_the_test_split(tmp_path: Path) -> None:
    edit_annotations(write_boxes(tmp_path), lambda data: data["categories"][0].update(name="pink"), "test")
    with pytest.raises(
        SmartpruneError, match=r"instances_test\.json has the categories 4 \(pink\).*instances_train\.json has 4 \(red\)"
    ):
        task(tmp_path).data("test", CPU)


def test_lenient_leaves_out_wrong_boxes_and_rounding_is_cut_off(tmp_path: Path) -> None:
    write_boxes(tmp_path)
    count = len(json.loads((tmp_path / "annotations/instances_train.json").read_text())["annotations"])
    entry("bbox", [3, 4, 0, 5])(tmp_path)
    entry("bbox", [-0.5, 3, 10, 5], 1)(tmp_path)
    found = task(tmp_path, lenient=True).data("train", CPU).truth  # type: ignore[attr-defined]
    boxes = [box for picture in found.pictures for box in picture.boxes]
    assert len(boxes) == count - 1
    assert (0.0, 3.0, 9.5, 8.0) in boxes


def test_results_that_do_not_fit(tmp_path: Path) -> None:
    own = read((write_boxes(tmp_path) / "annotations/instances_test.json").read_bytes(), "boxes")
    good = {"image_id": 100, "category_id": 7, "bbox": [1, 2, 3, 4], "score": 0.5}
    assert checked_finds([{**good, "more": 1}], own, "finds") == [{**good, "bbox": [1.0, 2.0, 3.0, 4.0]}]
    for data, message in (
        ({}, "finds holds a dict; results are a list"),
        ([good, 3], r"finds: \[1\] is 3; it must be a dictionary"),
        ([{**good, "image_id": 1}], r"finds: \[0\]: image_id 1 is none of the images of boxes"),
        ([{**good, "category_id": 1}], r"finds: \[0\]: category_id 1 is none of the categories"),
        ([{**good, "score": None}], r"finds: \[0\]: score is \[None\]"),
        ([{**good, "bbox": [1, 2, 3]}], r"finds: \[0\]: bbox is \[1, 2, 3\]"),
    ):
        with pytest.raises(SmartpruneError, match=message):
            checked_finds(data, own, "finds")


def test_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMARTPRUNE_DATA", raising=False)
    with pytest.raises(SmartpruneError, match="bccd: no data folder was given"):
        Bccd().data("train", CPU)
    with pytest.raises(SmartpruneError, match=r"holds no data for voc07sub: none of the folders annotations .*voc07sub\.tar"):
        TASKS["voc07sub"](folder=str(tmp_path)).data("train", CPU)
    with pytest.raises(SmartpruneError, match="detection: split='dev'; it is train, validation or test"):
        task(write_boxes(tmp_path)).data("dev", CPU)
    with pytest.raises(SmartpruneError, match="holds no boxes for the split validation"):
        task(write_boxes(tmp_path / "two", test=False)).score([], "validation")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 100}, "detection: size=100 should be a multiple of 32"),
        ({"mosaic": 1.5}, "mosaic=1.5 should be 0 to 1"),
        ({"scale": 1.0}, "scale=1.0 should be at least 0 and below 1"),
        ({"overlap": -0.1}, "overlap=-0.1 should be 0 to 1"),
        ({"most": 0}, "most=0 should be at least 1"),
        ({"memory": -1.0}, "memory=-1.0 should not be negative"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SmartpruneError, match=message):
        Detection(**settings)
    with pytest.raises(SmartpruneError, match="width=0 should be at least 1"):
        SceneBoxes(width=0)


# runs


def test_boxes_of_scenes_hold_the_ink() -> None:
    for split in SCENES:
        scenes, own = compose(split, 0), truth(split, 0)
        assert {label for picture in own.pictures for label in picture.classes} == set(range(10))
        for scene, picture in zip(scenes, own.pictures, strict=True):
            assert 2 <= len(picture.boxes) <= 4
            mask = scene[..., 3].clone()
            for (x1, y1, x2, y2), label in zip(picture.boxes, picture.classes, strict=True):
                inner = mask[int(y1) : int(y2), int(x1) : int(x2)]
                assert inner.unique().tolist() in ([0, label + 1], [label + 1])
                assert all(side.any() for side in (inner[0], inner[-1], inner[:, 0], inner[:, -1]))  # no smaller box would do
                inner.zero_()
            assert not mask.any()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Any:
    for split, count in (("train", 48), ("validation", 12), ("test", 12)):
        monkeypatch.setitem(SCENES, split, count)
    compose.cache_clear(), truth.cache_clear()
    yield
    compose.cache_clear(), truth.cache_clear()


SHORT = {"task": "sceneboxes", "dense_epochs": 8, "search_epochs": 1, "finetune_epochs": 4, "batch": 8, "device": "cpu"}


@pytest.mark.usefixtures("few")
def test_a_run_of_scenes_and_one_that_was_stopped_end_alike(tmp_path: Path) -> None:
    result = train(configure({**SHORT, "out": str(tmp_path / "a")}))
    assert (result.measure, result.verified) == ("mAP", True)
    steps = iter(range(100))
    with pytest.raises(SmartpruneError, match="stopped in search, after step 2 of 6"):
        train(configure({**SHORT, "out": str(tmp_path / "b")}), stop=lambda: next(steps) == 49)
    assert resume(tmp_path / "b").also == result.also
    assert_same_run(tmp_path / "a", tmp_path / "b")
    for name in ("dense_detections.json", "detections.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    if evaluator() is not None:
        assert [row["mAP"] is None for row in metric_rows(tmp_path / "a")] == [False] * 8 + [True] + [False] * 4
        assert set(result.also) == {"dense", "pruned"}
        assert result.also["pruned"]["mAP@.5"] > result.pruned > 0  # type: ignore[operator]


@pytest.mark.usefixtures("few")
def test_a_run_where_nothing_scores_is_scored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        for name in ("faster_coco_eval", "pycocotools", "pycocotools.coco"):
            patch.setitem(sys.modules, name, None)
        result = train(configure({**SHORT, "out": str(folder)}))
        assert (result.dense, result.pruned, result.verified) == (None, None, True)
        assert result == Result.load(folder) == resume(folder)
        assert all(row["mAP"] is None for row in metric_rows(folder))
        assert "not scored yet; what judges it is not installed here" in result.shown("pruned")
        assert main(["train", "--resume", "--out", str(folder)]) == 0
        assert f"smartprune eval {folder}" in capsys.readouterr().out
        with pytest.raises(SmartpruneError, match="dense is not scored yet; score it with: smartprune eval"):
            compare([folder])
        for words in ([str(folder)], [str(folder / "model.safetensors")]):
            assert main(["eval", *words]) == 1
            assert "mAP needs faster-coco-eval or pycocotools, neither of which is installed" in capsys.readouterr().err
    if evaluator() is None:
        pytest.skip("neither faster-coco-eval nor pycocotools is installed")
    damaged = (folder / "detections.json").read_text()
    (folder / "detections.json").write_text(damaged.replace('"image_id": 0', '"image_id": 99'))
    assert main(["eval", str(folder)]) == 1
    assert "detections.json: what was found: [0]: image_id 99 is none of the images" in capsys.readouterr().err
    assert Result.load(folder) == result
    (folder / "detections.json").write_text(damaged)
    for name in ("model", "dense"):  # scoring what was found needs no weights: they may have stayed on another machine
        (folder / f"{name}.safetensors").rename(tmp_path / name)
    assert main(["eval", str(folder), "--json"]) == 0
    for name in ("model", "dense"):
        (tmp_path / name).rename(folder / f"{name}.safetensors")
    told = json.loads(capsys.readouterr().out)["results"]
    after = Result.load(folder)
    assert [row["figures"]["mAP"] for row in told] == [after.dense, after.pruned]
    assert after.also["pruned"]["mAP@.5"] == told[1]["figures"]["mAP@.5"]
    assert compare([folder]).runs[0].pruned == after.pruned
    direct = train(configure({**SHORT, "out": str(tmp_path / "direct")}))
    assert (direct.dense, direct.pruned, direct.also) == (after.dense, after.pruned, after.also)
    for more, value in (([], after.pruned), (["--dense"], after.dense)):  # scored now, so the models are judged again
        assert main(["eval", str(folder), "--json", *more]) == 0
        assert json.loads(capsys.readouterr().out)["figures"]["mAP"] == value


@pytest.mark.parametrize("name", ["detection", "voc07sub"])
def test_a_step_of_yolov5m_on_pictures_from_a_tar(name: str, tmp_path: Path) -> None:
    tar = make_tar(write_boxes(tmp_path / "set"), tmp_path / "set.tar")
    own = TASKS[name](folder=str(tar), size=32)
    torch.manual_seed(0)
    model, batch = own.model("yolov5m"), next(iter(own.data("train", CPU).batches(4, seed=0, epoch=0)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    values = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = own.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        optimizer.step()
        values.append(float(loss.detach()))
    assert values[2] < values[0]
    recipe = own.recipe
    assert (recipe.momentum, recipe.weight_decay, recipe.block, recipe.model) == (0.937, 5e-4, "16x8", "yolov5m")
    assert recipe.sparsity in (0.5, 0.7)


def test_a_run_of_pictures_from_a_tar(tmp_path: Path) -> None:
    tar = make_tar(write_boxes(tmp_path / "set"), tmp_path / "bccd.tar")
    short = {"dense_epochs": 1, "search_epochs": 1, "finetune_epochs": 1, "warmup_epochs": 0.0, "batch": 6, "device": "cpu"}
    own = {"folder": str(tar), "size": 32}
    result = train(configure({"task": "bccd", "task_settings": own, **short, "threads": 1, "out": str(tmp_path / "run")}))
    assert result.verified
    layers = json.loads((tmp_path / "run/receipt.json").read_text())["layers"]
    assert not any(layer["name"].startswith("detect") for layer in layers)
    assert isinstance(json.loads((tmp_path / "run/detections.json").read_text()), list)
    if evaluator() is not None:
        assert 0 <= result.pruned <= 1  # type: ignore[operator]


# smartprune eval


@needs_evaluator
def test_eval_of_a_results_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = task(write_boxes(tmp_path / "set"))
    data, boxes = own.data("test", CPU), tmp_path / "set/annotations/instances_test.json"
    found = tmp_path / "found.json"
    found.write_text(json.dumps(own.predictions(Knows(data), data)))
    assert main(["eval", "--detections", str(found), "--annotations", str(boxes)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["  mAP     100.00 %", "  mAP@.5  100.00 %"]
    found.write_text("[{}]")
    assert main(["eval", "--detections", str(found), "--annotations", str(boxes)]) == 1
    assert "found.json: [0]: image_id is missing" in capsys.readouterr().err


def test_eval_of_other_tasks_and_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    short = {
        "dense_epochs": 1,
        "search_epochs": 1,
        "finetune_epochs": 1,
        "task_settings": {"width": 4},
        "block": "4x2",
        "device": "cpu",
    }
    result = train(configure({**short, "out": str(folder)}))
    for words, value in (([str(folder)], result.pruned), ([str(folder), "--dense"], result.dense)):
        assert main(["eval", *words, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["task"], told["split"], told["figures"]) == ("digits", "test", {"accuracy": value})
    alone = shutil.copy(folder / "model.safetensors", tmp_path / "alone.safetensors")
    assert main(["eval", str(alone), "--task", "digits", "--task-set", "width=4", "--split", "validation"]) == 0
    assert "alone.safetensors (digits, resnet8, validation)" in capsys.readouterr().out
    assert main(["eval", str(alone), "--task", "digits"]) == 1
    assert "does not fit the model" in capsys.readouterr().err
    for wrong, message in (
        ([], "give a run folder or a .safetensors file"),
        ([str(alone)], "lies in no run folder; say what it was trained on with --task"),
        ([str(tmp_path)], "holds no run"),
        ([str(tmp_path / "none.safetensors")], "is not there"),
        ([str(alone), "--dense"], "--dense is for run folders"),
        (["--detections", "a.json"], "--detections and --annotations go together"),
        (["--detections", "a.json", "--annotations", "b.json", "--task-set", "size=64"], "--task-set is for a model; finds are"),
        ([str(folder), "--device", "tpu"], "device='tpu'; it is one of auto, cpu, cuda"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["eval", *wrong])
        assert message in capsys.readouterr().err


def test_the_real_data() -> None:
    place = Path(os.environ.get("SMARTPRUNE_DATA", ""))
    if not os.environ.get("SMARTPRUNE_DATA") or not any(place.glob("**/bccd.tar")):
        pytest.skip("SMARTPRUNE_DATA does not name a folder with bccd.tar")
    data: Any = Bccd().data("test", CPU)
    assert data.shelf.kept.shape == (72, 320, 320, 3)
    labels = data.labels[..., 0]
    assert [int((labels == label).sum()) for label in range(3)] == [805, 71, 69]
