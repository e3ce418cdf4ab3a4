"""AC/DC: its phases, and what happens to weights and momentum."""

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import zoo
from helpers.slow_blocks import best, slow_norms
from helpers.training_cases import MethodCase


def test_compressed_and_dense_phases_alternate() -> None:
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


def test_too_few_steps_for_the_cycles_raise() -> None:
    with pytest.raises(sp.SmartpruneError, match=r"cycles=8 needs at least 16 steps, but the search has 10"):
        sp.attach(zoo.plain_cnn()[0], sp.Acdc(), block=(4, 4), sparsity=0.5, steps=10)


def test_freeze_in_a_compressed_phase_keeps_the_mask() -> None:
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
