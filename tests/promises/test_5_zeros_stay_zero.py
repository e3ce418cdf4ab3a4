"""Promise 5: removed blocks of frozen and baked models, and of their copies, stay zero under any optimizer, EMA and QAT."""

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import smartprune as sp
from helpers.training_cases import Case, removed_elements
from smartprune.pruning.multiply import BlockMultiplier

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=1e-1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


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


# -- copies ---------------------------------------------------------------------------------------------------------------


def baked(method: object = None, **options: object) -> tuple[Case, sp.Receipt]:
    case = Case("plain_cnn")
    pruner = case.attach(method or sp.Magnitude(), steps=1, **options)
    case.train(pruner, case.optimizer(), 1)
    return case, sp.bake(case.model)


def zeros_of(model: nn.Module, receipt: sp.Receipt) -> int:
    """Zero elements of the pruned layers, counted without smartprune."""
    weights = dict(model.named_parameters())
    return sum(int((weights[row.weight] == 0).sum()) for row in receipt.layers)


def train_plain(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        case.loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()


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


# -- hold -----------------------------------------------------------------------------------------------------------------


def loaded(case: Case) -> nn.Module:
    """A new model with the weights of a baked one, as from a file."""
    model = Case("plain_cnn").model
    model.load_state_dict(case.model.state_dict())
    return model


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
@pytest.mark.parametrize("how", ["receipt", "block", "elements"])
def test_hold_keeps_the_zeros_of_a_loaded_model(kind: str, how: str) -> None:
    case, receipt = baked()
    model = loaded(case)
    lost = loaded(case)
    train_plain(case, lost, OPTIMIZERS[kind](lost.parameters()), 1)
    assert zeros_of(lost, receipt) < receipt.weights.removed  # without hold
    keys = list(model.state_dict())
    handle = sp.hold(model, {"receipt": receipt, "block": (4, 4), "elements": None}[how])
    assert list(model.state_dict()) == keys
    train_plain(case, model, OPTIMIZERS[kind](model.parameters()))
    assert zeros_of(model, receipt) == receipt.weights.removed
    assert sp.verify(model, receipt=receipt).ok
    assert f"{receipt.weights.removed:,}" in repr(handle)
    handle.remove()
    train_plain(case, model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    assert zeros_of(model, receipt) < receipt.weights.removed


def test_hold_counts_what_it_holds() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv2d(8, 4, 3), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight[:4, :4] = 0.0
        model[1].weight[:, :, 1, 1] = 0.0
        model[2].weight.zero_()
    handle = sp.hold(model, (4, 4))
    assert repr(handle) == "<Hold: 4 zero blocks of 4x4x1x1 in 3 layers, 64 weights; all zero: 2>"
    assert handle.blocks == {"0": 1, "1": 2, "2": 1}
    assert repr(sp.hold(model)) == "<Hold: 64 zero weights in 3 layers; all zero: 2>"


def test_two_optimizers_keep_the_zeros_of_a_held_model() -> None:
    case, receipt = baked()
    model = loaded(case)
    sp.hold(model, receipt)
    first, second = list(model[:6].parameters()), list(model[6:].parameters())
    one = torch.optim.SGD(first, lr=0.1, momentum=0.9, weight_decay=0.1)
    two = torch.optim.AdamW(second, lr=1e-2, weight_decay=0.1)
    for i in range(6):
        case.loss(model).backward()
        (one, two)[i % 2].step()
        model.zero_grad()
        assert zeros_of(model, receipt) == receipt.weights.removed


def test_an_average_of_a_held_model_keeps_the_zeros_when_it_trains() -> None:
    case, receipt = baked()
    model = loaded(case)
    sp.hold(model, receipt)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        train_plain(case, model, optimizer, 1)
        average.update_parameters(model)
    train_plain(case, average, torch.optim.SGD(average.parameters(), lr=0.1))
    assert zeros_of(average.module, receipt) == receipt.weights.removed


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_of_a_held_model_keep_the_zeros(how: str) -> None:
    case, receipt = baked()
    model = loaded(case)
    handle = sp.hold(model, receipt)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    handle.remove()  # does not reach the copy
    train_plain(case, twin, torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9))
    assert zeros_of(twin, receipt) == receipt.weights.removed
    sp.hold(twin, receipt).remove()
    train_plain(case, twin, torch.optim.SGD(twin.parameters(), lr=0.1), 1)
    assert zeros_of(twin, receipt) < receipt.weights.removed


def test_a_held_model_loads_and_keeps_the_zeros_in_a_new_process(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].weight[:4] = 0.0
    sp.hold(model, (4, 4))
    torch.save(model, tmp_path / "held.pt")
    script = """
import sys, torch
model = torch.load(sys.argv[1], weights_only=False)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(3, 8)).square().sum().backward()
    optimizer.step()
print(int((model[0].weight == 0).sum()))
"""
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path / "held.pt")], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "32"


