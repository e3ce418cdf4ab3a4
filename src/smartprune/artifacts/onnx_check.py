"""Checks of an ONNX export: inputs to compare on, outputs of both sides, and zero blocks of the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from .. import text
from ..core.kinds import is_masked
from ..core.occupancy import occupied
from ..errors import SmartpruneError
from .counts import Count
from .onnx_graph import outputs_of, session_of
from .onnx_inputs import ONNX, Batch
from .quantized import is_quantized
from .receipt import Receipt
from .source import Cut, check_not_masked
from .verify import verify

# Largest difference of the outputs, relative to the largest output: float32 rounding, depending on the order of operations, and
# the same in half precision. Wrong graphs differ far more.
FLOAT_TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-2
MAX_INT8_ERROR = 0.5  # root mean square error of int8 outputs, relative to the float ones


@contextmanager
def explain_float64(model: nn.Module) -> Iterator[None]:
    """Adds a remedy to errors of float64 models, for which onnxruntime has few operations."""
    try:
        yield
    except SmartpruneError as error:
        if not any(tensor.dtype == torch.float64 for tensor in model.parameters()):
            raise
        raise SmartpruneError(
            f"{error}; the model is in float64, for which onnxruntime has few operations: give model.float(), and a float32 example"
        ) from error


def compare_outputs(
    data: bytes, batches: Sequence[Batch], expected: Sequence[list[Tensor]], tolerance: float | None
) -> tuple[float, float]:
    """The largest difference between the outputs of a graph and ``expected``, and the largest output."""
    session = session_of(data)
    pairs = [(outputs_of(session, batch), wanted) for batch, wanted in zip(batches, expected, strict=True)]
    half = any(x.dtype in (torch.float16, torch.bfloat16) for x in (*batches[0].values(), *expected[0]))
    return compare_tensors(pairs, (HALF_TOLERANCE if half else FLOAT_TOLERANCE) if tolerance is None else tolerance, ONNX)


def compare_tensors(pairs: Iterable[tuple[list[Tensor], list[Tensor]]], tolerance: float, where: str) -> tuple[float, float]:
    """The largest difference between outputs of a graph and those expected, and the largest output. Raises for larger ones than
    the tolerance, which is relative to the largest output."""
    difference = scale = 0.0
    for outputs, wanted in pairs:
        if [x.shape for x in outputs] != [x.shape for x in wanted]:
            shapes = [[text.format_shape(x.shape) for x in tensors] for tensors in (outputs, wanted)]
            raise SmartpruneError(f"{where}: the graph's outputs are {shapes[0]}, and the model's are {shapes[1]}")
        for a, b in zip(outputs, wanted, strict=True):
            finite = b.isfinite()
            if not torch.equal(a.isfinite(), finite):
                raise SmartpruneError(f"{where}: only one of graph and model returns NaN or infinity")
            if bool(finite.any()):
                difference = max(difference, float((a.double() - b.double())[finite].abs().max()))
                scale = max(scale, float(b.double()[finite].abs().max()))
    if difference > tolerance * scale:
        raise SmartpruneError(
            f"{where}: the graph's outputs differ from the model's by {difference:.2e}, and rounding allows "
            f"{tolerance * scale:.2e}; no file was written (random outputs and outputs of training mode cannot be exported)"
        )
    return difference, scale


def int8_error(data: bytes, batches: Sequence[Batch], expected: Sequence[list[Tensor]]) -> float:
    """The root mean square error of the int8 outputs, relative to the float ones."""
    session = session_of(data)
    return relative_error([(outputs_of(session, batch), wanted) for batch, wanted in zip(batches, expected, strict=True)], ONNX)


def relative_error(pairs: Iterable[tuple[list[Tensor], list[Tensor]]], where: str) -> float:
    """The root mean square error of int8 outputs, relative to the float ones. Raises if it is too large."""
    error = power = 0.0
    for outputs, wanted in pairs:
        for a, b in zip(outputs, wanted, strict=True):
            error += float((a.double() - b.double()).square().sum())
            power += float(b.double().square().sum())
    relative = float(np.sqrt(error / power)) if power else float(error > 0)
    if not relative <= MAX_INT8_ERROR:
        raise SmartpruneError(
            f"{where}: the int8 outputs differ from the float ones by {100 * relative:.0f}% (root mean square), which is too "
            "much; give calibration= inputs like those the model will see"
        )
    return relative


def check_model(model: nn.Module, receipt: Receipt | None, where: str, runtime: str) -> None:
    """Raises for a model that cannot be exported as it is."""
    if any(is_masked(module) for module in model.modules()):
        raise SmartpruneError(f"{where}: the model is still being pruned; call smartprune.bake(model) first")
    if is_quantized(model):
        raise SmartpruneError(
            f"{where}: the model is quantized, and torch cannot export its layers; export the float model, with int8=True and "
            "calibration= for an int8 file"
        )
    check_not_masked(model.state_dict(), f"{where}: {type(model).__name__}")
    if any(tensor.dtype == torch.bfloat16 for tensor in model.parameters()):
        raise SmartpruneError(f"{where}: {runtime} does not compute in bfloat16, so outputs cannot be compared; give model.float()")
    if receipt is not None and not (verification := verify(model, receipt=receipt)).ok:
        raise SmartpruneError(f"{where}: {type(model).__name__} does not match its receipt: {verification.problems[0]}")


def count_zero_blocks(tensors: Mapping[str, Tensor], cuts: Sequence[Cut], where: str) -> tuple[Count, int]:
    """The blocks of the written file, and how many became zero. A block that is zero in the model alone raises."""
    total = zero = vanished = 0
    for cut in cuts:
        tensor, before = tensors.get(cut.weight), occupied(cut.grid, cut.tensor)
        if tensor is None or tensor.shape != cut.tensor.shape:
            raise SmartpruneError(f"{where}: no node uses the weight {cut.weight} in its own shape, so its zeros cannot be checked")
        live = occupied(cut.grid, tensor)
        wrong = int((live & ~before).sum())
        if wrong:
            raise SmartpruneError(f"{where}: {wrong} zero blocks of {cut.weight} are not zero in the file")
        total, zero = total + cut.grid.n, zero + int((~live).sum())
        vanished += int((before & ~live).sum())
    return Count(total, total - zero), vanished
