"""AWG against slow loops: importance, calibration and nested masks."""

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers.training_cases import MethodCase


def test_weights_are_paused_during_calibration_and_masks_are_nested() -> None:
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


def test_a_floor_may_bring_removed_blocks_back() -> None:
    """With the blocks that an earlier stage kept, the floor would cost more than the budget, which is feasible by itself."""
    job = MethodCase("awg", "plain_cnn", block=(3, 5), budget=sp.params(0.9), floor=0.15).run()
    plan, mask = job.pruner.plan, job.pruner.mask
    assert plan.cost is not None
    assert plan.limit is not None
    assert plan.limit - int(plan.cost[~mask].min()) < int(plan.cost[mask].sum()) <= plan.limit
    assert all(int(mask[layer.start : layer.stop].sum()) >= 0.15 * layer.n for layer in plan.layers)


def test_replaced_parameters_are_paused_too() -> None:
    job = MethodCase("awg", "plain_cnn")
    job.model.load_state_dict({name: value.clone() for name, value in job.model.state_dict().items()}, assign=True)
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.02)
    before = [parameter.detach().clone() for parameter in job.model.parameters()]
    job.step()
    assert all(torch.equal(a, b) for a, b in zip(before, job.model.parameters(), strict=True))


def test_importance() -> None:
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


def test_missing_backward_pass_raises() -> None:
    job = MethodCase("awg", "plain_cnn")
    with pytest.raises(sp.SmartpruneError, match=r"Awg reads gradients.*loss\.backward\(\) before pruner\.step\(\)"):
        job.pruner.step()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_do_not_change_during_calibration(momentum: float | None) -> None:
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


def test_instance_norms_are_unchanged_during_calibration() -> None:
    """Calibration neither switches them to the statistics of their input nor updates their running statistics."""
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
