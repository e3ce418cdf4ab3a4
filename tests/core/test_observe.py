"""What a run of an example shows about each weight, on small models whose answer is known."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smartprune.core.block import Block
from smartprune.core.layers import candidates, find_layers
from smartprune.core.observe import observe
from smartprune.errors import SmartpruneError
from smartprune.pruning.plan import plan

BLOCK = Block(4, 4)


def names(model: nn.Module, example: object, fact: str) -> set[str]:
    """The layers of which a fact holds."""
    ids = getattr(observe(model, example), fact)
    return {candidate.name for candidate in candidates(model) if id(candidate.weight) in ids}


def reasons(model: nn.Module, example: object, **options: object) -> dict[str, str]:
    return {s.name: s.reason for s in find_layers(model, BLOCK, facts=observe(model, example), **options)[1]}  # type: ignore[arg-type]


# -- weights that inference never uses ------------------------------------------------------------------------------------


class Auxiliary(nn.Module):
    """Calls a second head in training only, as GoogLeNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.aux = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        self.body, self.fc = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.trunk(x).relu()
        out = self.fc(self.body(x).relu())
        return (out, self.aux(x)) if self.training else out


def test_layers_that_only_training_uses_are_skipped_unless_included() -> None:
    model, x = Auxiliary(), torch.randn(2, 8)
    assert names(model, x, "unreached") == {"aux.0", "aux.2"}
    assert reasons(model, x)["aux.0"] == "inference on the example never uses it"
    assert [layer.name for layer in plan(model, BLOCK, 0.5, example=x).layers] == ["trunk", "body"]
    everything = ["trunk", "aux.0", "aux.2", "body"]
    assert [layer.name for layer in plan(model, BLOCK, 0.5, example=x, include="aux.*").layers] == everything
    assert [layer.name for layer in plan(model, BLOCK, 0.5).layers] == everything  # no example, no facts
    text = " ".join(str(plan(model, BLOCK, 0.5, example=x)).split())
    assert "inference never uses aux.0, aux.2, so the budget does not count them; include= prunes them anyway" in text


