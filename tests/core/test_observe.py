"""What a run of an example shows about each weight, on small models whose answer is known."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.observed import BLOCK, names, reasons
from smartprune.core.observe import observe
from smartprune.errors import SmartpruneError
from smartprune.pruning.plan import plan

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
        self.e = nn.Conv2d(8, 8, 3)
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
        elif self.kind == "summed":
            w = w + self.e.weight
        elif self.kind == "joined":
            w = torch.cat([w[:4], self.e.weight[4:]])
        elif self.kind == "padded":
            w = torch.zeros(8, 8, 5, 5)
            w[:, :, 1:4, 1:4] = self.c.weight * 2
        elif self.kind == "modulated":  # as StyleGAN does
            w = w * style[:1, None, :, None, None].squeeze(0)
        elif self.kind == "shifted by data":
            w = w + style[:1].mean()
        x = F.conv2d(x, w, padding=2)
        return self.last(x if self.kind == "merged" else self.d(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["plain", "scaled", "cast", "padded", "modulated", "joined"])
def test_transformations_that_keep_zeros_are_prunable(kind: str) -> None:
    assert names(Parent(kind), torch.rand(2, 8, 9, 9) + 1, "transformed") == set()


@pytest.mark.parametrize(
    ("kind", "layers"), [("standardized", {"c"}), ("batch norm", {"c"}), ("merged", {"c", "d"}), ("summed", {"c", "e"})]
)
def test_weights_that_the_parent_transforms_are_never_matched_by_a_pattern(kind: str, layers: set[str]) -> None:
    torch.manual_seed(0)
    model, x = Parent(kind), torch.rand(2, 8, 9, 9)
    before = copy.deepcopy(model.state_dict())
    assert names(model, x, "transformed") == layers
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for include in ((), "*", nn.Conv2d, ["c*", "d*"]):
        skipped = reasons(model, x, include=include)
        assert all("transforms this weight before use, so zeros do not survive" in skipped[name] for name in layers)
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


# -- frozen weights -------------------------------------------------------------------------------------------------------


def test_frozen_weights_are_skipped_unless_included() -> None:
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.randn(2, 8)
    model[1].weight.requires_grad_(False)
    for example in (None, x):
        planned = plan(model, BLOCK, 0.5, example=example)
        assert [layer.name for layer in planned.layers] == ["0", "2"]
        assert {s.name: s.reason for s in planned.skipped}["1"] == "frozen: requires_grad is False"
        assert "frozen, so not pruned: 1; include= prunes them anyway" in str(planned)
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
