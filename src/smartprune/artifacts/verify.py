"""Verification: counts the zero blocks of a stored model again, and compares them with a receipt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import text
from ..core.block import Block
from ..core.occupancy import is_finite, map_hash, nonzero, occupied
from ..errors import SmartpruneError
from .axes import assumed_axes_lines, inputs_first, swap_axes
from .counts import Row, sparsity_line
from .receipt import AnyReceipt, Receipt, as_receipt
from .source import Model, Source, read_source, stored_and_network

WIDTH = 80
NOT_FINITE = "holds NaN or infinity"
MAX_SHOWN = 5  # wrong blocks in a message
COMMON_BLOCKS = tuple(
    map(Block.of, ("32x32", "16x16", "16x8", "8x16", "8x8", "8x4", "4x8", "4x4", "16x1", "1x16", "channel", "1x1"))
)
MIN_ZEROS = 0.01  # the share of weights that must lie in zero blocks
# A shape explains the zeros if it covers this share of what the best shape covers. The threshold is high because at a high
# sparsity many neighbouring blocks are removed, so that shapes that are too large cover much as well.
SAME_COVER = 0.9999


@dataclass(frozen=True)
class LayerCheck:
    """The counts of one weight. ``wrong`` lists blocks that are removed in the receipt and not zero."""

    name: str
    weight: str
    shape: tuple[int, ...]
    blocks: int
    zero: int
    wrong: tuple[int, ...] = ()

    @property
    def sparsity(self) -> float:
        return self.zero / self.blocks

    def to_json(self) -> dict[str, object]:
        return {key: list(v) if isinstance(v, tuple) else v for key, v in vars(self).items()}


@dataclass(frozen=True)
class ShapeTrial:
    """One block shape: how many of its blocks are zero, and how many of the zero weights lie ``inside`` them."""

    block: Block
    blocks: int
    zero: int
    weights: int
    zeros: int
    inside: int

    @property
    def covered(self) -> float:
        """The share of zero weights that lie in zero blocks."""
        return self.inside / self.zeros if self.zeros else 0.0

    @property
    def intended(self) -> bool:
        """Whether the zeros were made in such blocks. Random zeros would lie outside of zero blocks far more often."""
        if self.inside == 0 or self.inside < MIN_ZEROS * self.weights:
            return False
        chance = (self.zeros / self.weights) ** (self.weights / self.blocks - 1)
        return self.block == Block(1, 1) or 1 - self.covered <= 0.1 * (1 - chance)

    def to_json(self) -> dict[str, object]:
        return {**vars(self), "block": str(self.block)}


@dataclass(frozen=True)
class Verification:
    """The result of :func:`verify`. ``problems`` lists every difference from the receipt; ``ok`` is true if there are none."""

    where: str
    block: Block | None
    layers: tuple[LayerCheck, ...]
    problems: tuple[str, ...]
    receipt: Receipt | None = None
    mask_hash: str | None = None
    tried: tuple[ShapeTrial, ...] = ()
    assumed: tuple[str, ...] = ()  # weights whose axes are assumed to be (out, in, ...), without groups
    absent: tuple[str, ...] = ()  # weights of the receipt that the file leaves out, because no node of its graph uses them

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def blocks(self) -> int:
        return sum(layer.blocks for layer in self.layers)

    @property
    def zero(self) -> int:
        return sum(layer.zero for layer in self.layers)

    def to_json(self) -> dict[str, object]:
        """Plain data: numbers, strings, lists and dictionaries."""
        return {
            "where": self.where,
            "ok": self.ok,
            "block": None if self.block is None else str(self.block),
            "blocks": self.blocks,
            "zero": self.zero,
            "against_receipt": self.receipt is not None,
            "mask_hash": self.mask_hash,
            "problems": list(self.problems),
            "layers": [layer.to_json() for layer in self.layers],
            "tried": [tried.to_json() for tried in self.tried],
            "axes_assumed": list(self.assumed),
            "absent": list(self.absent),
        }

    def __repr__(self) -> str:
        return f"<Verification of {self.where}: {'ok' if self.ok else f'{len(self.problems)} problems'}>"

    def __str__(self) -> str:
        lines = [self.where]
        if self.tried:
            rows = [
                (
                    str(t.block),
                    f"{t.zero:,}",
                    f"{t.blocks:,}",
                    text.percent(t.zero, t.blocks),
                    f"{100 * t.covered:.1f}%",
                )
                for t in self.tried
            ]
            lines += [
                "",
                *text.table(("block", "zero", "blocks", "of all blocks", "of all zeros"), rows, "<>>>>", WIDTH),
                "",
            ]
            lines.append("not sparse in any block shape" if self.block is None else f"sparse in blocks of {self.block}")
        if self.layers and self.block is not None:
            checks = [
                (
                    x.name,
                    text.format_shape(x.shape),
                    f"{x.zero:,}",
                    f"{x.blocks:,}",
                    text.percent(x.zero, x.blocks),
                    "*" if x.weight in self.assumed else "",
                )
                for x in self.layers
            ]
            header = ("layer", "weight", "zero", f"blocks of {self.block}", "zero share", "")
            layers = "pruned layers" if self.receipt is not None else "all, axes assumed" if self.assumed else "all layers above"
            total = (layers, "", f"{self.zero:,}", f"{self.blocks:,}", text.percent(self.zero, self.blocks), "")
            lines += ["", *text.table(header, [*checks, total], "<<>>><", WIDTH, (0, 1))]
        lines += assumed_axes_lines(self.assumed, WIDTH, mark="* ")
        lines.append("")
        if self.receipt is not None and not self.problems:
            lines.append(sparsity_line(self.receipt.blocks))
        if self.problems:
            count = len(self.problems)
            lines += [f"NOT ok, {count} problem{'' if count == 1 else 's'}:", *(f"- {p}" for p in self.problems)]
        elif self.receipt is not None:
            lines.append(f"ok: matches the receipt, {self.receipt.mask_hash}")
            if self.absent:
                one = len(self.absent) == 1
                weights = "1 weight of the receipt is" if one else f"{len(self.absent)} weights of the receipt are"
                names = text.shorten(", ".join(self.absent), WIDTH)
                lines.append(f"{weights} not in the graph, because no node uses {'it' if one else 'them'}: {names}")
        else:
            lines.append("no problems found; there is no receipt to compare with")
        return "\n".join(lines)


def verify(
    stored: Model | None = None,
    /,
    block: Block | str | Sequence[int | None] | None = None,
    receipt: AnyReceipt | None = None,
    *,
    model: Model | None = None,
) -> Verification:
    """Counts the zero blocks in stored weights, and lists every difference from the receipt.

    A receipt that belongs to the file is read as well. In an ONNX file weights were scaled or rounded, so kept blocks may have
    become zero. For a model that is still masked, the unmasked weights count.

    A state dict, a checkpoint and a plain ``.safetensors`` file do not say which layers are transposed or grouped. Weights that
    no receipt lists are then read as (out, in, ...), and ``assumed`` of the result names them. Give the model to avoid this.

    Args:
        stored: A model, a state dict, a ``.safetensors`` file, a packed file, an ONNX file, a torch checkpoint or a run folder.
        block: The size of a block to count if there is no receipt. By default common sizes are tried.
        receipt: A receipt, its JSON data or its path.
        model: The ``torch.nn.Module`` that a state dict or a file belongs to.

    Returns:
        The counts. ``ok`` is true if there is no difference, and ``problems`` lists the differences.

    Raises:
        SmartpruneError: The weights or the receipt cannot be read.

    Examples:
        >>> import smartprune as sp
        >>> weight = torch.zeros(4, 4)
        >>> weight[:2, :2] = 1
        >>> result = sp.verify({"fc.weight": weight}, block=(2, 2))
        >>> result.ok, result.zero, result.blocks
        (True, 3, 4)
    """
    wanted = None if block is None else Block.of(block)
    source = read_source(*stored_and_network(stored, model, "verify"))
    known = source.receipt if receipt is None else as_receipt(receipt, "verify")
    if known is not None:
        result = compare_with_receipt(source, known, wanted)
        return result if known.met else replace(result, problems=(_unmet(known), *result.problems))
    wanted = source.block if wanted is None else wanted
    if wanted is not None:
        layers, problems, assumed = _count(source, wanted)
        return Verification(source.where, wanted, layers, problems, assumed=assumed)
    tried = tuple(_try(source, shape) for shape in COMMON_BLOCKS)
    best = _best(tried)
    layers, problems, _ = _count(source, best or Block(1, 1))
    assumed = tuple(cut.weight for cut in source.cuts(Block(2, 2))[0] if cut.assumed)  # for any of the shapes that were tried
    return Verification(source.where, best, layers, problems, tried=tried, assumed=assumed)


def _unmet(receipt: Receipt) -> str:
    assert receipt.requested is not None
    kept, limit = f"{receipt.requested.used:,} {receipt.requested.unit}", f"{receipt.requested.limit:,}"
    return f"the receipt itself does not meet its budget: {kept} were kept, {limit} were requested"


def compare_with_receipt(source: Source, receipt: Receipt, wanted: Block | None = None) -> Verification:
    """Counts the zero blocks of the layers that a receipt lists. ``wanted`` is the block that the caller expects."""
    problems: list[str] = []
    source = swap_axes(source, inputs_first(receipt.layers))
    if wanted is not None and wanted != receipt.block:
        problems.append(f"block {wanted} was given, and the receipt is about blocks of {receipt.block}")
    problems += _other_axes(source, receipt)
    checks: list[LayerCheck] = []
    maps: list[tuple[str, tuple[int, ...], Tensor]] = []
    absent: list[str] = []
    for row in receipt.layers:
        tensor = source.get(row.weight)
        if tensor is None and row.weight in source.absent:
            absent.append(row.weight)
        elif tensor is None:
            problems.append(f"{row.weight}: is in the receipt, but not in {source.where}")
        elif tuple(tensor.shape) != row.shape:
            problems.append(
                f"{row.weight}: has shape {text.format_shape(tensor.shape)}, the receipt says {text.format_shape(row.shape)}"
            )
        else:
            bits, check = _check(row, tensor, receipt.block, problems, source.rounded)
            maps.append((row.weight, row.grid, bits))
            checks.append(check)
    if absent and not checks:
        problems.append(f"{source.where}: holds no weight of the receipt")
    digest = map_hash(receipt.block, maps) if len(maps) == len(receipt.layers) else None
    fewer = source.rounded and sum(check.blocks - check.zero for check in checks) < sum(row.occupied for row in receipt.layers)
    if digest is not None and digest != receipt.mask_hash and not fewer:
        problems.append(f"the hash is {digest}, the receipt says {receipt.mask_hash}")
    return Verification(source.where, receipt.block, tuple(checks), tuple(problems), receipt, digest, absent=tuple(absent))


def _other_axes(source: Source, receipt: Receipt) -> list[str]:
    """Differences between the axes of weights in the receipt and in the model."""
    if source.model is None:
        return []
    model_axes = {cut.weight: (cut.grid.axes[0].parts, cut.transposed) for cut in source.cuts(receipt.block)[0]}
    rows = [(row.weight, (row.parts, row.transposed), model_axes.get(row.weight)) for row in receipt.layers]
    return [
        f"{name}: the receipt says groups={expected[0]}, transposed={expected[1]}, "
        f"the model groups={actual[0]}, transposed={actual[1]}"
        for name, expected, actual in rows
        if actual is not None and actual != expected
    ]


def _check(row: Row, tensor: Tensor, block: Block, problems: list[str], rounded: bool) -> tuple[Tensor, LayerCheck]:
    grid = row.cut(block)
    try:
        bits = occupied(grid, tensor)
    except SmartpruneError as error:
        raise SmartpruneError(f"{row.weight}: {error}") from None
    _finite(row.weight, tensor, problems)
    kept = row.mask()
    wrong = (bits & ~kept).nonzero().reshape(-1)
    for index in wrong[:MAX_SHOWN].tolist():
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(index, device="cpu"), grid.shape))
        problems.append(
            f"{row.weight}: block {index} at {at} of the grid {text.format_shape(grid.shape)} is removed in the receipt, "
            "but not zero"
        )
    if len(wrong) > MAX_SHOWN:
        problems.append(f"{row.weight}: {len(wrong) - MAX_SHOWN:,} more removed blocks are not zero")
    kept_nonzero = int((bits & kept).sum())
    if kept_nonzero != row.occupied and not (rounded and kept_nonzero < row.occupied):
        problems.append(f"{row.weight}: {kept_nonzero:,} kept blocks are not zero, the receipt says {row.occupied:,}")
    zero = grid.n - int(bits.sum())
    return bits, LayerCheck(row.name, row.weight, row.shape, grid.n, zero, tuple(wrong.tolist()))


def _count(source: Source, block: Block) -> tuple[tuple[LayerCheck, ...], tuple[str, ...], tuple[str, ...]]:
    problems: list[str] = []
    checks = []
    cuts, skipped = source.cuts(block)
    if not cuts:
        reasons = "; ".join(f"{s.name}: {s.reason}" for s in skipped) or "no tensor has two axes or more"
        raise SmartpruneError(f"{source.where}: no weight can be cut into blocks of {block} ({reasons})")
    for cut in cuts:
        try:
            zero = cut.grid.n - int(occupied(cut.grid, cut.tensor).sum())
        except SmartpruneError as error:
            raise SmartpruneError(f"{cut.weight}: {error}") from None
        _finite(cut.weight, cut.tensor, problems)
        checks.append(LayerCheck(cut.name, cut.weight, cut.grid.weight_shape, cut.grid.n, zero))
    return tuple(checks), tuple(problems), tuple(cut.weight for cut in cuts if cut.assumed)


def _finite(name: str, tensor: Tensor, problems: list[str]) -> None:
    if not is_finite(tensor):
        problems.append(f"{name}: {NOT_FINITE}")


def _try(source: Source, block: Block) -> ShapeTrial:
    blocks = zero = zeros = inside = weights = 0
    for cut in source.cuts(block)[0]:
        used = nonzero(cut.tensor)
        bits = cut.grid.sum(used).bool().cpu()
        blocks += cut.grid.n
        zero += cut.grid.n - int(bits.sum())
        weights += used.numel()
        zeros += used.numel() - int(used.sum())
        inside += int(cut.grid.sizes()[~bits].sum())
    return ShapeTrial(block, blocks, zero, weights, zeros, inside)


def _best(tried: Sequence[ShapeTrial]) -> Block | None:
    """The largest of the shapes that explain the zeros. Single weights are the last resort."""
    intended = [t for t in tried if t.intended]
    larger = [t for t in intended if t.block != Block(1, 1)] or intended
    if not larger:
        return None
    most = max(t.inside for t in larger)
    return min((t for t in larger if t.inside >= SAME_COVER * most), key=lambda t: t.blocks).block
