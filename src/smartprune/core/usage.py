"""Usage: how often a model uses each weight, and its multiply-accumulates (MACs), measured by running an example."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..errors import SmartpruneError
from ..text import format_shape
from .example import run_example
from .kinds import (
    ATTENTION_PARTS,
    CELL_WEIGHTS,
    LAYER_FUNCTIONS,
    TRANSPOSED,
    TRANSPOSED_FUNCTIONS,
    is_convolution,
    is_layer,
    is_masked,
)
from .layers import Layer, weight_name
from .macs import MacCounter
from .sharding import is_sharded

ATTENTION_INPUTS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "query"}  # projection: its input


@dataclass(frozen=True)
class Call:
    """One use of a weight, for one sample.

    ``uses`` is how often each element of the weight is multiplied. ``reads`` and ``writes`` are the positions (pixels
    or rows) of the input and of the output.
    """

    uses: int
    reads: int
    writes: int


Calls = dict[str, list[tuple[Call, ...]]]  # name of a weight -> its calls; a tuple has one entry per part of the weight


@dataclass(frozen=True)
class Usage:
    """The uses of all weights in one run of an example.

    ``calls`` are the calls of every weight, by its name. A tuple has one entry per part of the weight: the in-projection of
    attention has three, query, key and value. ``macs`` counts the whole model for one sample. ``not_counted`` names the
    operators that ran and whose MACs are not known.
    """

    calls: Mapping[str, Sequence[tuple[Call, ...]]] = field(repr=False)
    batch: int
    macs: int
    not_counted: tuple[str, ...] = ()

    def layer_calls(self, layer: Layer) -> list[tuple[Call, ...]]:
        """Every use of the layer's weight for one sample, in order."""
        return [
            tuple(Call(*(_per_sample(n, self.batch) for n in (part.uses, part.reads, part.writes))) for part in call)
            for site in layer.sites
            for call in self.calls.get(weight_name(*site), ())
        ]

    def uses(self, layer: Layer) -> tuple[int, ...]:
        """How often each element of the layer's weight is used for one sample, as one number per part.

        An element is used once per output position in a convolution, once per input position in a transposed convolution, and
        once per row in a linear layer.
        """
        counts = [0] * (layer.grid.axes[0].parts if layer.sites[0][1] in ATTENTION_PARTS else 1)
        for site in layer.sites:
            for i, count in enumerate(_uses_per_sample(self.calls.get(weight_name(*site), ()), self.batch)):
                counts[i] += count
        return tuple(counts)


