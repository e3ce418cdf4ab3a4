"""Promise 6: resuming a training loop is bit-exact. (tests/training/test_resume.py kills real processes.)"""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers.training_cases import Case
from smartprune.pruning.lookup import find_pruner

METHODS = [sp.Smart(), sp.Smart(mask_type="stochastic"), sp.Smart(ramp="cubic", clip=1.0), sp.Magnitude()]


def save(case: Case, pruner: sp.Pruner, optimizer: torch.optim.Optimizer) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save({"m": case.model.state_dict(), "p": pruner.state_dict(), "o": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.name}-{getattr(m, 'mask_type', '')}-{getattr(m, 'ramp', '')}")
def test_resuming_from_state_dicts_is_bit_exact(small: Case, method: object, stop: int) -> None:
    pruner = small.attach(method, steps=4)
    optimizer = small.optimizer()
    small.train(pruner, optimizer, stop)
    file = save(small, pruner, optimizer)
    small.train(pruner, optimizer, 7 - stop)

    resumed = Case(small.name)
    other = resumed.attach(method, steps=4)
    opt = resumed.optimizer()
    state = torch.load(file, weights_only=True)
    resumed.model.load_state_dict(state["m"])
    other.load_state_dict(state["p"])
    opt.load_state_dict(state["o"])
    resumed.train(other, opt, 7 - stop)

    assert torch.equal(pruner.mask, other.mask)
    for (name, a), b in zip(small.model.state_dict().items(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert str(sp.bake(small.model)) == str(sp.bake(resumed.model))


def test_states_of_other_methods_and_lengths_are_refused() -> None:
    pruner = Case("plain_cnn").attach(steps=4)
    with pytest.raises(sp.SmartpruneError, match=r"steps=4, this one 5"):
        Case("plain_cnn").attach(steps=5).load_state_dict(pruner.state_dict())
    with pytest.raises(sp.SmartpruneError, match=r"not the state of a pruner"):
        pruner.load_state_dict({"a": 1})
    with pytest.raises(sp.SmartpruneError, match=r"method='smart', this one 'magnitude'"):
        Case("plain_cnn").attach(sp.Magnitude(), steps=4).load_state_dict(pruner.state_dict())


SCHEDULED_METHODS = [
    sp.Acdc(cycles=2, cap="off"),
    sp.Awg(stages=2, cap="off"),
    sp.Gradual(),
    sp.Pdp(),
    sp.Pas(),
    sp.Smart(gain=True),
]


def setup(method: object, base: dict[str, torch.Tensor]) -> tuple[nn.Sequential, sp.Pruner, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 4))
    model.load_state_dict(base)
    pruner = sp.attach(model, method, block=(4, 4), sparsity=0.7, include="*", steps=16)  # type: ignore[arg-type]
    return model, pruner, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def train(model: nn.Module, pruner: sp.Pruner, optimizer: torch.optim.Optimizer, steps: int) -> None:
    x = torch.linspace(-1, 1, 16 * 12).sin().reshape(16, 12)
    for _ in range(steps):
        (model(x).square().mean() + pruner.penalty()).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("whole", [False, True], ids=["states", "whole"])
@pytest.mark.parametrize("method", SCHEDULED_METHODS, ids=lambda method: str(method.name))
def test_resuming_after_any_step_is_bit_exact(method: object, whole: bool) -> None:
    """Including steps after which the optimizer drops its momentum, and steps that change no weight."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 4)).state_dict()
    for stop in range(1, 16):
        first = setup(method, base)
        train(*first, stop)
        if whole:
            model = copy.deepcopy(first[0])
            pruner = find_pruner(model)
            assert pruner is not None
            second = (model, pruner, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
            second[2].load_state_dict(copy.deepcopy(first[2].state_dict()))
        else:
            states = copy.deepcopy([part.state_dict() for part in first])
            second = setup(method, base)
            for part, state in zip(second, states, strict=True):
                part.load_state_dict(state)
        train(*first, 18 - stop)
        train(*second, 18 - stop)
        for (name, a), b in zip(first[0].state_dict().items(), second[0].state_dict().values(), strict=True):
            assert torch.equal(a, b), (name, stop)


def test_a_frozen_pruner_can_load_a_state_of_the_search() -> None:
    """The frozen mask no longer applies afterwards."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 4)).state_dict()
    parts = setup(sp.Gradual(), base)
    train(*parts, 2)
    states = copy.deepcopy([part.state_dict() for part in parts])
    train(*parts, 16)
    before = [part.clone() for part in parts[0].state_dict().values()]
    assert parts[1].phase == "frozen"
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    train(*parts, 1)
    assert parts[1].phase == "search"
    assert not any(bool((weight == 0).any()) for weight in parts[1].blocks.weights)
    train(*parts, 15)
    assert all(torch.equal(a, b) for a, b in zip(before, parts[0].state_dict().values(), strict=True))


def test_states_of_other_settings_and_damaged_states_are_refused() -> None:
    def state(block: tuple[int, int] = (4, 2), method: object = sp.Magnitude()) -> tuple[sp.Pruner, dict[str, Any]]:
        model = nn.Linear(16, 16)
        pruner = sp.attach(model, method, block=block, sparsity=0.5, include="*", steps=4)  # type: ignore[arg-type]
        return pruner, pruner.state_dict()

    pruner, good = state()
    pruner.load_state_dict(good)
    with pytest.raises(sp.SmartpruneError, match="block='2x4x1x1', this one '4x2x1x1'"):
        pruner.load_state_dict(state((2, 4))[1])
    with pytest.raises(sp.SmartpruneError, match=r"settings=.*l2"):
        pruner.load_state_dict(state(method=sp.Magnitude(norm="l2"))[1])
    with pytest.raises(sp.SmartpruneError, match="not the state of a pruner"):
        pruner.load_state_dict({**good, "format": torch.ones(3)})
    for wrong in ({"mask": 3}, {"tensors": []}, {"count": -1}, {"side": torch.ones(3)}, {"tensors": {"mask": 3}}):
        with pytest.raises(sp.SmartpruneError, match="damaged"):
            pruner.load_state_dict({**good, **wrong})
    smart, learned = state(method=sp.Smart())
    with pytest.raises(sp.SmartpruneError, match="no 'scores'"):
        smart.load_state_dict({**learned, "tensors": {k: v for k, v in learned["tensors"].items() if k != "scores"}})
    for name in ("block", "settings", "forgets"):
        with pytest.raises(sp.SmartpruneError, match="damaged"):
            smart.load_state_dict({k: v for k, v in learned.items() if k != name})


def test_load_state_dict_cancels_a_pending_momentum_reset() -> None:
    """The loaded optimizer state is kept, although the pruner was about to drop momentum."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 4)).state_dict()
    method = sp.Acdc(cycles=2, cap="off")
    straight = setup(method, base)
    train(*straight, 3)
    states = copy.deepcopy([part.state_dict() for part in straight])
    train(*straight, 13)
    parts = setup(method, base)
    train(*parts, 4)  # requests the reset
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    train(*parts, 13)
    for a, b in zip(straight[0].state_dict().values(), parts[0].state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_copy_trains_with_a_closure_like_the_original() -> None:
    """The first forward pass of the copy happens inside optimizer.step()."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 4)).state_dict()
    first = setup(sp.Acdc(cycles=2, cap="off"), base)
    train(*first, 4)
    model = copy.deepcopy(first[0])
    pruner = find_pruner(model)
    assert pruner is not None
    second = (model, pruner, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    second[2].load_state_dict(copy.deepcopy(first[2].state_dict()))
    x = torch.linspace(-1, 1, 16 * 12).sin().reshape(16, 12)
    for net, pruner, optimizer in (first, second):
        for _ in range(3):

            def closure(net: nn.Module = net, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = net(x).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
            pruner.step()
    for a, b in zip(first[0].state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def three_layers(**options: object) -> tuple[nn.Module, sp.Pruner]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    return model, sp.attach(model, sp.Smart(), block=(8, 4), steps=4, **{"sparsity": 0.8, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("saved", "loaded", "match"),
    [
        ({"skip": "2"}, {"skip": "0"}, r"layers='0\.weight: 32 blocks', this one '2\.weight: 32 blocks'; attach with"),
        ({"floor": 0.1}, {}, r"floor=0\.1, this one 0\.0"),
        ({"sparsity": None, "budget": sp.params(0.8)}, {}, r"budget='params of layers', this one 'blocks of layers'|limit="),
    ],
)
def test_states_of_other_layers_floors_and_budgets_are_refused(saved: dict[str, Any], loaded: dict[str, Any], match: str) -> None:
    """The number of blocks is the same, so only the description of the search differs."""
    _, pruner = three_layers(**saved)
    model, other = three_layers(**loaded)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(sp.SmartpruneError, match=match):
        other.load_state_dict(pruner.state_dict())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    _, same = three_layers(**loaded)
    for name in ("layers", "floor", "budget", "measured"):
        state = same.state_dict()
        state.pop(name)
        with pytest.raises(sp.SmartpruneError, match="the state is damaged"):
            other.load_state_dict(state)


def test_a_state_of_a_wrapped_model_loads_into_a_plain_one() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"block": (8, 4), "sparsity": 0.8, "steps": 4}
    wrapped = nn.DataParallel(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)))
    pruner = sp.attach(wrapped, sp.Smart(), **options)
    plain = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    other = sp.attach(plain, sp.Smart(), **options)
    other.load_state_dict(pruner.state_dict())
    assert torch.equal(other.mask, pruner.mask)


@pytest.mark.parametrize("stop", [2, 5])
def test_telemetry_is_restored(stop: int) -> None:
    case = Case("plain_cnn")
    pruner = case.attach(steps=4)
    optimizer = case.optimizer()
    case.train(pruner, optimizer, stop)
    telemetry = pruner.telemetry()
    assert sum(telemetry["kept"].values()) > 0
    resumed = Case("plain_cnn")
    other = resumed.attach(steps=4)
    resumed.model.load_state_dict(case.model.state_dict())
    other.load_state_dict(torch.load(save(case, pruner, optimizer), weights_only=True)["p"])
    assert other.telemetry() == telemetry
