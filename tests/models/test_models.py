"""The networks have the published sizes."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import smartprune as sp
from smartprune.core.budget import min_keep
from smartprune.models import MODELS
from smartprune.models.bisenetv2 import bisenetv2
from smartprune.models.densenet import DenseLayer
from smartprune.models.resnet import resnet8, resnet18
from smartprune.models.resnet50 import resnet50
from smartprune.models.yolov5m import ANCHORS, STRIDES, YOLOv5, yolov5m
from smartprune.pruning.plan import plan


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@dataclass(frozen=True)
class Published:
    """Published sizes of a network for 32x32 images. Blocks and floors are for blocks of 8x8, 16x8 and 16x16."""

    params: int
    prunable: int
    layers: int
    macs: int
    blocks: tuple[int, int, int]
    floors: tuple[int, int, int]  # fewest blocks to keep if every layer keeps 2 %
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
    skipped_ends = [s.name for s in planned.skipped if not s.name.endswith("conv2")]  # conv2 is depthwise
    assert tuple(skipped_ends) == published.skipped
    for block, blocks, floor in zip([(8, 8), (16, 8), (16, 16)], published.blocks, published.floors, strict=True):
        planned = plan(model, block=block, sparsity=0.9)
        assert planned.n == blocks
        assert min_keep(planned.layers, 0.02).sum() == floor


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "resnet18"])
def test_every_weight_gets_a_gradient(name: str) -> None:
    model = MODELS[name](num_classes=7, in_channels=2)
    out = model(torch.randn(4, 2, 32, 32))
    assert out.shape == (4, 7)
    out.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters() if p.requires_grad)
    fixed = [key for key, p in model.named_parameters() if not p.requires_grad]
    assert len(fixed) == (sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) if name == "googlenet" else 0)


def test_biases_before_a_batch_norm_do_not_need_to_train() -> None:
    """GoogLeNet computes the same, to rounding, whether or not they train."""

    def trained(biases: bool) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(0)
        model = MODELS["googlenet"](num_classes=4).double()
        for p in model.parameters():
            p.requires_grad_(p.requires_grad or biases)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for _ in range(3):
            losses.append(nn.functional.cross_entropy(model(x), y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses, model.eval()(x)

    x, y = torch.randn(4, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.arange(4)
    (losses, outputs), (expected_losses, expected_outputs) = trained(False), trained(True)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(outputs, expected_outputs, rtol=1e-6, atol=1e-6)
    assert losses[2] < losses[0]


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


def test_num_classes_and_in_channels_set_the_shapes() -> None:
    assert resnet8(num_classes=7, in_channels=2, width=4)(torch.zeros(3, 2, 8, 8)).shape == (3, 7)
    assert resnet18(num_classes=100)(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_builds_and_has_blocks(name: str) -> None:
    planned = plan(MODELS[name](), block=(16, 8), sparsity=0.9)
    assert planned.feasible
    assert planned.n > 0


@dataclass(frozen=True)
class Large:
    """Published sizes of a network for larger images, with blocks of 16x8."""

    params: int
    convs: int
    prunable: int
    layers: int
    blocks: int
    macs: int
    image: tuple[int, int]  # the MACs are for this size
    small: tuple[int, int]  # for a short test
    skip: tuple[str, ...] = ()  # layers in smartprune_skip


AUXILIARY = tuple(f"auxiliary.{i}.{name}" for i in range(4) for name in ("conv.0", "wider.0", "logits"))
LARGE = {
    "resnet50": Large(25_557_032, 53, 23_445_504, 52, 183_168, 4_089_184_256, (224, 224), (64, 64)),
    "yolov5m": Large(
        21_190_557,
        82,
        20_805_120,
        78,
        162_540,
        24_436_224_000,
        (640, 640),
        (64, 96),
        skip=("detect.convs.0", "detect.convs.1", "detect.convs.2"),
    ),
    "bisenetv2": Large(
        5_231_487,
        68,
        3_278_336,
        37,
        25_613,
        24_603_312_128,
        (512, 1024),
        (64, 128),
        skip=("semantic.stem.first.0", "head.logits", *AUXILIARY),
    ),
}


def tensors(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else out


@pytest.mark.parametrize("name", LARGE)
def test_large_networks_have_the_published_sizes(name: str) -> None:
    large = LARGE[name]
    with torch.device("meta"):  # only shapes, so large images need no memory
        model, image = MODELS[name](), torch.zeros(1, 3, *large.image)
    planned = plan(model, block=(16, 8), sparsity=0.95, example=image)
    assert count(model) == large.params
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == large.convs
    assert (len(planned.layers), planned.params, planned.n) == (large.layers, large.prunable, large.blocks)
    assert tuple(s.name for s in planned.skipped if s.reason == "listed in smartprune_skip") == large.skip
    with FlopCounterMode(display=False) as flops:
        model.eval()(image)
    assert planned.model_macs == large.macs == flops.get_total_flops() // 2
    assert (planned.padding == 0) == (name != "bisenetv2")  # it has one layer with 8 output channels


def test_blocks_of_bisenetv2_exclude_the_auxiliary_heads() -> None:
    with torch.device("meta"):
        model = bisenetv2()
    assert count(model) - count(model.auxiliary) == 3_358_627  # type: ignore[arg-type]
    widest = max(plan(model, block=(16, 8)).layers, key=lambda layer: layer.params)
    assert (widest.name, widest.params) == ("head.conv.0", 1024 * 128 * 9)
    del model.auxiliary
    assert plan(model, block=(16, 8)).n == LARGE["bisenetv2"].blocks


@pytest.mark.parametrize("name", LARGE)
def test_large_networks_can_be_searched_and_baked(name: str) -> None:
    torch.manual_seed(0)
    model, image = MODELS[name](num_classes=5), torch.randn(2, 3, *LARGE[name].small)
    pruner = sp.attach(model, sp.Smart(), block=(16, 8), sparsity=0.9, steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    sum(out.square().mean() for out in tensors(model(image))).backward()  # type: ignore[union-attr]
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    optimizer.step()
    pruner.step()
    model.eval()
    with torch.no_grad():
        masked, copied = tensors(model(image)), tensors(deepcopy(model)(image))
        receipt = sp.bake(model)
        baked = tensors(model(image))
    assert receipt.blocks.kept == -(-LARGE[name].blocks // 10)
    for one, other, plain in zip(masked, copied, baked, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, plain)


def test_resnet50_has_strides_in_its_3x3_convolutions() -> None:
    with torch.device("meta"):
        model = resnet50(num_classes=7, in_channels=2)
        assert model(torch.zeros(2, 2, 64, 96)).shape == (2, 7)
    strided = [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)]
    assert strided == ["conv1"] + [f"layer{i}.0.{name}" for i in (2, 3, 4) for name in ("conv2", "downsample.0")]


def test_yolov5m_returns_three_maps() -> None:
    with torch.device("meta"):
        model = yolov5m(num_classes=4)
        for mode in (True, False):
            maps = model.train(mode)(torch.zeros(2, 3, 64, 96))
            assert [tuple(out.shape) for out in maps] == [(2, 3, 8, 12, 9), (2, 3, 4, 6, 9), (2, 3, 2, 3, 9)]
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {(m.eps, m.momentum) for m in norms} == {(1e-3, 0.03)}


def small_yolo(num_classes: int) -> YOLOv5:
    return YOLOv5((2, 4, 8, 8, 8), (1, 1, 1, 1), num_classes, 3)


def test_yolov5m_decodes_like_slow_loops() -> None:
    torch.manual_seed(0)
    model = small_yolo(num_classes=2)
    maps = [torch.randn(2, 3, 32 // stride, 64 // stride, 7) for stride in STRIDES]
    boxes = model.decode(maps)
    assert boxes.shape == (2, 3 * (4 * 8 + 2 * 4 + 1 * 2), 7)
    expected = []
    for raw, anchors, stride in zip(maps, ANCHORS, STRIDES, strict=True):
        for a in range(3):
            for row in range(raw.shape[2]):
                for column in range(raw.shape[3]):
                    x, y, w, h, *rest = raw[1, a, row, column].sigmoid().tolist()
                    xy = [(2 * x - 0.5 + column) * stride, (2 * y - 0.5 + row) * stride]
                    expected.append([*xy, (2 * w) ** 2 * anchors[a][0], (2 * h) ** 2 * anchors[a][1], *rest])
    assert torch.allclose(boxes[1], torch.tensor(expected), rtol=1e-4, atol=1e-4)
    middle = model.decode([torch.zeros(1, 3, 1, 1, 7)] * 3)[0]  # zeros decode to the middle of the cell and the anchor
    assert middle[:, :2].tolist() == [[stride / 2] * 2 for stride in STRIDES for _ in range(3)]
    assert middle[:, 2:4].tolist() == [list(map(float, anchor)) for anchors in ANCHORS for anchor in anchors]


def test_yolov5m_biases_expect_few_objects() -> None:
    torch.manual_seed(0)
    model = small_yolo(num_classes=80)
    for conv, stride in zip(model.detect.convs, STRIDES, strict=True):
        bias = conv.bias.detach().view(3, 85)  # type: ignore[operator]
        cells = (640 / stride) ** 2
        spread = conv.weight[0].numel() ** -0.5  # type: ignore[index]  # range of the default initialization
        assert (bias[:, 4] - torch.tensor(8 / cells).log()).abs().max() <= spread + 1e-6
        assert (bias[:, 5:] - torch.tensor(0.6 / 79.00001).log()).abs().max() <= spread + 1e-6
        assert bias[:, :4].abs().max() <= spread


def test_bisenetv2_has_auxiliary_logits_in_training_only() -> None:
    with torch.device("meta"):
        model, image = bisenetv2(num_classes=6), torch.zeros(2, 3, 64, 128)
        assert [tuple(out.shape) for out in model(image)] == [(2, 6, 64, 128)] * 5
        assert model.eval()(image).shape == (2, 6, 64, 128)
