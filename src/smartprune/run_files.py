"""The files of a run folder and the stages of a run.

The training job writes these files. Reports, exports and comparisons read them. This module does not import torch.
"""

from __future__ import annotations

CONFIG = "config.json"  # the settings, written first
METRICS = "metrics.jsonl"  # one row per epoch
CHECKPOINT = "checkpoint.pt"
DENSE = "dense.safetensors"  # the model after the dense stage
MODEL = "model.safetensors"  # the pruned model
RECEIPT = "receipt.json"
LATENCY = "latency.json"  # the times that a budget in time was measured with
SCORES = "scores.safetensors"  # the scores of all blocks at the end of the search
PACKED = "model.packed.safetensors"
ONNX = "model.onnx"
C_SOURCE = "model.c"  # written by ``smartprune export --c``, with a header next to it
COMPACT = "compact.pt2"  # written by ``smartprune compact``
RESULT = "result.json"  # written last: the run is finished
PAGE = "report.html"
BENCH = "bench.json"  # written by ``smartprune bench``
TENSORBOARD = "tensorboard"  # a folder
TRACKERS = "trackers.json"  # the names that MLflow and Weights & Biases gave to the run
DETECTIONS = {"dense": "dense_detections.json", "pruned": "detections.json"}  # of tasks that detect objects

PROTECTED = (CONFIG, METRICS, CHECKPOINT, RESULT, DENSE, MODEL, RECEIPT, SCORES, BENCH)  # commands with --out do not replace them

# The columns of METRICS, besides the metric of the task.
POSITION = ("stage", "epoch", "step", "seconds")
TELEMETRY = ("tau", "theta", "undecided", "changed", "gap", "kept", "collapsed")  # of the search
COLUMNS = (*POSITION, "loss", "lr", *TELEMETRY, "sample", "graph")

STAGES = ("dense", "search", "finetune")
STAGE_NAMES = {"dense": "dense", "search": "search", "finetune": "fine-tuning"}
