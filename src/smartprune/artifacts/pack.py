"""Packing: stores a model without its zero blocks, and restores it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .. import text
from ..core.block import Block, Layout
from ..core.kinds import is_masked
from ..core.layers import plain_name
from ..errors import SmartpruneError
from ..files import as_path, check_no_overwrite, check_writable, write_atomic
from .axes import assumed_axes_lines
from .counts import Count, sparsity_line
from .packfile import MAX_AXES, PackedFile, PackedWeight
from .packfile_read import read_packed
from .quantized import is_quantized
from .receipt import Receipt, receipt_of
from .safetensors_file import safetensors_size
from .source import Model, Source, check_not_masked, files_of, read_source
from .tensors import storage_key
from .verify import verify

WIDTH = 80
SUFFIX = ".packed.safetensors"
RUNTIME = "smartprune.runtime"


@dataclass(frozen=True)
class PackedRow:
    """One weight that can be cut. ``dense`` and ``size`` are bytes; ``packed`` is false if blocks would save no bytes."""

    name: str
    shape: tuple[int, ...]
    blocks: Count
    dense: int
    size: int
    packed: bool


@dataclass(frozen=True)
class Packed:
    """The result of :func:`pack`. ``dense`` is the size of a plain safetensors file of the same tensors.

    ``mask_hash`` is the hash in the receipt; without a receipt it is ``stored_hash``, the hash of the blocks that the file stores.
    The two differ where a pruned layer is stored unchanged, because its blocks would save no bytes.
    """

    path: str
    block: Block
    dense: int
    size: int
    mask_hash: str
    layers: tuple[PackedRow, ...]
    assumed: tuple[str, ...] = ()  # weights whose axes are assumed to be (out, in, ...), without groups
    stored_hash: str = ""
    pruned: Count | None = None  # blocks of the layers that the receipt lists, if there is one

    @property
    def share(self) -> float:
        """The size of the file as a share of the dense one."""
        return self.size / self.dense

    def to_json(self) -> dict[str, object]:
        """Plain data: numbers, strings, lists and dictionaries."""
        layers = [{**vars(row), "shape": list(row.shape), "blocks": row.blocks.to_json()} for row in self.layers]
        plain = {key: value for key, value in vars(self).items() if key != "assumed"}
        pruned = None if self.pruned is None else self.pruned.to_json()
        derived = {"block": str(self.block), "share": self.share, "pruned": pruned}
        return {**plain, **derived, "layers": layers, "axes_assumed": list(self.assumed)}

    def __repr__(self) -> str:
        return f"<Packed: {self.path}, {self.size:,} of {self.dense:,} bytes>"

    def __str__(self) -> str:
        rows = [
            (
                row.name,
                text.format_shape(row.shape),
                f"{row.blocks.kept:,}/{row.blocks.total:,}",
                f"{row.dense:,}",
                f"{row.size:,}" if row.packed else "unchanged",
            )
            for row in self.layers
        ]
        header = ("layer", "weight", "kept/blocks", "dense bytes", "packed bytes")
        nothing = f"no weight can be cut into blocks of {self.block}: every tensor is stored unchanged"
        return "\n".join(
            [
                *(text.table(header, rows, "<<>>>", WIDTH, (0, 1)) if rows else [nothing]),
                *assumed_axes_lines(self.assumed, WIDTH, "pack the model itself"),
                "",
                f"dense    {self.dense:,} bytes",
                f"packed   {self.size:,} bytes, {100 * self.share:.2f}% of the dense bytes, in blocks of {self.block}",
                *([] if self.pruned is None else [sparsity_line(self.pruned), f"mask     {self.mask_hash}"]),
                f"stored   {self.stored_hash}",
                f"file     {self.path}",
            ]
        )


def pack(
    model: Model,
    path: str | os.PathLike[str],
    block: Block | str | Sequence[int | None] | None = None,
    receipt: Receipt | None = None,
) -> Packed:
    """Writes a model without its zero blocks.

    :func:`unpack` restores it bit for bit, except that ``-0.0`` in a block of zeros becomes ``0.0``. A weight whose blocks
    would save no bytes is stored unchanged. The model does not change.

    A state dict or a plain file does not say which layers are transposed or grouped. Weights that no receipt lists are then
    read as (out, in, ...), and ``assumed`` of the result names them.

    Args:
        model: A baked or any other plain model, a state dict, a file or a run folder.
        path: The file to write; by convention it ends in ``.packed.safetensors``.
        block: The size of a block. Defaults to the block of the receipt or of the packed file.
        receipt: The receipt of the pruning. It is checked against the weights and stored in the file. The receipt of a run
            folder is found, and that of a model that this process pruned, unless ``block`` is given.

    Returns:
        The sizes of the dense and of the packed file, with a row per weight.

    Raises:
        SmartpruneError: No block is known, the weights do not match the receipt, or the model is still masked.

    Examples:
        >>> import smartprune as sp
        >>> import os, tempfile
        >>> weight = torch.zeros(32, 32)
        >>> weight[:8, :8] = 1
        >>> path = os.path.join(tempfile.mkdtemp(), "net.packed.safetensors")
        >>> packed = sp.pack({"fc.weight": weight}, path, block=(8, 8))
        >>> packed.layers[0].blocks.kept, torch.equal(sp.unpack(path)["fc.weight"], weight)
        (1, True)
    """
    target = as_path(path, "pack: path")
    source = _source(model)
    if receipt is not None and not isinstance(receipt, Receipt):
        raise SmartpruneError(f"pack: receipt is a {type(receipt).__name__}; give a Receipt, such as Receipt.load(path)")
    receipt = source.receipt if receipt is None else receipt
    if receipt is None and block is None and isinstance(model, nn.Module):
        receipt = receipt_of(model)
    source = replace(source, receipt=receipt)  # the receipt says how its layers are cut
    default = source.block if receipt is None else receipt.block
    if block is None and default is None:
        raise SmartpruneError("pack: no block was given and there is no receipt; give block=, such as (16, 8)")
    block = Block.of(default if block is None else block)  # type: ignore[arg-type]
    if receipt is not None:
        verification = verify(model, receipt=receipt)
        if not verification.ok:
            raise SmartpruneError(f"pack: {source.where} does not match its receipt: {verification.problems[0]}")
    check_no_overwrite(target, files_of(model), "pack:")
    check_writable(target)
    file, rows, assumed = _packed(source, block, receipt)
    data = file.to_bytes()
    write_atomic(target, data)
    matching = receipt if receipt is not None and receipt.block == block else None  # a receipt for other blocks is only stored
    return Packed(
        path=str(target),
        block=block,
        dense=_dense_size(source, file),
        size=len(data),
        mask_hash=file.mask_hash if matching is None else matching.mask_hash,
        layers=rows,
        assumed=assumed,
        stored_hash=file.mask_hash,
        pruned=None if matching is None else matching.blocks,
    )


def packed_sizes(model: Model, block: Block, network: nn.Module | None = None, receipt: Receipt | None = None) -> tuple[int, int]:
    """The sizes of a plain and of a packed file, without writing either. ``network`` is the model of the weights."""
    source = _source(model) if network is None else read_source(model, network)
    source = source if receipt is None else replace(source, receipt=receipt)
    file = _packed(source, block, source.receipt)[0]
    return _dense_size(source, file), len(file.to_bytes())


def unpack(path: str | os.PathLike[str], model: nn.Module | None = None, *, limit: int | None = None) -> dict[str, Tensor]:
    """Reads a packed file into a plain state dict.

    Args:
        path: The packed file.
        model: If given, the weights are loaded into it as well. Names, shapes and dtypes must match; otherwise nothing is loaded.
            Prefixes of wrappers, such as those of ``torch.compile``, may differ.
        limit: The most bytes that the tensors may take, because a small file can claim any size. The default is 64 MiB, or 256
            times the size of a larger file.

    Returns:
        The state dict.

    Raises:
        SmartpruneError: The file is missing or damaged, exceeds the limit, or does not match the model.

    Examples:
        >>> import smartprune as sp
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "net.packed.safetensors")
        >>> _ = sp.pack({"fc.weight": torch.zeros(32, 32), "fc.bias": torch.ones(2)}, path, block=(8, 8))
        >>> sp.unpack(path)["fc.bias"]
        tensor([1., 1.])
    """
    if limit is not None and (type(limit) is not int or limit < 0):
        raise SmartpruneError(f"unpack: limit={limit!r} must be a number of bytes, such as 2**30")
    if model is not None:
        check_loadable(model, "unpack")
    source = as_path(path, "unpack: path")
    if not source.is_file():
        raise SmartpruneError(f"{source}: no such file")
    file = read_packed(source, limit)
    state = file.dense()
    if model is not None:
        load_into(model, _named_like(model, state), file.where)
    return state


def _named_like(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of the model, if only wrappers such as ``torch.compile`` named them differently."""
    names = {plain_name(name): name for name in model.state_dict()}
    plain = {plain_name(name): tensor for name, tensor in state.items()}
    if len(plain) < len(state) or plain.keys() != names.keys():
        return state
    return {names[name]: tensor for name, tensor in plain.items()}


