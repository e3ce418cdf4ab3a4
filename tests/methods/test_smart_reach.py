"""How far the scores of SMART move: follow, reach, warmup, and the temperature of a band."""

import io
from typing import Any

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import zoo
from helpers.device_syncs import DeviceSyncs
from helpers.train_step import train_step
from smartprune.methods.method import Clock


@pytest.mark.parametrize("init", ["mean", "share"])
def test_followed_scores_equal_the_measure_of_the_current_weights(init: str) -> None:
    """With a learning rate of 0 for the scores, the weights alone determine the ranking after every step."""
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Smart(init=init, follow=True), block=(4, 4), sparsity=0.75, steps=9)
    weights = [p for p in model.parameters() if p is not pruner.parameters()[0]]
    optimizer = torch.optim.SGD([{"params": weights}, pruner.param_group(lr=0.0)], lr=0.5)
    start = pruner.scores.clone()
    for _ in range(5):
        train_step(model, x, optimizer, pruner)
        now = pruner.blocks.share() if init == "share" else pruner.blocks.mean(torch.abs)
        assert torch.allclose(pruner.scores, now, atol=1e-5)
    assert float((pruner.scores - start).abs().max()) > 1e-3


@pytest.mark.parametrize("steps", [50, 200])
def test_a_step_moves_scores_by_at_most_the_reach(steps: int) -> None:
    """The reach applies to a hundredth of the search: half a step of 50, or two steps of 200."""
    moves = {}
    for reach in (None, 0.1):
        torch.manual_seed(0)
        model, x = zoo.plain_cnn()
        pruner = sp.attach(model, sp.Smart(follow=False, reach=reach), block=(4, 4), sparsity=0.75, steps=steps)
        optimizer = torch.optim.SGD(model.parameters(), lr=10.0, momentum=0.9)
        nn.functional.cross_entropy(model(x), torch.tensor([1, 2, 3, 4])).backward()
        before, tau = pruner.scores.clone(), pruner.tau
        optimizer.step()
        pruner.step()
        moves[reach] = (pruner.scores - before) / tau
    unlimited, limited, limit = moves[None], moves[0.1], {50: 0.2, 200: 0.05}[steps]
    assert float(unlimited.abs().max()) > limit
    assert torch.allclose(limited, unlimited.clamp(-limit, limit), atol=1e-4)


@pytest.mark.parametrize(
    "method",
    [
        sp.Smart(init="share", follow=True, reach=0.05, ramp="cubic", start=0.5),
        sp.Smart(unit="band", start=0.1, end=0.01, init="balanced", reach=2.0, ramp="cubic", gain=True),
    ],
    ids=["share", "band"],
)
@pytest.mark.parametrize(("steps", "run", "stop"), [(9, 8, 4), (12, 12, 7)])
def test_resume_with_follow_and_reach_is_bit_exact(method: sp.Smart, steps: int, run: int, stop: int) -> None:
    results = []
    for resume_at in (None, stop):
        torch.manual_seed(0)
        model, x = zoo.plain_cnn()
        pruner = sp.attach(model, method, block=(4, 4), sparsity=0.75, steps=steps)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(run):
            if step == resume_at:
                states = save_and_load([part.state_dict() for part in (model, pruner, optimizer)])
                model, _ = zoo.plain_cnn()
                pruner = sp.attach(model, method, block=(4, 4), sparsity=0.75, steps=steps)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for part, state in zip((model, pruner, optimizer), states, strict=True):
                    part.load_state_dict(state)
            train_step(model, x, optimizer, pruner)
        results.append((pruner.scores, pruner.mask, model[3].weight.detach().clone()))
    for uninterrupted, resumed in zip(*results, strict=True):
        assert torch.equal(uninterrupted, resumed)


def save_and_load(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_the_reach_grows_during_the_warmup() -> None:
    """With a huge learning rate, scores move by a quarter, half, three quarters and then all of the reach."""
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Smart(follow=False, reach=0.1, warmup=0.2), block=(4, 4), sparsity=0.75, steps=20)
    optimizer = torch.optim.SGD(pruner.parameters(), lr=1e6)
    moved = []
    for _ in range(6):
        before, tau = pruner.scores.clone(), pruner.tau
        nn.functional.cross_entropy(model(x), torch.tensor([1, 2, 3, 4])).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
        moved.append(float((pruner.scores - before).abs().max() / tau))
    assert moved == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5], rel=1e-3)


