"""``attach``: checks the arguments, plans the model, and gives it a pruner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..core.block import Block
from ..core.budget import Budget
from ..core.kinds import is_masked
from ..core.layers import Patterns
from ..errors import SmartpruneError
from ..methods import METHODS
from ..methods.method import Method
from . import checks
from .lookup import find_pruner
from .plan import make_plan
from .pruner import Pruner


def attach(
    model: nn.Module,
    method: Method | str,
    block: Block | str | Sequence[int | None] = (16, 8),
    sparsity: float | None = None,
    budget: Budget | None = None,
    *,
    steps: int,
    floor: float | None = None,
    include: Patterns = (),
    skip: Patterns = (),
    example: Any = None,
    seed: int = 0,
    start: Any = None,
) -> Pruner:
    """Masks the weights of a model in place and returns the pruner that controls the masks.

    The model keeps its parameters, their names and their order. The scores of a method that learns them are one more parameter,
    the last one: add ``pruner.param_group()`` to an optimizer that exists already.

    Args:
        model: The model to prune.
        method: A method with its settings, such as ``Smart()``, or its name, such as ``"smart"``.
        block: The size of a block, such as ``(16, 8)`` or ``"16x8"``: output channels, input channels, then the kernel.
        sparsity: The share of the blocks to remove, in [0, 1).
        budget: Any other budget, such as ``macs(0.5, example=x)``. Give ``sparsity`` or ``budget``, not both.
        steps: The length of the search in optimizer steps. Afterwards the mask is hard, and the same loop fine-tunes the model.
        floor: The smallest share of its blocks that every layer keeps.
        include: Layers to prune although they are skipped by default: a glob of names such as ``"head.*"``, a layer type, or a
            list.
        skip: Layers to leave out, in the same form. It takes precedence over ``include``.
        example: One input of the model, see :func:`plan`.
        seed: The seed of methods that draw random numbers.
        start: Scores to start the search from, one number per block in the order of the plan, such as those of
            :func:`saliencies`. Only their order matters. By default, scores start from the magnitudes of the blocks.

    Returns:
        The pruner. Call its ``step()`` after each ``optimizer.step()``.

    Raises:
        SmartpruneError: The budget cannot be met, the model has a pruner already, or an argument is out of range.

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.75, steps=8)
        >>> optimizer.add_param_group(pruner.param_group())
        >>> for _ in range(10):  # 8 steps of search, 2 of fine-tuning
        ...     model(torch.randn(16, 8)).square().mean().backward()
        ...     optimizer.step()
        ...     pruner.step()
        ...     optimizer.zero_grad()
        >>> sp.bake(model).blocks.kept, pruner.plan.n
        (6, 24)
    """
    if isinstance(method, str) and method in METHODS:
        method = METHODS[method]()
    checks.require_arguments(model, method, steps, seed)
    assert not isinstance(method, str)
    if find_pruner(model) is not None:
        raise SmartpruneError("attach: the model already has a pruner; bake it first, or start from a fresh model")
    if sparsity is None and budget is None:
        raise SmartpruneError("attach: no budget given; give sparsity=0.95, or budget=smartprune.macs(0.5, example=x)")
    with torch.inference_mode(False):  # tensors made here are trained, or read by backward passes
        planned = make_plan(model, block, sparsity, budget, floor=floor, include=include, skip=skip, example=example).require()
    checks.require_blocks_that_fit(planned)
    masked = [layer.name for layer in planned.layers if any(is_masked(model.get_submodule(name)) for name, _ in layer.sites)]
    if masked:
        raise SmartpruneError(
            f"attach: {masked[0]} already belongs to another pruner, of a larger model or of one that shares the layer; bake "
            f"that one first, or leave the layer out: skip={masked[0]!r}"
        )
    with torch.inference_mode(False):
        return Pruner(model, method, planned, int(steps), int(seed), start)
