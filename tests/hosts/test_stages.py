"""Models of other packages go through every stage. Each stage has an independent check, in tests/helpers/hosts/stages.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.hosts.models import missing_package
from helpers.hosts.stages import LIFE, USES, HostRun

CHOSEN = [
    "timm/resnet10t",
    "timm/mobilenetv3_small_100",
    "timm/convnext_atto",
    "timm/vit_tiny_patch16_224",
    "timm/deit_tiny_distilled_patch16_224",
    "torchvision/googlenet",
    "torchvision/mobilenet_v2",
    "transformers/bert",
    "transformers/gpt2",
    "transformers/llama",
    "transformers/t5",
    "transformers/detr",
    "transformers/segformer",
    "ultralytics/yolov8n",
    "segmentation_models_pytorch/Unet",
    "monai/UNet_3d",
    "diffusers/UNet2DModel",
    "torch/lstm_tagger",
    "torch/conv3d_net",
]


@pytest.mark.parametrize("host", CHOSEN)
def test_every_stage_passes(host: str, subtests: pytest.Subtests, tmp_path: Path) -> None:
    if package := missing_package(host):
        pytest.skip(f"{package} is not installed; run make hosts")
    run = HostRun(host, tmp_path)
    for check in LIFE.values():
        check(run)
    for name, check in USES.items():
        with subtests.test(stage=name):
            check(run)
