"""Promise 5: momentum, weight decay and EMA never revive a removed block of a frozen or baked model."""

import copy

import pytest
import torch

import smartprune as sp
from helpers.training_cases import Case, removed_elements
from smartprune.pruning.multiply import Masking

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=1e-1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def revived(weights: list[torch.Tensor], gone: list[torch.Tensor]) -> int:
    return sum(int(torch.count_nonzero(w.detach()[g])) for w, g in zip(weights, gone, strict=True))


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_frozen_and_baked(small: Case, kind: str) -> None:
    pruner = small.attach(steps=4)
    optimizer = OPTIMIZERS[kind](small.model.parameters())
    small.train(pruner, optimizer, 4)
    weights, gone = pruner.blocks.weights, removed_elements(pruner)
    assert pruner.phase == "frozen"
    assert revived(weights, gone) == 0
    for _ in range(3):
        small.loss().backward()
        for weight, g in zip(weights, gone, strict=True):
            assert torch.count_nonzero(weight.grad[g]) == 0
        optimizer.step()
        assert revived(weights, gone) == 0  # at once: a checkpoint may be written here
        optimizer.zero_grad()
    before = [w.detach().clone() for w in weights]
    sp.bake(small.model)
    for _ in range(3):  # the user trains on, with the same optimizer and its momentum
        small.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert revived(weights, gone) == 0
    assert any(not torch.equal(a, b) for a, b in zip(before, weights, strict=True))


def test_released_on_request() -> None:
    case = Case("plain_cnn")
    pruner = case.attach(steps=1)
    optimizer = case.optimizer()
    case.train(pruner, optimizer, 1)
    gone = removed_elements(pruner)
    sp.bake(case.model, hold=False)
    case.loss().backward()
    optimizer.step()
    assert revived(pruner.blocks.weights, gone) > 0


def test_writes_behind_our_back_are_cleaned_before_use() -> None:
    case = Case("plain_cnn")
    pruner = case.attach(steps=1)
    case.train(pruner, case.optimizer(), 1)
    gone = removed_elements(pruner)
    expected = case.model.eval()(case.x).detach()
    with torch.no_grad():
        for weight, g in zip(pruner.blocks.weights, gone, strict=True):
            weight[g] = 1.0  # as an EMA swap or a loaded checkpoint might
    assert torch.equal(case.model(case.x), expected)
    with torch.no_grad():
        pruner.blocks.weights[0][gone[0]] = 1.0
    saved = case.model.state_dict()
    assert torch.count_nonzero(saved[pruner.plan.layers[0].weight][gone[0]]) == 0


@pytest.mark.parametrize("swap", [False, True], ids=["copied", "swapped"])
def test_writes_that_leave_no_trace(swap: bool) -> None:
    """Through ``weight.data``, as many an EMA and Lookahead do: no version counter rises."""
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
    assert revived([clean[layer.weight] for layer in pruner.plan.layers], gone) == 0
    expected = case.model(case.x).detach()
    write()
    assert torch.equal(case.model(case.x), expected)
    write()
    assert pruner.receipt().met
    write()
    assert sp.bake(case.model).met
    assert revived(list(pruner.blocks.weights), gone) == 0


def test_two_forward_passes_and_then_backward() -> None:
    """Cleaning at every forward pass must not look like a change to autograd."""
    case = Case("plain_cnn")
    pruner = case.attach(sp.Magnitude(), steps=1)
    case.train(pruner, case.optimizer(), 1)
    first = case.loss()
    with torch.no_grad():
        case.model(case.x)
    (first + case.loss()).backward()
    assert all(parameter.grad is not None for parameter in case.model.parameters())


def test_a_receipt_changes_nothing_in_a_baked_model() -> None:
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


def test_ema_of_frozen_and_of_baked_models() -> None:
    case = Case("plain_cnn")
    pruner = case.attach(steps=2)
    optimizer = case.optimizer()
    case.train(pruner, optimizer, 2)
    gone = removed_elements(pruner)
    ema = copy.deepcopy(case.model)
    for _ in range(3):
        case.train(pruner, optimizer, 1)
        theirs = ema.state_dict()
        for name, value in case.model.state_dict().items():
            if value.is_floating_point():
                theirs[name].lerp_(value, 0.3)
    assert revived(sp.find_pruner(ema).blocks.weights, gone) == 0
    sp.bake(ema)
    sp.bake(case.model)
    theirs = ema.state_dict()
    for name, value in case.model.state_dict().items():
        if value.is_floating_point():
            theirs[name].lerp_(value, 0.5)
    assert revived([theirs[layer.weight] for layer in pruner.plan.layers], gone) == 0


def test_momentum_is_cleaned_once_and_not_for_every_copy_that_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """An average that follows at every step changes nothing for the optimizer of the model."""
    case = Case("plain_cnn")
    pruner = case.attach(steps=3)
    optimizer = OPTIMIZERS["sgd"](case.model.parameters())
    ema = copy.deepcopy(case.model)
    case.train(pruner, optimizer, 4)
    cleaned: list[torch.Tensor] = []
    real = Masking.multiply_one_

    def noted(self: Masking, piece: torch.Tensor, i: int, value: torch.Tensor) -> None:
        cleaned.append(value)
        real(self, piece, i, value)

    monkeypatch.setattr(Masking, "multiply_one_", noted)
    for _ in range(2):
        pruner.apply_to(ema)
        case.train(pruner, optimizer, 1)
    momenta = {id(state["momentum_buffer"]) for state in optimizer.state.values()}
    assert not momenta & {id(value) for value in cleaned}
    case.train(pruner, OPTIMIZERS["sgd"](case.model.parameters()), 2)
    assert revived(pruner.blocks.weights, removed_elements(pruner)) == 0
