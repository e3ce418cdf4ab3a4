"""Measures layers in passes over the model: the moments of their inputs, and how much the loss depends on their outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...core.layers import Layer
from ...core.trace import tensors_in
from ...errors import SmartpruneError
from .batches import size_of
from .matrix import Pick
from .uses import Use, UseReader, run_with

Rows = list[tuple[Use, Tensor]]  # uses of one layer in one batch, and the rows that they multiply

ROWS_PER_INPUT, FEWEST_ROWS = 16, 16_384  # rows that a moment of so many inputs is averaged over, if there are so many
SPAN = 512  # rows of a moment that are computed at once


class Stop(SmartpruneError):  # noqa: N818 (not an error: it ends a forward pass)
    """Ends a forward pass after the last layer that is needed."""


def pick_rows(seed: int, share: float, inputs: int) -> Pick:
    """Picks rows at random: a share of those that a moment of so many inputs needs."""

    def pick(rows: int) -> Tensor | None:
        wanted = max(1, round(share * max(FEWEST_ROWS, ROWS_PER_INPUT * inputs)))
        if rows <= wanted:
            return None
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(rows, generator=generator)[:wanted].sort().values

    return pick


@dataclass
class Moment:
    """Sums over the rows of the inputs of one layer.

    Attributes:
        second: The sum of ``x x^T``, float64 [parts or 1, inputs, inputs]. The entries below the diagonal may be missing.
        first: The sum of ``x``, float64 [parts or 1, inputs].
        cross: The sum of ``x y^T`` with the outputs y of the dense layer, [parts, inputs, outputs], if these were given.
        target: The sum of ``y``, [parts, outputs].
        rows: The number of rows of each part.
    """

    second: Tensor
    first: Tensor
    rows: Tensor
    cross: Tensor | None = None
    target: Tensor | None = None

    @staticmethod
    def zeros(parts: int, shared: bool, inputs: int, device: torch.device, outputs: int = 0) -> Moment:
        kinds = 1 if shared else parts
        options: dict[str, Any] = {"dtype": torch.float64, "device": device}
        out = Moment(
            torch.zeros(kinds, inputs, inputs, **options), torch.zeros(kinds, inputs, **options), torch.zeros(kinds, **options)
        )
        if outputs:
            out.cross = torch.zeros(parts, inputs, outputs, **options)
            out.target = torch.zeros(parts, outputs, **options)
        return out

    def add(self, parts: slice, x: Tensor, y: Tensor | None = None) -> None:
        """Adds rows [parts or 1, rows, inputs]."""
        kinds = parts if self.second.shape[0] > 1 else slice(0, 1)
        x = x.float()
        for first in range(0, x.shape[2], SPAN):  # the product is symmetric, so half of it is enough
            self.second[kinds, first : first + SPAN, first:] += x[:, :, first : first + SPAN].mT @ x[:, :, first:]
        self.first[kinds] += x.sum(1)
        self.rows[kinds] += x.shape[1]
        if y is not None and self.cross is not None and self.target is not None:
            self.cross[parts] += x.mT @ y
            self.target[parts] += y.sum(1)

    def require_finite(self, layer: Layer) -> None:
        for values in (self.second, self.cross):
            if values is not None and not bool(values.isfinite().all()):
                raise SmartpruneError(
                    f"prune: the inputs of {layer.name} are too large: their squares overflow; scale down the data or the weights"
                )

    def mean(self, centered: bool) -> Tensor:
        """The mean of ``x x^T``, or the covariance, in place of the sum."""
        rows = self.rows.clamp(min=1)[:, None]
        mean = self.first / rows
        out = self.second / rows[..., None]
        for first in range(0, out.shape[1], SPAN):
            stop = first + SPAN
            square = out[:, first:stop, first:stop]
            square.copy_(square.triu() + square.triu(1).mT)
            out[:, stop:, first:stop] = out[:, first:stop, stop:].mT
        return out - mean[:, :, None] * mean[:, None] if centered else out

    def mean_cross(self, centered: bool) -> Tensor:
        assert self.cross is not None
        assert self.target is not None
        rows = self.rows.clamp(min=1)[:, None]
        out = self.cross / rows[..., None]
        return out - (self.first / rows)[:, :, None] * (self.target / rows)[:, None] if centered else out

    def means(self) -> tuple[Tensor, Tensor]:
        """The means of inputs and outputs."""
        assert self.target is not None
        rows = self.rows.clamp(min=1)[:, None]
        return self.first / rows, self.target / rows


@dataclass
class Survey:
    """What the first pass over the model records about each layer.

    Attributes:
        order: The layers in the order of their first use.
        uses: How often each layer is used in one forward pass.
        shared: Whether all parts of a layer read the same inputs.
        norms: The batch norm that alone reads the outputs of a layer, by layer.
    """

    order: list[int]
    uses: dict[int, int]
    shared: dict[int, bool]
    norms: dict[int, nn.Module] = field(default_factory=dict)


def survey(model: nn.Module, layers: Sequence[Layer], batches: Sequence[Any]) -> Survey:
    """Runs the batches until every layer was used, and raises if one never is."""
    watcher = _Watcher(model, layers)
    for batch in batches:
        run_with(model, batch, UseReader(model, layers, watcher.use, watcher.other))
        watcher.end()
        if len(watcher.uses) == len(layers):
            break
    missing = [layer.name for index, layer in enumerate(layers) if index not in watcher.uses]
    if missing:
        raise SmartpruneError(
            f"prune: {missing[0]} ({len(missing)} of {len(layers)} layers) computes nothing from the calibration data, or not "
            f"with a layer of torch, so its inputs are unknown; give data that reaches it, or leave it out: skip={missing[0]!r}"
        )
    return Survey(list(watcher.uses), watcher.uses, watcher.shared, watcher.norms())


class _Watcher:
    """Notes the uses of layers, and which functions read their outputs."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self.uses: dict[int, int] = {}
        self.shared: dict[int, bool] = {}
        self.by_buffer = {
            id(module.running_mean): module
            for module in model.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
        }
        self.outputs: dict[int, tuple[Tensor, int]] = {}  # by id, in the pass that runs
        self.readers: dict[int, list[nn.Module | None]] = {}
        self.normed: dict[int, int] = {}  # id of a norm -> how often it runs

    def use(self, use: Use, out: Tensor | None) -> Tensor | None:
        require_finite(self.layers[use.layer], use)
        self.uses[use.layer] = self.uses.get(use.layer, 0) + 1
        parts = self.layers[use.layer].grid.axes[0].parts
        self.shared[use.layer] = use.geometry is None and use.parts == slice(0, parts)
        if out is not None:
            self.outputs[id(out)] = out, use.layer
            self.readers.setdefault(use.layer, [])
        return out

    def other(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if not isinstance(out, (Tensor, tuple, list)):
            return
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) not in self.outputs:
                continue
            norm = None
            if func is nn.functional.batch_norm and tensor is args[0]:
                mean = args[1] if len(args) > 1 else kwargs.get("running_mean")
                norm = self.by_buffer.get(id(mean))
                if norm is not None:
                    self.normed[id(norm)] = self.normed.get(id(norm), 0) + 1
            self.readers[self.outputs[id(tensor)][1]].append(norm)

    def end(self) -> None:
        self.outputs.clear()

    def norms(self) -> dict[int, nn.Module]:
        norms = {}
        for layer, readers in self.readers.items():
            norm = readers[0] if len(readers) == 1 and self.uses[layer] == 1 else None
            if norm is not None and self.normed[id(norm)] == 1:
                norms[layer] = norm
        return norms


