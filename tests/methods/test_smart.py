"""SMART's own laws, against loops and finite differences."""

import copy
import dataclasses
import io
import json
import math
from typing import Any

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import zoo
from helpers.device_syncs import DeviceSyncs
from smartprune.methods.method import Clock, make, settings


def blocks_of(model: nn.Module, **options: object) -> object:
    return sp.plan(model, block=(4, 4), sparsity=0.75, **options).blocks(model)  # type: ignore[arg-type]


def one_step(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer, pruner: sp.Pruner) -> None:
    nn.functional.cross_entropy(model(x), torch.tensor([1, 2, 3, 4])).backward()
    optimizer.step()
    pruner.step()
    optimizer.zero_grad()


def slow_block_means(weight: torch.Tensor, step: tuple[int, int]) -> list[float]:
    """Mean of |w| block by block, with Python loops, for a [O, I, kh, kw] weight."""
    out = []
    weight = weight.detach()
    rows, columns, kh, kw = weight.shape
    for o in range(0, rows, step[0]):
        for i in range(0, columns, step[1]):
            for y in range(kh):
                for x in range(kw):
                    box = weight[o : o + step[0], i : i + step[1], y, x]
                    out.append(sum(abs(float(v)) for v in box.flatten()) / box.numel())
    return out


def test_scores_start_at_the_mean_over_real_elements() -> None:
    model, _ = zoo.plain_cnn()
    blocks = blocks_of(model)
    state = sp.Smart().state(blocks)
    expected = slow_block_means(model[3].weight, (4, 4)) + slow_block_means(model[6].weight, (4, 4))
    assert torch.allclose(state["scores"], torch.tensor(expected), atol=1e-6)
    sums = sp.Smart(init="l1").state(blocks)["scores"]
    assert torch.allclose(sums, state["scores"] * blocks.sizes, rtol=1e-5)
    assert sp.Smart(init="ones").state(blocks)["scores"].unique().tolist() == [1.0]


def test_temperatures_follow_the_scale_of_the_weights() -> None:
    masks, taus = [], []
    for scale in (1.0, 1e-3, 1e3):
        torch.manual_seed(0)
        model, _ = zoo.plain_cnn()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(scale)
        pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.75, steps=10)
        masks.append(pruner.mask)
        taus.append(pruner.tau / scale)
    assert torch.allclose(masks[0], masks[1], atol=1e-4)
    assert torch.allclose(masks[0], masks[2], atol=1e-4)
    assert taus[0] == pytest.approx(taus[1], rel=1e-4)


@pytest.mark.parametrize("init", ["mean", "ones"])
@pytest.mark.parametrize("value", [0.25, 0.1, 1 / 3])
def test_equal_weights_have_no_spread_whatever_their_value(value: float, init: str) -> None:
    """Full and partial blocks round the mean of 0.1 in different ways, which is nothing to take for a temperature."""
    model = nn.Sequential(nn.Linear(30, 50, bias=False), nn.Linear(50, 7, bias=False))
    for layer in model:
        nn.init.constant_(layer.weight, value)
    pruner = sp.attach(model, sp.Smart(init=init), block=(16, 8), sparsity=0.8, steps=50, include="*")
    assert pruner.tau == pytest.approx(2 * (value if init == "mean" else 1.0))


def test_defaults_start_soft_and_end_hard() -> None:
    for make_model in zoo.SMALL.values():
        model, _ = make_model()
        pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.75, steps=10)
        assert 0.05 < pruner.mask.min() < pruner.mask.max() < 0.9  # nothing is decided at the start
        pruner.search.count = pruner.steps
        pruner.search.advance()
        soft = pruner.mask
        assert torch.minimum(soft, 1 - soft).sum() / pruner.plan.limit < 0.1  # nearly everything is at the end


