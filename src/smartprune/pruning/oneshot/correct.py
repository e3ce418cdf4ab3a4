"""Corrections after the refit: batch-norm statistics, and scales and offsets, chosen by the outputs on data that was held out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.trace import tensors_in
from ..recalibrate import measure, norms_with_statistics, store
from .batches import divisible, samples_of, size_of
from .uses import run_with


def outputs_of(model: nn.Module, batch: Any) -> list[Tensor]:
    """The floating-point outputs of a model."""
    out = run_with(model, batch)
    logits = getattr(out, "logits", None)
    return [tensor.detach() for tensor in tensors_in(out if logits is None else logits) if tensor.is_floating_point()]


def distance(outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """How far outputs are from those of the dense network: the Kullback-Leibler divergence of classes, if there is one vector of
    outputs per sample, or else the squared error relative to the variance of the targets. Infinite if the outputs have other
    shapes, as those of detectors that return a varying number of boxes."""
    if [out.shape for out in outputs] != [target.shape for target in targets]:
        return torch.tensor(torch.inf)
    total = torch.zeros((), device=next((out.device for out in outputs), None))
    for out, target in zip(outputs, targets, strict=True):
        if not target.numel():
            continue
        out, target = out.float(), target.float()
        if len(outputs) == 1 and target.dim() == 2 and target.shape[1] > 1:
            total = total + (target.log_softmax(1).exp() * (target.log_softmax(1) - out.log_softmax(1))).sum(1).mean()
        else:
            total = total + (out - target).square().mean() / target.var(correction=0).clamp(min=1e-12)
    return total


def error(model: nn.Module, batches: Sequence[Any], targets: Sequence[Sequence[Tensor]]) -> float:
    """The mean distance over some batches; infinite if it is not a number."""
    values = [float(distance(outputs_of(model, batch), target)) for batch, target in zip(batches, targets, strict=True)]
    mean = sum(values) / len(values)
    return mean if mean == mean else float("inf")


def recalibrated(model: nn.Module, batches: Sequence[Any]) -> nn.Module:
    """A copy with new batch-norm statistics."""
    out = copy.deepcopy(model)
    store(measure(out, norms_with_statistics(out), batches))
    return out


def tuned(
    model: nn.Module,
    batches: Sequence[Any],
    targets: Sequence[Sequence[Tensor]],
    steps: int,
    rate: float,
    on_step: Callable[[int], None] = lambda done: None,
    at_once: float = math.inf,
) -> nn.Module:
    """A copy whose scales and offsets, the parameters of one axis, follow the outputs of the dense network.

    A step uses ``at_once`` samples of a batch, or all of them if the batch cannot be divided.
    """
    out = copy.deepcopy(model)
    parameters = [p for p in out.parameters() if p.dim() == 1 and p.is_floating_point()]
    needed = {id(p) for p in parameters}
    for parameter in out.parameters():
        parameter.requires_grad_(id(parameter) in needed)
    if not parameters:
        return out
    optimizer = torch.optim.Adam(parameters, lr=rate)
    for step in range(steps):
        turn, number = divmod(step, len(batches))
        batch, target = _part(batches[number], targets[number], turn, at_once)
        result: list[Tensor] = []
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        with torch.enable_grad():
            outputs = run_with(out, batch, torch.enable_grad())
            logits = getattr(outputs, "logits", None)
            result = [t for t in tensors_in(outputs if logits is None else logits) if t.is_floating_point()]
            loss = distance(result, target)
        if not bool(loss.isfinite()) or not loss.requires_grad:
            break
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        on_step(step + 1)
    return out


def _part(batch: Any, targets: Sequence[Tensor], turn: int, at_once: float) -> tuple[Any, Sequence[Tensor]]:
    """The samples of a batch that are used at its turn."""
    size = size_of(batch)
    if size <= at_once or not divisible(batch, size) or not divisible(targets, size):
        return batch, targets
    count = math.ceil(size / at_once)
    first, stop = size * (turn % count) // count, size * (turn % count + 1) // count
    return samples_of(batch, first, stop), [target[first:stop] for target in targets]
