"""``bake``: makes a pruned model plain again."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ..artifacts.receipt import Receipt, remember_receipt
from ..core.example import outputs_depend_on
from ..errors import SmartpruneError
from . import zeros
from .lookup import find_pruner

NAMES = 10  # of layers in a warning


def bake(model: nn.Module, hold: bool = True, example: Any = None) -> Receipt:
    """Makes a pruned model plain again, with zeros in the removed blocks, and returns the receipt.

    The parameters stay the same objects, under their names. A model that is loaded from a file later needs
    :func:`smartprune.hold` to keep its zeros while it trains.

    Args:
        model: The model, after its search.
        hold: Whether torch optimizers of this process keep the zeros when they train the model, or a deepcopy of it, further.
        example: One input of the model, as for :func:`smartprune.plan`. With it, a warning is given if the outputs of the pruned
            model no longer depend on the input.

    Returns:
        What was requested and what was achieved.

    Warns:
        UserWarning: Layers lost every block; the message names them. What such a layer computes no longer depends on its input.

    Raises:
        SmartpruneError: The model has no pruner, or its search is not finished.

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        >>> pruner = sp.attach(model, "magnitude", block=(4, 4), sparsity=0.5, steps=1)
        >>> pruner.freeze()
        >>> receipt = sp.bake(model)
        >>> receipt.blocks.kept, int((model[0].weight != 0).sum())
        (2, 32)
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
    problems = dead_layers(receipt) + ([] if example is None else dead_outputs(model, example))
    with torch.no_grad():
        torch._foreach_add_(list(pruner.blocks.weights), 0.0)  # a negative weight times zero is -0.0; files store +0.0
    pruner.detach()
    pruner.search.baked = True
    pruner.live.last = None
    remember_receipt(model, receipt)
    if not hold:
        zeros.release_zeros(pruner.blocks.weights)
    for problem in problems:  # last, since warnings may be errors, and then the model is baked already
        warnings.warn(f"bake: {problem}", stacklevel=2)
    return receipt


def dead_layers(receipt: Receipt) -> list[str]:
    """A warning that names the layers without blocks, if there are any."""
    dead = [row.name for row in receipt.layers if not row.occupied]
    if not dead:
        return []
    names = ", ".join(dead[:NAMES]) + (f" and {len(dead) - NAMES} more" if len(dead) > NAMES else "")
    return [
        f"{len(dead)} of {len(receipt.layers)} layers kept no block, so nothing passes through them: {names}; attach with "
        "floor=0.01 to keep some blocks of every layer, or remove less"
    ]


def dead_outputs(model: nn.Module, example: Any) -> list[str]:
    """A warning if the outputs are constant."""
    if outputs_depend_on(model, example):
        return []
    return [
        "the outputs of the pruned model do not depend on its input, because layers on every path from the input kept no block; "
        "attach with floor=0.01, or remove less"
    ]
