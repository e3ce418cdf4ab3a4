"""ONNX export. The file is opened again and run, its outputs are compared, and its zeros are counted block by block."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..core.block import Block
from ..core.occupancy import map_hash, occupied, pack_bits
from ..errors import SmartpruneError
from ..files import as_path, check_writable, write_atomic
from .axes import swapped
from .counts import Count, sparsity_line
from .onnx_check import check_model, compare_outputs, count_zero_blocks, explain_float64, int8_error
from .onnx_graph import add_metadata, check_half_steps, clean, export_graph, quantize, serialize
from .onnx_inputs import Arguments, Batch, Example, calibration_batches, random_batches, read_example, run_model
from .onnx_read import OnnxFile, need, parse_onnx
from .onnx_sparse import check_same_outputs, store_sparse
from .receipt import Receipt, receipt_of
from .source import Cut, Source, copy_of
from .verify import compare_with_receipt

SIDECAR = ".mask.json"


@dataclass(frozen=True)
class Exported:
    """The result of :func:`export_onnx`.

    ``size`` is the size of the file in bytes, and ``dense_size`` its size without sparse weights, which ``sparse`` names.
    ``difference`` is the largest deviation of the file's float outputs from the model's, ``scale`` the largest output;
    ``int8_error`` is the root mean square error of the int8 outputs, relative to the float ones. ``blocks`` counts the blocks of
    all weights that nodes use unchanged; removed are those that are zero in the file. ``pruned`` counts the blocks of the layers
    that the receipt in the file lists.
    """

    path: str
    mask_path: str
    block: Block
    size: int
    opset: int
    inputs: int  # batches compared
    difference: float
    scale: float
    blocks: Count
    vanished: int  # blocks that are not zero in the model and are zero in the file
    layers: int
    missing: tuple[str, ...]  # weights that no node uses, for example because only training uses them
    batchnorms: int  # left in the graph
    int8_error: float | None
    remade: tuple[str, ...] = ()  # weights that the graph changes before a node uses them
    unlisted: tuple[str, ...] = ()  # missing weights that the receipt in the file lists
    unquantized: tuple[str, ...] = ()  # nodes of an int8 file that compute in float
    pruned: Count | None = None
    dense_size: int = 0
    sparse: tuple[str, ...] = ()  # initializers that are stored as a sparse tensor

    def __repr__(self) -> str:
        return f"<Exported: {self.path}, {self.size:,} bytes, opset {self.opset}>"

    def to_json(self) -> dict[str, object]:
        """Plain data: numbers, strings, lists and dictionaries."""
        return {
            **vars(self),
            "block": str(self.block),
            "blocks": self.blocks.to_json(),
            "pruned": None if self.pruned is None else self.pruned.to_json(),
            "missing": list(self.missing),
            "remade": list(self.remade),
            "unlisted": list(self.unlisted),
            "unquantized": list(self.unquantized),
            "sparse": list(self.sparse),
        }

    def __str__(self) -> str:
        int8 = ", int8" if self.int8_error is not None else ""
        lines = [
            f"file     {self.path}, {self.size:,} bytes, opset {self.opset}{int8}",
            f"mask     {self.mask_path}",
            f"outputs  differ by at most {self.difference:.1e} of {self.scale:.3g}, over {self.inputs} batches",
            *([] if self.pruned is None else [sparsity_line(self.pruned)]),
            f"zeros    {self.blocks.removed:,} of {self.blocks.total:,} blocks of {self.block} of all {self.layers} layers in the "
            f"file: {self.blocks.percent}; every zero block of the model is zero in the file",
        ]
        if self.sparse:
            lines.append(
                f"sparse   {_count(self.sparse, 'weight is', 'weights are')} stored sparse: {self.dense_size:,} bytes without"
            )
            lines.append("note     onnxruntime makes sparse weights dense when it loads the file: they save space there, not time")
        if self.int8_error is not None:
            lines.append(f"int8     outputs differ from float by {100 * self.int8_error:.2f}% (root mean square)")
        return "\n".join([*lines, *(f"note     {note}" for note in self._notes())])

    def _notes(self) -> Iterable[str]:
        if self.unquantized:
            nodes = _count(self.unquantized, "node computes", "nodes compute")
            yield f"{nodes} in float, because onnxruntime cannot quantize the bias of a grouped transposed convolution"
        if self.missing:
            yield f"{_count(self.missing, 'weight is', 'weights are')} used by no node and not in the file"
        if self.unlisted:
            yield f"the receipt in the file also lists {_count(self.unlisted, 'weight', 'weights')} that no node uses"
        if self.remade:
            yield f"{_count(self.remade, 'weight is', 'weights are')} changed before use; those zeros are not counted"
        if self.vanished:
            yield f"{self.vanished:,} kept blocks became zero by folding or rounding"
        if self.batchnorms:
            yield f"{self.batchnorms} batch normalizations are left in the graph"


def _count(names: Sequence[str], one: str, several: str) -> str:
    """``2 weights (a, b)``."""
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    noun, _, verb = (one if len(names) == 1 else several).partition(" ")
    return f"{len(names)} {noun} ({shown}){' ' + verb if verb else ''}"


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Example,
    block: Block | str | Sequence[int | None] | None = None,
    *,
    receipt: Receipt | None = None,
    int8: bool = False,
    calibration: Iterable[Example] | None = None,
    fold: bool = True,
    dynamic_batch: bool = True,
    tolerance: float | None = None,
    sparse: bool = False,
) -> Exported:
    """Writes a baked model as ONNX, with a mask file next to it, and checks both.

    onnxruntime runs the graph on the example and on random inputs, and the outputs are compared with the model. Every
    zero block of the model must be zero in the file. The model does not change.

    Args:
        model: A baked or any other plain model.
        path: The file to write; it must end in ``.onnx``.
        example: An input with a batch axis, a tuple of them, or a dictionary of keyword arguments. The inputs of the graph have
            the names of the arguments of ``forward``. Numbers, texts, booleans and None in the dictionary become part of the
            graph.
        block: The size of a block. Defaults to the block of the receipt.
        receipt: The receipt of the pruning, which is stored in the file. The receipt of a model that this process pruned is found,
            unless ``block`` is given.
        int8: Whether to quantize. Weights are symmetric per channel, so zeros stay zero. Needs ``calibration``.
        calibration: Batches of inputs that set the ranges of the int8 activations.
        fold: Whether to merge batch normalization into the preceding convolution.
        dynamic_batch: Whether the graph accepts any batch size.
        tolerance: The largest allowed difference of the outputs, relative to the largest output. The default is 1e-4, and 1e-2
            in half precision.
        sparse: Whether to store each weight as a sparse tensor (``sparse_initializer``) if that is smaller: below a third of
            nonzero weights in float32, and below a ninth in int8. The file gets smaller. onnxruntime makes these weights dense
            when it loads the file, so its speed and memory stay the same; other runtimes may not support them.

    Returns:
        The counts and differences of the check. ``print`` shows them.

    Raises:
        SmartpruneError: The model cannot be exported, its outputs differ, or a zero block is not zero in the file.

    Examples:
        >>> import smartprune as sp
        >>> import torch
        >>> import tempfile
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> path = os.path.join(tempfile.mkdtemp(), "net.onnx")
        >>> exported = sp.export_onnx(model, path, torch.zeros(1, 8), block=(4, 4))
        >>> exported.blocks.total, exported.difference < 1e-4
        (6, True)
    """
    if receipt is None and block is None and isinstance(model, nn.Module):
        receipt = receipt_of(model)
    block = _check_arguments(model, block, receipt, int8, calibration)
    target = as_path(path, "export_onnx: path")
    if target.suffix != ".onnx":
        raise SmartpruneError(f"export_onnx: {target} must end in .onnx, so that other tools recognize it")
    mask_path = target.with_suffix(SIDECAR)
    for file_path in (target, mask_path):
        check_writable(file_path)
    check_model(model, receipt, "export_onnx", "onnxruntime")
    copied = copy_of(model, "export_onnx")
    arguments, batch = read_example(copied, example)
    export = _Export(copied, type(model).__name__, block, receipt, arguments)
    export.make_graph(batch, fold, dynamic_batch, tolerance)
    if calibration is not None:
        export.quantize(calibration)
    if sparse:
        export.store_sparse()
    exported, file = export.check(target, mask_path)
    write_atomic(target, export.data)
    write_atomic(mask_path, (json.dumps(mask_json(file, block), indent=1) + "\n").encode())
    return exported


def _check_arguments(
    model: nn.Module,
    block: Block | str | Sequence[int | None] | None,
    receipt: Receipt | None,
    int8: bool,
    calibration: object,
) -> Block:
    """The block, after the other arguments were checked."""
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"export_onnx: model is a {type(model).__name__}; give a torch.nn.Module")
    if receipt is not None and not isinstance(receipt, Receipt):
        raise SmartpruneError(f"export_onnx: receipt is a {type(receipt).__name__}; give a Receipt, such as Receipt.load(path)")
    if receipt is not None and block is None:
        block = receipt.block
    if block is None:
        raise SmartpruneError("export_onnx: no block was given and there is no receipt; give block=, such as (16, 8)")
    block = Block.of(block)
    if int8 and calibration is None:
        raise SmartpruneError("export_onnx: int8 needs calibration=, a few batches of real inputs, for the range of activations")
    if not int8 and calibration is not None:
        raise SmartpruneError("export_onnx: calibration= is for int8=True")
    return block


@dataclass
class _Export:
    """An export in progress. ``data`` is the file so far."""

    model: nn.Module  # a copy on the CPU
    name: str
    block: Block
    receipt: Receipt | None
    arguments: Arguments
    cuts: tuple[Cut, ...] = ()
    batches: list[Batch] = field(default_factory=list)
    graph: Any = None
    data: bytes = b""
    difference: float = 0.0
    scale: float = 0.0
    missing: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()
    unquantized: tuple[str, ...] = ()
    int8_error: float | None = None
    dense_size: int | None = None  # of the file before its weights became sparse
    sparse: tuple[str, ...] = ()

    def make_graph(self, example: Batch, fold: bool, dynamic_batch: bool, tolerance: float | None) -> None:
        need("onnx")
        self.cuts = Source(self.name, dict(self.model.state_dict()), self.model).cuts(self.block)[0]
        if not self.cuts:
            raise SmartpruneError(f"export_onnx: {self.name} has no weight that can be cut into blocks of {self.block}")
        self.batches = [example, *random_batches(example, dynamic_batch)]
        with explain_float64(self.model):
            expected = [run_model(self.model, self.arguments, batch) for batch in self.batches]
            self.graph = export_graph(self.model, self.arguments, example, len(expected[0]), fold, dynamic_batch)
            self.missing = tuple(clean(self.graph, self.cuts))
            if self.receipt is not None:
                self.unlisted = tuple(row.weight for row in self.receipt.layers if row.weight in self.missing)
            self._serialize()
            self.difference, self.scale = compare_outputs(self.data, self.batches, expected, tolerance)

    def quantize(self, calibration: Iterable[Example]) -> None:
        batches = calibration_batches(calibration, self.model, self.arguments, self.batches[0])
        float_file = parse_onnx(self.data, "the float graph")
        self.data, unquantized = quantize(self.data, batches)
        self.unquantized = tuple(unquantized)
        self.graph = need("onnx").load_model_from_string(self.data)
        self._serialize()
        check_half_steps(self.graph, float_file)
        self.int8_error = int8_error(self.data, batches, [run_model(self.model, self.arguments, batch) for batch in batches])

    def _serialize(self) -> None:
        add_metadata(self.graph, self.block, self.receipt, self.unlisted)
        self.data = serialize(self.graph)

    def store_sparse(self) -> None:
        dense, file = self.data, parse_onnx(self.data, "the dense graph")
        self.sparse = tuple(store_sparse(self.graph, {weight.initializer for weight in file.weights.values()}))
        self.data, self.dense_size = serialize(self.graph, full_check=False), len(dense)
        check_same_outputs(dense, self.data, self.batches)

    def check(self, target: Path, mask_path: Path) -> tuple[Exported, OnnxFile]:
        """Reads the file again, counts its zeros and compares it with the receipt."""
        where = f"export_onnx: {target}"
        file = parse_onnx(self.data, where)
        remade = tuple(cut.weight for cut in self.cuts if cut.weight in file.others)
        counted = [cut for cut in self.cuts if cut.weight not in (*self.missing, *remade)]
        tensors = swapped(file.tensors(), [cut.weight for cut in self.cuts if cut.transposed])
        blocks, vanished = count_zero_blocks(tensors, counted, where)
        if self.receipt is not None and not vanished:
            verification = compare_with_receipt(Source(self.name, tensors, absent=self.unlisted), self.receipt)
            if not verification.ok:
                raise SmartpruneError(f"{where}: the graph does not match the receipt: {verification.problems[0]}")
        exported = Exported(
            path=str(target),
            mask_path=str(mask_path),
            block=self.block,
            size=len(self.data),
            opset=max(entry.version for entry in self.graph.opset_import if entry.domain in ("", "ai.onnx")),
            inputs=len(self.batches),
            difference=self.difference,
            scale=self.scale,
            blocks=blocks,
            vanished=vanished,
            layers=len(self.cuts) - len(self.missing) - len(remade),
            missing=self.missing,
            batchnorms=sum(node.op_type == "BatchNormalization" for node in self.graph.graph.node),
            int8_error=self.int8_error,
            remade=remade,
            unlisted=self.unlisted,
            unquantized=self.unquantized,
            pruned=self.receipt.blocks if self.receipt is not None and self.receipt.block == self.block else None,
            dense_size=len(self.data) if self.dense_size is None else self.dense_size,
            sparse=self.sparse,
        )
        return exported, file


def mask_json(file: OnnxFile, block: Block) -> dict[str, object]:
    """Which blocks of which initializers are not zero; ``docs/format.md`` describes it."""
    rows, maps = [], []
    for weight in sorted(file.weights.values(), key=lambda weight: weight.initializer):
        try:
            grid = weight.layout.cut(block)
        except SmartpruneError:  # the block does not fit the shape of this weight
            continue
        bits = occupied(grid, weight.array)
        maps.append((weight.initializer, grid.shape, bits))
        rows.append(
            {
                "name": weight.initializer,
                "node": weight.layout.kind,
                "shape": list(weight.layout.shape),
                "groups": weight.layout.parts,
                "transposed": weight.layout.transposed,
                "grid": list(grid.shape),
                "present": int(bits.sum()),
                "bits": pack_bits(bits),
            }
        )
    return {"format": "smartprune.mask", "version": 1, "block": str(block), "mask_hash": map_hash(block, maps), "weights": rows}
