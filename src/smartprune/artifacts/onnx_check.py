"""Checks of an ONNX export: inputs to compare on, outputs of both sides, and zero blocks of the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from .. import text
from ..core.occupancy import occupied
from ..errors import SmartpruneError
from .counts import Count
from .onnx_graph import outputs_of, session_of
from .source import Cut

Batch = tuple[Tensor, ...]

# Largest difference of the outputs, relative to the largest output: float32 rounding, depending on the order of operations, and
# the same in half precision. Wrong graphs differ far more.
FLOAT_TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-2
MAX_INT8_ERROR = 0.5  # root mean square error of int8 outputs, relative to the float ones


def as_batch(example: Tensor | Sequence[Tensor]) -> Batch:
    batch = (example,) if isinstance(example, Tensor) else tuple(example)
    if not batch or any(not isinstance(x, Tensor) or x.dim() < 1 or x.shape[0] < 1 for x in batch):
        raise SmartpruneError("export_onnx: an example is a tensor with a batch axis, or a tuple of such tensors")
    return tuple(x.detach().cpu() for x in batch)


def calibration_batches(calibration: Iterable[Tensor | Sequence[Tensor]], example: Batch) -> list[Batch]:
    """The batches on which activations are measured, checked here because messages of onnxruntime say little."""
    batches = [as_batch(batch) for batch in calibration]
    if not batches:
        raise SmartpruneError("export_onnx: calibration= holds no batches")
    for batch in batches:
        samples, expected = _describe_samples(batch), _describe_samples(example)
        if samples != expected:
            raise SmartpruneError(
                f"export_onnx: calibration= holds samples of {samples}, and the example's are {expected}; "
                "give inputs like the example"
            )
        if not all(bool(x.isfinite().all()) for x in batch):
            raise SmartpruneError("export_onnx: calibration= holds NaN or infinity, so ranges are unknown; give finite inputs")
    return batches


def _describe_samples(batch: Batch) -> str:
    return ", ".join(f"{text.format_shape(x.shape[1:])} {str(x.dtype).removeprefix('torch.')}" for x in batch)


def random_batches(example: Batch, dynamic_batch: bool) -> Iterator[Batch]:
    """Other inputs: noise for floats, samples in random order for integers, and other batch sizes if these are dynamic."""
    generator = torch.Generator().manual_seed(0)
    size = example[0].shape[0]
    for count in (1, 3, 5) if dynamic_batch else (size, size):
        batch = []
        for x in example:
            samples = x[torch.randint(0, x.shape[0], (count,), generator=generator, device="cpu")]
            noise = torch.randn(samples.shape, generator=generator, device="cpu").to(x.dtype)
            batch.append(noise if x.is_floating_point() else samples)
        yield tuple(batch)


def run_model(model: nn.Module, batch: Batch) -> list[Tensor]:
    """The tensors among the outputs of a model."""
    try:
        with torch.no_grad():
            outputs = model(*batch)
    except Exception as error:  # the code of the model can raise anything
        shapes = ", ".join(text.format_shape(x.shape) for x in batch)
        raise SmartpruneError(
            f"export_onnx: the model failed on inputs of {shapes} with {type(error).__name__}: {error}; "
            "if it only supports one batch size, give dynamic_batch=False"
        ) from error
    return [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


@contextmanager
def explain_float64(model: nn.Module) -> Iterator[None]:
    """Adds what to do to errors of a model in float64, for which onnxruntime has few operations."""
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
    difference = scale = 0.0
    for batch, wanted in zip(batches, expected, strict=True):
        outputs = outputs_of(session, batch)
        if [x.shape for x in outputs] != [x.shape for x in wanted]:
            shapes = [[text.format_shape(x.shape) for x in tensors] for tensors in (outputs, wanted)]
            raise SmartpruneError(f"export_onnx: the graph's outputs are {shapes[0]}, and the model's are {shapes[1]}")
        for a, b in zip(outputs, wanted, strict=True):
            finite = b.isfinite()
            if not torch.equal(a.isfinite(), finite):
                raise SmartpruneError("export_onnx: only one of graph and model returns NaN or infinity")
            if bool(finite.any()):
                difference = max(difference, float((a.double() - b.double())[finite].abs().max()))
                scale = max(scale, float(b.double()[finite].abs().max()))
    half = any(x.dtype in (torch.float16, torch.bfloat16) for x in (*batches[0], *expected[0]))
    allowed = (HALF_TOLERANCE if half else FLOAT_TOLERANCE) if tolerance is None else tolerance
    if difference > allowed * scale:
        raise SmartpruneError(
            f"export_onnx: the graph's outputs differ from the model's by {difference:.2e}, and rounding allows "
            f"{allowed * scale:.2e}; no file was written (random outputs and those of training mode cannot be exported)"
        )
    return difference, scale


def int8_error(data: bytes, batches: Sequence[Batch], expected: Sequence[list[Tensor]]) -> float:
    """The root mean square error of the int8 outputs, relative to the float ones."""
    session = session_of(data)
    error = power = 0.0
    for batch, wanted in zip(batches, expected, strict=True):
        for a, b in zip(outputs_of(session, batch), wanted, strict=True):
            error += float((a.double() - b.double()).square().sum())
            power += float(b.double().square().sum())
    relative = float(np.sqrt(error / power)) if power else float(error > 0)
    if not relative <= MAX_INT8_ERROR:
        raise SmartpruneError(
            f"export_onnx: the int8 outputs differ from the float ones by {100 * relative:.0f}% (root mean square), which is too "
            "much; give calibration= inputs like those the model will see"
        )
    return relative


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