def test_two_blocks_that_are_nearly_equal_do_not_make_a_search_too_warm() -> None:
    """One block of four is kept, and two differ by less than the last temperature: hours of search must not end in an error."""
    model = nn.Sequential(nn.Linear(4, 16, bias=False), nn.Linear(16, 2))
    with torch.no_grad():
        for row, value in enumerate((0.1, 0.4, 0.40001, 0.2)):
            model[0].weight[4 * row : 4 * row + 4] = value
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.75, steps=1, include="*", skip="1")
    model(torch.zeros(1, 4)).sum().backward()
    pruner.step()
    assert pruner.phase == "frozen"
    assert pruner.mask.tolist() == [0.0, 0.0, 1.0, 0.0]


def test_score_gradient_is_the_block_sum_through_the_jacobian() -> None:
    """methods: dL/dm = J^T <dL/dw', w> per block, with J built entry by entry."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(16, 6).double(), torch.randint(0, 3, (16,))
    pruner = sp.attach(model, sp.Smart(start=2.0), block=(3, 2), sparsity=0.5, steps=10)
    nn.functional.cross_entropy(model(x), y).backward()
    got = pruner.parameters()[0].grad.double()
    weight, layer = pruner.blocks.weights[0].detach(), pruner.plan.layers[0]
    mask = pruner.mask.double()
    product = (weight * layer.grid.expand(mask)).requires_grad_()
    out = model[2](torch.tanh(nn.functional.linear(x, product, model[0].bias)))
    (grad,) = torch.autograd.grad(nn.functional.cross_entropy(out, y), product)
    n = layer.n
    g = [float((grad * weight)[layer.grid.expand(torch.eye(n)[i].double()) > 0].sum()) for i in range(n)]
    v = [float(m * (1 - m)) for m in mask]
    expected = [sum(((v[i] if i == j else 0) - v[i] * v[j] / sum(v)) * g[i] for i in range(n)) / pruner.tau for j in range(n)]
    assert torch.allclose(got, torch.tensor(expected).double(), rtol=1e-3, atol=1e-7)


def test_the_papers_form_has_nothing_of_ours() -> None:
    paper, ours = sp.Smart.paper(), sp.Smart()
    assert (paper.follow, paper.reach, paper.unit, paper.start, paper.end) == (False, None, "absolute", 0.5, 1e-5)
    assert (paper.ramp, paper.gain, paper.init) == ("none", False, "mean")
    assert (ours.follow, ours.reach) == (True, 0.5)
    assert sp.Smart.paper(follow=True, schedule="linear") == dataclasses.replace(paper, follow=True, schedule="linear")


def test_conservation_of_the_scores_sum_under_plain_sgd() -> None:
    """Of scores as the paper has them; those that follow the weights go where these go."""
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Smart(follow=False, reach=None), block=(4, 4), sparsity=0.75, steps=20)
    optimizer = torch.optim.SGD([{"params": model.parameters(), "lr": 0.05}])
    total = float(pruner.scores.double().sum())
    before = pruner.scores.clone()
    for _ in range(10):
        one_step(model, x, optimizer, pruner)
    assert float(pruner.scores.double().sum()) == pytest.approx(total, abs=1e-4)
    assert float((pruner.scores - before).abs().sum()) > 1e-4


def test_batch_norm_hides_a_layers_scale_from_its_masks() -> None:
    """A bias-free convolution before batch norm: the loss does not see its scale, so sum(f g) over the layer is
    zero (Euler)."""
    model = nn.Sequential(
        nn.Conv2d(8, 12, 3, bias=False),
        nn.BatchNorm2d(12, eps=1e-12),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 4),
    ).double()
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=9)
    weight = pruner.blocks.weights[0]
    x, y = torch.randn(16, 8, 6, 6).double(), torch.randint(0, 4, (16,))
    nn.functional.cross_entropy(model(x), y).backward()
    # dL/dw = f * dL/dw', hence sum(w * dL/dw) = sum over blocks of f g
    assert abs(float((weight.detach() * weight.grad).sum())) < 1e-9
    assert float((weight.detach() * weight.grad).abs().sum()) > 1e-3


def train(method: sp.Smart, steps: int = 12, seed: int = 0) -> tuple[sp.Pruner, nn.Module]:
    torch.manual_seed(seed)
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, method, block=(4, 4), sparsity=0.75, steps=steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        one_step(model, x, optimizer, pruner)
    return pruner, model


ABLATION = [
    *(sp.Smart(mask_type=kind) for kind in ("deterministic", "stochastic", "binary", "binary_soft")),
    *(sp.Smart(schedule="fixed", start=start) for start in (1.0, 1e-3)),
    *(sp.Smart(schedule=name, start=0.5, end=1e-5, unit="absolute") for name in ("geometric", "paper_exponential", "linear")),
    sp.Smart(schedule="inverse_exponential", start=0.5, end=1e-5, unit="absolute"),
    sp.Smart.paper(),
    sp.Smart.paper(start=10.0),
    sp.Smart(init="ones"),
    sp.Smart(init="l1"),
    sp.Smart(train_weights=False),
    sp.Smart(ramp="cubic"),
    sp.Smart(ramp="cubic", hold=0.5),
    sp.Smart(clip=0.1),
    sp.Smart(init="share"),
    sp.Smart(init="share", follow=True, reach=0.05, ramp="cubic", start=0.5),
    sp.Smart(follow=True, reach=0.05, mask_type="binary_soft"),
    sp.Smart(warmup=0.5),
    sp.Smart(follow=True, init="ones"),
    sp.Smart(gain=True),
    sp.Smart(gain=True, follow=True, reach=0.5, start=2.0, end=0.003),
    sp.Smart(gain=True, mask_type="stochastic"),
    sp.Smart(init="balanced"),
    sp.Smart(unit="band", start=0.1, end=0.01),
    sp.Smart(unit="band", start=0.1, end=0.01, init="balanced", reach=2.0, ramp="cubic", hold=0.25, gain=True),
]


@pytest.mark.parametrize("method", ABLATION, ids=str)
def test_every_switch_of_the_ablation_ends_exact(method: sp.Smart) -> None:
    pruner, model = train(method)
    assert pruner.phase == "frozen"
    assert int(pruner.mask.sum()) == math.ceil(0.25 * pruner.plan.n)
    sp.bake(model)


def test_frozen_weights_do_not_move_in_the_search() -> None:
    model, x = zoo.plain_cnn()
    before = [model[3].weight.detach().clone(), model[6].weight.detach().clone()]
    pruner = sp.attach(model, sp.Smart(train_weights=False), block=(4, 4), sparsity=0.75, steps=9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    scores = pruner.scores.clone()
    for _ in range(3):
        one_step(model, x, optimizer, pruner)
    for weight, old in zip(pruner.blocks.weights, before, strict=True):
        assert torch.equal(weight, old)
    assert not torch.equal(scores, pruner.scores)


def test_stochastic_masks_are_samples_of_the_soft_mask() -> None:
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Smart(mask_type="stochastic"), block=(4, 4), sparsity=0.75, steps=10_000)
    state = pruner.search.values()
    soft = pruner.method.mask(pruner.blocks, state, None).detach()
    samples = torch.stack([pruner.method.mask(pruner.blocks, state, seed).detach() for seed in range(400)])
    assert set(samples.round(decimals=4).unique().tolist()) == {0.0, 1.0}
    assert torch.allclose(samples.mean(0), soft, atol=0.15)
    assert float(samples.sum(1).mean()) == pytest.approx(pruner.plan.limit, rel=0.05)
    model.eval()
    assert torch.equal(model(x), model(x))  # evaluation is not random


def test_binary_masks_are_hard_in_the_forward_pass() -> None:
    for kind in ("binary", "binary_soft"):
        model, x = zoo.plain_cnn()
        pruner = sp.attach(model, sp.Smart(mask_type=kind), block=(4, 4), sparsity=0.75, steps=10)
        mask = pruner.mask
        assert float(torch.minimum(mask.abs(), (1 - mask).abs()).max()) < 1e-6
        assert int(mask.round().sum()) == pruner.plan.limit
        model(x).square().sum().backward()
        assert float(pruner.parameters()[0].grad.abs().sum()) > 0


@pytest.mark.parametrize("hold", [0.0, 0.6])
def test_ramp_of_the_budget(hold: float) -> None:
    model, _ = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Smart(ramp="cubic", hold=hold), block=(4, 4), sparsity=0.75, steps=10)
    n, k = pruner.plan.n, pruner.plan.limit
    for progress in (0.0, 0.2, 0.5, 1.0):
        pruner.search.count = round(progress * pruner.steps)
        pruner.search.advance()
        done = min(1.0, progress / (1 - hold))
        assert float(pruner.mask.double().sum()) == pytest.approx(k + (0.99 * n - k) * (1 - done) ** 3, rel=1e-5)


def test_share_of_a_layer_against_a_loop() -> None:
    model, _ = zoo.plain_cnn()
    blocks = blocks_of(model)
    got = sp.Smart(init="share").state(blocks)["scores"].tolist()
    for layer, weight in zip(blocks.layers, blocks.weights, strict=True):
        squares = slow_block_means(weight.detach().square(), (4, 4))
        for own, value in zip(squares, got[layer.start : layer.stop], strict=True):
            assert value == pytest.approx(math.log(own / sum(other for other in squares if other >= own)), abs=1e-4)
        assert max(got[layer.start : layer.stop]) == 0.0  # the best of every layer


def test_share_of_a_layer_ignores_its_scale_and_a_layer_of_zeros_comes_last() -> None:
    model, _ = zoo.plain_cnn()
    blocks = blocks_of(model)
    before = blocks.share()
    for scale in (1e3, 1e-9, 1e12, 1e-36, 1e30, 1e20):  # squares beyond float32 among them
        with torch.no_grad():
            model[3].weight.mul_(scale)
        assert torch.allclose(blocks.share(), before, atol=1e-4)
    with torch.no_grad():
        model[3].weight.zero_()
    after = blocks.share()
    assert torch.isfinite(after).all()
    assert float(after[: blocks.layers[0].n].max()) < float(after[blocks.layers[0].n :].min())


def test_share_of_a_layer_can_be_repeated_on_a_gpu() -> None:
    model = zoo.plain_cnn()[0]
    blocks = blocks_of(model)
    model.to("meta")
    blocks.to(blocks.device)
    with DeviceSyncs() as syncs:
        blocks.share()
    assert syncs.operations == []


def test_share_of_a_layer_that_diverged_is_no_number() -> None:
    model = zoo.plain_cnn()[0]
    blocks = blocks_of(model)
    with torch.no_grad():
        blocks.weights[0][0, 0] = math.nan
    assert blocks.share().isnan().any()


@pytest.mark.parametrize("init", ["mean", "share"])
def test_scores_that_follow_are_where_the_weights_are(init: str) -> None:
    """With scores that do not learn, the rank after every step is what the weights alone say."""
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Smart(init=init, follow=True), block=(4, 4), sparsity=0.75, steps=9)
    weights = [p for p in model.parameters() if p is not pruner.parameters()[0]]
    optimizer = torch.optim.SGD([{"params": weights}, pruner.param_group(lr=0.0)], lr=0.5)
    start = pruner.scores.clone()
    for _ in range(5):
        one_step(model, x, optimizer, pruner)
        now = blocks_of(model).share() if init == "share" else blocks_of(model).mean(torch.abs)
        assert torch.allclose(pruner.scores, now, atol=1e-5)
    assert float((pruner.scores - start).abs().max()) > 1e-3


@pytest.mark.parametrize("steps", [50, 200])
def test_no_step_takes_a_score_further_than_its_reach(steps: int) -> None:
    """The reach is that of a hundredth of the search: half a step here, and two steps there."""
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
    free, held, most = moves[None], moves[0.1], {50: 0.2, 200: 0.05}[steps]
    assert float(free.abs().max()) > most
    assert torch.allclose(held, free.clamp(-most, most), atol=1e-4)


def test_scores_that_follow_and_are_held_resume_to_the_same_bits() -> None:
    method = sp.Smart(init="share", follow=True, reach=0.05, ramp="cubic", start=0.5)
    ends = []
    for stop in (None, 4):
        torch.manual_seed(0)
        model, x = zoo.plain_cnn()
        pruner = sp.attach(model, method, block=(4, 4), sparsity=0.75, steps=9)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(8):
            if step == stop:
                kept = (model.state_dict(), pruner.state_dict(), optimizer.state_dict())
                kept = torch.load(_through_disk(kept), weights_only=True)
                model, _ = zoo.plain_cnn()
                pruner = sp.attach(model, method, block=(4, 4), sparsity=0.75, steps=9)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for part, state in zip((model, pruner, optimizer), kept, strict=True):
                    part.load_state_dict(state)
            one_step(model, x, optimizer, pruner)
        ends.append((pruner.scores, pruner.mask, model[3].weight.detach().clone()))
    for whole, resumed in zip(*ends, strict=True):
        assert torch.equal(whole, resumed)


def _through_disk(state: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def deep() -> nn.Module:
    """Eight layers and nothing that normalises: six of them at a quarter of their weights give outputs of a 4,096th."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.ReLU())]
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *hidden, nn.Linear(16, 10)).eval()
    for parameter in model.parameters():
        nn.init.kaiming_normal_(parameter) if parameter.ndim > 1 else nn.init.zeros_(parameter)
    return model


