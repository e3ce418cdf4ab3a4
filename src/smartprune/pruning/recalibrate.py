"""``recalibrate``: the statistics of batch norms, computed anew from data. No labels and no training are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.example import run_example
from ..errors import SmartpruneError
from .oneshot.batches import read_batches

Norm = nn.modules.batchnorm._BatchNorm
SAMPLES = 2048


def recalibrate(model: nn.Module, batches: Iterable[Any], *, samples: int = SAMPLES) -> None:
    """Computes the running statistics of all batch norms anew, from inputs without labels.

    After blocks were removed, the layers have other outputs than those that the stored statistics describe. The statistics are
    those of all samples together, so the size of the batches does not matter much. Weights do not change.

    Args:
        model: The model. If the call fails, the model does not change.
        batches: Any iterable of inputs, such as a DataLoader: tensors, dictionaries of arguments, or tuples whose first entries
            are the inputs. Labels are not used.
        samples: The least number of samples to read, if there are that many.

    Returns:
        Nothing. The statistics are written into the model.

    Raises:
        SmartpruneError: The model has no batch norm with running statistics, there is no data, all samples are equal, or a
            statistic is not finite.

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        >>> data = [torch.randn(32, 8) for _ in range(4)]
        >>> sp.recalibrate(model, data)
        >>> model[1].running_mean.allclose(model[0](torch.cat(data)).mean(0), atol=1e-5)
        True
    """
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"recalibrate: model is a {type(model).__name__}; give a torch.nn.Module")
    norms = norms_with_statistics(model)
    if not norms:
        raise SmartpruneError(
            f"recalibrate: this {type(model).__name__} has no batch norm with running statistics, so there is nothing to compute"
        )
    statistics = measure(model, norms, read_batches("recalibrate", model, batches, samples))
    names = {id(module): name for name, module in model.named_modules()}
    for norm in norms:
        if norm in statistics and not all(bool(value.isfinite().all()) for value in statistics[norm]):
            raise SmartpruneError(
                f"recalibrate: the inputs of {names[id(norm)]} are NaN or infinite; check the data and the weights of the model"
            )
    store(statistics)


def norms_with_statistics(model: nn.Module) -> list[nn.Module]:
    """The batch norms that use running statistics in evaluation."""
    return [module for module in model.modules() if isinstance(module, Norm) and module.running_mean is not None]


def measure(model: nn.Module, norms: Sequence[nn.Module], batches: Sequence[Any]) -> dict[nn.Module, tuple[Tensor, Tensor]]:
    """Mean and variance of the inputs of each norm, while all norms use the statistics of the batch."""
    sums: dict[nn.Module, list[Tensor]] = {}

    def add(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach().movedim(1, -1).flatten(0, -2).double()
        values = [torch.full((), len(x), dtype=torch.float64, device=x.device), x.sum(0), x.square().sum(0)]
        sums[norm] = [a + b for a, b in zip(sums[norm], values, strict=True)] if norm in sums else values
        norm.training = len(x) > 1  # one value has no variance, so it is normalized with the stored statistics

    hooks = [norm.register_forward_pre_hook(add) for norm in norms]
    try:
        for batch in batches:
            run_example(model, batch, _batch_statistics(norms), "batches")
    finally:
        for hook in hooks:
            hook.remove()
    out = {}
    for norm, (count, total, squares) in sums.items():
        mean = total / count
        out[norm] = mean, (squares / count - mean.square()).clamp(min=0) * count / (count - 1).clamp(min=1)
    return out


@contextmanager
def _batch_statistics(norms: Sequence[nn.Module]) -> Iterator[None]:
    """The norms use the statistics of the batch, and do not change the stored ones."""
    before: list[tuple[Any, bool, Any]] = [(norm, norm.training, norm.track_running_stats) for norm in norms]
    try:
        for norm, _, _ in before:
            norm.training, norm.track_running_stats = True, False
        yield
    finally:
        for norm, training, tracks in before:
            norm.training, norm.track_running_stats = training, tracks


@torch.no_grad()
def store(statistics: dict[nn.Module, tuple[Tensor, Tensor]]) -> None:
    """Writes the statistics into the norms."""
    for norm, (mean, variance) in statistics.items():
        norm.running_mean.copy_(mean)  # type: ignore[operator]
        norm.running_var.copy_(variance)  # type: ignore[operator]
