"""The cap per layer of AC/DC and AWG."""

import copy
import math
from fractions import Fraction

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import zoo
from smartprune.methods.cap import capped_floor, least


@pytest.mark.parametrize("cls", [sp.Acdc, sp.Awg])
def test_cap_is_checked_at_attach(cls: type) -> None:
    model, _ = zoo.plain_cnn()  # 180 and 15 blocks
    with pytest.raises(sp.SmartpruneError, match=r"mspl=0\.5 needs 98 blocks, the budget keeps 20.*cap='relax'"):
        sp.attach(model, cls(mspl=0.5), block=(4, 4), sparsity=0.9, steps=40)
    for cap in ("relax", "off"):
        torch.manual_seed(0)
        model, _ = zoo.plain_cnn()
        pruner = sp.attach(model, cls(mspl=0.5, cap=cap), block=(4, 4), sparsity=0.9, steps=40)
        assert pruner.plan.keep == 20
    with pytest.raises(sp.SmartpruneError, match=r"cap='maybe' is not known; it can be: strict, relax, off"):
        sp.attach(zoo.plain_cnn()[0], cls(cap="maybe"), block=(4, 4), sparsity=0.9, steps=40)


def test_cap_counts() -> None:
    model, _ = zoo.plain_cnn()
    blocks = sp.plan(model, block=(4, 4), sparsity=0.9).blocks(model)
    assert least(blocks, 0.98).tolist() == [layer.n - math.floor(Fraction("0.98") * layer.n) for layer in blocks.layers]
    relaxed = capped_floor(blocks, 0.5, "relax")
    assert relaxed is not None
    assert int(relaxed.sum()) <= blocks.limit
    assert int(relaxed.min()) >= 1
    assert capped_floor(blocks, 0.5, "off") is None


def test_relaxed_cap_leaves_room_for_the_floor() -> None:
    """Ten layers of 3 blocks and one of 100: the floor takes 2 and 34, a cap of 0.6 takes 1 and 60; together they are too many."""
    model = nn.Sequential(*(nn.Linear(1, 3) if i % 2 == 0 else nn.Linear(3, 1) for i in range(10)), nn.Linear(1, 100))
    for cls in (sp.Acdc, sp.Awg):
        job = copy.deepcopy(model)
        pruner = sp.attach(job, cls(2, mspl=0.0, cap="relax"), block=(1, 1), sparsity=0.423, floor=0.34, steps=8, include="*")
        assert pruner.plan.keep == 76
        optimizer = torch.optim.SGD(job.parameters(), 0.01)
        for _ in range(8):
            job(torch.ones(4, 1)).square().mean().backward()
            optimizer.step()
            pruner.step()
            optimizer.zero_grad()
        kept = [int(part.sum()) for part in pruner.mask.split([3] * 10 + [100])]
        assert sum(kept) == 76
        assert all(count >= 2 for count in kept[:10])
        assert kept[10] >= 40  # what is left of the cap, 0.4 of it


def test_relaxed_cap_takes_the_last_blocks_from_the_smallest_layers() -> None:
    """Five layers, of 3, 3, 6, 18 and 12 blocks, and a budget of two blocks: one block per layer is too many."""
    model = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1), nn.Linear(1, 6), nn.Linear(6, 3), nn.Linear(3, 4))
    blocks = sp.plan(model, block=(1, 1), sparsity=1 - 2 / 42, include="*").blocks(model)
    assert blocks.limit == 2
    floor = capped_floor(blocks, 0.98, "relax")
    assert floor is not None
    assert floor.tolist() == [0, 0, 0, 1, 1]