@pytest.mark.parametrize("macs", [False, True])
def test_with_gain_a_search_starts_with_the_network_as_it_came(macs: bool) -> None:
    model, x = deep(), torch.randn(4, 8)
    with torch.no_grad():
        before = model(x)
        outs = {}
        for gain in (False, True):
            searched = copy.deepcopy(model)
            budget = {"budget": sp.macs(0.75, x)} if macs else {"sparsity": 0.75}
            pruner = sp.attach(searched, sp.Smart(init="ones", gain=gain), block=(4, 4), steps=9, **budget)  # type: ignore[arg-type]
            outs[gain] = searched(x)
            if not macs:
                assert float(pruner.mask.sum()) == pytest.approx(pruner.plan.limit, rel=1e-5)  # the mask itself is what it is
    assert torch.allclose(outs[True], before, atol=1e-5)
    assert float(before.abs().max()) > 0.1
    assert float(outs[False].abs().max()) < 0.01 * float(before.abs().max())


def test_gain_is_gone_once_the_mask_is_hard() -> None:
    model = deep().train()
    pruner = sp.attach(model, sp.Smart(gain=True), block=(4, 4), sparsity=0.75, steps=9)
    for mask in (sp.hard_topk(pruner.scores, pruner.plan.limit).float(), torch.zeros(pruner.plan.n)):
        assert torch.equal(pruner.method.amplify(pruner.blocks, mask), mask)
    kept = [weight.detach().clone() for weight in pruner.blocks.weights]
    pruner.freeze(force=True)
    for layer, old, weight in zip(pruner.plan.layers, kept, pruner.blocks.weights, strict=True):
        assert torch.equal(weight, old * layer.grid.expand(pruner.mask[layer.start : layer.stop].float()))


