"""Output layers that a run of an example shows, on small models whose answer is known."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.observed import names, reasons


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def conv(inputs: int, outputs: int, size: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


@dataclass
class Answer:
    """An output that is not a container."""

    classes: Tensor
    boxes: list[Tensor]


class TwoHeads(nn.Module):
    """A shared trunk, a class head, a box head of two layers, and an output that is computed from features."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.classes = conv(3, 16, 3), nn.Linear(16, 5)
        self.boxes = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Answer:
        features = self.trunk(x).mean((2, 3))
        return Answer(self.classes(features).softmax(-1), [self.boxes(features).sigmoid().mul(2).unflatten(-1, (2, 2))])


class Distilled(nn.Module):
    """The mean of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.head_dist = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x + self.body(x), (8,))
        return (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2  # type: ignore[no-any-return]


class Detector(nn.Module):
    """Three scales, two branches each, joined by channel and by position, split again and decoded, as in YOLOv8."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleList([conv(3, 8, 3), conv(8, 8, 3), conv(8, 12, 3)])
        self.cv2 = nn.ModuleList(nn.Sequential(conv(n, 16), nn.Conv2d(16, 16, 1)) for n in (8, 8, 12))
        self.cv3 = nn.ModuleList(nn.Sequential(conv(n, 8), nn.Conv2d(8, 5, 1)) for n in (8, 8, 12))
        self.dfl = nn.Conv2d(4, 1, 1, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        maps = []
        for stage, box, cls in zip(self.backbone, self.cv2, self.cv3, strict=True):
            x = F.max_pool2d(stage(x), 2)
            maps.append(torch.cat([box(x), cls(x)], 1))
        boxes, classes = torch.cat([m.flatten(2) for m in maps], 2).split((16, 5), 1)
        bins = boxes.view(len(boxes), 4, 4, -1).transpose(2, 1).softmax(1)
        left, right = self.dfl(bins).view(len(boxes), 4, -1).chunk(2, 1)
        anchors = torch.arange(left.shape[-1], device=x.device) + 0.5
        low, high = anchors - left, anchors + right
        decoded = torch.cat([(low + high) / 2, high - low], 1) * 8
        return torch.cat([decoded, classes.sigmoid()], 1), maps


class InPlace(nn.Module):
    """Decodes its outputs in place, through views."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = conv(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        out = x.new_empty(len(x), 16, *x.shape[2:])
        out[:, :8], out[:, 8:] = self.a(x), self.b(x)
        out[:, :4].sigmoid_()
        return out.permute(0, 2, 3, 1)


class Words(nn.Module):
    """A masked language model: its decoder shares the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.norm = nn.Embedding(20, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.transform, self.decoder = nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.decoder.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = self.norm(x + self.body(x))
        return self.decoder(F.gelu(self.transform(x)))  # type: ignore[no-any-return]


class Cached(nn.Module):
    """Returns the keys and values of its attention, next to the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.lm_head = (nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor) -> dict[str, object]:
        k, v = self.k(x), self.v(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(x), k, v))
        return {"logits": self.lm_head(x), "cache": [(k, v)]}


class Block2(nn.Module):
    def __init__(self, inputs: int, outputs: int, norm: bool = True) -> None:
        super().__init__()
        bn = nn.BatchNorm2d if norm else nn.Identity
        self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.bn1, self.bn2 = bn(outputs), bn(outputs)
        self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1), bn(outputs)) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.down(x))


class Inception(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        make = conv if norm else (lambda i, o, s=1: nn.Sequential(nn.Conv2d(i, o, s, padding=s // 2), nn.ReLU()))
        self.one, self.three = make(8, 8), nn.Sequential(make(8, 4), make(4, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.cat([self.one(x), self.three(x)], 1)


class Dense(nn.Module):
    """Concatenates the outputs of all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8 + 4 * i, 4, 3, padding=1) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x.relu())], 1)
        return x


