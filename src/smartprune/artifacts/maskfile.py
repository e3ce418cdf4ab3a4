"""Mask files: which blocks of which weights are kept, eight to a byte. ``docs/format.md`` specifies them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from .. import text
from ..core.block import Block, Layout
from ..core.kinds import PRUNER, is_masked
from ..core.layers import candidates, plain_name
from ..core.occupancy import map_hash, occupied
from ..core.sharding import is_sharded
from ..errors import SmartpruneError
from ..fields import Fields, is_valid_name
from ..files import as_path, check_no_overwrite, check_writable, write_atomic
from .counts import Count, sparsity_line
from .packfile_read import MAX_NAMES, check_derived, read_block, read_layout
from .receipt import AnyReceipt, Receipt, as_receipt, receipt_of
from .safetensors_file import MASK, METADATA, read_entry, read_safetensors, safetensors_bytes
from .source import Model, files_of, read_source
from .verify import verify

VERSION = 1


class _Attached(Protocol):
    """The part of a pruner that a mask file needs."""

    def receipt(self) -> Receipt: ...


@dataclass(frozen=True, eq=False)
class MaskLayer:
    """The kept blocks of one weight. ``kept`` is bool, in the shape of the grid."""

    weight: str  # its name in the state dict
    layout: Layout
    kept: Tensor = field(repr=False)

    @property
    def blocks(self) -> Count:
        return Count(self.kept.numel(), int(self.kept.sum()))


@dataclass(frozen=True, eq=False)
class Mask:
    """The kept blocks of a model, without its weights. Made by :func:`save_mask` and :func:`load_mask`.

    Attributes:
        block: The size of a block.
        layers: The pruned layers, in the order of the model.
        where: The file, or the model that the mask was read from.
    """

    block: Block
    layers: tuple[MaskLayer, ...]
    where: str = "mask"

    @property
    def grids(self) -> dict[str, Tensor]:
        """The kept blocks of every layer by the name of its weight: bool, in the shape of its grid."""
        return {layer.weight: layer.kept for layer in self.layers}

    @property
    def blocks(self) -> Count:
        """Blocks of the layers of the mask."""
        return Count.sum([layer.blocks for layer in self.layers])

    @property
    def sparsity(self) -> float:
        """Share of blocks removed, over all layers of the mask."""
        return self.blocks.removed / self.blocks.total

    @property
    def hash(self) -> str:
        """The hash of the kept blocks. It equals the ``mask_hash`` of the receipt, unless some kept blocks hold only zeros."""
        return map_hash(self.block, ((layer.weight, layer.kept.shape, layer.kept) for layer in self.layers))

    def apply(self, model: nn.Module) -> int:
        """Sets the removed blocks of another model to zero, in place. If the mask does not fit the model, nothing changes.

        Later training would change the zeros: call ``smartprune.hold(model, mask.block)`` before it.

        Args:
            model: A model with weights of the same names, shapes and groups. Names may carry the prefixes of wrappers.

        Returns:
            How many blocks were not zero before.

        Raises:
            SmartpruneError: The mask does not fit, or the model has a pruner.
        """
        _check_plain(model, "mask.apply")
        users = {plain_name(user.weight_name): user for user in candidates(model)}
        changes: list[tuple[Tensor, Tensor]] = []  # complete before the first weight changes
        changed = 0
        for layer in self.layers:
            user = users.get(plain_name(layer.weight))
            problem = "the model has no such weight" if user is None else _misfit(user.weight, user.parts, user.transposed, layer)
            if user is None or problem is not None:
                raise SmartpruneError(
                    f"mask.apply: {layer.weight} of {self.where} does not fit {type(model).__name__}: {problem}; "
                    "give a model of the same architecture"
                )
            grid, kept = layer.layout.cut(self.block), layer.kept.reshape(-1)
            changed += int((occupied(grid, user.weight) & ~kept).sum())
            changes.append((user.weight, (~grid.expand(kept)).to(user.weight.device)))
        with torch.no_grad():
            for weight, removed in changes:
                weight.masked_fill_(removed, 0.0)
        return changed

    def to_bytes(self) -> bytes:
        """The file. Equal masks give equal bytes."""
        header = {
            "version": VERSION,
            "block": str(self.block),
            "layers": [_entry(layer, self.block) for layer in self.layers],
            "mask_hash": self.hash,
        }
        tensors = {layer.weight: _pack(layer.kept) for layer in self.layers}
        return b"".join(safetensors_bytes(tensors, {MASK: json.dumps(header, sort_keys=True, separators=(",", ":"))}))

    def __repr__(self) -> str:
        return f"<Mask: blocks of {self.block}, {text.counted(len(self.layers), 'layer')}, {sparsity_line(self.blocks)}>"


def save_mask(
    model: Model,
    path: str | os.PathLike[str],
    block: Block | str | Sequence[int | None] | None = None,
    receipt: AnyReceipt | None = None,
) -> Mask:
    """Writes which blocks of a model are kept, without the weights.

    The layers come from the receipt: the given receipt, the receipt of a run folder, the receipt of the pruner of a model whose
    search is over, or the receipt of a model that this process has pruned. Otherwise, ``block`` is needed, and the layers are
    those that have a block of zeros.

    Args:
        model: A model whose mask is hard (frozen, baked or any other with blocks of zeros), a state dict, a file or a run folder.
        path: The file to write; by convention it ends in ``.mask.safetensors``.
        block: The size of a block. Defaults to the block of the receipt.
        receipt: The receipt of the pruning, its JSON data or its path. It is checked against the weights.

    Returns:
        The mask that the file holds.

    Raises:
        SmartpruneError: The search is not finished, no block is known, no block is zero, or the weights do not match the receipt.

    Examples:
        >>> import smartprune as sp
        >>> import tempfile
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        >>> pruner = sp.attach(model, "magnitude", block=(4, 4), sparsity=0.75, steps=1)
        >>> pruner.freeze()
        >>> receipt = sp.bake(model)
        >>> path = os.path.join(tempfile.mkdtemp(), "net.mask.safetensors")
        >>> mask = sp.save_mask(model, path)
        >>> mask.hash == receipt.mask_hash, mask.grids["0.weight"].shape, mask.sparsity
        (True, torch.Size([2, 2]), 0.75)
    """
    target = as_path(path, "save_mask: path")
    check_no_overwrite(target, files_of(model), "save_mask:")
    check_writable(target)
    mask = _read_mask(model, None if block is None else Block.of(block), receipt)
    for layer in mask.layers:
        if not layer.weight or not is_valid_name(layer.weight) or layer.weight == METADATA:
            raise SmartpruneError(
                f"save_mask: the name {layer.weight[:40]!r} must have 1 to 1000 printable characters and differ from {METADATA!r}; "
                "rename the weight"
            )
    write_atomic(target, mask.to_bytes())
    return mask


def load_mask(path: str | os.PathLike[str]) -> Mask:
    """Reads a mask file.

    Args:
        path: The file.

    Returns:
        The mask: ``mask.grids`` by the name of the weight, ``mask.apply(model)``, ``mask.block``, ``mask.sparsity`` and
        ``mask.hash``.

    Raises:
        SmartpruneError: The file is missing, damaged, or not a mask file.

    Examples:
        >>> import smartprune as sp
        >>> import tempfile
        >>> pruned, other = nn.Linear(8, 8), nn.Linear(8, 8)
        >>> with torch.no_grad():
        ...     _ = pruned.weight[:4].zero_()
        >>> path = os.path.join(tempfile.mkdtemp(), "net.mask.safetensors")
        >>> _ = sp.save_mask(pruned, path, block=(4, 4))
        >>> sp.load_mask(path).apply(other), int((other.weight != 0).sum())
        (2, 32)
    """
    source = as_path(path, "load_mask: path")
    where = str(source)
    _, metadata, tensors = read_safetensors(source)
    if MASK not in metadata:
        raise SmartpruneError(f"{where}: not a mask file; its metadata has no {MASK!r}; give a file that save_mask wrote")
    fields = read_entry(metadata, MASK, where)
    if fields.raw("version") != VERSION or type(fields.raw("version")) is not int:
        raise fields.error("version", f"{VERSION}; a newer smartprune may read it")
    block = read_block(fields)
    layers = tuple(_read_layer(entry, block, tensors) for entry in fields.items("layers", MAX_NAMES))
    if not layers:
        raise fields.error("layers", "a list with at least one layer")
    if tensors:
        raise SmartpruneError(f"{where}: the tensor {text.escape(min(tensors))[:60]} belongs to no layer; the file may be damaged")
    mask = Mask(block, layers, where)
    stored = fields.match("mask_hash", "sha256:[0-9a-f]{64}", "'sha256:' and 64 hexadecimal digits")
    fields.reject_unknown_keys()
    if mask.hash != stored:
        raise SmartpruneError(f"{where}: the hash of the kept blocks is {mask.hash}, and mask_hash is {stored}")
    return mask


def _read_mask(model: Model, block: Block | None, receipt: AnyReceipt | None) -> Mask:
    """The mask of a model in any form."""
    where = type(model).__name__ if isinstance(model, nn.Module) else "the model"
    known = None if receipt is None else as_receipt(receipt, "save_mask")
    if known is None and isinstance(model, nn.Module) and any(is_masked(module) for module in model.modules()):
        return _of_receipt(_pruner_of(model).receipt(), block, where)  # which counts the weights
    source = read_source(model)
    known = source.receipt if known is None else known
    if known is None and block is None and isinstance(model, nn.Module):
        known = receipt_of(model)
    if known is not None:
        verification = verify(model, receipt=known)
        if not verification.ok:
            raise SmartpruneError(f"save_mask: {source.where} does not match its receipt: {verification.problems[0]}")
        return _of_receipt(known, block, where)
    block = source.block if block is None else block
    if block is None:
        raise SmartpruneError("save_mask: no block was given and there is no receipt; give block=, such as (16, 8)")
    layers = []
    for cut in source.cuts(block)[0]:
        kept = occupied(cut.grid, cut.tensor)
        if bool(kept.all()):
            continue
        if cut.assumed:
            raise SmartpruneError(
                f"save_mask: the axes of {cut.weight} are not known, because {source.where} does not say which layers are "
                "transposed or grouped; give the model itself, or the receipt"
            )
        layout = Layout(cut.name, cut.kind, cut.grid.weight_shape, cut.grid.axes[0].parts, cut.transposed)
        layers.append(MaskLayer(cut.weight, layout, kept.reshape(cut.grid.shape)))
    if not layers:
        raise SmartpruneError(
            f"save_mask: {source.where} has no zero block of {block}; give the pruned weights, and the block of their receipt"
        )
    return Mask(block, tuple(layers), where)


def _of_receipt(receipt: Receipt, block: Block | None, where: str) -> Mask:
    if block is not None and block != receipt.block:
        raise SmartpruneError(
            f"save_mask: block {block} was given, and the receipt is about blocks of {receipt.block}; leave it out"
        )
    layers = []
    for row in receipt.layers:
        layout = Layout(row.name, row.kind, row.shape, row.parts, row.transposed)
        layers.append(MaskLayer(row.weight, layout, row.mask().reshape(row.grid)))
    return Mask(receipt.block, tuple(layers), where)


def _pruner_of(model: nn.Module) -> _Attached:
    for module in model.modules():
        if PRUNER in module.__dict__:
            pruner: _Attached = module.__dict__[PRUNER]
            return pruner
    raise SmartpruneError(
        "save_mask: the layers of this model are masked by the pruner of another model; give that model, or the whole model"
    )


def _check_plain(model: nn.Module, where: str) -> None:
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"{where}: model is a {type(model).__name__}; give a torch.nn.Module")
    if any(is_masked(module) for module in model.modules()):
        raise SmartpruneError(f"{where}: the model has a pruner, whose own mask decides; call smartprune.bake(model) first")


def _misfit(weight: Any, parts: int, transposed: bool, layer: MaskLayer) -> str | None:
    """Why the mask of a layer cannot be applied to a weight; None if it can."""
    layout = layer.layout
    if isinstance(weight, nn.UninitializedParameter) or tuple(weight.shape) != layout.shape:
        shape = "lazy" if isinstance(weight, nn.UninitializedParameter) else text.format_shape(weight.shape)
        return f"it is {shape} in the model and {text.format_shape(layout.shape)} in the mask"
    if (parts, transposed) != (layout.parts, layout.transposed):
        return f"it is {_axes(parts, transposed)} in the model and {_axes(layout.parts, layout.transposed)} in the mask"
    if is_sharded(weight) or weight.layout is not torch.strided or weight.is_inference():
        return "its tensor is sharded, sparse or made in inference mode, and must be a plain one"
    if not weight.is_floating_point():
        return f"it holds {weight.dtype}, and must hold floating-point numbers"
    if weight.is_meta:
        return "it is on the meta device and has no values"
    return None


def _axes(parts: int, transposed: bool) -> str:
    return f"({'in, out' if transposed else 'out, in'}, ...) with {parts} group{'' if parts == 1 else 's'}"


def _entry(layer: MaskLayer, block: Block) -> dict[str, object]:
    layout = layer.layout
    return {
        "name": layer.weight,
        "layer": layout.name,
        "kind": layout.kind,
        "shape": list(layout.shape),
        "groups": layout.parts,
        "transposed": layout.transposed,
        "kept": int(layer.kept.sum()),
        **_derived(layout, block),
    }


def _derived(layout: Layout, block: Block) -> dict[str, object]:
    """The part of an entry that follows from the layout of a weight and the block."""
    grid = layout.cut(block)
    return {
        "output_axis": int(layout.transposed),
        "input_axis": int(not layout.transposed),
        "step": [axis.step for axis in grid.axes],
        "grid": list(grid.shape),
    }


def _read_layer(entry: Fields, block: Block, tensors: dict[str, Tensor]) -> MaskLayer:
    """One layer. Its tensor is taken out of ``tensors``."""
    layout, name = read_layout(entry), entry.text("name")
    try:
        grid = layout.cut(block)
    except SmartpruneError as error:
        raise SmartpruneError(f"{entry.where}: {error}") from None
    check_derived(entry, _derived(layout, block))
    bits, size = tensors.pop(name, None), -(-grid.n // 8)
    if bits is None or bits.dtype != torch.uint8 or tuple(bits.shape) != (size,):
        actual = "missing or used twice" if bits is None else f"{bits.dtype} {list(bits.shape)}"
        raise SmartpruneError(f"{entry.where}: the tensor {text.escape(name)} is {actual}; it must be U8 [{size}]")
    unpacked = np.unpackbits(bits.numpy(), bitorder="little")
    if unpacked[grid.n :].any():
        raise SmartpruneError(f"{entry.where}: bits after the last block of {text.escape(name)} are set; the file is damaged")
    kept = torch.from_numpy(unpacked[: grid.n].astype(bool))
    entry.integer("kept", int(kept.sum()), int(kept.sum()))
    entry.reject_unknown_keys()
    return MaskLayer(name, layout, kept.reshape(grid.shape))


def _pack(kept: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(kept.reshape(-1).cpu().numpy(), bitorder="little"))
