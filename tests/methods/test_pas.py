"""PaS: gradients, the penalty, and the final mask."""

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import zoo
from helpers.slow_blocks import best
from helpers.training_cases import MethodCase
from smartprune.methods import find_strength


def test_straight_through_gradients_and_penalty() -> None:
    job = MethodCase("pas", "plain_cnn", steps=50)
    pruner = job.pruner
    (gates,) = pruner.parameters()
    with torch.no_grad():
        gates[::2] = 0.4  # every other block is off
    mask = pruner.mask
    assert mask.tolist() == [1.0 if g > 0.5 else 0.0 for g in gates.tolist()]
    nn.functional.cross_entropy(job.model(job.x), job.y).backward()
    assert float(gates.grad[::2].abs().sum()) > 0  # gates of removed blocks learn
    gates.grad = None
    pruner.penalty().backward()
    share, wanted = float(mask.mean()), pruner.plan.limit / pruner.plan.n
    assert gates.grad.tolist() == pytest.approx([2 * 100.0 * (share - wanted) / pruner.plan.n] * pruner.plan.n, rel=1e-4)


def test_exact_keeps_the_highest_scores() -> None:
    job = MethodCase("pas", "plain_cnn", steps=10).run(9)
    gates = job.pruner.scores.tolist()
    job.pruner.freeze()
    assert set(job.pruner.mask.nonzero().flatten().tolist()) == best(gates, job.pruner.plan.keep)


def test_without_exact_the_receipt_reports_a_missed_budget() -> None:
    torch.manual_seed(0)
    model, _ = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Pas(exact=False, strength=0.0), block=(4, 4), sparsity=0.8, steps=2)
    pruner.freeze()
    receipt = sp.bake(model)
    assert not receipt.met
    assert "NOT" in str(receipt)
    assert receipt.blocks.kept == pruner.plan.n


def test_missing_penalty_raises() -> None:
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Pas(), block=(4, 4), sparsity=0.8, steps=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    with pytest.raises(sp.SmartpruneError, match=r"pruner\.penalty\(\) was not called in this step; add it to the loss"):
        pruner.step()


def test_find_strength() -> None:
    strength, tried = find_strength(lambda s: 1 / (1 + s / 37), wanted=0.2, tolerance=0.004, trials=8)
    assert strength is not None
    assert abs(1 / (1 + strength / 37) - 0.2) <= 0.004
    assert len(tried) <= 8
    missed, tried = find_strength(lambda s: 1.0 if s < 300 else 0.0, wanted=0.1)
    assert missed is None
    assert len(tried) == 6
