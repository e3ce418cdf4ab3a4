"""The guide to pruning without training, with timm, and networks of other packages."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch

import smartprune as sp
from helpers.hosts.models import missing_package
from helpers.torchvision_operators import declare_operators

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "without-training.md"


def test_the_guide_runs_with_timm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With random weights, a small network and small images, since nothing is downloaded."""
    if package := missing_package("timm/resnet10t"):
        pytest.skip(f"{package} is not installed; run make hosts")
    declare_operators()
    monkeypatch.chdir(tmp_path)
    torch.save(torch.randn(32, 3, 64, 64), "images.pt")
    text = next(text for text in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S) if "import timm" in text)
    scope: dict[str, object] = {}
    exec(text.replace('"resnet50", pretrained=True', '"test_resnet", pretrained=False'), scope)
    receipt, model = scope["receipt"], scope["model"]
    assert isinstance(receipt, sp.Receipt)
    assert isinstance(model, torch.nn.Module)
    assert receipt.blocks.kept == -(-receipt.blocks.total // 2)
    assert sp.verify(model, receipt=sp.Receipt.load("receipt.json")).ok
    assert Path("pruned.onnx").stat().st_size > 1e5


def test_a_vision_transformer_loses_less_than_by_magnitude() -> None:
    if package := missing_package("timm/vit_tiny_patch16_224"):
        pytest.skip(f"{package} is not installed; run make hosts")
    declare_operators()
    import timm

    torch.manual_seed(0)
    dense = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=10).eval()
    data = [torch.randn(16, 3, 64, 64) for _ in range(4)]
    other, model = copy.deepcopy(dense), copy.deepcopy(dense)
    receipt = sp.prune(model, data, (16, 8), 0.5)
    assert {"blocks.0.attn.qkv", "blocks.0.mlp.fc1"} <= {row.name for row in receipt.layers}
    sp.attach(other, "magnitude", (16, 8), 0.5, steps=1).freeze()
    x = torch.randn(64, 3, 64, 64)
    with torch.no_grad():
        errors = [float((each(x) - dense(x)).square().mean()) for each in (model, other)]
    assert errors[0] < errors[1]
