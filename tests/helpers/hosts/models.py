"""The models by name. Packages are imported only when a model is made."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers.torchvision_operators import declare_operators

from . import handwritten, timm_models, transformers_models, vision_packages

Made = tuple[nn.Module, Any]  # a model and an example: a tensor, a tuple, or a dict of keyword arguments

# The package of each table: a host is named after its package and its model.
TABLES: dict[str, dict[str, Callable[[], Made]]] = {
    "timm": timm_models.MODELS,
    "torchvision": vision_packages.TORCHVISION,
    "transformers": transformers_models.MODELS,
    "ultralytics": vision_packages.ULTRALYTICS,
    "segmentation_models_pytorch": vision_packages.SEGMENTATION,
    "monai": vision_packages.MONAI,
    "diffusers": vision_packages.DIFFUSERS,
    "torch": handwritten.MODELS,
}
HOSTS = {f"{package}/{name}": make for package, table in TABLES.items() for name, make in table.items()}


def make(host: str, seed: int = 0) -> Made:
    """The model and an example. Equal seeds give equal weights."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    declare_operators()
    torch.manual_seed(seed)
    model, example = HOSTS[host]()
    return model, example


def missing_package(host: str) -> str | None:
    """The package that a model needs and that is not installed."""
    package = host.partition("/")[0]
    return None if importlib.util.find_spec(package) else package
