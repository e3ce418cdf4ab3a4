"""ONNX export: written, opened again, run, compared, and its zeros counted block by block."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from .. import text
from ..core.block import Block
from ..core.kinds import is_masked
from ..core.occupancy import map_hash, occupied, pack_bits
from ..errors import SmartpruneError
from ..files import as_path, check_writable, write_atomic
from .counts import Count
from .onnx_graph import check_half_steps, clean, describe, export_graph, outputs_of, quantized, serialized, session_of
from .onnx_read import OnnxFile, need, parse_onnx
from .receipt import Receipt
from .source import Cut, Source, check_not_masked, copy_of
from .verify import verify

WIDTH = 80
SIDECAR = ".mask.json"
ROUNDING = 1e-4  # of the largest output: what float32 may differ by in another order of operations; wrong graphs differ far more
COARSE = 1e-2  # the same in half precision
BROKEN = 0.5  # int8 outputs that differ by more than this share of the float ones (root mean square) are no approximation


@dataclass(frozen=True)
class Exported:
    """What :func:`export_onnx` wrote, and what was found when it was opened again.

    ``difference`` is the largest deviation of the file's float outputs from the model's, ``scale`` the largest output;
    ``int8_error`` the root mean square error of the int8 outputs, relative to the float ones. ``blocks`` counts those of
    all weights that can be cut and that nodes compute with as they are; removed are the ones that are zero in the file.
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
    missing: tuple[str, ...]  # weights that are not in the graph: no node uses them, such as those for training alone
    batchnorms: int  # left in the graph
    int8_error: float | None
    remade: tuple[str, ...] = ()  # weights that the graph makes other numbers of before a node computes with them
    unlisted: tuple[str, ...] = ()  # missing ones that the receipt lists: the file then does not carry the receipt
    unquantized: tuple[str, ...] = ()  # nodes of an int8 file that compute in float

    def to_json(self) -> dict[str, object]:
        """Plain data: numbers, strings, lists and dictionaries."""
        return {
            **vars(self),
            "block": str(self.block),
            "blocks": self.blocks.to_json(),
            "missing": list(self.missing),
            "remade": list(self.remade),
            "unlisted": list(self.unlisted),
            "unquantized": list(self.unquantized),
        }

    def __str__(self) -> str:
        lines = [
            f"file     {self.path}, {self.size:,} bytes, opset {self.opset}" + (", int8" if self.int8_error is not None else ""),
            f"mask     {self.mask_path}",
            f"outputs  differ by at most {self.difference:.1e} of {self.scale:.3g}, over {self.inputs} batches",
            f"zeros    {self.blocks.removed:,} of {self.blocks.total:,} blocks of {self.block}, in {self.layers} layers: "
            f"{text.percent(self.blocks.removed, self.blocks.total)}; each removed block was found zero",
        ]
        if self.int8_error is not None:
            lines.append(f"int8     outputs differ from float by {100 * self.int8_error:.2f}% (root mean square)")
        if self.unquantized:
            names, many = _named(self.unquantized, "node computes", "nodes compute")
            lines.append(f"note     {many} in float: onnxruntime quantizes no bias of a grouped transposed convolution: {names}")
        if self.missing:
            names, many = _named(self.missing, "weight is", "weights are")
            lines.append(f"note     {many} used by no node, such as one for training alone, and not in the file: {names}")
        if self.unlisted:
            names, many = _named(self.unlisted, "weight", "weights")
            lines.append(f"note     the receipt is not in the file either, for it lists {many} that no node uses: {names}")
        if self.remade:
            names, many = _named(self.remade, "weight is", "weights are")
            lines.append(f"note     {many} changed before a node computes with the result; such zeros are not counted: {names}")
        if self.vanished:
            lines.append(f"note     {self.vanished:,} kept blocks became zero by folding or rounding")
        if self.batchnorms:
            lines.append(f"note     {self.batchnorms} batch normalizations are left in the graph")
        return "\n".join(lines)


