"""Mean average precision against slow loops."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from helpers.box_folders import CATEGORIES
from helpers.detection import needs_evaluator, slow_iou
from smartprune import SmartpruneError
from smartprune.tasks.coco_eval import faster_coco_eval, mean_average_precision, pycocotools
from smartprune.tasks.detection_files import AnnotatedImage, GroundTruth


def slow_map(truth: GroundTruth, detections: list[dict[str, Any]], levels: list[float]) -> float:
    """The rules of COCO as loops: at most 100 detections per image, and crowd boxes are ignored."""
    values = []
    for level in levels:
        for label, (category, _) in enumerate(truth.categories):
            marks: list[tuple[float, bool]] = []
            total = 0
            for image in truth.images:
                boxes = [(b, c) for b, k, c in zip(image.boxes, image.classes, image.crowd, strict=True) if k == label]
                boxes.sort(key=lambda pair: pair[1])  # crowds last
                total += sum(not crowd for _, crowd in boxes)
                candidates = [f for f in detections if f["image_id"] == image.id and f["category_id"] == category]
                matched: set[int] = set()
                for detection in sorted(candidates, key=lambda f: -f["score"])[:100]:
                    x, y, w, h = detection["bbox"]
                    best, at = level - 1e-12, None
                    for i, (box, crowd) in enumerate(boxes):
                        if (i in matched and not crowd) or (at is not None and not boxes[at][1] and crowd):
                            continue
                        value = slow_iou([x, y, x + w, y + h], list(box))
                        if crowd:
                            intersection = max(0.0, min(x + w, box[2]) - max(x, box[0])) * max(
                                0.0, min(y + h, box[3]) - max(y, box[1])
                            )
                            value = intersection / (w * h)
                        if value >= best:
                            best, at = value, i
                    if at is None or not boxes[at][1]:
                        marks.append((detection["score"], at is not None))
                    if at is not None:
                        matched.add(at)
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


def random_case(seed: int) -> tuple[GroundTruth, list[dict[str, Any]]]:
    rng = np.random.default_rng(seed)
    images, detections = [], []
    for number in range(6):
        boxes, classes, crowd = [], [], []
        for _ in range(int(rng.integers(0, 6))):
            x, y, w, h = rng.uniform(0, 60), rng.uniform(0, 60), rng.uniform(8, 40), rng.uniform(8, 40)
            label = int(rng.integers(3))
            boxes.append((x, y, x + w, y + h))
            classes.append(label)
            crowd.append(bool(rng.random() < 0.2))
            for _ in range(int(rng.integers(0, 4))):  # close to the true box
                close = np.array([x, y, w, h]) * rng.uniform(0.85, 1.15, 4)
                detections.append(
                    {
                        "image_id": 10 + number,
                        "category_id": CATEGORIES[label if rng.random() < 0.8 else 0][0],
                        "bbox": close.tolist(),
                        "score": float(rng.random()),
                    }
                )
        areas = tuple((x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in boxes)
        images.append(AnnotatedImage(10 + number, str(number), 100, 100, tuple(boxes), tuple(classes), areas, tuple(crowd)))
    return GroundTruth("random boxes", tuple(images), CATEGORIES), detections


@needs_evaluator
@pytest.mark.parametrize("seed", range(5))
def test_metric_matches_slow_loops(seed: int) -> None:
    truth, detections = random_case(seed)
    figures = mean_average_precision(truth, detections)
    assert figures is not None
    assert list(figures) == ["mAP", "mAP@.5"]
    assert figures["mAP@.5"] == pytest.approx(slow_map(truth, detections, [0.5]), abs=1e-6)
    assert figures["mAP"] == pytest.approx(slow_map(truth, detections, [0.5 + 0.05 * i for i in range(10)]), abs=1e-6)
    assert 0 < figures["mAP"] < figures["mAP@.5"] < 1
    assert "area" not in detections[0]  # the input is not modified


@pytest.mark.skipif(
    importlib.util.find_spec("faster_coco_eval") is None or importlib.util.find_spec("pycocotools") is None,
    reason="faster-coco-eval and pycocotools are not both installed",
)
def test_both_evaluators_agree(capsys: pytest.CaptureFixture[str]) -> None:
    truth, detections = random_case(9)
    one, other = (load()(truth.to_coco(), [{**row} for row in detections]) for load in (faster_coco_eval, pycocotools))
    assert list(one[:2]) == pytest.approx(list(other[:2]), abs=1e-9)
    capsys.readouterr()
    mean_average_precision(truth, detections)
    assert capsys.readouterr().out == ""


@needs_evaluator
def test_metric_without_detections_is_zero_and_without_boxes_raises() -> None:
    truth, _ = random_case(0)
    assert mean_average_precision(truth, []) == {"mAP": 0.0, "mAP@.5": 0.0}
    bare = GroundTruth("boxes.json", tuple(AnnotatedImage(p.id, p.name, 9, 9, (), (), (), ()) for p in truth.images), CATEGORIES)
    with pytest.raises(SmartpruneError, match=r"boxes\.json holds no boxes except crowds"):
        mean_average_precision(bare, [])
