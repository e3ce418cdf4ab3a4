"""A search that starts from scores of the user's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.vector import Blocks
from ..errors import SmartpruneError
from ..methods.method import Method, State

HINT = "give one number per block in the order of the plan, such as the result of smartprune.saliencies, or leave out start"


def initial_state(method: Method, blocks: Blocks, start: Any) -> State:
    """The state in which a search starts. Only the order of ``start``, one score per block, is used. The method keeps its own
    values, so that temperatures and limits mean the same."""
    state = method.state(blocks)
    if start is None:
        return state
    begin = getattr(method, "with_order", None)
    if begin is None:
        raise SmartpruneError(
            f"attach: start is given, but {method.name} learns no scores that could start there; leave it out, or use smart"
        )
    out: State = begin(state, _check(start, blocks))
    return out


def _check(start: Any, blocks: Blocks) -> Tensor:
    try:
        scores = torch.as_tensor(start).detach()
    except (TypeError, ValueError, RuntimeError):
        raise SmartpruneError(f"attach: start is a {type(start).__name__}; {HINT}") from None
    if tuple(scores.shape) != (blocks.n,) or scores.is_complex():
        raise SmartpruneError(f"attach: start has the shape {list(scores.shape)}, and the model has {blocks.n:,} blocks; {HINT}")
    if bool(scores.isnan().any()):
        raise SmartpruneError(f"attach: start contains NaN; {HINT}")
    return scores.to(blocks.device)
