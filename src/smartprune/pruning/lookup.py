"""``find_pruner``: finds the pruner of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ..core.kinds import PRUNER
from ..errors import SmartpruneError

if TYPE_CHECKING:
    from .pruner import Pruner

LINK = PRUNER


def find_pruner(model: nn.Module) -> Pruner | None:
    """Finds the pruner of a model, also through wrappers such as DDP and ``torch.compile``.

    Args:
        model: A model, or a wrapper around one.

    Returns:
        The pruner, or None if the model has none.

    Raises:
        SmartpruneError: Several parts of the model have a pruner.

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        >>> sp.find_pruner(model) is None
        True
        >>> pruner = sp.attach(model, "magnitude", block=(4, 4), sparsity=0.5, steps=1)
        >>> sp.find_pruner(nn.Sequential(model)) is pruner
        True
    """
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"find_pruner: model is a {type(model).__name__}; give a torch.nn.Module")
    pruners = {name: module.__dict__[LINK] for name, module in model.named_modules() if LINK in module.__dict__}
    if len(pruners) > 1:
        raise SmartpruneError(
            f"the model has {len(pruners)} pruners, on {' and '.join(pruners)}; give one part, such as model.{next(iter(pruners))}"
        )
    return next(iter(pruners.values()), None)
