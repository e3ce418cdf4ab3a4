"""A pruner as one line and as one table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import text
from .plan_text import plan_line

if TYPE_CHECKING:
    from .pruner import Pruner

WIDTH, BAR = 100, 14


def one_line(pruner: Pruner) -> str:
    """The method, the blocks, the budget and the phase."""
    return f"{pruner.method.name}: {plan_line(pruner.plan)}; {_phase(pruner)}"


def _phase(pruner: Pruner) -> str:
    return f"search, step {pruner.count} of {pruner.steps}" if pruner.phase == "search" else pruner.phase


def layer_table(pruner: Pruner, ascii_only: bool) -> str:
    """The line and a table of the layers. A soft mask keeps parts of blocks, so their sums have decimals."""
    mask, is_soft = pruner.mask.detach().double().cpu(), pruner.phase == "search"
    rows = []
    for layer in pruner.plan.layers:
        kept = float(mask[layer.start : layer.stop].sum())
        shape = text.format_shape(layer.grid.weight_shape)
        rows.append([layer.name, shape, *_numbers(kept, layer.n, is_soft), text.bar(round(kept), layer.n, BAR, ascii_only)])
    total = float(mask.sum())
    rows.append(
        ["all layers", "", *_numbers(total, pruner.plan.n, is_soft), text.bar(round(total), pruner.plan.n, BAR, ascii_only)]
    )
    header = ["layer", "weight", "blocks", "kept by the soft mask" if is_soft else "kept", "sparsity", ""]
    return "\n".join([one_line(pruner), "", *text.table(header, rows, "<<>>><", WIDTH, (0, 1))])


def _numbers(kept: float, blocks: int, is_soft: bool) -> list[str]:
    """Blocks, kept blocks and sparsity."""
    removed = f"{100 * (1 - kept / blocks):.1f}%" if is_soft else text.percent(blocks - round(kept), blocks)
    return [f"{blocks:,}", f"{kept:,.1f}" if is_soft else f"{round(kept):,}", removed]
