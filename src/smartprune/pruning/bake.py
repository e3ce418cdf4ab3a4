"""``bake``: makes a pruned model plain again."""

from __future__ import annotations

import torch
from torch import nn

from ..artifacts.receipt import Receipt
from ..errors import SmartpruneError
from . import zeros
from .pruner import find_pruner


def bake(model: nn.Module, hold: bool = True) -> Receipt:
    """Makes the model plain again, with zeros where blocks were removed, and returns the receipt.

    Parameters stay the same objects. With ``hold``, torch optimizers of this process that continue to train the model, or a
    deepcopy of it, keep the zeros. With ``hold=False`` they may train again. A model that was loaded from a file needs
    :func:`smartprune.hold`.
    """
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"bake: model is a {type(model).__name__}; give a torch.nn.Module")
    pruner = find_pruner(model)
    if pruner is None:
        raise SmartpruneError("bake: the model has no pruner; attach one first (a baked model is plain and needs no second bake)")
    if pruner.phase == "search":
        raise SmartpruneError(
            f"bake: the search is at step {pruner.count} of {pruner.steps}; let it finish, or call pruner.freeze() to harden the "
            "mask now; if this is a copy of a model whose search is over (EMA), call pruner.apply_to(copy) first"
        )
    receipt = pruner.receipt()
    with torch.no_grad():
        torch._foreach_add_(list(pruner.blocks.weights), 0.0)  # a negative weight times zero is -0.0; files store +0.0
    pruner.detach()
    pruner.search.baked = True
    pruner.live.last = None
    if not hold:
        zeros.release_zeros(pruner.blocks.weights)
    return receipt