def test_a_pickled_baked_model_needs_no_smartprune() -> None:
    case, _ = baked()
    assert b"smartprune" not in pickle.dumps(case.model)


def test_hold_follows_weights_that_are_replaced() -> None:
    case, receipt = baked()
    model = loaded(case)
    sp.hold(model, receipt)
    model.load_state_dict({name: value.clone() for name, value in case.model.state_dict().items()}, assign=True)
    train_plain(case, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert zeros_of(model, receipt) == receipt.weights.removed


def test_hold_of_tied_and_transposed_and_grouped_weights() -> None:
    model = nn.ModuleDict(
        {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "t": nn.ConvTranspose2d(8, 6, 3), "g": nn.Conv2d(8, 8, 3, groups=2)}
    )
    model["b"].weight = model["a"].weight
    with torch.no_grad():
        model["a"].weight[:4] = 0.0
        model["t"].weight[4:, :3] = 0.0
        model["g"].weight[4:] = 0.0
    handle = sp.hold(model, (3, 4))
    assert handle.blocks == {"a": 2, "t": 9, "g": 18}  # rows 3 to 5 of a are not all zero; groups of g are divided on their own
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    zeros = [int((p == 0).sum()) for group in optimizer.param_groups for p in group["params"] if p.dim() > 1]
    assert zeros == [24, 4 * 3 * 9, 4 * 4 * 9]


QUANTIZATION = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Please use quant_min:UserWarning")  # of PyTorch


@pytest.mark.parametrize("qconfig", ["eager", "fx"])
@QUANTIZATION
def test_hold_keeps_the_zeros_of_a_model_under_quantization_aware_training(qconfig: str) -> None:
    quantization = pytest.importorskip("torch.ao.quantization", reason="PyTorch without eager quantization")
    case, receipt = baked()
    model = loaded(case).train()
    if qconfig == "eager":
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        model = quantization.prepare_qat(model)
    else:
        fx = pytest.importorskip("torch.ao.quantization.quantize_fx", reason="PyTorch without FX quantization")
        model = fx.prepare_qat_fx(model, quantization.get_default_qat_qconfig_mapping("fbgemm"), (case.x,))
    handle = sp.hold(model, receipt.block)
    assert sum(handle.blocks.values()) == receipt.blocks.removed
    before = sorted(int((p == 0).sum()) for p in model.parameters() if p.dim() > 1)
    train_plain(case, model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
    assert sorted(int((p == 0).sum()) for p in model.parameters() if p.dim() > 1) == before


@QUANTIZATION
def test_a_baked_model_prepared_for_quantization_keeps_the_zeros() -> None:
    """``prepare_qat`` copies the model and replaces its modules."""
    quantization = pytest.importorskip("torch.ao.quantization", reason="PyTorch without eager quantization")
    case, receipt = baked()
    case.model.train().qconfig = quantization.get_default_qat_qconfig("fbgemm")
    model = quantization.prepare_qat(case.model)
    train_plain(case, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert zeros_of(model, receipt) == receipt.weights.removed


def test_attach_replaces_a_hold() -> None:
    case, receipt = baked()
    model = loaded(case)
    sp.hold(model, receipt)
    case.model = model
    pruner = case.attach(sp.Gradual(), steps=9)
    case.train(pruner, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    stored = {layer.weight: weight for layer, weight in zip(pruner.plan.layers, pruner.blocks.weights, strict=True)}
    assert sum(int((weight == 0).sum()) for weight in stored.values()) < receipt.weights.removed
    pruner.freeze()
    again = sp.bake(model)
    assert not [name for module in model.modules() for name in module.__dict__ if "smartprune" in name]
    train_plain(case, model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    assert zeros_of(model, again) == again.weights.removed


def test_hold_refuses_what_it_cannot_hold() -> None:
    _, receipt = baked()
    dense = Case("plain_cnn").model
    with pytest.raises(sp.SmartpruneError, match=r"hold: the model has no zero block of 4x4x1x1; load the pruned weights first"):
        sp.hold(dense, (4, 4))
    with pytest.raises(sp.SmartpruneError, match=r"hold: 3\.weight has \d+ blocks that are not zero and that the receipt lists"):
        sp.hold(dense, receipt)
    with pytest.raises(sp.SmartpruneError, match=r"hold: 3\.weight is \S+ in the receipt and not in the model; give the receipt"):
        sp.hold(nn.Linear(4, 4), receipt)
    with pytest.raises(sp.SmartpruneError, match="hold: model is a dict"):
        sp.hold({})  # type: ignore[arg-type]
    other = Case("plain_cnn")
    other.attach(sp.Magnitude())
    with pytest.raises(sp.SmartpruneError, match=r"hold: \d+ has a pruner.*bake first"):
        sp.hold(other.model)


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