def _named(names: Sequence[str], one: str, several: str) -> tuple[str, str]:
    """The first of them, and how many there are."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""), f"1 {one}" if len(names) == 1 else f"{len(names)} {several}"


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Tensor | Sequence[Tensor],
    block: Block | str | Sequence[int | None] | None = None,
    *,
    receipt: Receipt | None = None,
    int8: bool = False,
    calibration: Iterable[Tensor | Sequence[Tensor]] | None = None,
    fold: bool = True,
    dynamic_batch: bool = True,
    tolerance: float | None = None,
) -> Exported:
    """Writes a baked model as ONNX, and a mask beside it, after checking them.

    The graph is run in onnxruntime on the example and on random inputs, and its outputs held against the model's: they may
    differ by ``tolerance`` of the largest output (1e-4, in half precision 1e-2). Every zero block of the model must be zero in
    the file. ``fold`` merges batch normalization into the convolution before it. ``int8`` quantizes weights (symmetric, per
    channel, so that zero stays zero) and activations, with ranges from the batches in ``calibration``. ``example`` is an
    input with a batch axis, or a tuple of them; ``block`` is the receipt's unless given. The model stays as it is.
    """
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"export_onnx: model is a {type(model).__name__}; give a torch.nn.Module")
    if receipt is not None and not isinstance(receipt, Receipt):
        raise SmartpruneError(f"export_onnx: receipt is a {type(receipt).__name__}; give a Receipt, such as Receipt.load(path)")
    if receipt is not None and block is None:
        block = receipt.block
    if block is None:
        raise SmartpruneError("export_onnx: there is no receipt that says which block to check; give block=, such as (16, 8)")
    block = Block.of(block)
    if int8 and calibration is None:
        raise SmartpruneError(
            "export_onnx: int8 needs calibration=, a few batches of real inputs, to find the range of activations"
        )
    if not int8 and calibration is not None:
        raise SmartpruneError("export_onnx: calibration= is for int8=True")
    if any(is_masked(module) for module in model.modules()):
        raise SmartpruneError("export_onnx: the model is still being pruned; call smartprune.bake(model) first")
    target = as_path(path, "export_onnx: path")
    if target.suffix != ".onnx":
        raise SmartpruneError(f"export_onnx: {target} must end in .onnx, or nothing will know what it is")
    mask = target.with_suffix(SIDECAR)
    for file_path in (target, mask):
        check_writable(file_path)
    check_not_masked(model.state_dict(), f"export_onnx: {type(model).__name__}")
    if any(tensor.dtype == torch.bfloat16 for tensor in model.parameters()):
        raise SmartpruneError(
            "export_onnx: onnxruntime does not compute in bfloat16, so nothing can be compared; give model.float()"
        )
    if receipt is not None and not (found := verify(model, receipt=receipt)).ok:
        raise SmartpruneError(f"export_onnx: {type(model).__name__} is not what its receipt says: {found.problems[0]}")
    onnx = need("onnx")
    plain = copy_of(model, "export_onnx")
    cuts = Source(type(model).__name__, dict(plain.state_dict()), plain).cuts(block)[0]
    if not cuts:
        raise SmartpruneError(f"export_onnx: {type(model).__name__} has no weight that can be cut into blocks of {block}")
    inputs = _inputs(example)
    batches = [inputs, *_random(inputs, dynamic_batch)]
    with _float64_named(plain):
        wanted = [_run(plain, batch) for batch in batches]
        graph = export_graph(plain, inputs, len(wanted[0]), fold, dynamic_batch)
        missing = clean(graph, cuts)
        unlisted = [] if receipt is None else [row.weight for row in receipt.layers if row.weight in missing]
        if unlisted:
            receipt = None  # it speaks of more than the file holds
        describe(graph, block, receipt)
        data = serialized(graph)
        difference, scale = _compare(data, batches, wanted, tolerance)
    int8_error = None
    floats: list[str] = []
    if int8:
        assert calibration is not None
        steps = _steps(calibration, inputs)
        float_file = parse_onnx(data, "the float graph")
        data, floats = quantized(data, steps)
        graph = onnx.load_model_from_string(data)
        describe(graph, block, receipt)
        data = serialized(graph)
        check_half_steps(graph, float_file)
        int8_error = _quantized_error(data, steps, [_run(plain, batch) for batch in steps])
    where = f"export_onnx: {target}"
    file = parse_onnx(data, where)
    remade = tuple(cut.weight for cut in cuts if cut.weight in file.others)
    blocks, vanished = _zeros(file, [cut for cut in cuts if cut.weight not in (*missing, *remade)], where)
    if receipt is not None and not vanished and not (found := verify(file.tensors(), receipt=receipt)).ok:
        raise SmartpruneError(f"{where}: the graph is not what the receipt says: {found.problems[0]}")
    write_atomic(target, data)
    write_atomic(mask, (json.dumps(mask_json(file, block), indent=1) + "\n").encode())
    return Exported(
        path=str(target),
        mask_path=str(mask),
        block=block,
        size=len(data),
        opset=max(entry.version for entry in graph.opset_import if entry.domain in ("", "ai.onnx")),
        inputs=len(batches),
        difference=difference,
        scale=scale,
        blocks=blocks,
        vanished=vanished,
        layers=len(cuts) - len(missing) - len(remade),
        missing=tuple(missing),
        batchnorms=sum(node.op_type == "BatchNormalization" for node in graph.graph.node),
        int8_error=int8_error,
        remade=remade,
        unlisted=tuple(unlisted),
        unquantized=tuple(floats),
    )


def mask_json(file: OnnxFile, block: Block) -> dict[str, object]:
    """Which blocks of which initializers are not zero; ``docs/format.md`` describes it."""
    rows, maps = [], []
    for weight in sorted(file.weights.values(), key=lambda weight: weight.initializer):
        try:
            grid = weight.layout.cut(block)
        except SmartpruneError:  # no such blocks in a weight of that shape
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


@contextmanager
def _float64_named(model: nn.Module) -> Iterator[None]:
    """Says what to do where a model in float64 fails: onnxruntime knows few operations in it."""
    try:
        yield
    except SmartpruneError as error:
        if not any(tensor.dtype == torch.float64 for tensor in model.parameters()):
            raise
        raise SmartpruneError(
            f"{error}; the model is in float64, in which onnxruntime knows little: give model.float(), and a float32 example"
        ) from error


def _inputs(example: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    out = (example,) if isinstance(example, Tensor) else tuple(example)
    if not out or any(not isinstance(x, Tensor) or x.dim() < 1 or x.shape[0] < 1 for x in out):
        raise SmartpruneError("export_onnx: an example is a tensor with a batch axis, or a tuple of such tensors")
    return tuple(x.detach().cpu() for x in out)


def _steps(calibration: Iterable[Tensor | Sequence[Tensor]], inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """The batches that activations are measured on; onnxruntime says little of those that do not fit."""
    steps = [_inputs(batch) for batch in calibration]
    if not steps:
        raise SmartpruneError("export_onnx: calibration= holds no batches")
    for step in steps:
        given, wanted = (
            ", ".join(f"{text.format_shape(x.shape[1:])} {str(x.dtype).removeprefix('torch.')}" for x in batch)
            for batch in (step, inputs)
        )
        if given != wanted:
            raise SmartpruneError(f"export_onnx: calibration= holds samples of {given}, and the example's are {wanted}; give such")
        if not all(bool(x.isfinite().all()) for x in step):
            raise SmartpruneError("export_onnx: calibration= holds NaN or infinity, so nothing can be measured; give real inputs")
    return steps


def _random(inputs: tuple[Tensor, ...], dynamic_batch: bool) -> Iterator[tuple[Tensor, ...]]:
    """Other inputs: noise in place of floats, other samples' order in place of integers; other batch sizes where allowed."""
    draw = torch.Generator().manual_seed(0)
    size = inputs[0].shape[0]
    for batch in (1, 3, 5) if dynamic_batch else (size, size):
        out = []
        for x in inputs:
            chosen = x[torch.randint(0, x.shape[0], (batch,), generator=draw, device="cpu")]
            noise = torch.randn(chosen.shape, generator=draw, device="cpu").to(x.dtype)
            out.append(noise if x.is_floating_point() else chosen)
        yield tuple(out)


