"""Promise 6, for a user's own loop: stop anywhere, resume, and end with the same bits. (Real kills:
tests/test_resume.py.)"""

import io

import pytest
import torch

import smartprune as sp
from conftest import Case

METHODS = [sp.Smart(), sp.Smart(mask_type="stochastic"), sp.Smart(ramp="cubic", clip=1.0), sp.Magnitude()]


def save(case: Case, pruner: sp.Pruner, optimizer: torch.optim.Optimizer) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save({"m": case.model.state_dict(), "p": pruner.state_dict(), "o": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.name}-{getattr(m, 'mask_type', '')}-{getattr(m, 'ramp', '')}")
def test_interrupted_is_uninterrupted(small: Case, method: object, stop: int) -> None:
    pruner = small.attach(method, steps=4)
    optimizer = small.optimizer()
    small.train(pruner, optimizer, stop)
    file = save(small, pruner, optimizer)
    small.train(pruner, optimizer, 7 - stop)

    again = Case(small.name)
    other = again.attach(method, steps=4)
    opt = again.optimizer()
    state = torch.load(file, weights_only=True)
    again.model.load_state_dict(state["m"])
    other.load_state_dict(state["p"])
    opt.load_state_dict(state["o"])
    again.train(other, opt, 7 - stop)

    assert torch.equal(pruner.mask, other.mask)
    for (name, a), b in zip(small.model.state_dict().items(), again.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert str(sp.bake(small.model)) == str(sp.bake(again.model))


def test_wrong_state_is_refused() -> None:
    pruner = Case("plain_cnn").attach(steps=4)
    with pytest.raises(sp.SmartpruneError, match=r"steps=4, this one 5"):
        Case("plain_cnn").attach(steps=5).load_state_dict(pruner.state_dict())
    with pytest.raises(sp.SmartpruneError, match=r"not the state of a pruner"):
        pruner.load_state_dict({"a": 1})
    with pytest.raises(sp.SmartpruneError, match=r"method='smart', this one 'magnitude'"):
        Case("plain_cnn").attach(sp.Magnitude(), steps=4).load_state_dict(pruner.state_dict())
