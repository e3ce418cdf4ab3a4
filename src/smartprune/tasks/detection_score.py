"""Mean average precision by an evaluator of COCO's makers' rules: faster-coco-eval or pycocotools, whichever is installed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .detection_files import Truth

MEASURE, COARSE = "mAP", "mAP@.5"
NEEDS = "faster-coco-eval or pycocotools, neither of which is installed; run: pip install 'smartprune[detection]'"


def scored(truth: Truth, finds: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """mAP (the mean over overlaps of 0.50 to 0.95) and mAP@.5 of finds in COCO's form; None if no evaluator is installed."""
    evaluate = evaluator()
    if evaluate is None:
        return None
    truth.require_boxes("measure by")
    if not finds:
        return {MEASURE: 0.0, COARSE: 0.0}
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools talks
        stats = evaluate(truth.to_coco(), [{**find} for find in finds])  # it also writes into what it is given
    return {MEASURE: float(stats[0]), COARSE: float(stats[1])}


def evaluator() -> Callable[[dict[str, Any], list[dict[str, Any]]], Any] | None:
    for found in (faster_coco_eval, pycocotools):
        with contextlib.suppress(ImportError):
            return found()
    return None


def faster_coco_eval() -> Callable[[dict[str, Any], list[dict[str, Any]]], Any]:
    from faster_coco_eval import COCO, COCOeval_faster  # type: ignore[import-not-found,import-untyped,unused-ignore]

    def evaluate(truth: dict[str, Any], finds: list[dict[str, Any]]) -> Any:
        own = COCO(truth)
        return _stats(COCOeval_faster(own, own.loadRes(finds), "bbox"))

    return evaluate


def pycocotools() -> Callable[[dict[str, Any], list[dict[str, Any]]], Any]:
    from pycocotools.coco import COCO  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from pycocotools.cocoeval import COCOeval  # type: ignore[import-not-found,import-untyped,unused-ignore]

    def evaluate(truth: dict[str, Any], finds: list[dict[str, Any]]) -> Any:
        own = COCO()
        own.dataset = truth
        own.createIndex()
        return _stats(COCOeval(own, own.loadRes(finds), "bbox"))

    return evaluate


def _stats(evaluation: Any) -> Any:
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats
