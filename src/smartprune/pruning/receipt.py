"""Makes the receipt of a pruned model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from ..artifacts.counts import Asked, Count, Row
from ..core.budget import block_macs
from ..core.occupancy import map_hash, occupied, pack_bits
from ..errors import SmartpruneError

if TYPE_CHECKING:
    from .plan import Plan

from ..artifacts.receipt import Receipt, _settings, _version


def make_receipt(
    plan: Plan,
    weights: Mapping[str, Tensor],
    mask: Tensor,
    method: str,
    settings: Mapping[str, object] | None = None,
) -> Receipt:
    """The receipt of a mask [N] on ``weights`` (by ``Layer.weight``), which are zero where the mask removes.

    Everything is counted from the tensors given; a removed block with anything but zeros in it is an error.
    """
    if mask.numel() != plan.n:
        raise SmartpruneError(f"receipt: a mask of {mask.numel()} entries was given for {plan.n} blocks")
    mask = mask.detach().reshape(-1).bool().cpu()
    rows, maps = [], []
    for layer in plan.layers:
        if layer.weight not in weights:
            raise SmartpruneError(f"receipt: {layer.weight} is missing from the weights; give every pruned layer's weight")
        kept = mask[layer.start : layer.stop]
        found = occupied(layer.grid, weights[layer.weight])
        wrong = (found & ~kept).nonzero().reshape(-1).tolist()
        if wrong:
            raise SmartpruneError(
                f"receipt: {layer.weight} has {len(wrong)} removed blocks that are not zero, the first at {wrong[0]}; "
                "give the masked weights"
            )
        macs = None if plan.uses is None else block_macs(layer, plan.uses[layer.name])
        rows.append(
            Row(
                name=layer.name,
                weight=layer.weight,
                kind=layer.kind,
                shape=layer.grid.weight_shape,
                grid=layer.grid.shape,
                parts=layer.grid.axes[0].parts,
                transposed=layer.transposed,
                blocks=Count(layer.n, int(kept.sum())),
                occupied=int(found.sum()),
                weights=Count(layer.params, int(layer.grid.sizes()[kept].sum())),
                macs=None if macs is None else Count(int(macs.sum()), int(macs[kept].sum())),
                map=pack_bits(kept),
            )
        )
        maps.append((layer.weight, layer.grid.shape, found))
    asked = None
    if plan.budget is not None and plan.limit is not None:
        if plan.latency is not None:
            used = plan.latency.of(mask)
        else:
            used = int(mask.sum() if plan.cost is None else plan.cost[mask].sum())
        limit, total = plan.bound
        asked = Asked(plan.budget.kind, plan.budget.share, plan.budget.of, limit or 0, total, used, plan.budget.npu)
    removed_weights = sum(row.weights.removed for row in rows)
    removed_macs = sum(row.macs.removed for row in rows if row.macs is not None)
    return Receipt(
        version=_version(),
        method=method,
        settings=_settings(dict(settings or {}), "receipt: settings"),
        block=plan.block,
        floor=plan.floor,
        asked=asked,
        layers=tuple(rows),
        model_weights=Count(plan.model_params, plan.model_params - removed_weights),
        model_macs=None if plan.model_macs is None else Count(plan.model_macs, plan.model_macs - removed_macs),
        mask_hash=map_hash(plan.block, maps),
    )