def test_gradients_through_the_gain() -> None:
    """Against autograd through the mask, written down: weight * mask * sum(mask) / sum(mask ** 2)."""
    model, x = deep(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    pruner = sp.attach(model, sp.Smart(gain=True), block=(4, 4), sparsity=0.75, steps=9)
    model(x).square().sum().backward()
    leaf = pruner.parameters()[0].detach().clone().requires_grad_()
    mask = sp.soft_topk(leaf, pruner.plan.limit, pruner.tau)
    factors = mask * mask.sum() / mask.square().sum()
    named = dict(plain.named_parameters())
    masked = {
        layer.weight: named[layer.weight] * layer.grid.expand(factors[layer.start : layer.stop]) for layer in pruner.plan.layers
    }
    torch.func.functional_call(plain, masked, (x,)).square().sum().backward()
    pairs = [(pruner.parameters()[0].grad, leaf.grad)]
    both = zip(pruner.plan.layers, pruner.blocks.weights, strict=True)
    pairs += [(weight.grad, named[layer.weight].grad) for layer, weight in both]
    for got, wanted in pairs:
        assert (most := float(wanted.abs().max())) > 1e-6
        assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-6 * max(most, 1.0))


def test_the_reach_grows_while_a_search_warms_up() -> None:
    """Scores that are pushed as far as they may go: a quarter, half, three quarters of the reach, and all of it from then on."""
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
def test_scores_with_nothing_to_follow_go_where_they_are_pushed(method: sp.Smart) -> None:
    """Pushed far by every step, each in one direction: with a limit, equal scores that are pushed up would end at one place."""
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


