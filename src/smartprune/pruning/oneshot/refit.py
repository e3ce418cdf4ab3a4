"""Refit: the kept weights of a layer are chosen so that its outputs come as close as they can to those of the dense layer.

The inputs are those in the network that is already pruned up to this layer, so the refit also corrects what earlier layers changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .matrix import Tiles
from .order import MOST_DOUBLE, cholesky


def refit(dense: Tensor, moment: Tensor, cross: Tensor, keep: Tensor, tiles: Tiles, damping: float = 0.01) -> Tensor:
    """The weights that minimize the mean of ``|W x - y|^2 + d |W - dense|^2`` over the kept blocks, [parts, outputs, inputs].

    Args:
        dense: The weight of the dense layer, [parts, outputs, inputs].
        moment: The mean of ``x x^T``, [parts or 1, inputs, inputs].
        cross: The mean of ``x y^T``, [parts, inputs, outputs].
        keep: The blocks that are kept, bool [n].
        tiles: The blocks.
        damping: d, as a share of the mean diagonal of the moment.
    """
    out = torch.zeros_like(dense, dtype=torch.float32)
    keep = keep.cpu()
    for part in range(dense.shape[0]):
        second = moment[min(part, moment.shape[0] - 1)]
        mean = second.diagonal().mean()
        added = damping * (mean if float(mean) > 0 else torch.ones_like(mean))
        single: Tensor | None = None
        groups: dict[bytes, list[int]] = {}
        for row_group, kept in enumerate(keep[tiles.index[part]]):
            groups.setdefault(kept.numpy().tobytes(), []).append(row_group)
        for members in groups.values():
            kept = keep[tiles.index[part, members[0]]]
            columns = tiles.columns[kept].reshape(-1)
            rows = tiles.rows[members].reshape(-1)
            columns, rows = columns[columns >= 0].to(dense.device), rows[rows >= 0].to(dense.device)
            if not len(columns):
                continue
            goal = cross[part][columns][:, rows] + added * dense[part][rows][:, columns].T.to(cross.dtype)
            source = second
            if len(columns) > MOST_DOUBLE:
                single = second.float() if single is None else single
                source, goal = single, goal.float()
            system = source[columns][:, columns]
            system.diagonal().add_(added)
            solution = torch.cholesky_solve(goal, cholesky(system))
            out[part, rows[:, None], columns] = solution.T.float()
    return out
