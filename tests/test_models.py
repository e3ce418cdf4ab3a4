"""The networks have the shapes that the experiments state."""

from __future__ import annotations

import pytest
import torch

from smartprune.models import MODELS
from smartprune.models.resnet import resnet8, resnet18
from smartprune.plan import plan


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_resnet18_has_the_published_size_and_blocks() -> None:
    model = resnet18()
    planned = plan(model, block=(16, 8), sparsity=0.95, example=torch.zeros(1, 3, 32, 32))
    assert count(model) == 11_173_962
    assert len(planned.layers) == 19
    assert planned.params == 11_157_504
    assert planned.model_macs == 555_422_720
    assert [s.name for s in planned.skipped] == ["conv1", "fc"]


def test_resnet18_stages_halve_the_image() -> None:
    model, x = resnet18().eval(), torch.zeros(1, 3, 32, 32)
    shapes = []
    for stage in model.stages:  # type: ignore[union-attr]
        stage.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape[1:])))
    model(x)
    assert shapes == [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]


@pytest.mark.parametrize(("width", "weights"), [(4, 4_768), (12, 42_912), (16, 76_288)])
def test_resnet8_prunable_weights(width: int, weights: int) -> None:
    assert plan(resnet8(width=width), block=(8, 4)).params == weights


def test_num_classes_and_channels() -> None:
    assert resnet8(num_classes=7, in_channels=2, width=4)(torch.zeros(3, 2, 8, 8)).shape == (3, 7)
    assert resnet18(num_classes=100)(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_builds_and_has_blocks(name: str) -> None:
    planned = plan(MODELS[name](), block=(16, 8), sparsity=0.9)
    assert planned.feasible
    assert planned.n > 0
