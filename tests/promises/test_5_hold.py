"""Promise 5: ``hold`` keeps the zeros of any model, also of a loaded one, a copy, and one under quantization-aware training."""

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers.training_cases import Case
from helpers.zeros import OPTIMIZERS, baked, train_plain, zeros_of


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