def _dense_size(source: Source, file: PackedFile) -> int:
    return safetensors_size((name, source.tensors[name]) for name in file.names if name not in file.tied)


def _source(model: Model) -> Source:
    if not isinstance(model, nn.Module):
        return read_source(model)
    if any(is_masked(module) for module in model.modules()):
        raise SmartpruneError("pack: the model is still being pruned; call smartprune.bake(model) first")
    if any(type(module).__module__.startswith(RUNTIME) for module in model.modules()):
        raise SmartpruneError(
            "pack: the model was made by smartprune.accelerate and stores its weights in another form; give the original model"
        )
    check_shapes(model, "pack")
    if is_quantized(model):
        raise SmartpruneError(
            "pack: the model is quantized, and a packed file stores ordinary tensors; pack the float model before you quantize it, "
            "or save the state dict with torch.save"
        )
    state = model.state_dict()  # without buffers that are not persistent
    extra = next((name for name, value in state.items() if not isinstance(value, Tensor)), None)
    if extra is not None:
        raise SmartpruneError(f"pack: {extra} is a {type(state[extra]).__name__}; a packed file can only store tensors")
    if not state:
        raise SmartpruneError(
            f"pack: {type(model).__name__} has no tensors, so there is nothing to store; is this the right model?"
        )
    check_not_masked(state, type(model).__name__)
    return Source(type(model).__name__, state, model)


