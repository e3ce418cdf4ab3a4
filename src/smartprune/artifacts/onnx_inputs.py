"""Inputs of an export to ONNX or LiteRT: their names, how the model takes them, and more inputs to compare outputs on.

``where`` is the function that messages name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .. import text
from ..errors import SmartpruneError

ONNX = "export_onnx"

Batch = dict[str, Tensor]  # by the name of the input
Example = Tensor | Sequence[Tensor] | Mapping[str, Any]  # a tensor, a tuple of arguments, or a dictionary of keyword arguments


@dataclass(frozen=True)
class Arguments:
    """How a model takes a batch: by position, or by keyword together with ``constants``, which do not become inputs."""

    by_keyword: bool
    several: str | None = None  # the name of a parameter like *images, which takes all tensors
    constants: Mapping[str, object] = field(default_factory=dict)

    def positional(self, batch: Batch) -> tuple[Tensor, ...]:
        return () if self.by_keyword else tuple(batch.values())

    def keywords(self, batch: Batch) -> dict[str, Any]:
        return {**batch, **self.constants} if self.by_keyword else {}

    def dynamic_shapes(self, batch: Batch, axis: Any) -> Any:
        """The first axis of every tensor as ``axis``, in the form that torch.export takes."""
        if self.several is not None:
            return {self.several: tuple({0: axis} for _ in batch)}
        if not self.by_keyword:
            return tuple({0: axis} for _ in batch)
        return {**{name: {0: axis} for name in batch}, **dict.fromkeys(self.constants)}

    def call(self, model: nn.Module, batch: Batch) -> Any:
        return model(*self.positional(batch), **self.keywords(batch))


def read_example(model: nn.Module, example: Example, where: str = ONNX) -> tuple[Arguments, Batch]:
    """How the model takes the example, and its tensors by the names of the arguments in ``forward``."""
    if not isinstance(example, Mapping):
        tensors = _tensors(example, where)
        names, several = _names(model, tensors)
        taken = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
        return Arguments(False, several), {f"{n}_input" if n in taken else n: x for n, x in zip(names, tensors, strict=True)}
    constants = {name: value for name, value in example.items() if not isinstance(value, Tensor)}
    wrong = [name for name, value in constants.items() if not (value is None or isinstance(value, (bool, int, float, str)))]
    if wrong or not all(isinstance(name, str) for name in example):
        shown = f"{wrong[0]!r} is a {type(constants[wrong[0]]).__name__}" if wrong else "a key is not a string"
        raise SmartpruneError(
            f"{where}: in the example {shown}; a dictionary holds the keyword arguments of the model: tensors, and numbers, "
            "texts, true, false or None, which become part of the graph"
        )
    tensors = _tensors([value for value in example.values() if isinstance(value, Tensor)], where)
    return Arguments(True, constants=constants), dict(
        zip((name for name in example if name not in constants), tensors, strict=True)
    )


def _tensors(example: Tensor | Sequence[Tensor], where: str) -> tuple[Tensor, ...]:
    tensors = tuple(example) if isinstance(example, Sequence) and not isinstance(example, (str, bytes)) else (example,)
    wrong = [x for x in tensors if not isinstance(x, Tensor) or x.dim() < 1 or x.shape[0] < 1]
    if wrong or not tensors:
        first = "empty" if not wrong else text.show(wrong[0])
        first = f"a tensor of shape {tuple(wrong[0].shape)}" if wrong and isinstance(wrong[0], Tensor) else first
        raise SmartpruneError(
            f"{where}: an example is a tensor with a batch axis, or a tuple of such tensors or a dictionary of keyword arguments; "
            f"this one {'is' if not wrong or wrong[0] is example else 'holds'} {first}"
        )
    return tuple(x.detach().cpu() for x in tensors)


def _names(model: nn.Module, tensors: Sequence[Tensor]) -> tuple[list[str], str | None]:
    """The names of positional arguments, and the name of the parameter that takes all of them, if one does."""
    try:
        signature = inspect.signature(model.forward)
        values = signature.bind(*tensors).arguments
    except (TypeError, ValueError):  # calling the model raises a clearer error
        return ["input", *(f"input{i}" for i in range(2, len(tensors) + 1))], None
    names = []
    for name, value in values.items():
        several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}_{i}" for i in range(len(value))] if several else [name]
    only = next(iter(values))
    return names, only if len(values) == 1 and signature.parameters[only].kind is inspect.Parameter.VAR_POSITIONAL else None


def calibration_batches(
    calibration: Iterable[Example], model: nn.Module, arguments: Arguments, example: Batch, where: str = ONNX
) -> list[Batch]:
    """The batches on which activations are measured, checked here because errors of onnxruntime are vague."""
    read = [read_example(model, batch, where) for batch in calibration]
    if not read:
        raise SmartpruneError(f"{where}: calibration= holds no batches")
    batches = []
    for other, batch in read:
        samples, expected = _describe_samples(batch), _describe_samples(example)
        if other.by_keyword != arguments.by_keyword or set(batch) != set(example):
            raise SmartpruneError(
                f"{where}: calibration= holds the inputs {', '.join(batch)}, and the example has {', '.join(example)}; "
                "give inputs like the example"
            )
        batch = {name: batch[name] for name in example}
        samples = _describe_samples(batch)
        if samples != expected:
            raise SmartpruneError(
                f"{where}: calibration= holds samples of {samples}, and the example's are {expected}; give inputs like the example"
            )
        if not all(bool(x.isfinite().all()) for x in batch.values()):
            raise SmartpruneError(f"{where}: calibration= holds NaN or infinity, so ranges are unknown; give finite inputs")
        batches.append(batch)
    return batches


def _describe_samples(batch: Batch) -> str:
    return ", ".join(f"{text.format_shape(x.shape[1:])} {str(x.dtype).removeprefix('torch.')}" for x in batch.values())


def random_batches(example: Batch, dynamic_batch: bool) -> Iterator[Batch]:
    """Other inputs: noise for floats, samples in random order for integers, and other batch sizes if these are dynamic."""
    generator = torch.Generator().manual_seed(0)
    for count in (1, 3, 5) if dynamic_batch else (None, None):
        batch = {}
        for name, x in example.items():
            rows = x.shape[0] if count is None else count
            samples = x[torch.randint(0, x.shape[0], (rows,), generator=generator, device="cpu")]
            noise = torch.randn(samples.shape, generator=generator, device="cpu").to(x.dtype)
            batch[name] = noise if x.is_floating_point() else samples
        yield batch


def run_model(model: nn.Module, arguments: Arguments, batch: Batch, where: str = ONNX) -> list[Tensor]:
    """The tensors among the outputs of a model."""
    try:
        with torch.no_grad():
            outputs = arguments.call(model, batch)
    except Exception as error:  # the code of the model can raise anything
        shapes = ", ".join(text.format_shape(x.shape) for x in batch.values())
        hint = "if it only supports one batch size, give dynamic_batch=False" if where == ONNX else "give an example that it takes"
        raise SmartpruneError(
            f"{where}: the model failed on inputs of {shapes} with {type(error).__name__}: {error}; {hint}"
        ) from error
    return [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
