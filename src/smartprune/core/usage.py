"""Usage: how often a model uses each weight, and its multiply-accumulates (MACs), measured by running an example."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..errors import SmartpruneError
from .example import run_example
from .kinds import LAYER_FUNCTIONS, LAYER_TYPES, TRANSPOSED, TRANSPOSED_FUNCTIONS, is_masked
from .layers import Layer
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


Calls = dict[str, list[tuple[Call, ...]]]  # module name -> its calls; a tuple has one entry per part of the weight


def count_macs(model: nn.Module, example: Any) -> int:
    """MACs of all convolutions and linear layers for one sample of ``example``."""
    total = 0
    uses = _uses(model, example)
    for name, module in model.named_modules():
        if name in uses and isinstance(module, LAYER_TYPES):
            stored = module._parameters.get("weight")  # None in a parametrized layer
            weight = module.weight if stored is None else stored
            total += uses[name][0] * weight.numel()
        elif name in uses and isinstance(module, nn.MultiheadAttention):
            query, key, value = uses[name]
            width = module.embed_dim
            total += width * (query * width + key * (module.kdim or width) + value * (module.vdim or width))
            total += query * width * width
    return total


def count_uses(model: nn.Module, layers: Sequence[Layer], example: Any) -> dict[str, tuple[int, ...]]:
    """How often each element of a layer's weight is used for one sample, as one number per part of the weight.

    The in-projection of attention has three parts: query, key and value. An element is used once per output position
    in a convolution, once per input position in a transposed convolution, and once per row in a linear layer.
    """
    uses = _uses(model, example)
    out: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        counts = [0] * (3 if layer.sites[0][1] == "in_proj_weight" else 1)
        for module_name, _ in layer.sites:
            used = uses.get(module_name)
            if used is None and module_name.endswith("out_proj"):  # attention uses this weight without calling the layer
                used = uses.get(module_name.rpartition(".")[0], (0,))[:1]
            for i, count in enumerate(used or ()):
                counts[i] += count
        out[layer.name] = tuple(counts)
    return out


def find_calls(model: nn.Module, layers: Sequence[Layer], example: Any) -> Calls:
    """Every use of each layer's weight, in order, by layer name. A tuple has one entry per part, as in :func:`count_uses`."""
    calls, batch = _record_calls(model, example)
    out: Calls = {}
    for layer in layers:
        layer_calls: list[tuple[Call, ...]] = []
        for module_name, _ in layer.sites:
            if module_name not in calls and module_name.endswith("out_proj"):  # as in count_uses
                layer_calls += [call[:1] for call in calls.get(module_name.rpartition(".")[0], ())]
            else:
                layer_calls += calls.get(module_name, ())
        out[layer.name] = [
            tuple(Call(*(_per_sample(n, batch) for n in (part.uses, part.reads, part.writes))) for part in call)
            for call in layer_calls
        ]
    return out


def _uses(model: nn.Module, example: Any) -> dict[str, tuple[int, ...]]:
    """How often each module used its weight for one sample, summed over all calls."""
    calls, batch = _record_calls(model, example)
    sums = {name: [sum(part.uses for part in parts) for parts in zip(*entries, strict=True)] for name, entries in calls.items()}
    return {name: tuple(_per_sample(count, batch) for count in counts) for name, counts in sums.items()}


def _record_calls(model: nn.Module, example: Any) -> tuple[Calls, int]:
    """All calls of all layers while ``example`` runs once in eval mode, and the batch size."""
    if example is None:
        raise SmartpruneError("an example input is needed to count MACs or cycles; give example=one input of the model")
    recorder = _Recorder(model)
    try:
        run_example(model, example, recorder)
    finally:
        recorder.remove_hooks()
    return recorder.all_calls(), 1 if recorder.unbatched else _batch_size(example)


class _Recorder(TorchFunctionMode):
    """Records the calls of layers, with hooks, and uses of weights outside of their layer, as a function mode.

    An example of the latter is ``F.linear(x, layer.weight)`` in the forward method of another module.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: Calls = {}  # from hooks
        self.outside: Calls = {}  # from the mode
        self.unbatched = False  # whether a convolution ran on an input without batch axis
        self.names: dict[int, str] = {}  # names of layers, by the id of their weight
        self.running: set[int] = set()  # ids of the weights whose layer is being called
        self.masked: list[nn.Module] = []  # layers whose `weight` attribute is a masked copy
        self.hooks: list[RemovableHandle] = []
        for name, module in model.named_modules():
            if isinstance(module, nn.MultiheadAttention):
                self._hook_attention(name, module)
            elif isinstance(module, LAYER_TYPES):
                self._hook_layer(name, module)

    def all_calls(self) -> Calls:
        names = {**self.calls, **self.outside}
        return {name: [*self.calls.get(name, ()), *self.outside.get(name, ())] for name in names}

    def remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _hook_attention(self, name: str, module: nn.MultiheadAttention) -> None:
        def record(m: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            inputs = [kwargs.get(key, args[i] if i < len(args) else None) for i, key in enumerate(("query", "key", "value"))]
            rows = [tensor.numel() // tensor.shape[-1] for tensor in inputs]
            self.calls.setdefault(name, []).append(tuple(Call(n, n, n) for n in rows))

        self.hooks.append(module.register_forward_hook(record, with_kwargs=True))

    def _hook_layer(self, name: str, module: nn.Module) -> None:
        def enter(m: nn.Module, args: Any) -> None:
            self.running.add(id(m._parameters.get("weight")))

        def record(m: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
            x = args[0] if args else kwargs["input"]
            axis = -1 if isinstance(m, nn.Linear) else out.dim() - len(m.kernel_size) - 1  # type: ignore[arg-type]
            self.unbatched |= axis == 0
            self.calls.setdefault(name, []).append((_call(x, out, axis, isinstance(m, TRANSPOSED)),))
            self.running.discard(id(m._parameters.get("weight")))

        if (stored := module._parameters.get("weight")) is not None:
            self.names.setdefault(id(stored), name)
            if is_masked(module) and not is_sharded(stored):
                self.masked.append(module)
        self.hooks.append(module.register_forward_pre_hook(enter))
        self.hooks.append(module.register_forward_hook(record, with_kwargs=True))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in LAYER_FUNCTIONS:
            x, weight = (args[i] if i < len(args) else kwargs[key] for i, key in enumerate(("input", "weight")))
            stored = self._stored_id(weight)
            name = self.names.get(stored)
            if name is not None and stored not in self.running:
                axis = -1 if func is F.linear else out.dim() - weight.dim() + 1
                self.outside.setdefault(name, []).append((_call(x, out, axis, func in TRANSPOSED_FUNCTIONS),))
        elif func is F.multi_head_attention_forward:
            arguments = inspect.signature(func).bind(*args, **kwargs).arguments
            # weights of linear layers, as in the attention pooling of CLIP; those of nn.MultiheadAttention are not in names
            if self._stored_id(arguments.get("q_proj_weight")) in self.names:
                for projection, source in ATTENTION_INPUTS.items():
                    name = self.names.get(self._stored_id(arguments.get(f"{projection}_weight")))
                    count = arguments[source].numel() // arguments[source].shape[-1]
                    if name is not None:
                        self.outside.setdefault(name, []).append((Call(count, count, count),))
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


def _batch_size(example: Any) -> int:
    values = list(example.values()) if isinstance(example, Mapping) else [example] if isinstance(example, Tensor) else example
    first = next((value for value in values if isinstance(value, Tensor) and value.dim() > 0), None)
    return 1 if first is None else max(1, first.shape[0])
