"""Models with zero blocks, and agreement to float rounding."""

import torch
from torch import Tensor, nn

import smartprune as sp


def pruned(model: nn.Module, sparsity: float, block: tuple[int, ...] = (16, 8)) -> nn.Module:
    """Zeroes random blocks and gives batch norms something to do."""
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


def agree(ours: object, theirs: object, share: float = 1e-5) -> None:
    """Equal to float rounding: within a share of the largest number."""
    if isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor)
        assert ours.shape == theirs.shape
        assert not ours.requires_grad
        assert float((ours - theirs.detach()).abs().max()) <= share * max(1.0, float(theirs.detach().abs().max()))
    else:
        assert isinstance(theirs, (tuple, list))
        assert isinstance(ours, (tuple, list))
        for a, b in zip(ours, theirs, strict=True):
            agree(a, b, share)
