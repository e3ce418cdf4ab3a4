"""Each method's own law, against slow loops."""

import copy
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import zoo
from helpers.training_cases import MethodCase
from smartprune.methods import METHODS, find_strength
from smartprune.methods.cap import capped_floor, least
from smartprune.methods.method import Clock
from smartprune.methods.pdp import apportion


def slow_norms(pruner: sp.Pruner) -> list[float]:
    """L2 norm of every block, element by element."""
    out = []
    for layer, weight in zip(pruner.plan.layers, pruner.blocks.weights, strict=True):
        sums = [0.0] * layer.n
        index = layer.grid.expand(torch.arange(layer.n, dtype=torch.float64)).flatten().tolist()
        for i, value in zip(index, weight.detach().flatten().tolist(), strict=True):
            sums[round(i)] += value * value
        out += [math.sqrt(total) for total in sums]
    return out


def best(values: list[float], k: int) -> set[int]:
    return set(sorted(range(len(values)), key=lambda i: (-values[i], i))[:k])


# -- PDP -----------------------------------------------------------------------------------------------------------


def test_pdp_mask_from_norms_within_layers() -> None:
    job = MethodCase("pdp", "plain_cnn", steps=100)
    job.run(90)  # the ramp is over
    pruner = job.pruner
    norms, mask = slow_norms(pruner), pruner.mask.tolist()
    keep = [int(k) for k in pruner.search.values()["keep"].tolist()]
    assert sum(keep) == pruner.plan.keep
    for layer, k in zip(pruner.plan.layers, keep, strict=True):
        own = norms[layer.start : layer.stop]
        ranked = sorted(own, reverse=True)
        t = (ranked[k - 1] + ranked[k]) / 2 if k < layer.n else None
        for norm, value in zip(own, mask[layer.start : layer.stop], strict=True):
            expected = 1.0 if t is None else 1 / (1 + math.exp(min(50, max(-50, -(norm**2 - t**2) / 1e-4))))
            assert value == pytest.approx(expected, abs=2e-3)
        assert sum(value > 0.5 for value in mask[layer.start : layer.stop]) == k


def test_pdp_gradient_has_both_terms() -> None:
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


def test_pdp_ramps_over_the_first_four_fifths() -> None:
    job = MethodCase("pdp", "plain_cnn", steps=50)
    pruner = job.pruner
    for count, share in ((0, 0.0), (20, 0.5), (40, 1.0), (49, 1.0)):
        pruner.search.count = count
        pruner.search.advance()
        kept = int((pruner.mask > 0.5).sum())
        assert abs(kept - (pruner.plan.n - share * (pruner.plan.n - pruner.plan.keep))) <= len(pruner.plan.layers)


@pytest.mark.parametrize("sizes", [[100, 10, 1], [7, 7, 7], [1000, 3, 2, 1, 64], [5], [1] * 30])
@pytest.mark.parametrize("share", [Fraction(3, 100), Fraction(1, 3), Fraction(1, 2), Fraction(9, 10)])
def test_largest_remainder(sizes: list[int], share: Fraction) -> None:
    counts = apportion(sizes, share)
    seats = math.floor(share * sum(sizes))
    assert sum(counts) == seats
    assert all(0 <= count <= size for count, size in zip(counts, sizes, strict=True))
    if seats >= len(sizes):
        assert min(counts) >= 1


def test_pdp_global_once() -> None:
    torch.manual_seed(0)
    model, _ = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Pdp(allocation="global_once"), block=(4, 4), sparsity=0.8, steps=10)
    chosen = best(slow_norms(pruner), pruner.plan.keep)
    expected = [sum(layer.start <= i < layer.stop for i in chosen) for layer in pruner.plan.layers]
    assert pruner.search.values()["keep"].tolist() == expected


# -- AC/DC ---------------------------------------------------------------------------------------------------------