def measure(model: nn.Module, example: Any) -> Usage:
    """Runs ``example`` once in eval mode."""
    if example is None:
        raise SmartpruneError("an example input is needed to count MACs or cycles; give example=one input of the model")
    counter = MacCounter()
    recorder = _Recorder(model, counter)
    try:
        run_example(model, example, _both(recorder, counter))
    finally:
        recorder.remove_hooks()
    calls, batch = recorder.all_calls(), recorder.batch_size(example)
    macs = -(-counter.macs // batch)  # of everything that is not a call of a weight
    for name, entries in calls.items():
        macs += _macs(recorder.sizes[name], _uses_per_sample(entries, batch))
    return Usage(calls, batch, macs, tuple(sorted(counter.not_counted)))


def find_calls(model: nn.Module, layers: Sequence[Layer], example: Any) -> Calls:
    """Every use of each layer's weight for one sample, in order, by layer name."""
    usage = measure(model, example)
    return {layer.name: usage.layer_calls(layer) for layer in layers}


def _uses_per_sample(entries: Sequence[tuple[Call, ...]], batch: int) -> tuple[int, ...]:
    """How often each part of a weight is used for one sample, over all calls."""
    return tuple(_per_sample(sum(part.uses for part in parts), batch) for parts in zip(*entries, strict=True))


def _macs(elements: int, uses: Sequence[int]) -> int:
    """MACs of a weight whose parts have equal numbers of elements."""
    return sum(elements // len(uses) * count for count in uses)


@contextmanager
def _both(recorder: _Recorder, counter: MacCounter) -> Iterator[None]:
    with recorder, counter:
        yield


class _Recorder(TorchFunctionMode):
    """Records the calls of layers, with hooks, and uses of weights outside of their layer, as a function mode.

    An example of the latter is ``F.linear(x, layer.weight)`` in the forward method of another module. ``counter`` counts every
    operation; what it counts for a recorded call is subtracted again, so that only everything else remains.
    """

    def __init__(self, model: nn.Module, counter: MacCounter) -> None:
        super().__init__()
        self.counter = counter
        self.calls: Calls = {}  # from hooks
        self.outside: Calls = {}  # from the mode
        self.sizes: dict[str, int] = {}  # elements of the weights
        self.unbatched = False  # whether a convolution ran on an input without batch axis
        self.time_first: tuple[int, ...] = ()  # (time, batch) of an input that attention or a recurrent layer reads in that order
        self.names: dict[int, str] = {}  # names of the weights of layers, by their id
        self.running: set[int] = set()  # ids of the weights whose layer is being called
        self.started: list[int] = []  # MACs at the start of each module call that is still running
        self.masked: list[nn.Module] = []  # layers whose `weight` attribute is a masked copy
        self.hooks: list[RemovableHandle] = []
        masked = any(is_masked(module) for module in model.modules())
        for name, module in model.named_modules():
            if masked and module._forward_pre_hooks:
                self._ignore_pre_hooks(module)
            if isinstance(module, nn.MultiheadAttention):
                self._hook_attention(name, module)
            elif isinstance(module, nn.RNNBase):
                self.hooks.append(module.register_forward_pre_hook(self._note_axes, with_kwargs=True))
            elif isinstance(module, nn.RNNCellBase):
                self._hook_cell(name, module)
            elif is_layer(module):
                self._hook_layer(name, module)

    def all_calls(self) -> Calls:
        names = {**self.calls, **self.outside}
        return {name: [*self.calls.get(name, ()), *self.outside.get(name, ())] for name in names}

    def batch_size(self, example: Any) -> int:
        """The number of samples: the first axis of the example, or the second if a layer of the model reads the first as time."""
        tensor = _first_tensor(example)
        if self.unbatched or tensor is None:
            return 1
        size = tensor.shape[1 if self.time_first and tuple(tensor.shape[:2]) == self.time_first else 0]
        if not size:
            raise SmartpruneError(
                f"example: its first tensor is {format_shape(tensor.shape)} and holds no sample; give an input with one sample "
                "or more"
            )
        return size

    def remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _ignore_pre_hooks(self, module: nn.Module) -> None:
        """Masks are made in hooks before a forward pass. They are not part of the model."""

        def note(m: nn.Module, args: Any) -> None:
            self.started.append(self.counter.macs)

        def restore(m: nn.Module, args: Any) -> None:
            self.counter.macs = self.started.pop()

        self.hooks.append(module.register_forward_pre_hook(note, prepend=True))
        self.hooks.append(module.register_forward_pre_hook(restore))

    def _hook_attention(self, name: str, module: nn.MultiheadAttention) -> None:
        def enter(m: nn.Module, args: Any, kwargs: Any) -> None:
            self._note_axes(m, args, kwargs)
            self.started.append(self.counter.macs)

        def record(m: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            inputs = [kwargs.get(key, args[i] if i < len(args) else None) for i, key in enumerate(("query", "key", "value"))]
            rows = [tensor.numel() // tensor.shape[-1] for tensor in inputs]
            query, key, value = (Call(n, n, n) for n in rows)
            width = module.embed_dim
            uses: dict[str, tuple[tuple[Call, ...], int]] = {"out_proj.weight": ((query,), width * width)}
            if module._qkv_same_embed_dim:
                uses["in_proj_weight"] = ((query, key, value), 3 * width * width)
            else:
                widths = {"q": width, "k": module.kdim or width, "v": module.vdim or width}
                uses |= {
                    f"{x}_proj_weight": ((call,), width * widths[x]) for x, call in zip("qkv", (query, key, value), strict=True)
                }
            start = self.started.pop()
            for attribute, (parts, size) in uses.items():
                self._add(self.calls, weight_name(name, attribute), parts, size)
                self._subtract(start, _macs(size, [part.uses for part in parts]))

        self.hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self.hooks.append(module.register_forward_hook(record, with_kwargs=True))

    def _hook_cell(self, name: str, module: nn.RNNCellBase) -> None:
        def enter(m: nn.Module, args: Any) -> None:
            self.started.append(self.counter.macs)

        def record(m: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            x, start = args[0] if args else kwargs["input"], self.started.pop()
            rows = x.numel() // x.shape[-1]
            for attribute in CELL_WEIGHTS:
                stored = m._parameters.get(attribute)
                if stored is not None:
                    self._add(self.calls, weight_name(name, attribute), (Call(rows, rows, rows),), stored.numel())
                    self._subtract(start, stored.numel() * rows)

        self.hooks.append(module.register_forward_pre_hook(enter))
        self.hooks.append(module.register_forward_hook(record, with_kwargs=True))

    def _hook_layer(self, name: str, module: nn.Module) -> None:
        def enter(m: nn.Module, args: Any) -> None:
            self.running.add(id(m._parameters.get("weight")))
            self.started.append(self.counter.macs)

        def record(m: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
            start, now = self.started.pop(), self.counter.macs
            stored = m._parameters.get("weight")
            size = (m.weight if stored is None else stored).numel()  # type: ignore[operator]  # None if parametrized
            self.counter.macs = now  # a parametrization was just computed again
            x = args[0] if args else next(iter(kwargs.values()))
            axis = out.dim() - len(m.kernel_size) - 1 if is_convolution(m) else -1  # type: ignore[arg-type]
            self.unbatched |= axis == 0
            call = _call(x, out, axis, isinstance(m, TRANSPOSED))
            self._add(self.calls, weight_name(name, "weight"), (call,), size)
            self._subtract(start, size * call.uses)
            self.running.discard(id(stored))

        if (stored := module._parameters.get("weight")) is not None:
            self.names.setdefault(id(stored), weight_name(name, "weight"))
            if is_masked(module) and not is_sharded(stored):
                self.masked.append(module)
        self.hooks.append(module.register_forward_pre_hook(enter))
        self.hooks.append(module.register_forward_hook(record, with_kwargs=True))

    def _add(self, calls: Calls, name: str, parts: tuple[Call, ...], size: int) -> None:
        calls.setdefault(name, []).append(parts)
        self.sizes[name] = size

    def _subtract(self, start: int, macs: int) -> None:
        """Subtracts the MACs of a recorded call from those since ``start``. A layer may run operations besides the product with its
        weight."""
        self.counter.macs = max(start, self.counter.macs - macs)

    def _note_axes(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Remembers the axes of an input whose first axis is time."""
        x = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(x, Tensor) and x.dim() == 3 and not module.batch_first:
            self.time_first = tuple(x.shape[:2])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        start = self.counter.macs
        out = func(*args, **kwargs)
        if func in LAYER_FUNCTIONS:
            x, weight = (args[i] if i < len(args) else kwargs[key] for i, key in enumerate(("input", "weight")))
            stored = self._stored_id(weight)
            name = self.names.get(stored)
            if name is not None and stored not in self.running:
                axis = -1 if func is F.linear else out.dim() - weight.dim() + 1
                call = _call(x, out, axis, func in TRANSPOSED_FUNCTIONS)
                self._add(self.outside, name, (call,), weight.numel())
                self._subtract(start, weight.numel() * call.uses)
        elif func is F.multi_head_attention_forward:
            arguments = inspect.signature(func).bind(*args, **kwargs).arguments
            # weights of linear layers, as in the attention pooling of CLIP; those of nn.MultiheadAttention are not in names
            if self._stored_id(arguments.get("q_proj_weight")) in self.names:
                for projection, source in ATTENTION_INPUTS.items():
                    weight = arguments.get(f"{projection}_weight")
                    name = self.names.get(self._stored_id(weight))
                    count = arguments[source].numel() // arguments[source].shape[-1]
                    if weight is not None and name is not None:
                        self._add(self.outside, name, (Call(count, count, count),), weight.numel())
                        self._subtract(start, weight.numel() * count)
        return out

    def _stored_id(self, weight: Any) -> int:
        """The id of the stored parameter that a weight belongs to."""
        return next((id(module._parameters["weight"]) for module in self.masked if module.weight is weight), id(weight))


def _call(x: Tensor, out: Tensor, axis: int, transposed: bool) -> Call:
    """The call of a layer with input ``x``. ``axis`` is the channel axis."""
    reads, writes = (tensor.numel() // tensor.shape[axis] for tensor in (x, out))
    return Call(reads if transposed else writes, reads, writes)


def _per_sample(count: int, batch: int) -> int:
    """A count for one sample. A count that the batch size does not divide belongs to every sample."""
    return count // batch if count % batch == 0 else count


def _first_tensor(example: Any) -> Tensor | None:
    values = list(example.values()) if isinstance(example, Mapping) else [example] if isinstance(example, Tensor) else example
    return next((value for value in values if isinstance(value, Tensor) and value.dim() > 0), None)
