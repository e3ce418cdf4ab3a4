"""Calibration data: the inputs among the batches of any iterable, checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.trace import tensors_in
from ...errors import SmartpruneError

GIVE = "give a few hundred inputs of the model, such as a DataLoader of its training data"


def read_batches(where: str, model: nn.Module, batches: Iterable[Any], samples: int) -> list[Any]:
    """The inputs of the first batches, at least ``samples`` samples if there are that many, on the device of the model.

    A batch is a tensor, a dictionary of arguments, or a tuple or list. Of these, as many entries are arguments as the model
    requires; the others are labels. Batches without samples are left out.
    """
    if isinstance(batches, (Tensor, Mapping, str, bytes)) or not isinstance(batches, Iterable):
        hint = "; write [batch] for one batch" if isinstance(batches, (Tensor, Mapping)) else ""
        raise SmartpruneError(f"{where}: batches is a {type(batches).__name__}; {GIVE}{hint}")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        raise SmartpruneError(f"{where}: the model is on the meta device and has no values; load them first")
    signature = _Signature.of(model)
    out: list[Any] = []
    seen = 0
    for batch in batches:
        arguments = _arguments(where, batch, signature)
        if any(tensor.is_meta for tensor in tensors_in(arguments)):
            raise SmartpruneError(f"{where}: a batch is on the meta device and has no values; {GIVE}")
        arguments = _to(arguments, device)
        if size := size_of(arguments):
            out.append(arguments)
            seen += size
        if seen >= samples:
            break
    _check(where, out, seen)
    return out


def size_of(batch: Any) -> int:
    """The number of samples: the length of the first axis of the first tensor."""
    return next((int(tensor.shape[0]) for tensor in tensors_in(batch) if tensor.dim()), 0)


def first_sample(batch: Any) -> Any:
    """The first sample, as a batch of one. The whole batch, if its tensors do not all have one entry per sample."""
    return samples_of(batch, 0, 1) if divisible(batch, size_of(batch)) else batch


def divisible(batch: Any, size: int) -> bool:
    """Whether each tensor has one entry for each of ``size`` samples."""
    return all(tensor.dim() > 0 and tensor.shape[0] == size for tensor in tensors_in(batch))


def samples_of(batch: Any, first: int, stop: int) -> Any:
    """Some samples of a batch that is divisible."""
    return _map(batch, lambda tensor: tensor[first:stop])


@dataclass(frozen=True)
class _Signature:
    """What the forward method of a model accepts.

    Attributes:
        required: How many arguments it cannot do without, at least one.
        most: How many arguments it takes by position.
        names: The arguments that it takes by name; None if it takes every name.
    """

    required: int = 1
    most: float = math.inf
    names: frozenset[str] | None = None

    @staticmethod
    def of(model: nn.Module) -> _Signature:
        try:
            parameters = inspect.signature(model.forward).parameters.values()
        except (TypeError, ValueError):
            return _Signature()
        kinds = {p.kind for p in parameters}
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        names = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        return _Signature(
            max(1, sum(p.default is p.empty for p in positional)),
            math.inf if inspect.Parameter.VAR_POSITIONAL in kinds else len(positional),
            None if inspect.Parameter.VAR_KEYWORD in kinds else names,
        )

    def single(self, value: Any) -> Any:
        """A dictionary, tuple or list: the arguments of the model, or its only argument."""
        if isinstance(value, Mapping):
            by_name = self.names is None or self.names.issuperset(value)
            return dict(value) if by_name else (dict(value),)
        return tuple(value) if self.most > 1 else (value,)


def _arguments(where: str, batch: Any, signature: _Signature) -> Any:
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        return signature.single(batch)
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)) and len(batch) > 0:
        if signature.required == 1 and isinstance(batch[0], (Mapping, tuple, list)):
            return signature.single(batch[0])
        return tuple(batch[: signature.required])
    raise SmartpruneError(
        f"{where}: a batch is a {type(batch).__name__}; it can be a tensor, a dictionary of arguments, or a tuple"
    )


def _check(where: str, batches: Sequence[Any], samples: int) -> None:
    if not batches or samples == 0:
        raise SmartpruneError(
            f"{where}: there is no calibration data: batches is empty; {GIVE} (a generator can be read only once)"
        )
    tensors = [tensor for batch in batches for tensor in tensors_in(batch)]
    for tensor in tensors:
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise SmartpruneError(f"{where}: the calibration data contains NaN or infinity; {GIVE}")
    if samples == 1:
        raise SmartpruneError(f"{where}: one sample is not enough to see what the layers compute; {GIVE}")
    if _all_equal(batches):
        raise SmartpruneError(f"{where}: all {samples} samples are equal; {GIVE}")


def _all_equal(batches: Sequence[Any]) -> bool:
    first: Tensor | None = None
    for batch in batches:
        tensor = next(iter(tensors_in(batch)))
        first = tensor[:1] if first is None else first
        if tensor.shape[1:] != first.shape[1:] or not bool((tensor == first).all()):
            return False
    return True


def _to(value: Any, device: torch.device) -> Any:
    return _map(value, lambda tensor: tensor.detach().to(device))


def _map(value: Any, function: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: _map(item, function) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_map(item, function) for item in value) if type(value) in (tuple, list) else value
    return value