@pytest.mark.parametrize("budget", [None, sp.params(0.75)], ids=["blocks", "params"])
def test_a_band_holds_its_share_of_the_kept_blocks(budget: Any) -> None:
    """The temperature is half the distance between two scores, one on either side of the threshold; against a sorted list."""
    model, x = zoo.plain_cnn()
    method = sp.Smart(unit="band", start=0.5, end=0.1, ramp="cubic")
    given: dict[str, object] = {"sparsity": 0.75} if budget is None else {"budget": budget}
    pruner = sp.attach(model, method, block=(4, 4), steps=8, **given)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(7):
        one_step(model, x, optimizer, pruner)
        limit = method.scalars(pruner.blocks, pruner.search.values(), pruner.progress)["limit"]
        kept = pruner.plan.n * limit / pruner.blocks.total
        half = max(1, round(0.5 * 0.5 * (0.1 / 0.5) ** pruner.progress * kept))
        order = sorted(pruner.scores.tolist(), reverse=True)
        high, low = order[max(0, round(kept) - 1 - half)], order[min(pruner.plan.n - 1, round(kept) - 1 + half)]
        assert pruner.tau == pytest.approx((high - low) / 2, rel=1e-4)


def test_a_band_of_equal_scores_has_a_temperature() -> None:
    model = nn.Sequential(nn.Linear(30, 50, bias=False), nn.Linear(50, 7, bias=False))
    for layer in model:
        nn.init.constant_(layer.weight, 0.25)
    pruner = sp.attach(model, sp.Smart(unit="band", start=0.1, end=0.01), block=(16, 8), sparsity=0.8, steps=50, include="*")
    assert 0 < pruner.tau < 1e-6
    assert torch.isfinite(pruner.mask).all()