class Experts(nn.Module):
    """Every row goes to the expert that a router chooses, and a second list of experts is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.out = nn.Linear(8, 4), nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.spare = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        choice, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for expert in choice.unique().tolist():
            rows = choice == expert
            out[rows] = self.experts[expert](x[rows])
        return self.out(out)  # type: ignore[no-any-return]


def test_experts_that_the_example_does_not_choose_stay() -> None:
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(1, 8)  # one row chooses one expert
    assert names(model, x, "unreached") == {"spare.0", "spare.1"}


def test_weights_used_outside_of_their_layer_are_reached() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.data, self.head = nn.Linear(8, 24), nn.Linear(24, 8), nn.Linear(8, 2)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = F.linear(F.linear(x, self.qkv.weight), self.data.weight.data)
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))  # type: ignore[no-any-return]

    model, x = Functional(), torch.randn(2, 5, 8)
    assert names(model, x, "unreached") == set()
    assert names(model, x, "transformed") == set()
    assert names(model, x, "heads") == {"head"}


# -- zeros that do not survive --------------------------------------------------------------------------------------------


class Parent(nn.Module):
    """Computes with a function of the weight of its child."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.c, self.d, self.last = kind, nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1)
        self.gain = nn.Parameter(torch.zeros(8, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        w, style = self.c.weight, x.mean((2, 3))
        if self.kind == "standardized":
            mean = w.mean((1, 2, 3), keepdim=True)
            w = self.gain * (w - mean) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        elif self.kind == "batch norm":
            w = F.batch_norm(w.reshape(1, 8, -1), None, None, training=True).reshape_as(w)
        elif self.kind == "scaled":
            w = self.gain * F.normalize(w.flatten(1)).view_as(w)
        elif self.kind == "cast":
            w = w.double().contiguous(memory_format=torch.channels_last).float()
        elif self.kind == "merged":  # as RepVGG merges its branches
            w = w + F.pad(self.d.weight, (1, 1, 1, 1))
        elif self.kind == "padded":
            w = torch.zeros(8, 8, 5, 5)
            w[:, :, 1:4, 1:4] = self.c.weight * 2
        elif self.kind == "modulated":  # as StyleGAN does
            w = w * style[:1, None, :, None, None].squeeze(0)
        elif self.kind == "shifted by data":
            w = w + style[:1].mean()
        x = F.conv2d(x, w, padding=2)
        return self.last(x if self.kind == "merged" else self.d(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["plain", "scaled", "cast", "padded", "modulated"])
def test_transformations_that_keep_zeros_are_prunable(kind: str) -> None:
    assert names(Parent(kind), torch.rand(2, 8, 9, 9) + 1, "transformed") == set()


@pytest.mark.parametrize(("kind", "layers"), [("standardized", {"c"}), ("batch norm", {"c"}), ("merged", {"c", "d"})])
def test_weights_that_the_parent_transforms_are_never_matched_by_a_pattern(kind: str, layers: set[str]) -> None:
    torch.manual_seed(0)
    model, x = Parent(kind), torch.rand(2, 8, 9, 9)
    before = copy.deepcopy(model.state_dict())
    assert names(model, x, "transformed") == layers
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for include in ((), "*", nn.Conv2d, ["c*", "d*"]):
        found = reasons(model, x, include=include)
        assert all("transforms this weight before use, so zeros do not survive" in found[name] for name in layers)
    for include in ("c", ["last", "c"]):
        with pytest.raises(SmartpruneError, match=r"^include: c cannot be pruned: the model transforms this weight before use"):
            reasons(model, x, include=include)
    assert "c" in reasons(model, x, include="c", skip="c")  # skip takes precedence


def test_zeros_of_a_skipped_layer_would_not_have_reached_the_kernel() -> None:
    """The oracle: the weight that conv2d gets has no zeros, although the stored weight has."""
    model, x = Parent("standardized"), torch.rand(2, 8, 9, 9)
    with torch.no_grad():
        model.gain += 1
        model.c.weight[:4] *= 0
        model.c.weight[4:, :4] = 0
    seen: list[Tensor] = []
    original = F.conv2d
    try:
        F.conv2d = lambda x, w, *args, **kwargs: (seen.append(w), original(x, w, *args, **kwargs))[1]  # type: ignore[assignment]
        model(x)
    finally:
        F.conv2d = original
    assert (model.c.weight == 0).float().mean() == 0.75
    assert (seen[0][4:] == 0).sum() == 0
    assert names(model, x, "transformed") == {"c"}  # zeros that the weight has already do not hide it


# -- output layers --------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_output_layers_are_those_whose_result_reaches_an_output(name: str, device: str) -> None:
    model, x, expected = HEADS[name]
    model = copy.deepcopy(model).to(device)
    if isinstance(model, Words):
        model.decoder.weight = model.embed.weight  # moving it to the meta device unties them
    assert {found for found in names(model, x.to(device), "heads") if "_l0" not in found} == expected  # not those of an LSTM


def test_every_output_layer_is_skipped_and_all_others_are_prunable() -> None:
    for model, x, expected in HEADS.values():
        found = reasons(model, x)
        spared = {name for name, reason in found.items() if reason.startswith(("output layer", "embedding, tied to the output"))}
        assert spared == expected - {"decoder"}
    assert reasons(Words(), torch.randint(20, (2, 5))) == {"embed": "embedding, tied to the output layer decoder"}
    assert reasons(Detector(), image())["dfl"] == "frozen: requires_grad is False"


# -- frozen weights -------------------------------------------------------------------------------------------------------


def test_frozen_weights_are_skipped_unless_included() -> None:
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.randn(2, 8)
    model[1].weight.requires_grad_(False)
    for example in (None, x):
        found = plan(model, BLOCK, 0.5, example=example)
        assert [layer.name for layer in found.layers] == ["0", "2"]
        assert {s.name: s.reason for s in found.skipped}["1"] == "frozen: requires_grad is False"
        assert "frozen, so not pruned: 1; include= prunes them anyway" in str(found)
        assert [layer.name for layer in plan(model, BLOCK, 0.5, include="1", example=example).layers] == ["0", "1", "2"]
    model.requires_grad_(False)
    with pytest.raises(SmartpruneError, match=r"nothing to prune .*frozen: requires_grad is False.*include= adds layers"):
        plan(model, BLOCK, 0.5)
    assert names(model, x, "heads") == {"3"}  # where all weights are frozen, none is a constant


# -- the run itself -------------------------------------------------------------------------------------------------------


def test_observing_does_not_change_the_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Flatten(), nn.LazyLinear(2))
    model(torch.randn(2, 3, 8, 8))
    model[1].eval()
    before, modes, state = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()], torch.get_rng_state()
    pointers = [p.data_ptr() for p in model.parameters()]
    observe(model, torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert ([m.training for m in model.modules()], [p.data_ptr() for p in model.parameters()]) == (modes, pointers)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_model_that_fails_with_other_weights_is_restored_and_its_weight_is_skipped() -> None:
    class Strict(Parent):
        def forward(self, x: Tensor) -> Tensor:
            if self.c.weight.flatten()[0] == 0:
                raise ValueError("zero")
            return super().forward(x)

    model, x = Strict("scaled"), torch.rand(2, 8, 9, 9)
    before = copy.deepcopy(model.state_dict())
    assert names(model, x, "transformed") == {"c"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_wrong_examples_raise() -> None:
    with pytest.raises(SmartpruneError, match="example: the model does not run on it"):
        observe(nn.Linear(3, 2), torch.zeros(1, 4))
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
