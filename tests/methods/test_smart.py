"""SMART: equations against loops and autograd, mask types, gain and settings."""

import copy
import dataclasses
import json
import math

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import zoo
from helpers.train_step import train_step
from smartprune.methods.method import make, settings


def blocks_of(model: nn.Module, **options: object) -> object:
    return sp.plan(model, block=(4, 4), sparsity=0.75, **options).blocks(model)  # type: ignore[arg-type]


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
def test_equal_weights_use_their_mean_as_unit_of_temperature(value: float, init: str) -> None:
    """Full and partial blocks round the mean of 0.1 differently. Rounding must not set the temperature."""
    model = nn.Sequential(nn.Linear(30, 50, bias=False), nn.Linear(50, 7, bias=False))
    for layer in model:
        nn.init.constant_(layer.weight, value)
    pruner = sp.attach(model, sp.Smart(init=init), block=(16, 8), sparsity=0.8, steps=50, include="*")
    assert pruner.tau == pytest.approx(2 * (value if init == "mean" else 1.0))


def test_defaults_start_soft_and_end_hard() -> None:
    for make_model in zoo.SMALL.values():
        model, _ = make_model()
        pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.75, steps=10)
        assert 0.05 < pruner.mask.min() < pruner.mask.max() < 0.9  # no block is decided at the start
        pruner.search.count = pruner.steps
        pruner.search.advance()
        soft = pruner.mask
        assert torch.minimum(soft, 1 - soft).sum() / pruner.plan.limit < 0.1  # nearly all are decided at the end


def test_two_nearly_equal_blocks_do_not_prevent_freezing() -> None:
    """One block of four is kept, and two blocks differ by less than the last temperature."""
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
    """dL/dm = J^T <dL/dw', w> per block, with J built entry by entry."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(16, 6).double(), torch.randint(0, 3, (16,))
    pruner = sp.attach(model, sp.Smart(start=2.0), block=(3, 2), sparsity=0.5, steps=10)
    nn.functional.cross_entropy(model(x), y).backward()
    gradient = pruner.parameters()[0].grad.double()
    weight, layer = pruner.blocks.weights[0].detach(), pruner.plan.layers[0]
    mask = pruner.mask.double()
    product = (weight * layer.grid.expand(mask)).requires_grad_()
    out = model[2](torch.tanh(nn.functional.linear(x, product, model[0].bias)))
    (grad,) = torch.autograd.grad(nn.functional.cross_entropy(out, y), product)
    n = layer.n
    g = [float((grad * weight)[layer.grid.expand(torch.eye(n)[i].double()) > 0].sum()) for i in range(n)]
    v = [float(m * (1 - m)) for m in mask]
    expected = [sum(((v[i] if i == j else 0) - v[i] * v[j] / sum(v)) * g[i] for i in range(n)) / pruner.tau for j in range(n)]
    assert torch.allclose(gradient, torch.tensor(expected).double(), rtol=1e-3, atol=1e-7)


def test_paper_form_has_the_settings_of_the_paper() -> None:
    paper, default = sp.Smart.paper(), sp.Smart()
    assert (paper.follow, paper.reach, paper.unit, paper.start, paper.end) == (False, None, "absolute", 0.5, 1e-5)
    assert (paper.ramp, paper.gain, paper.init) == ("none", False, "mean")
    assert (default.follow, default.reach) == (True, 0.5)
    assert sp.Smart.paper(follow=True, schedule="linear") == dataclasses.replace(paper, follow=True, schedule="linear")


def test_plain_sgd_conserves_the_sum_of_the_scores() -> None:
    """This holds for the paper's scores. Scores that follow the weights change with them."""
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Smart(follow=False, reach=None), block=(4, 4), sparsity=0.75, steps=20)
    optimizer = torch.optim.SGD([{"params": model.parameters(), "lr": 0.05}])
    total = float(pruner.scores.double().sum())
    before = pruner.scores.clone()
    for _ in range(10):
        train_step(model, x, optimizer, pruner)
    assert float(pruner.scores.double().sum()) == pytest.approx(total, abs=1e-4)
    assert float((pruner.scores - before).abs().sum()) > 1e-4


