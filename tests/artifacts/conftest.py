"""Fixtures that several modules share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import smartprune as sp
from helpers import zoo
from helpers.pruned_models import model_and_receipt


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[nn.Module, sp.Receipt, Any, Path]]:
    """Three models, exported once: batch normalization, groups, transposed convolutions, matrices."""
    folder, exports = tmp_path_factory.mktemp("onnx"), {}
    for name in ("mobilenet_block", "transformer_block", "unet"):
        torch.manual_seed(0)
        model, receipt = model_and_receipt(name)
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):  # as if trained
                    for tensor in (module.weight, module.bias, module.running_mean):
                        tensor.normal_()
                    module.running_var.uniform_(0.5, 2)
        path = folder / f"{name}.onnx"
        model.train()
        exports[name] = (model, receipt, sp.export_onnx(model, path, zoo.SMALL[name]()[1], receipt=receipt), path)
    return exports


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model, receipt = model_and_receipt()
    save_file({key: value.clone() for key, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    receipt.save(tmp_path / "receipt.json")
    return tmp_path