def require_finite(layer: Layer, use: Use) -> None:
    if not bool(use.x.detach().isfinite().all()):
        raise SmartpruneError(f"prune: the inputs of {layer.name} are NaN or infinite; check the data and the weights of the model")


# -- moments ----------------------------------------------------------------------------------------------------------------


def picked_rows(layer: Layer, use: Use, number: int, share: float, seen: int) -> Tensor:
    """The rows of a use that are looked at in the batch of this number, after so many other uses."""
    return use.rows(pick_rows(1_000_003 * number + 1009 * use.layer + seen, share, layer_inputs(layer))).detach()


def collect_rows(
    model: nn.Module,
    layers: Sequence[Layer],
    batch: Any,
    number: int,
    share: float,
    wanted: Collection[int],
    on_rows: Callable[[Use, Tensor], None],
    stop_after: int = 0,
) -> None:
    """Calls ``on_rows`` with the inputs of the wanted layers in one batch. ``stop_after`` ends the pass after so many uses."""
    seen = 0

    def on_use(use: Use, out: Tensor | None) -> Tensor | None:
        nonlocal seen
        if use.layer in wanted:
            require_finite(layers[use.layer], use)
            on_rows(use, picked_rows(layers[use.layer], use, number, share, seen))
            seen += 1
            if stop_after and seen >= stop_after:
                raise Stop("")
        return out

    with suppress(Stop):
        run_with(model, batch, UseReader(model, layers, on_use))


# -- sensitivity ------------------------------------------------------------------------------------------------------------


