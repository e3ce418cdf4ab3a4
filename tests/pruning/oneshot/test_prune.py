"""Pruning without training. Contract: for every kind of layer the budget is exact, and the outputs are closer to those of the dense
model than after one-shot magnitude pruning."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smartprune as sp


class Attention(nn.Module):
    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(12, 2, batch_first=True, **sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state  # type: ignore[return-value]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()).relu())  # type: ignore[no-any-return]


def conv(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 8, 1))


KINDS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8)), (12,)),
    "linear without bias": (lambda: nn.Sequential(nn.Linear(12, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False)), (12,)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(8, 12, 3), nn.ReLU(), nn.Conv1d(12, 8, 3)), (8, 9)),
    "conv2d": (lambda: conv(nn.Conv2d(8, 12, 3, padding=1, bias=False)), (8, 6, 6)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(8, 12, 3), nn.ReLU(), nn.Conv3d(12, 8, 1)), (8, 4, 4, 4)),
    "grouped": (lambda: conv(nn.Conv2d(8, 12, 3, groups=2)), (8, 6, 6)),
    "transposed": (lambda: conv(nn.ConvTranspose2d(8, 12, 3, 2, 1, groups=2)), (8, 4, 4)),
    "attention": (Attention, (5, 12)),
    "attention of other widths": (lambda: Attention(kdim=12, vdim=12), (5, 12)),
    "recurrent": (Recurrent, (4, 12)),
    "tied": (Tied, (12,)),
    "transformer": (lambda: nn.TransformerEncoderLayer(12, 2, 16, batch_first=True), (5, 12)),
}


def data_of(shape: tuple[int, ...], batches: int = 8) -> list[Tensor]:
    """Correlated inputs, as layers have them."""
    generator = torch.Generator().manual_seed(1)
    channels = shape[0] if len(shape) > 2 else shape[-1]
    mix = torch.randn(channels, channels // 2, generator=generator)
    axis = 1 if len(shape) > 2 or len(shape) == 1 else -1
    out = []
    for _ in range(batches):
        size = [16, *shape]
        size[axis] = channels // 2
        x = torch.randn(size, generator=generator).movedim(axis, -1) @ mix.T
        out.append((x + 0.1 * torch.randn(x.shape, generator=generator)).movedim(-1, axis))
    return out


def with_seed(make: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = make()
    return model.eval()


def error(model: nn.Module, dense: nn.Module, data: list[Tensor]) -> float:
    x = torch.cat(data)
    with torch.no_grad():
        y = dense(x)
        return float((model(x) - y).square().mean() / y.var())


def images() -> nn.Module:
    return conv(nn.Conv2d(8, 12, 3, padding=1, bias=False))


@pytest.mark.parametrize("block", [(4, 2), (1, None, None), (3, 3, 3)], ids=["4x2", "channel", "ragged"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_is_pruned_exactly_and_better_than_by_magnitude(kind: str, block: Any) -> None:
    make, shape = KINDS[kind]
    if block == (3, 3, 3) and "conv" not in kind:
        block = (5, 5)
    dense, data = with_seed(make), data_of(shape)
    model, other = copy.deepcopy(dense), copy.deepcopy(dense)
    receipt = sp.prune(model, data, block=block, sparsity=0.5, include="*")
    assert receipt.blocks.kept == -(-receipt.blocks.total // 2)
    assert sp.verify(model, receipt=receipt).ok
    assert [row.name for row in receipt.layers] == [layer.name for layer in sp.plan(dense, block=block, include="*").layers]
    pruner = sp.attach(other, "magnitude", block=block, sparsity=0.5, include="*", steps=1)
    pruner.freeze()
    fresh = data_of(shape, 12)[8:]
    assert error(model, dense, fresh) < error(other, dense, fresh)


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("kind", ["params", "macs", "cycles"])
def test_budgets_are_met_and_missed_by_less_than_one_block(kind: str, share: float) -> None:
    x = torch.zeros(1, 8, 6, 6)
    budget = {
        "params": lambda: sp.params(share),
        "macs": lambda: sp.macs(share, example=x),
        "cycles": lambda: sp.cycles(share, example=x, npu=sp.NPU.small()),
    }[kind]()
    model = with_seed(images)
    receipt = sp.prune(model, data_of((8, 6, 6)), block=(4, 2), budget=budget, include="*")
    assert receipt.met
    assert receipt.requested is not None
    if kind != "cycles":
        plan = sp.plan(with_seed(images), block=(4, 2), budget=budget, include="*", example=x)
        assert plan.cost is not None
        assert receipt.requested.limit - receipt.requested.used < int(plan.cost.max())


def test_floor_include_and_skip_are_followed() -> None:
    model, data = with_seed(lambda: nn.Sequential(*[nn.Linear(12, 12) for _ in range(4)])), data_of((12,))
    receipt = sp.prune(model, data, block=(3, 3), sparsity=0.85, floor=0.1, include="3", skip="1")
    assert [row.name for row in receipt.layers] == ["0", "2", "3"]
    assert min(row.blocks.kept for row in receipt.layers) >= 2
    assert receipt.blocks.kept == 8  # of 48


def test_the_same_call_gives_the_same_bits() -> None:
    models = [with_seed(images) for _ in range(2)]
    receipts = [sp.prune(model, data_of((8, 6, 6)), block=(4, 2), sparsity=0.6, include="*") for model in models]
    assert receipts[0].mask_hash == receipts[1].mask_hash
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_labels_and_the_random_state_do_not_matter() -> None:
    a, b, data = with_seed(images), with_seed(images), data_of((8, 6, 6))
    sp.prune(a, data, block=(4, 2), sparsity=0.6, include="*")
    torch.manual_seed(99)
    labelled = [(x, torch.randint(0, 9, (len(x),))) for x in data]
    before = torch.get_rng_state()
    sp.prune(b, iter(labelled), block=(4, 2), sparsity=0.6, include="*")
    assert torch.equal(a[0].weight, b[0].weight)  # type: ignore[index]
    assert torch.equal(before, torch.get_rng_state())


class Stateful(nn.Module):
    """Counts its calls, changes a buffer and draws random numbers in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += len(x)
        return self.b(self.a(x).relu() + 0.01 * torch.randn(len(x), 12))  # type: ignore[no-any-return]


