"""Makes the receipt of a pruned model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import __version__, text
from ..artifacts.counts import Count, Requested, Row
from ..artifacts.receipt import Receipt, plain_settings
from ..core.budget import block_macs, scope
from ..core.layers import Layer
from ..core.occupancy import map_hash, occupied, pack_bits
from ..errors import SmartpruneError
from ..fields import MAX_TEXT

if TYPE_CHECKING:
    from .plan import Plan


def make_receipt(
    plan: Plan,
    weights: Mapping[str, Tensor],
    mask: Tensor,
    method: str,
    settings: Mapping[str, object] | None = None,
) -> Receipt:
    """The receipt of a mask [N] on ``weights`` (by ``Layer.weight``), which are zero where the mask removes.

    Everything is counted from the given tensors. A removed block that holds anything but zeros raises.
    """
    if mask.numel() != plan.n:
        raise SmartpruneError(f"receipt: a mask of {mask.numel()} entries was given for {plan.n} blocks")
    mask = mask.detach().reshape(-1).bool().cpu()
    rows, maps = [], []
    for layer in plan.layers:
        if layer.weight not in weights:
            raise SmartpruneError(f"receipt: {layer.weight} is missing from the weights; give every pruned layer's weight")
        kept = mask[layer.start : layer.stop]
        live = _occupied(layer, weights[layer.weight], kept)
        rows.append(_row(plan, layer, kept, live))
        maps.append((layer.weight, layer.grid.shape, live))
    removed_weights = sum(row.weights.removed for row in rows)
    removed_macs = sum(row.macs.removed for row in rows if row.macs is not None)
    return Receipt(
        version=__version__,
        method=method,
        settings=plain_settings(dict(settings or {}), "receipt: settings"),
        block=plan.block,
        floor=plan.floor,
        requested=_requested(plan, mask),
        layers=tuple(rows),
        model_weights=Count(plan.model_params, plan.model_params - removed_weights),
        model_macs=None if plan.model_macs is None else Count(plan.model_macs, plan.model_macs - removed_macs),
        mask_hash=map_hash(plan.block, maps),
        not_counted=plan.not_counted,
        not_pruned=tuple((_text(s.name), _text(s.reason)) for s in plan.skipped if s.cause),
    )


def _text(value: str) -> str:
    """A text that a receipt can store."""
    return text.shorten(text.escape(value), MAX_TEXT)


def _occupied(layer: Layer, weight: Tensor, kept: Tensor) -> Tensor:
    """The blocks of a layer that are not all zeros, which must all be kept."""
    live = occupied(layer.grid, weight)
    wrong = torch.nonzero(live & ~kept).reshape(-1).tolist()
    if wrong:
        raise SmartpruneError(
            f"receipt: {layer.weight} has {len(wrong)} removed blocks that are not zero, the first at {wrong[0]}; "
            "give the masked weights"
        )
    return live


def _row(plan: Plan, layer: Layer, kept: Tensor, live: Tensor) -> Row:
    macs = None if plan.uses is None else block_macs(layer, plan.uses[layer.name])
    return Row(
        name=layer.name,
        weight=layer.weight,
        kind=layer.kind,
        shape=layer.grid.weight_shape,
        grid=layer.grid.shape,
        parts=layer.grid.axes[0].parts,
        transposed=layer.transposed,
        blocks=Count(layer.n, int(kept.sum())),
        occupied=int(live.sum()),
        weights=Count(layer.params, int(layer.grid.sizes()[kept].sum())),
        macs=None if macs is None else Count(int(macs.sum()), int(macs[kept].sum())),
        map=pack_bits(kept),
    )


def _requested(plan: Plan, mask: Tensor) -> Requested | None:
    if plan.budget is None or plan.resolved is None:
        return None
    limit, total = plan.bound
    npu = getattr(plan.budget, "npu", None)
    return Requested(
        kind=plan.budget.kind,
        share=plan.share,
        of=scope(plan.budget),
        limit=limit or 0,
        total=total,
        used=plan.resolved.used(mask),
        npu=None if npu is None else npu.to_json(),
        table=plan.resolved.table,
    )
