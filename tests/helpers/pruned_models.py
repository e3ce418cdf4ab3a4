"""Models with random zero blocks, and a comparison of outputs to float rounding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import smartprune as sp
from helpers import reference, zoo
from smartprune.artifacts.receipt import Receipt
from smartprune.pruning.plan import Plan
from smartprune.pruning.receipt import make_receipt


def randomly_pruned(model: nn.Module, sparsity: float, block: tuple[int, ...] = (16, 8)) -> nn.Module:
    """The model in evaluation mode, with random zero blocks and random batch-norm statistics."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)) and getattr(module, "groups", 1) == 1 and sparsity:
            grid = sp.Block(*block).grid(tuple(module.weight.shape))
            module.weight.data *= grid.expand((torch.rand(grid.n) >= sparsity).float())
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                module.weight.data.uniform_(0.5, 1.5)
                module.bias.data.normal_(0, 0.2)
    return model.eval()


def model_and_receipt(
    name: str = "plain_cnn", block: tuple[int, ...] = (4, 4), sparsity: float = 0.75
) -> tuple[nn.Module, Receipt]:
    """A model of the zoo with random zero blocks, and its receipt."""
    model, _ = zoo.SMALL[name]()
    plan = sp.plan(model, block, sparsity)
    mask = torch.zeros(plan.n, dtype=torch.bool)
    mask[torch.randperm(plan.n)[: plan.keep]] = True
    with torch.no_grad():
        for layer in plan.layers:
            model.get_parameter(layer.weight).mul_(layer.grid.expand(mask[layer.start : layer.stop].float()))
    return model, make_receipt(plan, model.state_dict(), mask, "magnitude")


def assert_equal_to_rounding(actual: object, expected: object, tolerance: float = 1e-5) -> None:
    """Compares tensors, or nested tuples and lists of tensors; ``tolerance`` is relative to the largest expected value."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor)
        assert actual.shape == expected.shape
        assert not actual.requires_grad
        largest = float(expected.detach().abs().max())
        assert float((actual - expected.detach()).abs().max()) <= tolerance * max(1.0, largest)
    else:
        assert isinstance(expected, (tuple, list))
        assert isinstance(actual, (tuple, list))
        for a, b in zip(actual, expected, strict=True):
            assert_equal_to_rounding(a, b, tolerance)


def pruned_weights(pruning_plan: Plan, model: torch.nn.Module, mask: Tensor) -> dict[str, Tensor]:
    """The weights of the pruned layers, with zeros in removed blocks, computed with loops."""
    out = {}
    for layer in pruning_plan.layers:
        weight = model.get_parameter(layer.weight).detach().clone()
        parts = layer.grid.axes[0].parts
        index = reference.block_index(weight.shape, pruning_plan.block.sizes, parts, layer.transposed)
        piece = [float(m) for m in mask[layer.start : layer.stop]]
        out[layer.weight] = weight * torch.tensor(reference.expand(piece, index)).reshape(weight.shape)
    return out


def random_mask(pruning_plan: Plan, count: int) -> Tensor:
    mask = torch.zeros(pruning_plan.n, dtype=torch.bool)
    mask[torch.randperm(pruning_plan.n)[:count]] = True
    return mask