def test_state_that_the_model_changes_in_forward_passes_does_not_change() -> None:
    models, data = [with_seed(Stateful) for _ in range(2)], data_of((12,))
    example = data[0][:1]
    for seed, model in enumerate(models):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        sp.saliencies(model, data, block=(4, 4), include="*")
        sp.prune(model, data, block=(4, 4), sparsity=0.5, include="*", example=example)
        assert torch.equal(before, torch.get_rng_state())
        assert float(model.seen) == 0  # type: ignore[arg-type]
    assert torch.equal(models[0].a.weight, models[1].a.weight)  # type: ignore[arg-type, union-attr]


class Mixing(nn.Module):
    """Mixes features by a fixed sparse matrix, which it may change in evaluation."""

    def __init__(self, grow: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.grow = nn.Linear(12, 12), nn.Linear(12, 12), grow
        self.register_buffer("mix", torch.eye(12).roll(1, 0).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        if self.grow:
            self.mix.mul_(1.5)  # type: ignore[operator, union-attr]
        return self.b(torch.sparse.mm(self.mix, self.a(x).relu().T).T)  # type: ignore[no-any-return, arg-type]


def test_models_with_sparse_buffers_are_pruned_and_their_buffers_stay(tmp_path: Path) -> None:
    """torch cannot compare sparse tensors, and they have no storage."""
    data = data_of((12,))
    for folder, grow in ((None, False), (tmp_path, False), (None, True)):
        model = with_seed(lambda grow=grow: Mixing(grow))
        before = model.mix.to_dense()  # type: ignore[operator, union-attr]
        sp.saliencies(model, data, block=(4, 4), include="*")
        receipt = sp.prune(model, data, block=(4, 4), sparsity=0.5, include="*", folder=folder)
        assert (receipt.blocks.kept, receipt.blocks.total) == (9, 18)
        assert torch.equal(model.mix.to_dense(), before)  # type: ignore[operator, union-attr]


def test_a_model_that_fails_late_is_left_as_it_was() -> None:
    class Late(Stateful):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 7:
                raise ValueError("seven")
            return super().forward(x)

    model = with_seed(Late).train()
    model.a.bias.requires_grad_(False)  # type: ignore[union-attr, operator]
    parameters = [parameter.clone() for parameter in model.parameters()]
    before = torch.get_rng_state()
    with pytest.raises(sp.SmartpruneError, match="does not run on it"):
        sp.prune(model, [*data_of((12,)), torch.randn(7, 12, generator=torch.Generator())], block=(4, 4), sparsity=0.5, include="*")
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(parameters, model.parameters(), strict=True))
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
    assert all(p.grad is None for p in model.parameters())
    assert model.a.training  # type: ignore[union-attr]
    assert not model.a._forward_hooks  # type: ignore[union-attr]


def test_the_model_keeps_its_objects_and_modes() -> None:
    model = with_seed(images).train()
    model[1].weight.requires_grad_(False)  # type: ignore[index, union-attr, operator]
    parameters = dict(model.named_parameters())
    needed = {name: parameter.requires_grad for name, parameter in parameters.items()}
    modules = dict(model.named_modules())
    sp.prune(model, data_of((8, 6, 6)), block=(4, 2), sparsity=0.5, include="*")
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == needed
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(modules[name] is module and module.training for name, module in model.named_modules())


def test_zeros_stay_zero_in_later_training() -> None:
    model, data = with_seed(images), data_of((8, 6, 6))
    receipt = sp.prune(model, data, block=(4, 2), sparsity=0.5, include="*")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    for x in data:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sp.verify(model, receipt=receipt).ok


class Interrupt(Exception):  # noqa: N818
    pass


def failing(data: list[Tensor]) -> Iterator[Tensor]:
    yield data[0]
    raise Interrupt


@pytest.mark.parametrize("at", ["data", "sensitivities", "order", "refit", "tune"])
def test_an_interruption_leaves_the_model_as_it_was(at: str) -> None:
    model, data = with_seed(images).train(), data_of((8, 6, 6))
    before = copy.deepcopy(model.state_dict())

    def progress(step: str, done: int, total: int) -> None:
        if step == at and done:
            raise Interrupt

    with pytest.raises(Interrupt):
        sp.prune(model, failing(data) if at == "data" else data, block=(4, 2), sparsity=0.5, include="*", progress=progress)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training and not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_progress_reaches_the_end_of_each_step() -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    sp.prune(
        with_seed(images),
        data_of((8, 6, 6)),
        block=(4, 2),
        sparsity=0.5,
        include="*",
        progress=lambda step, done, total: seen.setdefault(step, []).append((done, total)),
    )
    assert list(seen) == ["sensitivities", "order", "refit", "tune"]
    assert all(steps[-1][0] == steps[-1][1] for steps in seen.values())
    assert all(a <= b for steps in seen.values() for a, b in pairwise(steps))


X = torch.randn(8, 12)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no data": ({"batches": []}, "no calibration data"),
    "one sample": ({"batches": [X[:1]]}, "one sample is not enough"),
    "constant samples": ({"batches": [torch.ones(8, 12)]}, "all 8 samples are equal"),
    "NaN": ({"batches": [X * torch.nan]}, "NaN or infinity"),
    "another shape": ({"batches": [torch.randn(8, 5)]}, "the model does not run on it"),
    "no budget": ({"sparsity": None}, "no budget given"),
    "two budgets": ({"budget": sp.params(0.5)}, "both given"),
    "samples": ({"samples": 1}, "samples=1; give an integer, at least 2"),
    "memory": ({"memory": 0}, "memory=0; give a positive number"),
    "seed": ({"seed": 0.5}, "seed=0.5; give an integer"),
    "impossible": ({"sparsity": 0.9, "floor": 0.5}, "at most"),
    "unknown layer": ({"skip": "x"}, "matches no layer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_and_nothing_changes(name: str) -> None:
    model = with_seed(lambda: nn.Sequential(*[nn.Linear(12, 12) for _ in range(3)]))
    before = copy.deepcopy(model.state_dict())
    arguments, message = WRONG[name]
    with pytest.raises(sp.SmartpruneError, match=message):
        sp.prune(model, **{"batches": [X, X[:3]], "block": (4, 4), "sparsity": 0.5, **arguments})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_wrong_models_are_refused() -> None:
    with pytest.raises(sp.SmartpruneError, match=r"give a torch\.nn\.Module"):
        sp.prune("resnet18", [X], sparsity=0.5)  # type: ignore[arg-type]
    model = with_seed(lambda: nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12)))
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan  # type: ignore[index, operator]
    with pytest.raises(sp.SmartpruneError, match="weight contains NaN"):
        sp.prune(model, [X], block=(4, 4), sparsity=0.5)
    model = with_seed(lambda: nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12)))
    sp.attach(model, "magnitude", block=(4, 4), sparsity=0.5, steps=1)
    with pytest.raises(sp.SmartpruneError, match="has a pruner"):
        sp.prune(model, [X], block=(4, 4), sparsity=0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_models_of_other_number_types_are_pruned_in_their_type(dtype: torch.dtype) -> None:
    reference, dense = with_seed(images), with_seed(images).to(dtype)
    model, data = copy.deepcopy(dense), data_of((8, 6, 6))
    receipt = sp.prune(model, [x.to(dtype) for x in data], block=(4, 2), sparsity=0.4, include="*")
    assert all(p.dtype == dtype for p in model.parameters())
    assert sp.verify(model, receipt=receipt).ok
    sp.prune(reference, data, block=(4, 2), sparsity=0.4, include="*")
    own, expected = (error(each.float(), dense.float(), data) for each in (model, reference))
    assert own < 2 * expected + 1e-3


def test_autocast_of_the_caller_changes_nothing() -> None:
    models, data = [with_seed(images) for _ in range(2)], data_of((8, 6, 6))
    for model, enabled in zip(models, (True, False), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            sp.prune(model, data, block=(4, 2), sparsity=0.5, include="*")
    assert all(torch.equal(a, b) for a, b in zip(*(model.state_dict().values() for model in models), strict=True))


class Boxes(nn.Module):
    """Returns as many boxes as it finds, like a detector."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [row[row > 0] for row in self.b(self.norm(self.a(x)).relu())]


def test_models_whose_outputs_vary_in_shape_are_pruned() -> None:
    model = with_seed(Boxes)
    data = [*data_of((12,)), torch.randn(1, 12, generator=torch.Generator().manual_seed(3))]
    receipt = sp.prune(model, data, block=(4, 4), sparsity=0.5, include="*")
    assert sp.verify(model, receipt=receipt).ok


def test_layers_that_lost_every_block_are_named() -> None:
    model = with_seed(lambda: nn.Sequential(*[nn.Linear(12, 12) for _ in range(4)]))
    with (
        pytest.warns(UserWarning, match="outputs of the pruned model do not depend on its input"),
        pytest.warns(UserWarning, match=r"prune: . of 3 layers kept no block, .*; use floor=0\.01") as caught,
    ):
        receipt = sp.prune(model, data_of((12,)), block=(6, 6), sparsity=0.9)
    empty = [row.name for row in receipt.layers if not row.blocks.kept]
    assert any(f"through them: {', '.join(empty)};" in str(warning.message) for warning in caught)


def test_weights_created_in_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        model = with_seed(images)
    with pytest.raises(sp.SmartpruneError, match=r"0\.weight was created in inference_mode"):
        sp.prune(model, data_of((8, 6, 6)), block=(4, 2), sparsity=0.5, include="*")


def test_inputs_whose_squares_overflow_are_refused_and_nothing_changes() -> None:
    model = with_seed(images)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(sp.SmartpruneError, match=r"the inputs of .* are too large: their squares overflow"):
        sp.prune(model, [1e20 * x for x in data_of((8, 6, 6))], block=(4, 2), sparsity=0.5, include="*")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_activations_that_overflow_are_named() -> None:
    model = with_seed(lambda: nn.Sequential(*[nn.Linear(12, 12) for _ in range(4)]))
    with torch.no_grad():
        model[0].weight.mul_(1e30)  # type: ignore[union-attr, operator]
        model[1].weight.mul_(1e30)  # type: ignore[union-attr, operator]
    with pytest.raises(sp.SmartpruneError, match="NaN or infinite"):
        sp.prune(model, [X], block=(4, 4), sparsity=0.5)