class Supervised(nn.Module):
    """A U-Net that returns a prediction at every scale, and ``joined`` their mean."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.joined = joined
        self.down1, self.down2, self.up = conv(3, 8, 3), conv(8, 16, 3), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.fuse, self.coarse, self.fine = conv(16, 8, 3), nn.Conv2d(16, 2, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        fine = self.fine(self.fuse(torch.cat([a, self.up(b)], 1)))
        coarse = F.interpolate(self.coarse(b), scale_factor=2, mode="bilinear")
        return (fine + coarse) / 2 if self.joined else [fine, coarse]


class Refined(nn.Module):
    """Adds its output to boxes that an earlier layer has proposed, and that its own input depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.proposals, self.bbox_predictor = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).relu()
        boxes = self.proposals(x)
        return boxes + self.bbox_predictor(torch.cat([x, boxes], -1))  # type: ignore[no-any-return]


class Pixels(nn.Module):
    """Adds its result to its input, and shuffles channels to pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.up = nn.Sequential(conv(3, 8, 3), conv(8, 8, 3)), nn.Conv2d(8, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2) + F.pixel_shuffle(self.up(self.body(x)), 2).tanh()


class FrozenScaling(nn.Sequential):
    """Ends with a fixed upsampling."""

    def __init__(self) -> None:
        super().__init__(conv(3, 8), nn.Conv2d(8, 2, 1), nn.ConvTranspose2d(2, 2, 4, 2, 1, bias=False))
        self[2].requires_grad_(False)


def encoder() -> nn.Module:
    """On its fast path, torch computes a whole layer in one operation."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


def image() -> Tensor:
    return torch.randn(2, 3, 16, 16)


YOLO = {f"cv{branch}.{i}.1" for branch in (2, 3) for i in range(3)}
HEADS: dict[str, tuple[nn.Module, Tensor, set[str]]] = {
    "two heads": (TwoHeads(), image(), {"classes", "boxes.2"}),
    "mean of two heads": (Distilled(), torch.randn(2, 3, 8), {"head", "head_dist"}),
    "anchors of three scales": (Detector(), image(), YOLO),
    "decoded in place": (InPlace(), image(), {"a", "b"}),
    "tied decoder": (Words(), torch.randint(20, (2, 5)), {"embed", "decoder"}),
    "cache of keys and values": (Cached(), torch.randn(2, 5, 8), {"lm_head"}),
    "sequential": (nn.Sequential(conv(3, 8), nn.Conv2d(8, 8, 1), nn.Sigmoid()), image(), {"1"}),
    "residual block": (nn.Sequential(conv(3, 8), Block2(8, 8), Block2(8, 8)), image(), set()),
    "residual block that widens": (nn.Sequential(conv(3, 8), Block2(8, 12)), image(), set()),
    "folded residual block that widens": (nn.Sequential(conv(3, 8), Block2(8, 12, norm=False)), image(), set()),
    "pooled residual features": (nn.Sequential(Block2(3, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten()), image(), set()),
    "inception": (Inception(True), image(), set()),
    "inception without norm": (Inception(False), image(), set()),
    "dense block": (Dense(), torch.randn(2, 8, 4, 4), set()),
    "deep supervision": (Supervised(False), image(), {"coarse", "fine"}),
    "mean of deep supervision": (Supervised(True), image(), {"coarse", "fine"}),
    "refined boxes": (Refined(), torch.randn(2, 8), {"bbox_predictor"}),
    "super-resolution": (Pixels(), image(), {"up"}),
    "fixed upsampling": (FrozenScaling(), image(), {"1"}),
    "transformer features": (encoder(), torch.randn(2, 5, 8), set()),
    "recurrent": (nn.LSTM(8, 8, batch_first=True), torch.randn(2, 5, 8), set()),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_output_layers_are_those_whose_result_reaches_an_output(case: str, device: str) -> None:
    model, x, expected = HEADS[case]
    model = copy.deepcopy(model).to(device)
    if isinstance(model, Words):
        model.decoder.weight = model.embed.weight  # moving it to the meta device unties them
    assert {name for name in names(model, x.to(device), "heads") if "_l0" not in name} == expected  # not those of an LSTM


def test_every_output_layer_is_skipped_and_all_others_are_prunable() -> None:
    as_heads = ("output layer", "embedding, tied to the output")
    for model, x, expected in HEADS.values():
        skipped = {name for name, reason in reasons(model, x).items() if reason.startswith(as_heads)}
        assert skipped == expected - {"decoder"}
    assert reasons(Words(), torch.randint(20, (2, 5))) == {"embed": "embedding, tied to the output layer decoder"}
    assert reasons(Detector(), image())["dfl"] == "frozen: requires_grad is False"