def test_acdc_phases() -> None:
    """Compressed: exactly k, gradients masked. Dense: nothing masked, removed weights start from zero, no momentum."""
    job = MethodCase("acdc", "plain_cnn", steps=24)  # three cycles of four and four steps
    pruner, optimizer = job.pruner, job.optimizer
    was_gone: list[torch.Tensor] = []
    for step in range(24):
        compressed = step % 8 < 4
        mask = pruner.mask
        assert int(mask.sum()) == (pruner.plan.keep if compressed else pruner.plan.n), step
        gone = [layer.grid.expand(mask[layer.start : layer.stop]) == 0 for layer in pruner.plan.layers]
        if step % 8 == 0:
            assert set(mask.nonzero().flatten().tolist()) == best(slow_norms(pruner), pruner.plan.keep)
        if step % 8 == 4:  # just decompressed
            for weight, was in zip(pruner.blocks.weights, was_gone, strict=True):
                assert torch.count_nonzero(weight[was]) == 0
        nn.functional.cross_entropy(job.model(job.x), job.y).backward()
        for weight, where in zip(pruner.blocks.weights, gone, strict=True):
            assert torch.count_nonzero(weight.grad[where]) == 0
        before = [weight.detach().clone() for weight in pruner.blocks.weights]
        grads = [weight.grad.clone() for weight in pruner.blocks.weights]
        optimizer.step()
        if step % 8 == 4:  # the first dense step is one of plain SGD: momentum was forgotten
            for weight, old, grad in zip(pruner.blocks.weights, before, grads, strict=True):
                assert torch.allclose(weight, old - 0.02 * (grad + 1e-4 * old), atol=1e-6)
        pruner.step()
        optimizer.zero_grad()
        was_gone = gone
    assert pruner.phase == "frozen"


def test_acdc_needs_room_for_its_cycles() -> None:
    with pytest.raises(sp.SmartpruneError, match=r"cycles=8 needs at least 16 steps, but the search has 10"):
        sp.attach(zoo.plain_cnn()[0], sp.Acdc(), block=(4, 4), sparsity=0.5, steps=10)


# -- the cap -------------------------------------------------------------------------------------------------------


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


def test_a_cap_that_is_relaxed_leaves_room_for_the_floor() -> None:
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


# -- AWG -----------------------------------------------------------------------------------------------------------


def test_awg_weights_rest_while_it_watches_and_masks_are_nested() -> None:
    job = MethodCase("awg", "plain_cnn", steps=24)  # three stages of eight steps: two watch, six train
    pruner = job.pruner
    kept = [pruner.plan.n]
    for step in range(24):
        watching = step % 8 < 2
        before = {name: p.detach().clone() for name, p in job.model.named_parameters()}
        mask = pruner.mask
        job.step()
        moved = [name for name, p in job.model.named_parameters() if not torch.equal(p, before[name])]
        if watching:
            assert moved == [] or step == 23, step
        else:
            assert "0.weight" in moved, step
        now = pruner.mask.float()
        assert bool((now <= mask.float()).all())  # nested
        kept.append(int(now.sum()))
    n, k = pruner.plan.n, pruner.plan.keep
    assert kept[2] == n - (n - k) * 1 // 3
    assert kept[10] == n - (n - k) * 2 // 3
    assert kept[18] == kept[24] == k


def test_awg_pays_for_a_floor_with_blocks_that_were_gone() -> None:
    """Of what an earlier stage kept, the floor would cost more than the budget; attach promised that it fits."""
    job = MethodCase("awg", "plain_cnn", block=(3, 5), budget=sp.params(0.9), floor=0.15).run()
    plan, mask = job.pruner.plan, job.pruner.mask
    assert plan.cost is not None
    assert plan.limit is not None
    assert plan.limit - int(plan.cost[~mask].min()) < int(plan.cost[mask].sum()) <= plan.limit
    assert all(int(mask[layer.start : layer.stop].sum()) >= 0.15 * layer.n for layer in plan.layers)


def test_awg_holds_parameters_still_that_were_put_in_place_of_others() -> None:
    job = MethodCase("awg", "plain_cnn")
    job.model.load_state_dict({name: value.clone() for name, value in job.model.state_dict().items()}, assign=True)
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.02)
    before = [parameter.detach().clone() for parameter in job.model.parameters()]
    job.step()
    assert all(torch.equal(a, b) for a, b in zip(before, job.model.parameters(), strict=True))


