"""C export: a network as one C file and its header, compiled here and compared with the model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ... import __version__
from ...artifacts.litert_run import in_batches
from ...artifacts.onnx_check import FLOAT_TOLERANCE, HALF_TOLERANCE, check_model, compare_tensors, relative_error
from ...artifacts.onnx_inputs import Batch, Example, calibration_batches, random_batches, read_example, run_model
from ...artifacts.receipt import Receipt
from ...errors import SmartpruneError
from ...files import as_path, check_writable, write_atomic
from ..cpu import build
from ..cpu.instruction_sets import INSTRUCTION_SETS, InstructionSet
from ..fallback import original_of
from ..module import Accelerated, inference_copy
from .check import FLAGS, compile_and_load, for_export
from .graph import WHERE, Graph, on_cpu
from .network import Network

SUFFIX = ".c"
SYSTEM_HEADERS = ("arm_neon.h", "immintrin.h", "math.h", "stdint.h", "string.h")


@dataclass(frozen=True)
class ExportedC:
    """The result of :func:`export_c`.

    ``memory`` are the bytes of the activations, and ``constants`` those of weights and tables. ``compared`` is the instruction set
    on which the outputs were compared with the model, None without a C compiler. ``difference`` and ``scale`` are the largest
    deviation of the outputs, and the largest output. ``int8_error`` is the root mean square error of int8 outputs, relative.
    """

    path: str
    header: str
    function: str
    target: str
    command: str
    size: int
    memory: int
    constants: int
    operations: int
    compared: str | None = None
    inputs: int = 0  # batches compared
    difference: float = 0.0
    scale: float = 0.0
    int8_error: float | None = None

    def __repr__(self) -> str:
        return f"<ExportedC: {self.path}, {self.target}>"

    def to_json(self) -> dict[str, object]:
        """Plain data: numbers and strings."""
        return dict(vars(self))

    def __str__(self) -> str:
        if self.compared is None:
            outputs = "outputs  not compared with the model: there is no C compiler"
        elif self.int8_error is not None:
            outputs = (
                f"outputs  int8: differ from float by {100 * self.int8_error:.2f}% (root mean square), over {self.inputs} batches"
            )
        else:
            outputs = f"outputs  differ by at most {self.difference:.1e} of {self.scale:.3g}, over {self.inputs} batches"
        lines = [
            f"file     {self.path}, {self.size:,} bytes of text, and {self.header}",
            f"target   {self.target}; compile with: {self.command}",
            f"memory   {self.memory:,} bytes of activations, {self.constants:,} bytes of weights and tables",
            outputs,
        ]
        if self.compared not in (None, self.target):
            lines.append(
                f"note     this machine lacks {self.target}, so the same network was compared with the {self.compared} kernels"
            )
        return "\n".join(lines)


def export_c(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Example,
    *,
    target: str = "portable",
    receipt: Receipt | None = None,
    int8: bool = False,
    fp16: bool = False,
    calibration: Iterable[Example] | None = None,
    tolerance: float | None = None,
) -> ExportedC:
    """Writes a baked model as one C file and its header, compiles it here, and compares its outputs.

    The file has the weights, the operations and the kernels. It needs a C compiler with vector extensions, gcc 9 or clang 11 or
    newer, and libm. It needs no Python, no thread and no heap: all memory is static. Zero blocks are neither stored nor computed.
    The function is named after the file: ``net.c`` has ``int net_run(const float *input, float *output)``, and ``net.h`` has the
    sizes.

    Args:
        model: A baked or any other plain model, or what :func:`smartprune.accelerate` returned for it. All of its operations must
            have kernels.
        path: The file to write; it must end in ``.c``, and its name must be a C name. The header is written next to it.
        example: An input with a batch axis, a tuple of them, or a dictionary of keyword arguments. The function takes inputs of
            exactly these sizes.
        target: The instruction set: ``"portable"`` for any processor, or one of those of the CPU runtime, such as ``"avx2"``,
            ``"neon"``, ``"neon_fp16"`` or ``"neon_dot"``.
        receipt: The receipt of the pruning. The model is compared with it, and the file names its mask.
        int8: Whether to compute in int8. Inputs and outputs stay float32. Needs ``calibration``.
        fp16: Whether to store and multiply float16 numbers: half the memory, and twice the products per instruction with the target
            ``"neon_fp16"``. Other targets convert them, which is slower than float32. Inputs and outputs stay float32. Numbers may
            be 8,000 times as large as with the example; larger ones are cut off.
        calibration: Batches of inputs that set the ranges of the int8 activations.
        tolerance: The largest allowed difference of the float outputs, relative to the largest output; 1e-4 by default, and 1e-2
            with ``fp16``.

    Returns:
        Sizes, the command to compile the file, and differences. ``print`` shows them.

    Raises:
        SmartpruneError: The model has an operation without kernel, or the outputs differ.

    Examples:
        >>> import smartprune as sp
        >>> import tempfile
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
        >>> path = os.path.join(tempfile.mkdtemp(), "net.c")
        >>> exported = sp.export_c(model, path, torch.zeros(1, 3, 8, 8))
        >>> exported.function
        'int net_run(const float *input, float *output)'
    """
    isa = _check_arguments(model, target, receipt, int8, fp16, calibration, tolerance)
    dtype = "int8" if int8 else "float16" if fp16 else "float32"
    model = _without_kernels(model, dtype)
    file = as_path(path, f"{WHERE}: path")
    name = file.stem
    if file.suffix != SUFFIX or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise SmartpruneError(
            f"{WHERE}: {file} must be a C name that ends in {SUFFIX}, such as net.c: functions are named after it"
        )
    header = file.with_suffix(".h")
    if header.name in SYSTEM_HEADERS:
        raise SmartpruneError(
            f"{WHERE}: {header} would hide <{header.name}> of the system, which the file includes; choose another name"
        )
    for output in (file, header):
        check_writable(output)
    check_model(model, receipt, WHERE, "C")
    copied = inference_copy(model)
    arguments, batch = read_example(copied, example, WHERE)
    batches = [on_cpu(batch), *random_batches(batch, dynamic_batch=False)]
    expected = [run_model(copied, arguments, each, WHERE) for each in batches]
    graph = Graph(copied, arguments, batch)
    if calibration is not None:
        rows = next(iter(batch.values())).shape[0]
        given = calibration_batches(calibration, copied, arguments, batch, WHERE)
        batches = [part for whole in given for part in in_batches(whole, rows)]
        if not batches:
            raise SmartpruneError(
                f"{WHERE}: every batch of calibration= has fewer than {rows} samples, as the example has; give more"
            )
        graph.measure(batches)
        expected = [run_model(copied, arguments, each, WHERE) for each in batches]
    elif fp16:
        graph.measure(batches)
    network = graph.network(isa, dtype)
    comment = _comment(name, isa, receipt, dtype)
    source, declarations = _texts(network, name, comment)
    result = ExportedC(
        path=str(file),
        header=str(header),
        function=network.signature(name),
        target=isa.name,
        command=command_line(name, isa),
        size=len(source),
        memory=network.memory,
        constants=network.constants,
        operations=len(network.compiled.operations),
        inputs=len(batches),
    )
    allowed = HALF_TOLERANCE if fp16 else FLOAT_TOLERANCE
    result = _compare(result, graph, network, dtype, name, batches, expected, allowed if tolerance is None else tolerance)
    write_atomic(header, declarations.encode())
    write_atomic(file, source.encode())
    return result


FLAGS_OF = {"int8": ("int8", "int8=True and calibration="), "float16": ("fp16", "fp16=True")}  # dtype -> argument, what to add


def _without_kernels(model: nn.Module, dtype: str) -> nn.Module:
    """The model inside one that :func:`smartprune.accelerate` returned, whose layers may be replaced by kernels."""
    used = model.options.dtype if isinstance(model, Accelerated) else dtype
    if used in FLAGS_OF and dtype == "float32":
        argument, addition = FLAGS_OF[used]
        raise SmartpruneError(
            f"{WHERE}: the model was accelerated in {used}, and {argument}=False writes float32; add {addition}, or give the model "
            "itself"
        )
    return original_of(model)


def command_line(name: str, isa: InstructionSet) -> str:
    """How to compile an exported network."""
    return " ".join(("cc", *FLAGS, *isa.flags, "-c", f"{name}.c"))


def _texts(network: Network, name: str, comment: str) -> tuple[str, str]:
    return f'{comment}#include "{name}.h"\n\n{network.source(name)}', network.header(name, comment)


def _compare(
    result: ExportedC,
    graph: Graph,
    network: Network,
    dtype: str,
    name: str,
    batches: Sequence[Batch],
    expected: Sequence[list[torch.Tensor]],
    tolerance: float,
) -> ExportedC:
    """Runs the network on this machine: with the kernels of the target if it has them, else with portable ones.

    Kernels that were compiled before, such as those of a wheel, do not replace the compiler.
    """
    if not os.environ.get("CC"):
        try:
            build.compiler()
        except SmartpruneError:  # there is none; an error in $CC is raised below
            return result
    with for_export():
        supported = build.supported_sets()
    if network.isa.name not in supported:
        network = graph.network(INSTRUCTION_SETS[0], dtype)
    shapes = [shape for _, shape in network.outputs]
    run = compile_and_load(*_texts(network, name, ""), name, network.isa, shapes)
    pairs = [(graph.arranged(run(graph.tensors(b))), wanted) for b, wanted in zip(batches, expected, strict=True)]
    if dtype == "int8":
        return replace(result, compared=network.isa.name, int8_error=relative_error(pairs, WHERE))
    difference, scale = compare_tensors(pairs, tolerance, WHERE)
    return replace(result, compared=network.isa.name, difference=difference, scale=scale)


def _check_arguments(
    model: object, target: str, receipt: object, int8: bool, fp16: bool, calibration: object, tolerance: object
) -> InstructionSet:
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"{WHERE}: model is a {type(model).__name__}; give a torch.nn.Module")
    if receipt is not None and not isinstance(receipt, Receipt):
        raise SmartpruneError(f"{WHERE}: receipt is a {type(receipt).__name__}; give a Receipt, such as Receipt.load(path)")
    if int8 and fp16:
        raise SmartpruneError(f"{WHERE}: int8=True and fp16=True exclude each other; give one of them")
    if int8 and calibration is None:
        raise SmartpruneError(f"{WHERE}: int8 needs calibration=, a few batches of real inputs, for the range of activations")
    if tolerance is not None and (isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0):
        raise SmartpruneError(f"{WHERE}: tolerance={tolerance!r} is not a number from 0 on, such as 1e-4")
    if not int8 and calibration is not None:
        raise SmartpruneError(f"{WHERE}: calibration= is for int8=True")
    for row in INSTRUCTION_SETS:
        if row.name == target:
            return row
    names = ", ".join(row.name for row in INSTRUCTION_SETS)
    raise SmartpruneError(f"{WHERE}: target={target!r} is not one of {names}; portable runs everywhere")


def _comment(name: str, isa: InstructionSet, receipt: Receipt | None, dtype: str) -> str:
    pruned = (
        ""
        if receipt is None
        else f"   Pruned: {receipt.blocks.removed:,} of {receipt.blocks.total:,} blocks. Mask: {receipt.mask_hash}\n"
    )
    return (
        f"/* {name}: a network in {dtype} for {isa.name}, written by smartprune {__version__}.\n\n{pruned}"
        f"   Compile: {command_line(name, isa)}\n   Link: -lm\n"
        "   Needs gcc 9 or clang 11 or newer. Without -ffp-contract=fast, results differ by rounding. */\n"
    )