def _packed(source: Source, block: Block, receipt: Receipt | None) -> tuple[PackedFile, tuple[PackedRow, ...], tuple[str, ...]]:
    plain: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in source.tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "on the meta device" if tensor.is_meta else str(tensor.layout if not tensor.is_quantized else tensor.dtype)
            raise SmartpruneError(f"pack: {name} is {kind}; a packed file can only store dense tensors on a device")
        first = seen.setdefault(storage_key(tensor), name)
        if first == name:
            plain[name] = tensor
        else:
            tied[name] = first
    rows, layouts, weights, assumed = [], {}, {}, []
    for cut in source.cuts(block)[0]:
        if cut.weight not in plain or cut.tensor.dim() > MAX_AXES:  # readers refuse blocks of more axes
            continue
        assumed += [cut.weight] if cut.assumed else []
        layout = Layout(cut.name, cut.kind, cut.grid.weight_shape, cut.grid.axes[0].parts, cut.transposed)
        layouts[cut.weight] = layout
        packed = PackedWeight.of(layout, cut.grid, cut.tensor)
        dense = cut.tensor.numel() * cut.tensor.element_size()
        saves = packed.nbytes < dense
        if saves:
            weights[cut.weight] = packed
            del plain[cut.weight]
        blocks = Count(cut.grid.n, len(packed.cols))
        rows.append(PackedRow(cut.name, layout.shape, blocks, dense, packed.nbytes if saves else dense, saves))
    names = tuple(source.tensors)
    return PackedFile(source.where, block, names, layouts, weights, plain, tied, receipt), tuple(rows), tuple(assumed)


def check_loadable(model: nn.Module, where: str) -> None:
    """Raises if values cannot be copied into the model."""
    if not isinstance(model, nn.Module):
        raise SmartpruneError(
            f"{where}: model is a {type(model).__name__}; give a torch.nn.Module, or leave it out to get the tensors only"
        )
    check_shapes(model, where)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise SmartpruneError(
                f"{where}: {name} of the model is on the meta device and has no values; call model.to_empty(device='cpu') first"
            )


def check_shapes(model: nn.Module, where: str) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise SmartpruneError(f"{where}: {name} of the model has no shape yet (a lazy layer); run one forward pass first")


def load_into(model: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Loads a state dict, which must fit the model exactly; otherwise the model is not changed."""
    check_loadable(model, where)
    current = model.state_dict()
    for name in sorted(current.keys() ^ state.keys()):
        holder = "the model has no such tensor" if name in state else "the file has no such tensor"
        raise SmartpruneError(f"{where} does not fit the model: {name}: {holder}; give the model that was packed")
    for name, tensor in state.items():
        if tensor.shape != current[name].shape or tensor.dtype != current[name].dtype:
            raise SmartpruneError(
                f"{where} does not fit the model: {name} is {tensor.dtype} {text.format_shape(tensor.shape)} in the file and "
                f"{current[name].dtype} {text.format_shape(current[name].shape)} in the model"
            )
    current.update(state)  # keeps the metadata of state_dict, from which some modules read the version of their format
    model.load_state_dict(current)
