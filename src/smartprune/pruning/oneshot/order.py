"""In which order the blocks of a layer are removed, and what each removal costs: optimal brain surgeon on blocks.

Removing the columns S of a row of weights w changes the layer's output. If the other columns make up for it as well as they can,
the mean squared change is ``w_S [H^-1]_SS^-1 w_S``, where H is the second moment of the inputs. All rows of a row group lose the
same columns, so they share one inverse, from which removed columns are eliminated. In layers with very many inputs, only
columns of the same piece make up for each other here; the refit uses all columns.
"""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor

from .matrix import Tiles

ROUND = 16  # each round removes 1/16 of the column groups that are left, and at least one
DROP = 0.8  # removed columns are dropped when this share of the column groups is left
MOST_DOUBLE = 1536  # larger matrices are factorized in float32
MOST_INPUTS = 1152  # layers with more inputs are ordered in pieces: the time grows with the cube


def removal_costs(
    weight: Tensor,
    moment: Tensor,
    row_weights: Tensor,
    tiles: Tiles,
    damping: float = 0.01,
    memory: int = 2**30,
    rounds: int = ROUND,
    removed: Tensor | None = None,
) -> Tensor:
    """What removing each block adds to the weighted squared error of the outputs, in the order of removal, float64 [n].

    Args:
        weight: [parts, outputs, inputs].
        moment: The mean of ``x x^T`` over the inputs x, [parts or 1, inputs, inputs].
        row_weights: The weight of the squared error of each output, [parts, outputs].
        tiles: The blocks.
        damping: What is added to the diagonal of the moment, as a share of its mean.
        memory: How many bytes the inverses may take.
        rounds: Each round removes one in so many of the column groups that are left.
        removed: Blocks that are removed already, bool [n]. Their weights are zero, and they come first.

    Within a row group (and a piece, see ``MOST_INPUTS``) the costs do not decrease in the order of removal, so a threshold over
    all blocks follows that order.
    """
    device = weight.device
    rows, every = tiles.rows.to(device), tiles.columns.to(device)
    scaled = weight.double() * row_weights.clamp(min=0).sqrt().double()[..., None]
    unit = scaled.abs().max()  # numbers around 1 do not overflow
    unit = torch.where(unit > 0, unit, 1.0)
    scaled = (scaled / unit).float()
    out = torch.zeros(tiles.index.numel(), dtype=torch.float64, device=device)
    inverse = None
    for piece, part in product(_pieces(every), range(weight.shape[0])):
        columns = every[piece]
        groups, size = columns.shape
        if inverse is None or part == 0 or moment.shape[0] > 1:
            padded, real = _padded(moment[min(part, moment.shape[0] - 1)], columns), columns.reshape(-1) >= 0
            mean = padded.diagonal()[real].mean()
            mean = torch.where(mean > 0, mean, 1.0)
            damped, factor = _damped(padded / mean, real, damping), unit.square() * mean
            inverse = torch.cholesky_inverse(cholesky(damped)).float() if groups > 1 else damped
        matrix = _pad_columns(scaled[part], columns)
        matrix = torch.where((rows >= 0)[..., None], matrix[rows.clamp(min=0)], 0.0)  # [row groups, rows, columns]
        if groups == 1:  # nothing is left that could make up for the removal
            out[tiles.index[part, :, piece.start].to(device)] = factor * ((matrix.to(damped) @ damped) * matrix).sum((1, 2))
            continue
        at_once = max(1, int(memory // (4 * (groups * size) ** 2 * _matrices_per_row_group(groups, rounds))))
        for first in range(0, len(rows), at_once):
            index = tiles.index[part, first : first + at_once, piece].to(device)
            gone = torch.zeros_like(index, dtype=torch.bool) if removed is None else removed.to(device)[index]
            out[index] = factor * eliminate(matrix[first : first + at_once], inverse, size, rounds, gone)
    return out


def _pieces(columns: Tensor) -> list[slice]:
    """The column groups in pieces of about equal size with at most ``MOST_INPUTS`` columns, or one group if groups are larger."""
    groups, size = columns.shape
    step = math.ceil(groups / math.ceil(groups / max(1, MOST_INPUTS // size)))
    return [slice(first, min(groups, first + step)) for first in range(0, groups, step)]


def eliminate(weight: Tensor, inverse: Tensor, size: int, rounds: int, gone: Tensor) -> Tensor:
    """Removes all column groups of ``size`` columns of every row group. Returns what each removal costs, float64 [row groups, n].

    ``weight`` is [row groups, rows, columns], ``inverse`` the inverse of the moment, [columns, columns], and ``gone`` the column
    groups that come first, [row groups, n].
    """
    count, height, width = weight.shape
    n = width // size
    state = _Inverse(inverse, count, size, rounds)
    weight = weight.clone()
    names = torch.arange(n, device=weight.device).expand(count, n)
    out = torch.zeros(count, n, dtype=torch.float64, device=weight.device)
    highest = torch.zeros(count, 1, dtype=torch.float64, device=weight.device)
    left, inside = n, torch.arange(size, device=weight.device)
    while left:
        costs = _single_costs(weight, state.blocks, state.dead).masked_fill(gone & ~state.dead, -1.0)
        take = max(1, left // rounds)
        chosen = costs.sort(stable=True).indices[:, :take]
        columns = (chosen[..., None] * size + inside).flatten(1)
        lines = state.rows(columns)
        factor = cholesky(lines.gather(2, columns[:, None].expand(-1, columns.shape[1], -1)))
        part = weight.gather(2, columns[:, None].expand(-1, height, -1)).mT
        errors = torch.linalg.solve_triangular(factor, part, upper=False)  # [row groups, removed columns, rows]
        steps = errors.double().square().unflatten(1, (take, size)).sum((2, 3))
        steps = torch.cat([highest, steps], 1).cummax(1).values[:, 1:]
        highest = steps[:, -1:]
        out.scatter_(1, names.gather(1, chosen), steps)
        left -= take
        if not left:
            break
        change = torch.linalg.solve_triangular(factor, lines, upper=False)
        weight.baddbmm_(errors.mT, change, alpha=-1)
        state.eliminate(chosen, change)
        if left <= DROP * state.dead.shape[1]:
            alive = (~state.dead).nonzero()[:, 1].view(count, left)
            columns = (alive[..., None] * size + inside).flatten(1)
            weight = weight.gather(2, columns[:, None].expand(-1, height, -1))
            names, gone = names.gather(1, alive), gone.gather(1, alive)
            state.keep(alive, columns)
    return out


class _Inverse:
    """The inverse of the moment after eliminations, one per row group.

    Only its diagonal blocks are kept up to date. Other rows are computed when they are needed, from the first inverse, which all
    row groups share, and from the changes so far. This takes half the operations of updating every entry, and less memory.

    Attributes:
        blocks: The diagonal blocks, [row groups, n, size, size].
        dead: Which column groups are eliminated, [row groups, n].
    """

    def __init__(self, inverse: Tensor, count: int, size: int, rounds: int) -> None:
        n = len(inverse) // size
        self.first, self.size, self.rounds = inverse, size, rounds
        diagonal = inverse.view(n, size, n, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        self.blocks = diagonal.expand(count, n, size, size).clone()
        self.dead = torch.zeros(count, n, dtype=torch.bool, device=inverse.device)
        self._columns = torch.arange(len(inverse), device=inverse.device).expand(count, -1)  # where they are in ``first``
        self._changes, self._used = self._reserve(0), 0

    def rows(self, columns: Tensor) -> Tensor:
        """The rows of these columns, [row groups, columns, width]."""
        out = self.first[self._columns.gather(1, columns)]
        if self._columns.shape[1] < len(self.first):
            out = out.gather(2, self._columns[:, None].expand(-1, columns.shape[1], -1))
        if self._used:
            changes = self._changes[:, : self._used]
            before = changes.gather(2, columns[:, None].expand(-1, self._used, -1))
            out.baddbmm_(before.mT, changes, alpha=-1)
        return out

    def eliminate(self, chosen: Tensor, change: Tensor) -> None:
        """Subtracts the product of ``change`` [row groups, removed columns, width] with itself."""
        count, removed, width = change.shape
        self._changes[:, self._used : self._used + removed] = change
        self._used += removed
        parts = change.view(count, removed, width // self.size, self.size).permute(0, 2, 3, 1)
        self.blocks -= parts @ parts.mT
        self.dead.scatter_(1, chosen, True)

    def keep(self, alive: Tensor, columns: Tensor) -> None:
        """Drops the eliminated columns."""
        index = alive[..., None, None].expand(-1, -1, self.size, self.size)
        self.blocks, self.dead = self.blocks.gather(1, index), torch.zeros_like(alive, dtype=torch.bool)
        self._columns = self._columns.gather(1, columns)
        used = self._changes[:, : self._used]
        self._changes = self._reserve(self._used)
        torch.gather(used, 2, columns[:, None].expand(-1, self._used, -1), out=self._changes[:, : self._used])

    def _reserve(self, used: int) -> Tensor:
        """Space for the changes until columns are dropped the next time."""
        count, n = self.dead.shape
        more = math.ceil((1 - DROP) * n) + n // self.rounds + 1
        return self.first.new_empty(count, used + more * self.size, n * self.size)


def _single_costs(weight: Tensor, blocks: Tensor, dead: Tensor) -> Tensor:
    """What the removal of each column group alone costs now, [row groups, n]; infinite if it is removed already."""
    count, n, size, _ = blocks.shape
    if size == 1:
        diagonal = blocks[..., 0, 0]
        costs: Tensor = weight.square().sum(1) / torch.where(dead | (diagonal <= 0), 1.0, diagonal)
        return costs.masked_fill(dead, torch.inf)
    blocks = torch.where(dead[..., None, None], torch.eye(size, dtype=blocks.dtype, device=blocks.device), blocks)
    parts = weight.view(count, weight.shape[1], n, size).permute(0, 2, 3, 1)
    errors: Tensor = torch.linalg.solve_triangular(cholesky(blocks), parts, upper=False)
    return errors.square().sum((2, 3)).masked_fill(dead, torch.inf)


def cholesky(matrices: Tensor) -> Tensor:
    """The Cholesky factors. Matrices that rounding has made indefinite get a larger diagonal."""
    factors: Tensor
    factors, info = torch.linalg.cholesky_ex(matrices)
    if not bool(info.any()):
        return factors
    indefinite = (info > 0)[..., None, None]
    scale = matrices.diagonal(dim1=-2, dim2=-1).abs().mean(-1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0).expand(matrices.shape[:-1])
    for jitter in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0):
        factors, info = torch.linalg.cholesky_ex(torch.where(indefinite, matrices + torch.diag_embed(jitter * scale), matrices))
        if not bool(info.any()):
            break
    return factors


def _padded(moment: Tensor, columns: Tensor) -> Tensor:
    """The moment in the order of the column groups. Missing columns of partial groups are independent of all others."""
    index = columns.reshape(-1)
    real = index >= 0
    return torch.where(real[:, None] & real, moment[index.clamp(min=0)][:, index.clamp(min=0)], 0.0)


def _pad_columns(matrix: Tensor, columns: Tensor) -> Tensor:
    index = columns.reshape(-1)
    return torch.where(index >= 0, matrix[:, index.clamp(min=0)], 0.0)


def _matrices_per_row_group(groups: int, rounds: int) -> float:
    """How much memory the elimination takes for each row group, in matrices of the size of the moment."""
    removed = max(1, groups // rounds)
    return max(1.0, ((1 - DROP) * groups + 2 + 4 * removed) / groups)


def _damped(moment: Tensor, real: Tensor, damping: float) -> Tensor:
    """A moment whose mean is 1, damped."""
    moment = moment.double() if len(moment) <= MOST_DOUBLE else moment.float()
    moment.diagonal().add_(torch.where(real, damping, 1.0))
    return moment