def test_a_band_resumes_with_the_same_bits() -> None:
    method = sp.Smart(unit="band", start=0.1, end=0.01, init="balanced", reach=2.0, ramp="cubic", gain=True)
    runs = []
    for stop in (None, 7):
        torch.manual_seed(0)
        model, x = zoo.plain_cnn()
        pruner = sp.attach(model, method, block=(4, 4), sparsity=0.75, steps=12)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(12):
            if step == stop:
                saved = io.BytesIO()
                torch.save({"model": model.state_dict(), "pruner": pruner.state_dict()}, saved)
                saved.seek(0)
                state = torch.load(saved, weights_only=True)
                model, _ = zoo.plain_cnn()
                pruner = sp.attach(model, method, block=(4, 4), sparsity=0.75, steps=12)
                model.load_state_dict(state["model"])
                pruner.load_state_dict(state["pruner"])
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            one_step(model, x, optimizer, pruner)
        runs.append((pruner.mask, model[3].weight.detach()))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


def test_a_band_waits_for_no_gpu() -> None:
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
    with pytest.raises(sp.SmartpruneError, match="unit='band' takes the temperature from the distance between scores"):
        sp.attach(model, sp.Smart(unit="band", **changes), block=(4, 4), sparsity=0.75, steps=9)  # type: ignore[arg-type]


