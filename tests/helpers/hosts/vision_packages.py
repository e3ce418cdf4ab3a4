"""Models of torchvision, ultralytics, segmentation-models-pytorch, MONAI and diffusers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Table = dict[str, Callable[[], tuple[nn.Module, Any]]]

CLASSIFIERS: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "googlenet": {"init_weights": False},
    "mobilenet_v2": {},
    "mobilenet_v3_small": {},
    "shufflenet_v2_x0_5": {},
    "swin_v2_t": {"embed_dim": 48, "depths": [2, 2, 2, 2]},
    "squeezenet1_1": {},
}


def torchvision_classifier(name: str) -> tuple[nn.Module, Tensor]:
    from torchvision import models

    if name == "swin_v2_t":
        from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

        heads = {"num_heads": [3, 6, 12, 24], "window_size": [4, 4], "patch_size": [4, 4], "num_classes": 10}
        blocks = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
        return SwinTransformer(**CLASSIFIERS[name], **heads, **blocks), torch.randn(2, 3, 64, 64)
    return getattr(models, name)(weights=None, num_classes=10, **CLASSIFIERS[name]), torch.randn(2, 3, 64, 64)


def deeplabv3() -> tuple[nn.Module, Tensor]:
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    return deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5), torch.randn(2, 3, 64, 64)


def quantizable_resnet18() -> tuple[nn.Module, Tensor]:
    from torchvision.models.quantization import resnet18

    return resnet18(weights=None, num_classes=10, quantize=False), torch.randn(2, 3, 64, 64)


def r3d() -> tuple[nn.Module, Tensor]:
    from torchvision.models.video.resnet import BasicBlock, BasicStem, Conv3DSimple, VideoResNet

    return VideoResNet(BasicBlock, [Conv3DSimple] * 4, [1, 1, 1, 1], BasicStem, num_classes=10), torch.randn(1, 3, 4, 32, 32)


TORCHVISION: Table = {name: partial(torchvision_classifier, name) for name in CLASSIFIERS} | {
    "deeplabv3_mobilenet_v3_large": deeplabv3,
    "quantizable_resnet18": quantizable_resnet18,
    "r3d_18": r3d,
}


def yolo(name: str) -> tuple[nn.Module, Tensor]:
    """A detector or segmenter, whose classes are those of its configuration."""
    os.environ.setdefault("YOLO_OFFLINE", "true")
    os.environ.setdefault("YOLO_CONFIG_DIR", str(Path(tempfile.gettempdir()) / "smartprune-hosts"))
    from ultralytics.nn.tasks import ClassificationModel, DetectionModel, SegmentationModel

    classes = {"seg": SegmentationModel, "cls": ClassificationModel}
    model = classes.get(name.partition("-")[2], DetectionModel)(f"{name}.yaml", verbose=False)
    return model, torch.randn(2, 3, 64, 64)


ULTRALYTICS: Table = {name: partial(yolo, name) for name in ("yolov8n", "yolo11n", "yolo11n-seg", "yolo11n-cls")}


def segmentation(name: str) -> tuple[nn.Module, Tensor]:
    import segmentation_models_pytorch

    model = getattr(segmentation_models_pytorch, name)("resnet18", encoder_weights=None, classes=5)
    return model, torch.randn(2, 3, 64, 64)


SEGMENTATION: Table = {name: partial(segmentation, name) for name in ("Unet", "FPN", "DeepLabV3Plus", "Linknet", "Segformer")}


def monai_unet() -> tuple[nn.Module, Tensor]:
    from monai.networks.nets import UNet

    model = UNet(spatial_dims=3, in_channels=1, out_channels=3, channels=(16, 32, 64), strides=(2, 2), num_res_units=1)
    return model, torch.randn(1, 1, 16, 16, 16)


def swin_unetr() -> tuple[nn.Module, Tensor]:
    from monai.networks.nets import SwinUNETR

    model = SwinUNETR(in_channels=1, out_channels=3, depths=(1, 1, 1, 1), num_heads=(2, 2, 4, 4), feature_size=24, spatial_dims=2)
    return model, torch.randn(2, 1, 64, 64)


MONAI: Table = {"UNet_3d": monai_unet, "SwinUNETR": swin_unetr}


def diffusion_unet() -> tuple[nn.Module, Any]:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return model, {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.tensor([3, 70])}


def autoencoder() -> tuple[nn.Module, Tensor]:
    from diffusers import AutoencoderKL

    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return AutoencoderKL(block_out_channels=(32, 64), norm_num_groups=8, latent_channels=4, **kinds), torch.randn(2, 3, 32, 32)


DIFFUSERS: Table = {"UNet2DModel": diffusion_unet, "AutoencoderKL": autoencoder}
