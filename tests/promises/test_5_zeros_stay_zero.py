"""Promise 5: removed blocks of frozen and baked models stay zero under any optimizer, EMA and parametrizations."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import smartprune as sp
from helpers.training_cases import Case, removed_elements
from helpers.zeros import OPTIMIZERS, baked, train_plain
from smartprune.pruning.multiply import BlockMultiplier


def nonzero_removed(weights: list[torch.Tensor], removed: list[torch.Tensor]) -> int:
    return sum(int(torch.count_nonzero(w.detach()[r])) for w, r in zip(weights, removed, strict=True))


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_zeros_survive_training_of_frozen_and_baked_models(small: Case, kind: str) -> None:
    pruner = small.attach(steps=4)
    optimizer = OPTIMIZERS[kind](small.model.parameters())
    small.train(pruner, optimizer, 4)
    weights, gone = pruner.blocks.weights, removed_elements(pruner)
    assert pruner.phase == "frozen"
    assert nonzero_removed(weights, gone) == 0
    for _ in range(3):
        small.loss().backward()
        for weight, g in zip(weights, gone, strict=True):
            assert torch.count_nonzero(weight.grad[g]) == 0
        optimizer.step()
        assert nonzero_removed(weights, gone) == 0  # directly after the step: a checkpoint may be saved here
        optimizer.zero_grad()
    before = [w.detach().clone() for w in weights]
    sp.bake(small.model)
    for _ in range(3):  # training continues with the same optimizer and its momentum
        small.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert nonzero_removed(weights, gone) == 0
    assert any(not torch.equal(a, b) for a, b in zip(before, weights, strict=True))


def test_bake_without_hold_lets_zeros_train() -> None:
    case = Case("plain_cnn")
    pruner = case.attach(steps=1)
    optimizer = case.optimizer()
    case.train(pruner, optimizer, 1)
    gone = removed_elements(pruner)
    sp.bake(case.model, hold=False)
    case.loss().backward()
    optimizer.step()
    assert nonzero_removed(pruner.blocks.weights, gone) > 0


def test_writes_to_removed_blocks_are_zeroed_before_use() -> None:
    case = Case("plain_cnn")
    pruner = case.attach(steps=1)
    case.train(pruner, case.optimizer(), 1)
    gone = removed_elements(pruner)
    expected = case.model.eval()(case.x).detach()
    with torch.no_grad():
        for weight, g in zip(pruner.blocks.weights, gone, strict=True):
            weight[g] = 1.0  # like an EMA swap or a loaded checkpoint
    assert torch.equal(case.model(case.x), expected)
    with torch.no_grad():
        pruner.blocks.weights[0][gone[0]] = 1.0
    saved = case.model.state_dict()
    assert torch.count_nonzero(saved[pruner.plan.layers[0].weight][gone[0]]) == 0


@pytest.mark.parametrize("swap", [False, True], ids=["copied", "swapped"])
def test_writes_through_data_are_zeroed_before_use(swap: bool) -> None:
    """EMA and Lookahead often write through ``weight.data``, which does not change the version counter."""
    case = Case("plain_cnn")
    dense = copy.deepcopy(case.model.state_dict())
    pruner = case.attach(sp.Magnitude(), steps=1)
    optimizer = case.optimizer()
    case.train(pruner, optimizer, 1)
    gone = removed_elements(pruner)

    def write() -> None:
        for name, parameter in case.model.named_parameters():
            if swap:
                parameter.data = dense[name].clone()
            else:
                parameter.data.copy_(dense[name])

    write()
    case.model.eval()
    clean = {name: value.clone() for name, value in case.model.state_dict().items()}
    assert nonzero_removed([clean[layer.weight] for layer in pruner.plan.layers], gone) == 0
    expected = case.model(case.x).detach()
    write()
    assert torch.equal(case.model(case.x), expected)
    write()
    assert pruner.receipt().met
    write()
    assert sp.bake(case.model).met
    assert nonzero_removed(list(pruner.blocks.weights), gone) == 0


def test_two_forward_passes_before_backward_are_allowed() -> None:
    """Zeroing removed blocks in the second forward pass must not invalidate saved tensors."""
    case = Case("plain_cnn")
    pruner = case.attach(sp.Magnitude(), steps=1)
    case.train(pruner, case.optimizer(), 1)
    first = case.loss()
    with torch.no_grad():
        case.model(case.x)
    (first + case.loss()).backward()
    assert all(parameter.grad is not None for parameter in case.model.parameters())


def test_receipt_does_not_change_a_baked_model() -> None:
    case = Case("plain_cnn")
    pruner = case.attach(sp.Magnitude(), steps=1)
    case.train(pruner, case.optimizer(), 1)
    sp.bake(case.model, hold=False)
    assert pruner.receipt().met
    with torch.no_grad():
        for weight in pruner.blocks.weights:
            weight.fill_(1.0)
    with pytest.raises(sp.SmartpruneError, match="not zero"):
        pruner.receipt()
    assert all(bool((weight == 1).all()) for weight in pruner.blocks.weights)


def test_ema_of_frozen_and_baked_models_keeps_the_zeros() -> None:
    case = Case("plain_cnn")
    pruner = case.attach(steps=2)
    optimizer = case.optimizer()
    case.train(pruner, optimizer, 2)
    gone = removed_elements(pruner)
    ema = copy.deepcopy(case.model)
    for _ in range(3):
        case.train(pruner, optimizer, 1)
        averages = ema.state_dict()
        for name, value in case.model.state_dict().items():
            if value.is_floating_point():
                averages[name].lerp_(value, 0.3)
    assert nonzero_removed(sp.find_pruner(ema).blocks.weights, gone) == 0
    sp.bake(ema)
    sp.bake(case.model)
    averages = ema.state_dict()
    for name, value in case.model.state_dict().items():
        if value.is_floating_point():
            averages[name].lerp_(value, 0.5)
    assert nonzero_removed([averages[layer.weight] for layer in pruner.plan.layers], gone) == 0


def test_apply_to_does_not_clear_momentum_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updating an EMA copy at every step does not touch the optimizer of the model."""
    case = Case("plain_cnn")
    pruner = case.attach(steps=3)
    optimizer = OPTIMIZERS["sgd"](case.model.parameters())
    ema = copy.deepcopy(case.model)
    case.train(pruner, optimizer, 4)
    cleaned: list[torch.Tensor] = []
    real = BlockMultiplier.multiply_layer_

    def record(self: BlockMultiplier, piece: torch.Tensor, i: int, value: torch.Tensor) -> None:
        cleaned.append(value)
        real(self, piece, i, value)

    monkeypatch.setattr(BlockMultiplier, "multiply_layer_", record)
    for _ in range(2):
        pruner.apply_to(ema)
        case.train(pruner, optimizer, 1)
    momenta = {id(state["momentum_buffer"]) for state in optimizer.state.values()}
    assert not momenta & {id(value) for value in cleaned}
    case.train(pruner, OPTIMIZERS["sgd"](case.model.parameters()), 2)
    assert nonzero_removed(pruner.blocks.weights, removed_elements(pruner)) == 0


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("stage", ["search", "frozen"])
def test_parametrizing_a_masked_layer_raises_and_changes_nothing(stage: str) -> None:
    case = Case("plain_cnn")
    pruner = case.attach(steps=2)
    if stage == "frozen":
        case.train(pruner, case.optimizer(), 2)
    expected, keys = case.model.eval()(case.x).detach(), set(case.model.state_dict())
    with pytest.raises(
        sp.SmartpruneError, match=r"register_parametrization: a pruner masks the weight of this Conv2d, .*after smartprune\.bake"
    ):
        parametrize.register_parametrization(case.model[3], "weight", Double())
    parametrize.register_parametrization(case.model[4], "weight", Double())  # a layer that is not pruned
    parametrize.remove_parametrizations(case.model[4], "weight", leave_parametrized=False)
    assert set(case.model.state_dict()) == keys
    assert torch.equal(case.model(case.x), expected)


def test_a_baked_layer_can_be_parametrized_and_keeps_the_zeros() -> None:
    case, receipt = baked()
    zeros = int((case.model[3].weight == 0).sum())
    parametrize.register_parametrization(case.model[3], "weight", Double())
    train_plain(case, case.model, torch.optim.SGD(case.model.parameters(), lr=0.01, momentum=0.9))
    assert int((case.model[3].weight == 0).sum()) == zeros
    assert receipt.met
