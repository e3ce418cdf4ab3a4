"""Mean average precision by the rules of COCO, with faster-coco-eval or pycocotools, whichever is installed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .detection_files import GroundTruth

MEASURE, MEASURE_50 = "mAP", "mAP@.5"
NEEDS = "faster-coco-eval or pycocotools, and neither is installed; run: pip install faster-coco-eval"

Evaluator = Callable[[dict[str, Any], list[dict[str, Any]]], Any]  # (ground truth, detections in COCO's format) -> stats


def mean_average_precision(truth: GroundTruth, detections: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """mAP (averaged over overlaps from 0.50 to 0.95) and mAP@.5 of detections in COCO's format.

    ``None`` if no evaluator is installed.
    """
    evaluate = evaluator()
    if evaluate is None:
        return None
    truth.require_boxes("evaluate")
    if not detections:
        return {MEASURE: 0.0, MEASURE_50: 0.0}
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its results
        stats = evaluate(truth.to_coco(), [{**detection} for detection in detections])  # evaluators modify their input
    return {MEASURE: float(stats[0]), MEASURE_50: float(stats[1])}


def evaluator() -> Evaluator | None:
    for load in (faster_coco_eval, pycocotools):
        with contextlib.suppress(ImportError):
            return load()
    return None


def faster_coco_eval() -> Evaluator:
    from faster_coco_eval import COCO, COCOeval_faster  # type: ignore[import-not-found,import-untyped,unused-ignore]

    def evaluate(truth: dict[str, Any], detections: list[dict[str, Any]]) -> Any:
        coco = COCO(truth)
        return _stats(COCOeval_faster(coco, coco.loadRes(detections), "bbox"))

    return evaluate


def pycocotools() -> Evaluator:
    from pycocotools.coco import COCO  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from pycocotools.cocoeval import COCOeval  # type: ignore[import-not-found,import-untyped,unused-ignore]

    def evaluate(truth: dict[str, Any], detections: list[dict[str, Any]]) -> Any:
        coco = COCO()
        coco.dataset = truth
        coco.createIndex()
        return _stats(COCOeval(coco, coco.loadRes(detections), "bbox"))

    return evaluate


def _stats(evaluation: Any) -> Any:
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats
