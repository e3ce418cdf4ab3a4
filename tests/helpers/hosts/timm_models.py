"""Models of timm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

SIDE = 64  # of the input image
SETTINGS: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "resnet10t": {},
    "resnetv2_50x1_bit": {},
    "res2net50_26w_4s": {"layers": (1, 1, 1, 1)},
    "densenet121": {"block_config": (2, 2, 2, 2)},
    "efficientnet_b0": {},
    "mobilenetv3_small_100": {},
    "regnetx_002": {},
    "nf_regnet_b0": {},
    "repvgg_a0": {"width_factor": 0.5},
    "convnext_atto": {},
    "convnextv2_atto": {},
    "mixer_s32_224": {"img_size": SIDE},
    "vit_tiny_patch16_224": {"img_size": SIDE, "depth": 3},
    "deit_tiny_distilled_patch16_224": {"img_size": SIDE, "depth": 3},
    "swin_tiny_patch4_window7_224": {"img_size": SIDE, "window_size": 4, "embed_dim": 48, "depths": (2, 2, 2, 2)},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 3},
    "efficientvit_m0": {},
    "maxvit_pico_rw_256": {"img_size": SIDE},
    "levit_128s": {},
    "poolformer_s12": {},
}
SIDES = {"eva02_tiny_patch14_224": 56, "efficientvit_m0": 224, "levit_128s": 224}


def make(name: str) -> tuple[nn.Module, Tensor]:
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=10, **SETTINGS[name])
    side = SIDES.get(name, SIDE)
    return model, torch.randn(2, 3, side, side)


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {name: partial(make, name) for name in SETTINGS}
