"""Compaction: removes empty channels from a pruned model, so that it is smaller and faster in any runtime."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.example import run_example
from ..core.kinds import is_masked
from ..core.layers import unwrapped
from ..core.trace import tensors_in
from ..core.usage import measure
from ..errors import SmartpruneError
from .compact_apply import apply
from .compact_choose import Choice, Frozen, choose, roots_by_weight
from .compact_graph import Graph, call_arguments, export
from .compact_layers import RULES
from .compact_report import CompactedLayer, Compaction, other_layers
from .compact_rules import record
from .source import check_not_masked, copy_of

# Largest difference of the outputs, relative to the largest output
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
SEED = 0

_REPORTS: weakref.WeakKeyDictionary[nn.Module, Compaction] = weakref.WeakKeyDictionary()


def compact(model: nn.Module, example: Any, *, multiple: int = 1) -> nn.Module:
    """Removes channels that are empty, so that the model is smaller and faster in any runtime.

    An output channel whose weights are all zero is a constant, and remains one through normalization and activations. If the
    layers that read it can take that constant into their bias, the channel is removed from all of them. A channel that nothing
    reads is removed, too. Channels of residual additions are removed only if all summands can lose them. The result computes
    the same function as the model, to float rounding. It is compared with the model on the example, on random inputs and on
    another batch size. :func:`smartprune.compaction` says what was removed, and why something could not be removed.

    The result has the classes, the code and the names of the model, with smaller parameters. It is meant for inference: it is in
    eval mode, and in training mode, its normalization would be computed over other channels than before. The model does not change.

    Args:
        model: A baked or any other plain model.
        example: An input: a tensor, or a tuple or dictionary of arguments.
        multiple: Layers that lose channels keep a multiple of this number, so some empty channels stay. Many kernels are fast for
            multiples of 8 or 16 only, such as those of onnxruntime on x86.

    Returns:
        A smaller model on the device and in the dtype of the given one. If there is no empty channel, an equal copy.

    Raises:
        SmartpruneError: The model is still being pruned, does not run on the example, or cannot be recorded, or ``multiple`` is not
            a positive number.

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()
        >>> with torch.no_grad():
        ...     _ = model[0].weight[:12].zero_()
        >>> x = torch.randn(1, 3, 8, 8)
        >>> smaller = sp.compact(model, x)
        >>> smaller
        Sequential(
          (0): Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1))
          (1): ReLU()
          (2): Conv2d(4, 8, kernel_size=(3, 3), stride=(1, 1))
        )
        >>> torch.allclose(smaller(x), model(x), atol=1e-5)
        True
    """
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"compact: model is a {type(model).__name__}; give a torch.nn.Module")
    if any(is_masked(module) for module in model.modules()):
        raise SmartpruneError("compact: the model is still being pruned; call smartprune.bake(model) first")
    check_not_masked(model.state_dict(), f"compact: {type(model).__name__}")
    if type(multiple) is not int or multiple < 1:
        raise SmartpruneError(f"compact: multiple={multiple!r} is not a positive integer; give 8 or 16, or leave it out")
    args, kwargs = call_arguments(example)
    work = _Work(copy_of(model, "compact"), args, kwargs, multiple)
    small, choice = work.run()
    result = _like(unwrapped(model), small)
    report = work.report(type(unwrapped(model)).__name__, result, choice)
    _REPORTS[result] = report
    return result


def compaction(model: nn.Module) -> Compaction:
    """What :func:`smartprune.compact` removed from a model, and why it could not remove more.

    Args:
        model: A model that ``compact`` returned, in the same process. Copies of it have no report.

    Returns:
        The layers before and after, parameters, MACs, and reasons. ``print`` shows them.

    Raises:
        SmartpruneError: ``compact`` did not return this model.

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> with torch.no_grad():
        ...     _ = model[0].weight[2:].zero_()
        >>> report = sp.compaction(sp.compact(model, torch.randn(1, 8)))
        >>> report.parameters
        (108, 30)
        >>> [layer.after for layer in report.layers]
        [(2, 8), (4, 2)]
    """
    report = _REPORTS.get(model) if isinstance(model, nn.Module) else None
    if report is None:
        raise SmartpruneError(
            f"compaction: this {type(model).__name__} has no report; give the model that smartprune.compact returned, not a copy"
        )
    return report


@dataclass
class _Work:
    """A compaction in progress. ``model`` is a copy on the CPU."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    multiple: int = 1
    difference: float = 0.0
    scale: float = 0.0
    batches: list[Any] = field(default_factory=list)
    frozen: dict[str, int | None] = field(default_factory=dict)

    def run(self) -> tuple[nn.Module, Choice]:
        """The smaller model, in the precision of the model."""
        self._outputs(self.model, (self.args, self.kwargs))  # raises for a wrong example
        self.exact = self._in_double()
        dtype = torch.float64 if self.exact is not self.model else None
        self.batches = list(self._inputs())
        graph = self.graph = export(self.exact, *self._cast((self.args, self.kwargs), dtype))
        record(graph, RULES)
        expected = [self._outputs(self.exact, self._cast(batch, dtype)) for batch in self.batches]
        outcome = self._search(graph, expected, dtype)
        plain = [self._outputs(self.model, batch) for batch in self.batches]
        small, choice = outcome
        for new, dtype_before in _with_dtypes(self.model, small):
            new.data = new.data.to(dtype_before)
        problem = self._compare(small, plain, None, TOLERANCES if dtype is None else {})
        if problem:
            raise SmartpruneError(f"compact: {problem}; please report this model")
        return small, choice

    def _in_double(self) -> nn.Module:
        """The model in double precision, in which rounding cannot be confused with an error. The model itself if that fails."""
        exact = copy.deepcopy(self.model).double()
        try:
            outputs = self._outputs(exact, self._cast((self.args, self.kwargs), torch.float64))
        except SmartpruneError:
            return self.model
        return exact if all(x.dtype == torch.float64 for x in outputs if x.is_floating_point()) else self.model

    @staticmethod
    def _cast(batch: Any, dtype: torch.dtype | None) -> Any:
        def cast(x: Any) -> Any:
            return x.to(dtype) if dtype is not None and isinstance(x, Tensor) and x.is_floating_point() else x

        return torch.utils._pytree.tree_map(cast, batch)

    def _inputs(self) -> Iterator[Any]:
        """The example, random inputs like it, and another batch size if the model takes it."""
        yield self.args, self.kwargs
        tensors = [x for x in torch.utils._pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]
        rows = next((x.shape[0] for x in tensors if x.dim() > 0), 1)
        yield self._noise(rows, rows)
        other = self._noise(rows, rows - 1 if rows > 1 else 2)
        try:
            self._outputs(self.model, other)
        except SmartpruneError:
            return
        yield other

    def _noise(self, rows: int, count: int) -> Any:
        generator = torch.Generator().manual_seed(SEED)

        def noise(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.dim() == 0:
                return x
            shape = (count, *x.shape[1:]) if x.shape[0] == rows else x.shape
            if x.is_floating_point():
                return torch.randn(shape, generator=generator, device="cpu").to(x.dtype)
            return x[torch.arange(shape[0], device="cpu") % x.shape[0]]

        return torch.utils._pytree.tree_map(noise, (self.args, self.kwargs))

    @staticmethod
    def _outputs(model: nn.Module, batch: Any) -> list[Tensor]:
        args, kwargs = batch
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            out = run_example(_Call(model, kwargs), args, torch.no_grad())
        return [x.detach() for x in tensors_in(out)]

    def _compare(
        self,
        small: nn.Module,
        expected: list[list[Tensor]],
        dtype: torch.dtype | None,
        tolerances: Mapping[torch.dtype, float] = TOLERANCES,
    ) -> str | None:
        """Describes what is wrong with the outputs of a smaller model; None if they agree.

        A model that agrees in double precision differs in another one by rounding alone, so there is no tolerance then.
        """
        self.difference = self.scale = 0.0
        for batch, wanted in zip(self.batches, expected, strict=True):
            try:
                outputs = self._outputs(small, self._cast(batch, dtype))
            except SmartpruneError as error:
                return f"the smaller model fails ({error})"
            if [x.shape for x in outputs] != [x.shape for x in wanted]:
                return "the shapes of the outputs differ"
            for a, b in zip(outputs, wanted, strict=True):
                same = torch.isfinite(b.double())
                difference = (a.double() - b.double())[same].abs().max() if bool(same.any()) else torch.zeros(())
                scale = b.double()[same].abs().max() if bool(same.any()) else torch.zeros(())
                if not torch.equal(torch.isfinite(a.double()), same):
                    return "only one of the models returns NaN or infinity"
                if tolerances and float(difference) > tolerances.get(a.dtype, 0.0) * float(scale):
                    return f"the outputs differ by {float(difference):.2e} of {float(scale):.2e}"
                self.difference, self.scale = max(self.difference, float(difference)), max(self.scale, float(scale))
        return None

    def _choose(self, graph: Graph, frozen: Frozen, held: Collection[int] = ()) -> Choice:
        return choose(graph, frozen, held, self.multiple)

    def _try(
        self, graph: Graph, frozen: Frozen, expected: list[list[Tensor]], dtype: Any, held: Collection[int] = ()
    ) -> tuple[Any, Choice] | str:
        choice = self._choose(graph, frozen, held)
        small = copy.deepcopy(self.exact)
        apply(graph, choice, small)
        return self._compare(small, expected, dtype) or (small, choice)

    def _search(self, graph: Graph, expected: list[list[Tensor]], dtype: Any) -> tuple[nn.Module, Choice]:
        """The smallest model that the code of the model can run.

        Code may state the shape of a tensor, as in ``x.view(-1, 64)``. The graph does not show whether 64 was computed from
        another shape. Running the smaller model shows it, for one line of code at a time.
        """
        result = self._try(graph, {}, expected, dtype)
        if not isinstance(result, str):
            return result
        options: dict[str, list[int | None]] = {}
        for line, values in graph.reshapes.items():
            axes = sorted({axis for value in values for axis in value.axes()})
            options[line] = [*axes, None] if len(axes) > 1 else [None]
        frozen: dict[str, int | None] = dict.fromkeys(options)
        result = self._try(graph, frozen, expected, dtype)
        if isinstance(result, str):
            self.frozen = frozen
            return self._search_parts(graph, frozen, expected, dtype)
        for line, allowed in options.items():
            for attempt in ({k: v for k, v in frozen.items() if k != line}, *({**frozen, line: axis} for axis in allowed[:-1])):
                if torch.equal(self._choose(graph, attempt).removed, result[1].removed):
                    continue
                better = self._try(graph, attempt, expected, dtype)
                if not isinstance(better, str):
                    frozen, result = attempt, better
                    break
        final = self._try(graph, frozen, expected, dtype)
        assert not isinstance(final, str)
        self.frozen = frozen
        return final

    def _search_parts(self, graph: Graph, frozen: Frozen, expected: list[list[Tensor]], dtype: Any) -> tuple[nn.Module, Choice]:
        """The smallest model of which parts stay as they are, because the code of the model depends on their number of channels.

        The graph does not show such code: ``x * x.shape[1] ** -0.5`` is a product with a number in it. The parts are found by
        running the model with one half of the removals, then with the other, and so on.
        """
        parts = roots_by_weight(graph, self._choose(graph, frozen))
        held = frozenset[int]().union(*parts)
        found = self._try(graph, frozen, expected, dtype, held)
        if isinstance(found, str):
            raise SmartpruneError(
                f"compact: {found}, although nothing was removed; the model may draw random numbers or keep state"
            )
        waiting = [parts[: len(parts) // 2], parts[len(parts) // 2 :]] if len(parts) > 1 else []
        while waiting:
            some = waiting.pop(0)
            attempt = held.difference(*some)
            better = self._try(graph, frozen, expected, dtype, attempt)
            if not isinstance(better, str):
                held, found = attempt, better
            elif len(some) > 1:
                waiting[:0] = [some[: len(some) // 2], some[len(some) // 2 :]]
        return found

    def report(self, name: str, result: nn.Module, choice: Choice) -> Compaction:
        graph = self.graph
        after = {**dict(result.named_parameters()), **dict(result.named_buffers())}
        layers: dict[str, CompactedLayer] = {}
        for reader in graph.readers:
            if reader.weight in layers:
                continue
            old, new = graph.tensors[reader.weight], after[reader.weight]
            labels = graph.weights[reader.weight][reader.out_axis]
            idle = torch.ones(0, dtype=torch.bool)
            if len(labels) == reader.reads.shape[0]:
                idle = ~reader.live_outputs() | ~reader.reads.any(1)
                idle &= ~choice.of(labels)
            reasons = Counter(choice.reason(int(label)) for label in labels[idle]) if len(idle) else Counter[str]()
            reason = reasons.most_common(1)[0][0] if reasons else ""
            layers[reader.weight] = CompactedLayer(reader.weight, tuple(old.shape), tuple(new.shape), int(idle.sum()), reason)
        layers |= {layer.weight: layer for layer in other_layers(graph, choice) if layer.weight not in layers}
        before = dict(self.model.named_parameters())
        added = tuple(key for key in after if key not in before and key not in dict(self.model.named_buffers()))
        stated = tuple(line for line, allowed in self.frozen.items() if any(value.axes() for value in graph.reshapes[line]))
        parameters = (sum(p.numel() for p in before.values()), sum(p.numel() for p in result.parameters()))
        return Compaction(
            name,
            tuple(layers.values()),
            parameters,
            self._macs(result),
            self.difference,
            self.scale,
            len(self.batches),
            added,
            stated,
        )

    def _macs(self, result: nn.Module) -> tuple[int, int] | None:
        example = self.kwargs or self.args
        try:
            return measure(self.model, example).macs, measure(copy.deepcopy(result).cpu(), example).macs
        except SmartpruneError:
            return None


class _Call(nn.Module):
    """A model with fixed keyword arguments."""

    def __init__(self, model: nn.Module, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.kwargs = model, kwargs

    def forward(self, *args: Any) -> Any:
        return self.model(*args, **self.kwargs)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _with_dtypes(model: nn.Module, small: nn.Module) -> Iterator[tuple[Tensor, torch.dtype]]:
    """The tensors of the smaller model, each with its dtype in the model. A new bias gets the dtype of its weight."""
    dtypes = {name: tensor.dtype for name, tensor in _named(model)}
    for name, tensor in _named(small):
        yield tensor, dtypes.get(name) or dtypes[f"{name.rpartition('.')[0]}.weight"]


def _like(model: nn.Module, small: nn.Module) -> nn.Module:
    """Moves the smaller model to the devices of the model, and copies ``requires_grad`` of its parameters."""
    tensors = dict(_named(model))
    for name, new in _named(small):
        old = tensors.get(name, tensors.get(f"{name.rpartition('.')[0]}.weight"))
        if old is not None:
            new.data = new.data.to(old.device)
            if isinstance(new, nn.Parameter):
                new.requires_grad_(old.requires_grad)
    return small