def test_mask_gradients_behind_batch_norm_sum_to_zero_in_a_layer() -> None:
    """A bias-free convolution before batch norm: the loss does not depend on its scale, so sum(f g) over the layer is
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
        train_step(model, x, optimizer, pruner)
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
def test_every_form_ends_with_the_exact_budget(method: sp.Smart) -> None:
    pruner, model = train(method)
    assert pruner.phase == "frozen"
    assert int(pruner.mask.sum()) == math.ceil(0.25 * pruner.plan.n)
    sp.bake(model)


def test_weights_stay_fixed_without_train_weights() -> None:
    model, x = zoo.plain_cnn()
    before = [model[3].weight.detach().clone(), model[6].weight.detach().clone()]
    pruner = sp.attach(model, sp.Smart(train_weights=False), block=(4, 4), sparsity=0.75, steps=9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    scores = pruner.scores.clone()
    for _ in range(3):
        train_step(model, x, optimizer, pruner)
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
def test_ramp_lowers_the_budget_along_a_cubic(hold: float) -> None:
    model, _ = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Smart(ramp="cubic", hold=hold), block=(4, 4), sparsity=0.75, steps=10)
    n, k = pruner.plan.n, pruner.plan.limit
    for progress in (0.0, 0.2, 0.5, 1.0):
        pruner.search.count = round(progress * pruner.steps)
        pruner.search.advance()
        done = min(1.0, progress / (1 - hold))
        assert float(pruner.mask.double().sum()) == pytest.approx(k + (0.99 * n - k) * (1 - done) ** 3, rel=1e-5)


def test_scores_start_at_the_share_of_the_layer() -> None:
    model, _ = zoo.plain_cnn()
    blocks = blocks_of(model)
    shares = sp.Smart(init="share").state(blocks)["scores"].tolist()
    for layer, weight in zip(blocks.layers, blocks.weights, strict=True):
        squares = slow_block_means(weight.detach().square(), (4, 4))
        for square, share in zip(squares, shares[layer.start : layer.stop], strict=True):
            assert share == pytest.approx(math.log(square / sum(other for other in squares if other >= square)), abs=1e-4)
        assert max(shares[layer.start : layer.stop]) == 0.0  # the largest block of every layer


def deep_without_normalization() -> nn.Module:
    """Eight layers without normalization. With six of them at a quarter of their weights, outputs shrink to 1 / 4,096."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.ReLU())]
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *hidden, nn.Linear(16, 10)).eval()
    for parameter in model.parameters():
        nn.init.kaiming_normal_(parameter) if parameter.ndim > 1 else nn.init.zeros_(parameter)
    return model


@pytest.mark.parametrize("macs", [False, True])
def test_with_gain_a_search_starts_with_the_dense_outputs(macs: bool) -> None:
    model, x = deep_without_normalization(), torch.randn(4, 8)
    with torch.no_grad():
        before = model(x)
        outputs = {}
        for gain in (False, True):
            searched = copy.deepcopy(model)
            budget = {"budget": sp.macs(0.75, x)} if macs else {"sparsity": 0.75}
            pruner = sp.attach(searched, sp.Smart(init="ones", gain=gain), block=(4, 4), steps=9, **budget)  # type: ignore[arg-type]
            outputs[gain] = searched(x)
            if not macs:
                assert float(pruner.mask.sum()) == pytest.approx(
                    pruner.plan.limit, rel=1e-5
                )  # gain does not change the mask itself
    assert torch.allclose(outputs[True], before, atol=1e-5)
    assert float(before.abs().max()) > 0.1
    assert float(outputs[False].abs().max()) < 0.01 * float(before.abs().max())


def test_gain_does_not_change_a_hard_mask() -> None:
    model = deep_without_normalization().train()
    pruner = sp.attach(model, sp.Smart(gain=True), block=(4, 4), sparsity=0.75, steps=9)
    for mask in (sp.hard_topk(pruner.scores, pruner.plan.limit).float(), torch.zeros(pruner.plan.n)):
        assert torch.equal(pruner.method.amplify(pruner.blocks, mask), mask)
    kept = [weight.detach().clone() for weight in pruner.blocks.weights]
    pruner.freeze(force=True)
    for layer, old, weight in zip(pruner.plan.layers, kept, pruner.blocks.weights, strict=True):
        assert torch.equal(weight, old * layer.grid.expand(pruner.mask[layer.start : layer.stop].float()))


def test_gradients_with_gain_match_autograd() -> None:
    """The reference is autograd through weight * mask * sum(mask) / sum(mask ** 2)."""
    model, x = deep_without_normalization(), torch.randn(4, 8)
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
    for gradient, expected in pairs:
        assert (largest := float(expected.abs().max())) > 1e-6
        assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6 * max(largest, 1.0))


@pytest.mark.parametrize("field", ["reach", "clip"])
@pytest.mark.parametrize("value", [0, -1.0, "far", math.nan])
def test_limits_must_be_positive(field: str, value: object) -> None:
    model, _ = zoo.plain_cnn()
    with pytest.raises(sp.SmartpruneError, match=rf"Smart: {field}=.* must be a positive"):
        sp.attach(model, sp.Smart(**{field: value}), block=(4, 4), sparsity=0.75, steps=9)  # type: ignore[arg-type]


def test_clip_limits_the_norm_of_the_scores_gradient() -> None:
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
