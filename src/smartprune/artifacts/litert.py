"""LiteRT export. The file is read and run again, its outputs are compared, and its zeros are checked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..core.block import Block
from ..errors import SmartpruneError
from ..files import as_path, check_writable, write_atomic
from .axes import swapped
from .counts import Count, sparsity_line
from .litert_file import file_bytes
from .litert_graph import Net
from .litert_int8 import quantize
from .litert_read import ABSENT, BLOCK, RECEIPT, SHAPES, LitertFile, parse_litert
from .litert_run import Runner, in_batches
from .litert_translate import translate
from .onnx_check import FLOAT_TOLERANCE, check_model, compare_tensors, count_zero_blocks, relative_error
from .onnx_inputs import Arguments, Batch, Example, calibration_batches, random_batches, read_example, run_model
from .receipt import Receipt
from .source import Source, copy_of
from .verify import compare_with_receipt

WHERE = "export_litert"
SUFFIX = ".tflite"


@dataclass(frozen=True)
class ExportedLitert:
    """The result of :func:`export_litert`.

    ``size`` is the size of the file in bytes, and ``dense_size`` its size without sparse weights, which ``sparse`` names.
    ``difference`` is the largest deviation of the file's float outputs from the model's, ``scale`` the largest output;
    ``int8_error`` is the root mean square error of the int8 outputs, relative to the float ones. ``weights`` counts the numbers of
    all layers; removed are those that are zero in the file. ``blocks`` counts blocks, if their size is known.
    """

    path: str
    size: int
    dense_size: int
    inputs: int  # batches compared
    difference: float
    scale: float
    layers: int
    weights: Count
    blocks: Count | None
    block: Block | None
    sparse: tuple[str, ...]  # weights that are stored sparse
    int8_error: float | None = None
    float_operations: tuple[str, ...] = ()  # of an int8 file
    missing: tuple[str, ...] = ()  # weights that the graph does not use, or not as they are
    pruned: Count | None = None

    def __repr__(self) -> str:
        return f"<ExportedLitert: {self.path}, {self.size:,} bytes>"

    def to_json(self) -> dict[str, object]:
        """Plain data: numbers, strings, lists and dictionaries."""
        counts = {
            name: None if (count := getattr(self, name)) is None else count.to_json() for name in ("weights", "blocks", "pruned")
        }
        lists = {name: list(getattr(self, name)) for name in ("sparse", "float_operations", "missing")}
        return {**vars(self), **counts, **lists, "block": None if self.block is None else str(self.block)}

    def __str__(self) -> str:
        lines = [
            f"file     {self.path}, {self.size:,} bytes{'' if self.int8_error is None else ', int8'}",
            f"outputs  differ by at most {self.difference:.1e} of {self.scale:.3g}, over {self.inputs} batches",
            *([] if self.pruned is None else [sparsity_line(self.pruned)]),
            f"zeros    {self.weights.removed:,} of {self.weights.total:,} weights of {self.layers} layers in the file: "
            f"{self.weights.percent}; every zero of the model is zero in the file",
        ]
        if self.blocks is not None:
            lines.append(
                f"blocks   {self.blocks.removed:,} of {self.blocks.total:,} of {self.block} are zero: {self.blocks.percent}"
            )
        if self.sparse:
            count = "1 weight is" if len(self.sparse) == 1 else f"{len(self.sparse)} weights are"
            lines.append(f"sparse   {count} stored sparse: {self.dense_size:,} bytes without")
        if self.int8_error is not None:
            lines.append(f"int8     outputs differ from float by {100 * self.int8_error:.2f}% (root mean square)")
        if self.float_operations:
            lines.append(f"note     computed in float: {', '.join(self.float_operations)}")
        if self.missing:
            shown = ", ".join(self.missing[:3]) + (", ..." if len(self.missing) > 3 else "")
            lines.append(f"note     {len(self.missing)} weights are not in the file as they are: {shown}")
        return "\n".join(lines)


def export_litert(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Example,
    block: Block | str | Sequence[int | None] | None = None,
    *,
    receipt: Receipt | None = None,
    int8: bool = False,
    calibration: Iterable[Example] | None = None,
    channels_last: bool = False,
    sparse: bool = True,
    tolerance: float | None = None,
) -> ExportedLitert:
    """Writes a baked model as a LiteRT file (``.tflite``), and checks it.

    The graph comes from ``torch.export``; TensorFlow is not needed. Batch normalization and activations become part of the layers
    before them. LiteRT runs the file on the example and on random inputs, and the outputs are compared with the model.
    Every zero of the model must be zero in the file. The model does not change.

    Weights with many zeros are stored sparse. LiteRT skips the zeros of float32 linear layers if at most a fifth of all 1x4 blocks
    is left: then they are faster as well. All other sparse weights are made dense when the file is loaded: they save space in the
    file, but no time.

    Args:
        model: A baked or any other plain model, in float32.
        path: The file to write; it must end in ``.tflite``.
        example: An input with a batch axis, a tuple of them, or a dictionary of keyword arguments. The file takes inputs of
            exactly these sizes.
        block: The size of a block, to count blocks. By default that of the receipt, if there is one.
        receipt: The receipt of the pruning, which is stored in the file.
        int8: Whether to compute in int8. Inputs and outputs stay float32. Weights are symmetric per channel, so zeros stay zero.
            Needs ``calibration``.
        calibration: Batches of inputs that set the ranges of the int8 activations.
        channels_last: Whether inputs and outputs with four axes are (batch, height, width, channels) in the file. This saves a
            copy, as LiteRT computes in this order.
        sparse: Whether to store weights sparse where that is smaller.
        tolerance: The largest allowed difference of the float outputs, relative to the largest output; 1e-4 by default.

    Returns:
        The counts and differences of the check. ``print`` shows them.

    Raises:
        SmartpruneError: The model has an operation that cannot be exported, its outputs differ, or a zero is not zero in the file.

    Examples:
        >>> import smartprune as sp
        >>> import tempfile
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
        >>> path = os.path.join(tempfile.mkdtemp(), "net.tflite")
        >>> exported = sp.export_litert(model, path, torch.zeros(1, 3, 8, 8))
        >>> exported.layers, exported.difference < 1e-4
        (2, True)
    """
    block = _check_arguments(model, block, receipt, int8, calibration)
    target = as_path(path, f"{WHERE}: path")
    if target.suffix != SUFFIX:
        raise SmartpruneError(f"{WHERE}: {target} must end in {SUFFIX}, so that other tools recognize it")
    check_writable(target)
    check_model(model, receipt, WHERE, "LiteRT")
    work = _Work(copy_of(model, WHERE), block, receipt, channels_last, sparse)
    work.translate(example, tolerance)
    if calibration is not None:
        work.quantize(calibration)
    exported = work.check(type(model).__name__, str(target))
    write_atomic(target, work.data)
    return exported


def _check_arguments(model: object, block: object, receipt: object, int8: bool, calibration: object) -> Block | None:
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"{WHERE}: model is a {type(model).__name__}; give a torch.nn.Module")
    if receipt is not None and not isinstance(receipt, Receipt):
        raise SmartpruneError(f"{WHERE}: receipt is a {type(receipt).__name__}; give a Receipt, such as Receipt.load(path)")
    if int8 and calibration is None:
        raise SmartpruneError(f"{WHERE}: int8 needs calibration=, a few batches of real inputs, for the range of activations")
    if not int8 and calibration is not None:
        raise SmartpruneError(f"{WHERE}: calibration= is for int8=True")
    if block is None:
        return None if receipt is None else receipt.block
    return Block.of(block)  # type: ignore[arg-type]


class _Work:
    """An export in progress. ``data`` is the file so far."""

    def __init__(self, model: nn.Module, block: Block | None, receipt: Receipt | None, channels_last: bool, sparse: bool) -> None:
        self.model, self.block, self.receipt = model, block, receipt
        self.channels_last, self.sparse = channels_last, sparse
        self.arguments = Arguments(False)
        self.batches: list[Batch] = []
        self.net = Net()
        self.data = b""
        self.sparse_names: tuple[str, ...] = ()
        self.dense_size = 0
        self.difference = self.scale = 0.0
        self.int8_error: float | None = None
        self.float_operations: tuple[str, ...] = ()

    def translate(self, example: Example, tolerance: float | None) -> None:
        self.arguments, batch = read_example(self.model, example, WHERE)
        self.batches = [batch, *random_batches(batch, dynamic_batch=False)]
        expected = [run_model(self.model, self.arguments, batch, WHERE) for batch in self.batches]
        self.net = translate(self.model, self.arguments, batch, self.channels_last)
        self._write()
        pairs = self._run(self.batches, expected)
        self.difference, self.scale = compare_tensors(pairs, FLOAT_TOLERANCE if tolerance is None else tolerance, WHERE)

    def quantize(self, calibration: Iterable[Example]) -> None:
        example = self.batches[0]
        rows = next(iter(example.values())).shape[0]
        given = calibration_batches(calibration, self.model, self.arguments, example, WHERE)
        batches = [part for batch in given for part in in_batches(batch, rows)]
        if not batches:
            raise SmartpruneError(
                f"{WHERE}: calibration= holds batches of fewer samples than the example, which has {rows}; give larger ones"
            )
        runner = Runner(file_bytes(self.net, {}, sparse=False)[0], self.channels_last, keep_all=True)
        self.net, self.float_operations = quantize(self.net, runner.ranges(batches))
        self._write()
        expected = [run_model(self.model, self.arguments, batch, WHERE) for batch in batches]
        self.int8_error = relative_error(self._run(batches, expected), WHERE)

    def _run(
        self, batches: Sequence[Batch], expected: Sequence[list[torch.Tensor]]
    ) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        runner = Runner(self.data, self.channels_last)
        return [(runner(batch), wanted) for batch, wanted in zip(batches, expected, strict=True)]

    def _write(self) -> None:
        metadata = {SHAPES: json.dumps(self.net.shapes).encode()}
        if self.block is not None:
            metadata[BLOCK] = str(self.block).encode()
        if self.receipt is not None:
            metadata[RECEIPT] = json.dumps(self.receipt.to_json(), sort_keys=True).encode()
            absent = [row.weight for row in self.receipt.layers if row.weight not in self.net.shapes]
            if absent:
                metadata[ABSENT] = json.dumps(absent).encode()
        dense, _ = file_bytes(self.net, metadata, sparse=False)
        self.data, self.sparse_names, self.dense_size = dense, (), len(dense)
        if self.sparse:
            data, names = file_bytes(self.net, metadata, sparse=True)
            if len(data) < len(dense):
                self.data, self.sparse_names = data, names

    def check(self, name: str, target: str) -> ExportedLitert:
        """Reads the file, and compares its zeros with those of the model and the receipt."""
        where, stored = f"{WHERE}: {target}", dict(self.model.state_dict())
        file = parse_litert(self.data, where)
        weights, missing = self._zeros(file, where)
        blocks, vanished = None, 0
        if self.block is not None:
            cuts = [cut for cut in Source(name, stored, self.model).cuts(self.block)[0] if cut.weight not in missing]
            tensors = swapped(file.weights, [cut.weight for cut in cuts if cut.transposed])
            blocks, vanished = count_zero_blocks(tensors, cuts, where)
            if self.receipt is not None and not vanished:
                absent = tuple(row.weight for row in self.receipt.layers if row.weight in missing)
                verification = compare_with_receipt(Source(name, tensors, absent=absent), self.receipt)
                if not verification.ok:
                    raise SmartpruneError(f"{where}: the file does not match the receipt: {verification.problems[0]}")
        result = ExportedLitert(
            path=target,
            size=len(self.data),
            dense_size=self.dense_size,
            inputs=len(self.batches),
            difference=self.difference,
            scale=self.scale,
            layers=len(file.weights),
            weights=weights,
            blocks=blocks,
            block=self.block,
            sparse=self.sparse_names,
            int8_error=self.int8_error,
            float_operations=self.float_operations,
            missing=missing,
        )
        pruned = self.receipt.blocks if self.receipt is not None and self.receipt.block == self.block else None
        return replace(result, pruned=pruned)

    def _zeros(self, file: LitertFile, where: str) -> tuple[Count, tuple[str, ...]]:
        """The weights of the file, of which the kept ones are not zero, and the parameters that it does not hold."""
        total = sum(tensor.numel() for tensor in file.weights.values())
        kept = sum(int((tensor != 0).sum()) for tensor in file.weights.values())
        missing = []
        for name, weight in self.model.named_parameters():
            tensor = file.weights.get(name)
            if weight.dim() < 2:
                continue
            if tensor is None or tensor.numel() != weight.numel():
                missing.append(name)
                continue
            tensor = tensor if tensor.shape == weight.shape else tensor.t()
            wrong = int(((weight == 0) & (tensor != 0)).sum())
            if wrong:
                raise SmartpruneError(f"{where}: {wrong} zeros of {name} are not zero in the file; please report this model")
        return Count(total, kept), tuple(missing)
