"""The networks have the shapes that the experiments state."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from smartprune.budget import min_keep
from smartprune.models import MODELS
from smartprune.models.densenet import DenseLayer
from smartprune.models.resnet import resnet8, resnet18
from smartprune.plan import plan


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@dataclass(frozen=True)
class Published:
    """What the experiments state about a network for 32x32 images; blocks and floors for 8x8, 16x8, 16x16."""

    params: int
    prunable: int
    layers: int
    macs: int
    blocks: tuple[int, int, int]
    floors: tuple[int, int, int]  # least blocks to keep, over all layers, when every layer keeps 2 %
    skipped: tuple[str, ...] = ("conv1", "fc")


PUBLISHED = {
    "resnet18": Published(11_173_962, 11_157_504, 19, 555_422_720, (174336, 87168, 43584), (3499, 1755, 882)),
    "densenet": Published(1_000_618, 964_800, 119, 125_341_440, (16728, 8364, 4227), (414, 250, 145)),
    "googlenet": Published(6_166_250, 6_127_104, 63, 1_521_756_160, (95736, 47932, 24002), (1947, 991, 512)),
    "mobilenetv2": Published(2_296_922, 2_183_936, 39, 91_154_944, (34124, 17078, 8548), (697, 352, 187)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_and_blocks(name: str) -> None:
    model, published = MODELS[name](), PUBLISHED[name]
    planned = plan(model, block=(16, 8), sparsity=0.95, example=torch.zeros(1, 3, 32, 32))
    assert count(model) == published.params
    assert len(planned.layers) == published.layers
    assert planned.params == published.prunable
    assert planned.model_macs == published.macs
    dense_at_both_ends = [s.name for s in planned.skipped if not s.name.endswith("conv2")]  # those are depthwise
    assert tuple(dense_at_both_ends) == published.skipped
    for block, blocks, floor in zip([(8, 8), (16, 8), (16, 16)], published.blocks, published.floors, strict=True):
        planned = plan(model, block=block, sparsity=0.9)
        assert planned.n == blocks
        assert min_keep(planned.layers, 0.02).sum() == floor


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "resnet18"])
def test_a_step_trains_every_weight(name: str) -> None:
    model = MODELS[name](num_classes=7, in_channels=2)
    out = model(torch.randn(4, 2, 32, 32))
    assert out.shape == (4, 7)
    out.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_densenet_puts_new_features_first() -> None:
    layer, x = DenseLayer(6, 3).eval(), torch.randn(1, 6, 4, 4)
    assert torch.equal(layer(x)[:, 3:], x)


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
