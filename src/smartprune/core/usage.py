"""Who reads a weight, and how often: uses and multiply-accumulates of layers, counted on an example."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import SmartpruneError
from .kinds import LAYER_FUNCTIONS, LAYER_TYPES, TRANSPOSED, TRANSPOSED_FUNCTIONS, is_masked
from .layers import Layer
from .sharding import is_sharded


@dataclass(frozen=True)
class Call:
    """One use of a weight for one sample: how often each of its elements meets an input, and at how many positions
    (pixels, rows) the layer reads its input and writes its output."""

    uses: int
    reads: int
    writes: int


def count_macs(model: nn.Module, example: Any) -> int:
    """MACs of all convolutions and linear layers for one sample of ``example``."""
    total = 0
    positions = _positions(model, example)
    for name, module in model.named_modules():
        if name in positions and isinstance(module, LAYER_TYPES):
            stored = module._parameters.get("weight")  # a parametrized layer stores it elsewhere
            weight = module.weight if stored is None else stored
            total += positions[name][0] * weight.numel()
        elif name in positions and isinstance(module, nn.MultiheadAttention):
            query, key, value = positions[name]
            width = module.embed_dim
            total += width * (query * width + key * (module.kdim or width) + value * (module.vdim or width))
            total += query * width * width
    return total


def count_uses(model: nn.Module, layers: Sequence[Layer], example: Any) -> dict[str, tuple[int, ...]]:
    """How often each weight element of a layer is used for one sample; one number per part (query, key, value have
    three).

    Every element of a convolution's weight meets every output position once, of a transposed one every input
    position, of a linear layer every row.
    """
    positions = _positions(model, example)
    out: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        counts = [0] * (3 if layer.sites[0][1] == "in_proj_weight" else 1)
        for module_name, _ in layer.sites:
            found = positions.get(module_name)
            if found is None and module_name.endswith("out_proj"):  # attention reads this weight without calling the layer
                found = positions.get(module_name.rpartition(".")[0], (0,))[:1]
            for i, count in enumerate(found or ()):
                counts[i] += count
        out[layer.name] = tuple(counts)
    return out


def find_calls(model: nn.Module, layers: Sequence[Layer], example: Any) -> dict[str, list[tuple[Call, ...]]]:
    """Every use of each layer's weight, in order; a tuple has one entry per part (query, key, value have three)."""
    calls, batch = _calls(model, example)
    out: dict[str, list[tuple[Call, ...]]] = {}
    for layer in layers:
        found: list[tuple[Call, ...]] = []
        for module_name, _ in layer.sites:
            if module_name not in calls and module_name.endswith("out_proj"):  # as in count_uses
                found += [call[:1] for call in calls.get(module_name.rpartition(".")[0], ())]
            else:
                found += calls.get(module_name, ())
        out[layer.name] = [
            tuple(Call(*(_share(n, batch) for n in (part.uses, part.reads, part.writes))) for part in call) for call in found
        ]
    return out


def _positions(model: nn.Module, example: Any) -> dict[str, tuple[int, ...]]:
    """At how many positions per sample each layer was applied, over all its calls."""
    calls, batch = _calls(model, example)
    sums = {name: [sum(part.uses for part in parts) for parts in zip(*found, strict=True)] for name, found in calls.items()}
    return {name: tuple(_share(count, batch) for count in counts) for name, counts in sums.items()}


