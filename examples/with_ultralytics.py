"""Pruning in the trainer of Ultralytics. Run: python examples/with_ultralytics.py DATA.yaml

Ultralytics is licensed under the AGPL-3.0; see docs/adopt.md.
"""

import sys
from pathlib import Path
from typing import Any

from ultralytics import YOLO

import smartprune as sp
from smartprune.integrations.ultralytics import prune_trainer


def main(
    data: str, weights: str = "yolo11n.pt", folder: Path = Path("runs/with_ultralytics"), **options: Any
) -> tuple[Any, sp.Receipt]:
    """Trains for 100 epochs, the first 30 of which search for blocks, and exports the pruned model."""
    model = YOLO(weights)
    trainer = prune_trainer(model, block=(16, 8), sparsity=0.5)
    model.train(trainer=trainer, data=data, project=str(folder.absolute()), **{"epochs": 100, **options})
    return model, model.trainer.receipt


if __name__ == "__main__":
    model, receipt = main(sys.argv[1])
    print(receipt)
    model.export(format="onnx")
