"""PDP against slow loops."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import zoo
from helpers.slow_blocks import best, slow_norms
from helpers.training_cases import MethodCase
from smartprune.methods.pdp import apportion


def test_mask_follows_norms_within_each_layer() -> None:
    job = MethodCase("pdp", "plain_cnn", steps=100)
    job.run(90)  # the ramp is over
    pruner = job.pruner
    norms, mask = slow_norms(pruner), pruner.mask.tolist()
    keep = [int(k) for k in pruner.search.values()["keep"].tolist()]
    assert sum(keep) == pruner.plan.keep
    for layer, k in zip(pruner.plan.layers, keep, strict=True):
        layer_norms = norms[layer.start : layer.stop]
        ranked = sorted(layer_norms, reverse=True)
        t = (ranked[k - 1] + ranked[k]) / 2 if k < layer.n else None
        for norm, value in zip(layer_norms, mask[layer.start : layer.stop], strict=True):
            expected = 1.0 if t is None else 1 / (1 + math.exp(min(50, max(-50, -(norm**2 - t**2) / 1e-4))))
            assert value == pytest.approx(expected, abs=2e-3)
        assert sum(value > 0.5 for value in mask[layer.start : layer.stop]) == k


def test_gradient_has_both_terms() -> None:
    """dL/dw = M h + (2 w / tau) M (1 - M) <h, w>, with the border held fixed."""
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False)).double()
    pruner = sp.attach(model, sp.Pdp(tau=0.5), block=(4, 3), sparsity=0.5, steps=10)
    pruner.search.count = 10
    pruner.search.advance()
    x = torch.randn(5, 6).double()
    model(x).square().sum().backward()
    weight, layer = model[0]._parameters["weight"], pruner.plan.layers[0]
    w = weight.detach()
    mask = pruner.mask.double()
    wide = layer.grid.expand(mask)
    product = (w * wide).requires_grad_()
    nn.functional.linear(nn.functional.linear(x, product), model[1].weight).square().sum().backward()
    h = product.grad
    inner = layer.grid.expand(layer.grid.sum(h * w))
    expected = wide * h + (2 * w / 0.5) * wide * (1 - wide) * inner
    assert torch.allclose(weight.grad, expected, rtol=1e-4, atol=1e-6)


def test_sparsity_rises_over_the_first_four_fifths() -> None:
    job = MethodCase("pdp", "plain_cnn", steps=50)
    pruner = job.pruner
    for count, share in ((0, 0.0), (20, 0.5), (40, 1.0), (49, 1.0)):
        pruner.search.count = count
        pruner.search.advance()
        kept = int((pruner.mask > 0.5).sum())
        assert abs(kept - (pruner.plan.n - share * (pruner.plan.n - pruner.plan.keep))) <= len(pruner.plan.layers)


@pytest.mark.parametrize("sizes", [[100, 10, 1], [7, 7, 7], [1000, 3, 2, 1, 64], [5], [1] * 30])
@pytest.mark.parametrize("share", [Fraction(3, 100), Fraction(1, 3), Fraction(1, 2), Fraction(9, 10)])
def test_apportion_uses_every_block(sizes: list[int], share: Fraction) -> None:
    counts = apportion(sizes, share)
    seats = math.floor(share * sum(sizes))
    assert sum(counts) == seats
    assert all(0 <= count <= size for count, size in zip(counts, sizes, strict=True))
    if seats >= len(sizes):
        assert min(counts) >= 1


def test_apportion_rounds_by_largest_remainder() -> None:
    assert apportion([9, 1015, 1016], Fraction(1, 10)) == [1, 101, 102]
    draw = torch.Generator().manual_seed(0)
    for _ in range(200):
        sizes = torch.randint(1, 60, (int(torch.randint(1, 8, (1,), generator=draw)),), generator=draw).tolist()
        share = Fraction(int(torch.randint(1, 99, (1,), generator=draw)), 100)
        counts, seats = apportion(sizes, share), math.floor(share * sum(sizes))
        assert sum(counts) == seats
        assert all(0 <= count <= size for count, size in zip(counts, sizes, strict=True))
        if seats >= len(sizes):  # no layer gets more than the next whole number, or the one block that is guaranteed
            assert all(1 <= count <= max(1, math.ceil(share * size)) for count, size in zip(counts, sizes, strict=True))


def test_global_once_uses_one_global_choice() -> None:
    torch.manual_seed(0)
    model, _ = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Pdp(allocation="global_once"), block=(4, 4), sparsity=0.8, steps=10)
    chosen = best(slow_norms(pruner), pruner.plan.keep)
    expected = [sum(layer.start <= i < layer.stop for i in chosen) for layer in pruner.plan.layers]
    assert pruner.search.values()["keep"].tolist() == expected


def test_every_layer_keeps_its_floor() -> None:
    """Of layers of 3, 3 and 20 blocks: half of 3 is 1 or 2, and the floor is 2. The hard mask keeps what the soft mask keeps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1), nn.Linear(1, 20))
    pruner = sp.attach(model, sp.Pdp(tau=1e-6), block=(1, 1), sparsity=0.54, floor=0.34, include="*", steps=4)
    pruner.search.count = 4
    pruner.search.advance()
    soft = pruner.mask > 0.5
    assert [int(part.sum()) for part in soft.split([3, 3, 20])] == [2, 2, 8]
    pruner.freeze()
    assert torch.equal(pruner.mask, soft)


@pytest.mark.parametrize("kind", ["orthogonal", "zeros", "equal"])
def test_shares_are_exact_when_norms_tie(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            if kind == "orthogonal":
                nn.init.orthogonal_(layer.weight)
            elif kind == "equal":
                layer.weight.fill_(0.1)
        if kind == "zeros":
            model[0].weight[:28] = 0.0
    pruner = sp.attach(model, sp.Pdp(), block=(1, None), sparsity=0.75, include="*", steps=4)
    pruner.freeze()
    assert [int(part.sum()) for part in pruner.mask.split(32)] == [8, 8]