def _calls(model: nn.Module, example: Any) -> tuple[dict[str, list[tuple[Call, ...]]], int]:
    """Runs ``example`` once, as in evaluation, and notes every call of every layer; and how many samples there were."""
    if example is None:
        raise SmartpruneError("an example input is needed to count MACs or cycles; give example=one input of the model")
    found: dict[str, list[tuple[Call, ...]]] = {}
    hooks = []
    unbatched = False
    aside = _Aside()

    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):

            def attention(m: nn.Module, args: Any, kwargs: Any, out: Any, name: str = name) -> None:
                given = [kwargs.get(key, args[i] if i < len(args) else None) for i, key in enumerate(("query", "key", "value"))]
                rows = [tensor.numel() // tensor.shape[-1] for tensor in given]
                found.setdefault(name, []).append(tuple(Call(n, n, n) for n in rows))

            hooks.append(module.register_forward_hook(attention, with_kwargs=True))
        elif isinstance(module, LAYER_TYPES):

            def plain(m: nn.Module, args: Any, kwargs: Any, out: Tensor, name: str = name) -> None:
                nonlocal unbatched
                given = args[0] if args else kwargs["input"]
                axis = -1 if isinstance(m, nn.Linear) else out.dim() - len(m.kernel_size) - 1  # type: ignore[arg-type]
                unbatched |= axis == 0
                found.setdefault(name, []).append((_call(given, out, axis, isinstance(m, TRANSPOSED)),))
                aside.inside.discard(id(m._parameters.get("weight")))

            def enter(m: nn.Module, args: Any) -> None:
                aside.inside.add(id(m._parameters.get("weight")))

            if (stored := module._parameters.get("weight")) is not None:
                aside.names.setdefault(id(stored), name)
                if is_masked(module) and not is_sharded(stored):
                    aside.masked.append(module)
            hooks.append(module.register_forward_pre_hook(enter))
            hooks.append(module.register_forward_hook(plain, with_kwargs=True))
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), _uncompiled(), aside:
            if isinstance(example, Tensor):
                model(_writable(example))
            elif isinstance(example, Mapping):
                model(**{name: _writable(value) for name, value in example.items()})
            elif isinstance(example, Sequence):
                model(*map(_writable, example))
            else:
                raise SmartpruneError(f"example is a {type(example).__name__}; give a tensor, or a tuple or dict of arguments")
    except SmartpruneError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SmartpruneError(f"example: the model does not run on it ({reason}); give one input as the model takes it") from error
    finally:
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    for name, calls in aside.found.items():
        found.setdefault(name, []).extend(calls)
    return found, 1 if unbatched else _batch(example)


def _writable(value: Any) -> Any:
    """A copy of what was made in inference mode, where a model may not write to it: its first layer may work in place."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _uncompiled() -> AbstractContextManager[object]:
    """Code that was compiled runs as it was written: what the compiler makes of hooks and modes counts a layer twice."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class _Aside(TorchFunctionMode):
    """Notes uses of weights whose layer is not called: ``F.linear(x, layer.weight)`` in the code of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}  # of layers, by the identity of their weight
        self.inside: set[int] = set()  # weights of layers that are being called
        self.masked: list[nn.Module] = []  # layers that hand out their weight times a mask
        self.found: dict[str, list[tuple[Call, ...]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in LAYER_FUNCTIONS:
            given, weight = (args[i] if i < len(args) else kwargs[key] for i, key in enumerate(("input", "weight")))
            stored = self._stored(weight)
            name = self.names.get(stored)
            if name is not None and stored not in self.inside:
                axis = -1 if func is F.linear else out.dim() - weight.dim() + 1
                self.found.setdefault(name, []).append((_call(given, out, axis, func in TRANSPOSED_FUNCTIONS),))
        elif func is F.multi_head_attention_forward:
            bound = inspect.signature(func).bind(*args, **kwargs).arguments
            # of a layer, as where CLIP pools; nn.MultiheadAttention has its own
            if self._stored(bound.get("q_proj_weight")) in self.names:
                for key, rows in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("out_proj", "query")):
                    name = self.names.get(self._stored(bound.get(f"{key}_weight")))
                    count = bound[rows].numel() // bound[rows].shape[-1]
                    if name is not None:
                        self.found.setdefault(name, []).append((Call(count, count, count),))
        return out

    def _stored(self, weight: Any) -> int:
        """The identity of a weight as its layer stores it."""
        return next((id(module._parameters["weight"]) for module in self.masked if module.weight is weight), id(weight))


def _call(given: Tensor, out: Tensor, axis: int, transposed: bool) -> Call:
    reads, writes = (tensor.numel() // tensor.shape[axis] for tensor in (given, out))
    return Call(reads if transposed else writes, reads, writes)


def _share(count: int, batch: int) -> int:
    """What one sample of the batch takes; a count that is not shared by the samples is all of it."""
    return count // batch if count % batch == 0 else count


def _batch(example: Any) -> int:
    values = list(example.values()) if isinstance(example, Mapping) else [example] if isinstance(example, Tensor) else example
    first = next((value for value in values if isinstance(value, Tensor) and value.dim() > 0), None)
    return 1 if first is None else max(1, first.shape[0])