def test_awg_importance() -> None:
    """EMA of sum |g w| times blocks over surviving blocks, element by element."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Linear(12, 12, bias=False), nn.Linear(12, 4, bias=False))
    pruner = sp.attach(model, sp.Awg(stages=1, calibration=0.5, gamma=0.9, cap="off"), block=(4, 4), sparsity=0.5, steps=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected: list[float] | None = None
    for _ in range(3):
        x = torch.randn(6, 8)
        weights = [model[i]._parameters["weight"].detach().clone().requires_grad_() for i in range(2)]
        out = nn.functional.linear(nn.functional.linear(x, weights[0]), weights[1])
        nn.functional.linear(out, model[2].weight.detach()).square().sum().backward()
        seen = []
        for weight in weights:
            product = (weight.grad * weight.detach()).abs()
            corners = [(o, i) for o in range(0, weight.shape[0], 4) for i in range(0, weight.shape[1], 4)]
            seen += [float(product[o : o + 4, i : i + 4].sum()) for o, i in corners]
        expected = seen if expected is None else [0.9 * a + 0.1 * b for a, b in zip(expected, seen, strict=True)]
        model(x).square().sum().backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    assert pruner.search.values()["importance"].tolist() == pytest.approx(expected, rel=1e-4)


def test_awg_without_a_backward_pass() -> None:
    job = MethodCase("awg", "plain_cnn")
    with pytest.raises(sp.SmartpruneError, match=r"Awg reads gradients.*loss\.backward\(\) before pruner\.step\(\)"):
        job.pruner.step()


# -- PaS -----------------------------------------------------------------------------------------------------------


def test_pas_straight_through_gates_and_penalty() -> None:
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


def test_pas_exact_keeps_the_highest_gates() -> None:
    job = MethodCase("pas", "plain_cnn", steps=10).run(9)
    gates = job.pruner.scores.tolist()
    job.pruner.freeze()
    assert set(job.pruner.mask.nonzero().flatten().tolist()) == best(gates, job.pruner.plan.keep)


def test_plain_pas_says_that_it_missed() -> None:
    torch.manual_seed(0)
    model, _ = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Pas(exact=False, strength=0.0), block=(4, 4), sparsity=0.8, steps=2)
    pruner.freeze()
    receipt = sp.bake(model)
    assert not receipt.met
    assert "NOT" in str(receipt)
    assert receipt.blocks.kept == pruner.plan.n


def test_penalty_never_added() -> None:
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Pas(), block=(4, 4), sparsity=0.8, steps=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    with pytest.raises(sp.SmartpruneError, match=r"pruner\.penalty\(\) was not called in this step; add it to the loss"):
        pruner.step()


def test_search_for_a_strength() -> None:
    strength, tried = find_strength(lambda s: 1 / (1 + s / 37), wanted=0.2, tolerance=0.004, trials=8)
    assert strength is not None
    assert abs(1 / (1 + strength / 37) - 0.2) <= 0.004
    assert len(tried) <= 8
    missed, tried = find_strength(lambda s: 1.0 if s < 300 else 0.0, wanted=0.1)
    assert missed is None
    assert len(tried) == 6


# -- Gradual and Magnitude -----------------------------------------------------------------------------------------


def test_gradual_ramps_cubically_and_blocks_come_back() -> None:
    job = MethodCase("gradual", "plain_cnn", steps=40)
    pruner, n = job.pruner, job.pruner.plan.n
    for count in range(1, 40):
        job.step()
        kept = int(pruner.mask.sum())
        expected = pruner.plan.keep + (n - pruner.plan.keep) * (1 - count / 40) ** 3
        assert kept == math.ceil(expected - 1e-9)
        now = pruner.mask.bool()
        layer, weight = pruner.plan.layers[0], pruner.blocks.weights[0]
        means = layer.grid.mean(weight.detach().abs())
        assert float(means[now[: layer.n]].min()) >= float(means[~now[: layer.n]].max() if (~now[: layer.n]).any() else 0)
    with torch.no_grad():  # a removed block whose stored weights grow returns
        gone = int((~pruner.mask[: pruner.plan.layers[0].n].bool()).nonzero()[0])
        one = torch.zeros(pruner.plan.layers[0].n)
        one[gone] = 1
        pruner.blocks.weights[0].add_(10 * pruner.plan.layers[0].grid.expand(one))
    job.step()
    assert bool(pruner.mask[gone])


@pytest.mark.parametrize("scale", [2.0**-120, 2.0**-100, 2.0**100])
@pytest.mark.parametrize(
    "method", [sp.Magnitude("l2"), sp.Gradual(norm="l2", updates=1), sp.Acdc(1), sp.Pdp(allocation="global_once")]
)
def test_norms_of_any_size_rank_blocks(method: Any, scale: float) -> None:
    """Squares of these weights are beyond float32, the norms are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30, bias=False), nn.Linear(30, 20, bias=False))
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(scale)
    pruner = sp.attach(model, method, block=(4, 3), sparsity=0.6, include="*", steps=2)
    norms = slow_norms(pruner)
    pruner.freeze()
    assert set(pruner.mask.nonzero().flatten().tolist()) == best(norms, pruner.plan.keep)