def sensitivities(
    model: nn.Module, layers: Sequence[Layer], batches: Sequence[Any], seed: int, step: Callable[[], None]
) -> list[Tensor]:
    """How much the loss depends on each output of each layer: the mean over samples of the sum over positions of the squared
    gradient, [parts, outputs].

    The loss is that of labels drawn from the model's own predictions if it classifies (one vector of outputs per sample), and a
    random projection of the outputs otherwise.
    """
    totals = [_zero_rows(layer, next(model.parameters()).device) for layer in layers]
    samples = 0
    generator = torch.Generator().manual_seed(seed)
    for batch in batches:
        samples += size_of(batch)
        _add_gradients(model, layers, batch, totals, generator)
        step()
    totals = [total / samples for total in totals]
    known = [total for total in totals if bool((total > 0).any())]
    for index, total in enumerate(totals):
        if not bool(total.isfinite().all()):
            raise SmartpruneError(
                f"prune: the gradients of {layers[index].name} are NaN or infinite; check the weights of the model"
            )
        if not bool((total > 0).any()):  # no gradient reaches it, for example behind argmax
            mean = torch.stack([other.mean() for other in known]).mean() if known else torch.ones((), dtype=total.dtype)
            totals[index] = torch.ones_like(total) * mean.to(total.device)
    return totals


def _zero_rows(layer: Layer, device: torch.device) -> Tensor:
    parts, inputs = layer.grid.axes[0].parts, layer_inputs(layer)
    return torch.zeros(parts, layer.params // inputs // parts, dtype=torch.float64, device=device)


def layer_inputs(layer: Layer) -> int:
    """The length of the rows that a layer multiplies."""
    first = layer.grid.axes[0]
    if layer.transposed:
        return layer.params // layer.grid.axes[1].size // first.parts
    return layer.params // first.size


def _add_gradients(model: nn.Module, layers: Sequence[Layer], batch: Any, totals: list[Tensor], generator: torch.Generator) -> None:
    probes: list[Tensor] = []

    def on_use(use: Use, out: Tensor | None) -> Tensor | None:
        require_finite(layers[use.layer], use)
        if out is None or not out.is_floating_point():
            return out
        total = totals[use.layer][use.parts]
        probe = torch.zeros((), dtype=out.dtype, device=out.device, requires_grad=True)
        probes.append(probe)
        out = out + probe
        if out.requires_grad:

            def add(grad: Tensor) -> None:
                total.add_(_sums_of_squares(grad.detach(), use.axis).view_as(total))

            out.register_hook(add)
        return out

    out = run_with(model, batch, torch.enable_grad(), UseReader(model, layers, on_use))
    with torch.enable_grad():
        loss = sampled_loss(out, generator)
        if loss is not None and probes and loss.requires_grad:
            torch.autograd.grad(loss, probes, allow_unused=True)


def _sums_of_squares(values: Tensor, axis: int) -> Tensor:
    """The sum of the squares over all other axes, float64. Squares are taken in units of the largest value."""
    values = values if values.dtype == torch.float64 else values.float()
    unit = torch.linalg.vector_norm(values, torch.inf) if values.numel() else values.new_ones(())
    unit = torch.where(unit == 0, 1.0, unit)
    others = [other for other in range(values.dim()) if other != axis % values.dim()]
    squares = (values / unit).square_()
    return (squares.sum(others) if others else squares).double() * unit.double().square()


def sampled_loss(out: Any, generator: torch.Generator) -> Tensor | None:
    """A loss without labels, summed over the samples. None if no output can be differentiated."""
    if not all(bool(tensor.isfinite().all()) for tensor in tensors_in(out)):
        raise SmartpruneError("prune: the outputs of the model are NaN or infinite; check the data and the weights of the model")
    logits = getattr(out, "logits", out)
    if isinstance(logits, Tensor) and logits.dim() == 2 and logits.shape[1] > 1 and logits.is_floating_point():
        labels = torch.multinomial(logits.detach().float().softmax(1).cpu(), 1, generator=generator)[:, 0].to(logits.device)
        return nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
    total: Tensor | None = None
    for tensor in tensors_in(out):
        if tensor.is_floating_point() and tensor.requires_grad and tensor.numel():
            noise = torch.randn(tensor.shape, generator=generator).to(tensor)
            term = (tensor.float() * noise).sum() / _size(tensor.detach().float())
            total = term if total is None else total + term
    return total


def _size(tensor: Tensor) -> Tensor:
    """The standard deviation of the values; if all are equal, their absolute value; 1 if all are zero."""
    for size in (tensor.std(correction=0), tensor.abs().mean()):
        if float(size) > 1e-12:
            return size
    return torch.ones_like(size)