@pytest.mark.parametrize("method", [sp.Smart(init="ones"), sp.Smart(train_weights=False)])
def test_reach_does_not_limit_scores_with_nothing_to_follow(method: sp.Smart) -> None:
    """Every step moves each score far in one direction. With a limit, scores that start equal would end equal."""
    model, _ = zoo.plain_cnn()
    pruner = sp.attach(model, method, block=(4, 4), sparsity=0.75, steps=40)
    (scores,) = pruner.parameters()
    push = torch.randn(scores.numel(), generator=torch.Generator().manual_seed(3)) * 10 * pruner.tau
    for _ in range(40):
        with torch.no_grad():
            scores += push
        pruner.step()
    assert pruner.phase == "frozen"
    assert set(pruner.mask.nonzero().flatten().tolist()) == set(push.topk(pruner.plan.limit).indices.tolist())


def test_a_warmup_needs_a_reach() -> None:
    model, _ = zoo.plain_cnn()
    for method, message in (
        (sp.Smart(reach=None, warmup=0.1), r"warmup=0\.1 needs a reach, and there is none"),
        (sp.Smart(init="ones", warmup=0.1), r"warmup=0\.1 needs a reach, and there is none"),
        (sp.Smart(train_weights=False, warmup=0.1), r"warmup=0\.1 needs a reach, and there is none"),
        (sp.Smart(warmup=1.5), "Smart: warmup"),
    ):
        with pytest.raises(sp.SmartpruneError, match=message):
            sp.attach(model, method, block=(4, 4), sparsity=0.75, steps=9)


@pytest.mark.parametrize("budget", [None, sp.params(0.75)], ids=["blocks", "params"])
def test_a_band_contains_its_share_of_the_kept_blocks(budget: Any) -> None:
    """The temperature is half the distance between two scores, one on either side of the threshold, in a sorted list."""
    model, x = zoo.plain_cnn()
    method = sp.Smart(unit="band", start=0.5, end=0.1, ramp="cubic")
    budgets: dict[str, object] = {"sparsity": 0.75} if budget is None else {"budget": budget}
    pruner = sp.attach(model, method, block=(4, 4), steps=8, **budgets)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(7):
        train_step(model, x, optimizer, pruner)
        limit = method.scalars(pruner.blocks, pruner.search.values(), pruner.progress)["limit"]
        kept = pruner.plan.n * limit / pruner.blocks.total
        half = max(1, round(0.5 * 0.5 * (0.1 / 0.5) ** pruner.progress * kept))
        order = sorted(pruner.scores.tolist(), reverse=True)
        high, low = order[max(0, round(kept) - 1 - half)], order[min(pruner.plan.n - 1, round(kept) - 1 + half)]
        assert pruner.tau == pytest.approx((high - low) / 2, rel=1e-4)


def test_a_band_of_equal_scores_has_a_positive_temperature() -> None:
    model = nn.Sequential(nn.Linear(30, 50, bias=False), nn.Linear(50, 7, bias=False))
    for layer in model:
        nn.init.constant_(layer.weight, 0.25)
    pruner = sp.attach(model, sp.Smart(unit="band", start=0.1, end=0.01), block=(16, 8), sparsity=0.8, steps=50, include="*")
    assert 0 < pruner.tau < 1e-6
    assert torch.isfinite(pruner.mask).all()


def test_updating_a_band_does_not_synchronize() -> None:
    model = zoo.plain_cnn()[0]
    method = sp.Smart(unit="band", start=0.1, end=0.01, init="balanced", ramp="cubic")
    pruner = sp.attach(model, method, block=(4, 4), sparsity=0.75, steps=10)
    model.to("meta")
    pruner.search.to_device()
    with DeviceSyncs() as syncs:
        method.update(pruner.blocks, pruner.search.values(), Clock(3, 10))
    assert syncs.operations == []


@pytest.mark.parametrize("changes", [{"reach": None}, {"init": "ones"}, {"train_weights": False}])
def test_a_band_needs_a_reach(changes: dict[str, object]) -> None:
    model, _ = zoo.plain_cnn()
    with pytest.raises(sp.SmartpruneError, match="unit='band' needs a reach, and there is none"):
        sp.attach(model, sp.Smart(unit="band", **changes), block=(4, 4), sparsity=0.75, steps=9)  # type: ignore[arg-type]