def test_a_balanced_ranking_lies_between_magnitudes_and_shares() -> None:
    model, _ = zoo.plain_cnn()
    blocks = blocks_of(model)
    share, got = blocks.share().tolist(), sp.Smart(init="balanced").state(blocks)["scores"].tolist()
    for layer, weight in zip(blocks.layers, blocks.weights, strict=True):
        squares = slow_block_means(weight.detach().square(), (4, 4))
        for i, square in zip(range(layer.start, layer.stop), squares, strict=True):
            assert got[i] == pytest.approx(0.75 * math.log(square) + 0.25 * share[i], abs=1e-4)
    assert torch.equal(sp.Gradual(norm="balanced").rank(blocks, {}), sp.Smart(init="balanced").measure(blocks))


def test_a_balanced_ranking_of_zeros_and_of_large_weights_is_finite() -> None:
    model, _ = zoo.plain_cnn()
    blocks = blocks_of(model)
    for scale in (1e15, 1e-30, 0.0):
        with torch.no_grad():
            model[3].weight.mul_(scale)
        rank = sp.Gradual(norm="balanced").rank(blocks, {})
        assert torch.isfinite(rank).all()
    assert float(rank[: blocks.layers[0].n].max()) < float(rank[blocks.layers[0].n :].min())
    with torch.no_grad():
        model[6].weight.zero_()
    assert torch.isfinite(sp.Gradual(norm="balanced").rank(blocks, {})).all()


def test_a_warmup_needs_a_reach() -> None:
    model, _ = zoo.plain_cnn()
    for method, message in (
        (sp.Smart(reach=None, warmup=0.1), r"warmup=0\.1 is that of a reach, and there is none"),
        (sp.Smart(init="ones", warmup=0.1), r"warmup=0\.1 is that of a reach, and there is none"),
        (sp.Smart(train_weights=False, warmup=0.1), r"warmup=0\.1 is that of a reach, and there is none"),
        (sp.Smart(warmup=1.5), "Smart: warmup"),
    ):
        with pytest.raises(sp.SmartpruneError, match=message):
            sp.attach(model, method, block=(4, 4), sparsity=0.75, steps=9)


@pytest.mark.parametrize("field", ["reach", "clip"])
@pytest.mark.parametrize("value", [0, -1.0, "far", math.nan])
def test_limits_must_be_positive(field: str, value: object) -> None:
    model, _ = zoo.plain_cnn()
    with pytest.raises(sp.SmartpruneError, match=rf"Smart: {field}=.* must be a positive"):
        sp.attach(model, sp.Smart(**{field: value}), block=(4, 4), sparsity=0.75, steps=9)  # type: ignore[arg-type]


def test_clipped_scores_gradient() -> None:
    norms = {}
    for clip in (None, 1e-4):
        torch.manual_seed(0)
        model, x = zoo.plain_cnn()
        pruner = sp.attach(model, sp.Smart(clip=clip), block=(4, 4), sparsity=0.75, steps=10)
        nn.functional.cross_entropy(model(x), torch.tensor([1, 2, 3, 4])).backward()
        norms[clip] = pruner.parameters()[0].grad
    assert float(norms[None].norm()) > 1e-4
    assert float(norms[1e-4].norm()) == pytest.approx(1e-4, rel=1e-4)
    cosine = nn.functional.cosine_similarity(norms[None], norms[1e-4], dim=0)
    assert float(cosine) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("method", ABLATION, ids=str)
def test_settings_survive_json(method: sp.Smart) -> None:
    assert make(sp.Smart, json.loads(json.dumps(settings(method)))) == method


def test_unknown_setting_lists_the_settings() -> None:
    with pytest.raises(sp.SmartpruneError, match=r"unknown setting 'strat' for Smart; it has: start, end, unit"):
        make(sp.Smart, {"strat": 1})
    with pytest.raises(dataclasses.FrozenInstanceError):
        sp.Smart().start = 3.0  # type: ignore[misc]