def test_magnitude_is_chosen_once() -> None:
    job = MethodCase("magnitude", "plain_cnn")
    first = job.pruner.mask
    job.run(5)
    assert torch.equal(first, job.pruner.mask)


def test_clock_parts_cover_the_search() -> None:
    for steps in (5, 24, 100, 101):
        for parts in (1, 3, 5):
            entered = [Clock(count, steps).enters(parts) for count in range(1, steps + 1)]
            assert [part for part in entered if part is not None] == list(range(1, parts))


def test_every_method_is_listed() -> None:
    assert list(METHODS) == ["smart", "magnitude", "gradual", "pdp", "pas", "awg", "acdc"]


def test_pdp_shares_by_what_is_owed() -> None:
    assert apportion([9, 1015, 1016], Fraction(1, 10)) == [1, 101, 102]
    draw = torch.Generator().manual_seed(0)
    for _ in range(200):
        sizes = torch.randint(1, 60, (int(torch.randint(1, 8, (1,), generator=draw)),), generator=draw).tolist()
        share = Fraction(int(torch.randint(1, 99, (1,), generator=draw)), 100)
        counts, seats = apportion(sizes, share), math.floor(share * sum(sizes))
        assert sum(counts) == seats
        assert all(0 <= count <= size for count, size in zip(counts, sizes, strict=True))
        if seats >= len(sizes):  # nobody gets more than the next whole number, or the one that is guaranteed
            assert all(1 <= count <= max(1, math.ceil(share * size)) for count, size in zip(counts, sizes, strict=True))


def test_pdp_gives_every_layer_what_the_floor_wants() -> None:
    """Of layers of 3, 3 and 20 blocks: half of 3 is 1 or 2, the floor wants 2. What the soft mask keeps, hardening keeps."""
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
def test_pdp_keeps_its_shares_where_norms_tie(kind: str) -> None:
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


def test_acdc_frozen_in_a_compressed_phase_keeps_its_mask() -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        pruner = sp.attach(model, sp.Acdc(cycles=1, cap="off"), block=(4, 4), sparsity=0.7, include="*", steps=80)
        optimizer, x = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9, weight_decay=0.1), torch.randn(32, 16)
        for _ in range(20):
            (model(x) - x).square().mean().backward()
            optimizer.step()
            pruner.step()
            optimizer.zero_grad()
        before, out = pruner.mask.bool(), model(x).detach()
        pruner.freeze()
        assert torch.equal(pruner.mask, before)
        assert torch.allclose(model(x), out, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_awg_leaves_running_statistics_alone_while_it_watches(momentum: float | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
    )
    pruner = sp.attach(model, sp.Awg(stages=2, calibration=0.5, cap="off"), block=(4, 4), sparsity=0.5, include="*", steps=8)
    optimizer, changed = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(9):
        before = {name: value.clone() for name, value in model.named_buffers()}
        model(torch.randn(8, 4, 8, 8)).square().mean().backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
        changed.append(sum(not torch.equal(value, before[name]) for name, value in model.named_buffers()))
    assert changed == [0, 0, 6, 6, 0, 0, 6, 6, 6]
    assert all(module.track_running_stats for module in model if isinstance(module, nn.BatchNorm2d))


def test_awg_leaves_instance_norms_as_they_are_while_it_watches() -> None:
    """In evaluation they went over to the statistics of their input, and in training they kept an account of it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.InstanceNorm2d(16, track_running_stats=True), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 4, 1)
    )
    x = torch.randn(4, 3, 8, 8)
    model(x)
    expected = model.eval()(x)
    pruner = sp.attach(model, sp.Awg(stages=2, cap="off"), block=(8, 4), sparsity=0.5, steps=8)
    assert torch.equal(model(x), expected)  # no block is gone yet
    before = model[1].running_mean.clone()
    model.train()(x + 5)
    assert torch.equal(model[1].running_mean, before)
    pruner.freeze()
    model(x + 5)
    assert not torch.equal(model[1].running_mean, before)
    assert (model[1].momentum, model[1].track_running_stats) == (0.1, True)


def test_no_layer_is_called_collapsed_while_the_mask_is_soft() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.9, include="*", steps=40)
    optimizer, told = torch.optim.SGD(model.parameters(), 0.05), []
    for _ in range(40):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
        told.append(pruner.telemetry())
    assert told[0]["gap"] > 0.3
    assert told[0]["collapsed"] == []
    assert told[-1]["collapsed"] == [layer.name for layer in pruner.plan.layers if not pruner.mask[layer.start : layer.stop].any()]