def _run(model: nn.Module, batch: tuple[Tensor, ...]) -> list[Tensor]:
    try:
        with torch.no_grad():
            found = model(*batch)
    except Exception as error:  # whatever happens in code that is not ours
        shapes = ", ".join(text.format_shape(x.shape) for x in batch)
        raise SmartpruneError(
            f"export_onnx: the model failed on inputs of {shapes} with {type(error).__name__}: {error}; "
            "if it takes one batch size only, give dynamic_batch=False"
        ) from error
    return [leaf for leaf in torch.utils._pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


def _compare(
    data: bytes, batches: Sequence[tuple[Tensor, ...]], wanted: Sequence[list[Tensor]], tolerance: float | None
) -> tuple[float, float]:
    """The largest difference and the largest output."""
    session = session_of(data)
    difference = scale = 0.0
    for batch, expected in zip(batches, wanted, strict=True):
        found = outputs_of(session, batch)
        if [x.shape for x in found] != [x.shape for x in expected]:
            shapes = [[text.format_shape(x.shape) for x in outputs] for outputs in (found, expected)]
            raise SmartpruneError(f"export_onnx: the graph gives outputs of {shapes[0]} where the model gives {shapes[1]}")
        for a, b in zip(found, expected, strict=True):
            if not torch.equal(a.isfinite(), b.isfinite()):
                raise SmartpruneError("export_onnx: the graph gives NaN or infinity where the model does not, or the reverse")
            real = b.isfinite()
            difference = max(difference, float((a.double() - b.double())[real].abs().max()) if bool(real.any()) else 0.0)
            scale = max(scale, float(b.double()[real].abs().max()) if bool(real.any()) else 0.0)
    half = any(x.dtype in (torch.float16, torch.bfloat16) for x in (*batches[0], *wanted[0]))
    allowed = (COARSE if half else ROUNDING) if tolerance is None else tolerance
    if difference > allowed * scale:
        raise SmartpruneError(
            f"export_onnx: the graph's outputs differ from the model's by {difference:.2e}, and rounding allows "
            f"{allowed * scale:.2e}; no file was written (outputs that depend on chance or on the training mode cannot be exported)"
        )
    return difference, scale


def _zeros(file: OnnxFile, cuts: Sequence[Cut], where: str) -> tuple[Count, int]:
    """Counts the blocks of the written file; a block that is zero in the model and not in the file is an error."""
    tensors = file.tensors()
    total = zero = vanished = 0
    for cut in cuts:
        tensor, before = tensors.get(cut.weight), occupied(cut.grid, cut.tensor)
        if tensor is None or tensor.shape != cut.tensor.shape:
            raise SmartpruneError(f"{where}: no node uses the weight {cut.weight} as it should be, so its zeros cannot be checked")
        bits = occupied(cut.grid, tensor)
        wrong = int((bits & ~before).sum())
        if wrong:
            raise SmartpruneError(f"{where}: {wrong} zero blocks of {cut.weight} are not zero in the file")
        total, zero, vanished = total + cut.grid.n, zero + int((~bits).sum()), vanished + int((before & ~bits).sum())
    return Count(total, total - zero), vanished


def _quantized_error(data: bytes, batches: Sequence[tuple[Tensor, ...]], wanted: Sequence[list[Tensor]]) -> float:
    """Root mean square difference of the int8 outputs, relative to the float ones."""
    session = session_of(data)
    error = power = 0.0
    for batch, expected in zip(batches, wanted, strict=True):
        for a, b in zip(outputs_of(session, batch), expected, strict=True):
            error += float((a.double() - b.double()).square().sum())
            power += float(b.double().square().sum())
    found = float(np.sqrt(error / power)) if power else float(error > 0)
    if not found <= BROKEN:
        raise SmartpruneError(
            f"export_onnx: the int8 outputs differ from the float ones by {100 * found:.0f}% (root mean square), which is no "
            "approximation; give calibration= inputs like those the model will see"
        )
    return found
