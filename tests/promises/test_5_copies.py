"""Promise 5: copies of frozen, baked and held models keep the zeros, under any optimizer."""

import copy

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers.training_cases import Case
from helpers.zeros import OPTIMIZERS, baked, train_plain, zeros_of


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
@pytest.mark.parametrize("variant", ["plain", "foreach", "fused"])
def test_a_deepcopy_of_a_baked_model_keeps_the_zeros(kind: str, variant: str) -> None:
    case, receipt = baked()
    twin = copy.deepcopy(case.model)
    optimizer = OPTIMIZERS[kind](twin.parameters())
    if variant != "plain":
        if variant == "fused" and kind == "rmsprop":
            pytest.skip("RMSprop has no fused form")
        optimizer = type(optimizer)(twin.parameters(), lr=0.05, weight_decay=0.01, **{variant: True})
    expected, before = receipt.weights.removed, [p.detach().clone() for p in twin.parameters()]
    for _ in range(3):
        train_plain(case, twin, optimizer, 1)
        assert zeros_of(twin, receipt) == expected
    assert any(not torch.equal(a, b) for a, b in zip(before, twin.parameters(), strict=True))
    assert sp.verify(twin, receipt=receipt).ok


def test_copies_of_copies_and_of_parts_keep_the_zeros() -> None:
    case, receipt = baked()
    second = copy.deepcopy(copy.deepcopy(case.model))
    train_plain(case, second, torch.optim.AdamW(second.parameters(), weight_decay=0.1))
    assert zeros_of(second, receipt) == receipt.weights.removed
    layer = copy.deepcopy(case.model.get_submodule("3"))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    zeros = int((layer.weight == 0).sum())
    assert zeros > 0
    for _ in range(3):
        layer(torch.randn(2, 16, 8, 8)).square().mean().backward()
        optimizer.step()
        assert int((layer.weight == 0).sum()) == zeros


def test_a_copy_and_its_model_keep_the_zeros_in_one_optimizer() -> None:
    case, receipt = baked()
    twin = copy.deepcopy(case.model)
    optimizer = torch.optim.SGD([*case.model.parameters(), *twin.parameters()], lr=0.05, momentum=0.9)
    for _ in range(3):
        (case.loss() + case.loss(twin)).backward()
        optimizer.step()
        assert zeros_of(twin, receipt) == zeros_of(case.model, receipt) == receipt.weights.removed


def test_a_copy_lets_zeros_train_after_bake_without_hold() -> None:
    case = Case("plain_cnn")
    pruner = case.attach(sp.Magnitude(), steps=1)
    case.train(pruner, case.optimizer(), 1)
    receipt = sp.bake(case.model, hold=False)
    twin = copy.deepcopy(case.model)
    train_plain(case, twin, torch.optim.SGD(twin.parameters(), lr=0.1), 1)
    assert zeros_of(twin, receipt) < receipt.weights.removed


def test_a_copy_that_gets_dense_weights_raises_at_the_first_step() -> None:
    dense = {name: value.clone() for name, value in Case("plain_cnn").model.state_dict().items()}
    case, _ = baked()
    teacher = copy.deepcopy(case.model)
    teacher.load_state_dict(dense)
    before = {name: value.clone() for name, value in teacher.state_dict().items() if "running" not in name}
    optimizer = torch.optim.SGD(teacher.parameters(), lr=0.1)
    for _ in range(2):
        case.loss(teacher).backward()
        with pytest.raises(sp.SmartpruneError, match=r"optimizer\.step\(\): a weight of shape .*hold\(model\)\.remove\(\)"):
            optimizer.step()
    assert all(torch.equal(teacher.state_dict()[name], value) for name, value in before.items() if value.is_floating_point())
    sp.hold(case.model).remove()  # of the original: the copy has its own
    with pytest.raises(sp.SmartpruneError, match="copy of a pruned model"):
        optimizer.step()
    with pytest.raises(sp.SmartpruneError, match="no zero block of 4x4"):
        sp.hold(teacher, (4, 4))
    sp.hold(teacher_with_a_zero(teacher)).remove()
    optimizer.step()


def teacher_with_a_zero(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = 0.0
    return model


@pytest.mark.parametrize("phase", ["frozen", "baked"])
def test_a_plain_model_keeps_the_zeros_after_apply_to(phase: str) -> None:
    case = Case("plain_cnn")
    plain = copy.deepcopy(case.model)
    pruner = case.attach(sp.Magnitude(), steps=1)
    case.train(pruner, case.optimizer(), 1)
    receipt = pruner.receipt()
    if phase == "baked":
        sp.bake(case.model)
    pruner.apply_to(plain)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(2):
        train_plain(case, plain, optimizer, 2)
        assert zeros_of(plain, receipt) == receipt.weights.removed
        pruner.apply_to(plain)
    assert zeros_of(case.model, receipt) == receipt.weights.removed
