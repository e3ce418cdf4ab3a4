"""Uses of weights: what the layers of a model multiply while the model runs.

A function mode sees every call of ``F.linear`` and the convolutions, also those outside of the module that holds the weight. The
projections of attention run as four calls of ``F.linear``, with the same result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...core.example import run_example
from ...core.kinds import CELL_WEIGHTS, LAYER_FUNCTIONS, TRANSPOSED_FUNCTIONS, is_conv1d
from ...core.layers import Layer
from .matrix import Geometry, Pick, conv_rows, linear_rows


@dataclass(frozen=True)
class Use:
    """One use of a weight in a forward pass.

    Attributes:
        layer: The index of the layer.
        parts: The matrices of the weight that are used: all of them, or one of query, key and value.
        axis: The axis of the outputs in the result.
        x: What is multiplied.
        geometry: That of a convolution, else None.
    """

    layer: int
    parts: slice
    axis: int
    x: Tensor
    geometry: Geometry | None

    def rows(self, pick: Pick) -> Tensor:
        """The inputs at the picked positions, [parts or 1, rows, inputs]."""
        if self.geometry is None:
            return linear_rows(self.x, pick)
        return conv_rows(self.x, self.geometry, pick)


OnUse = Callable[[Use, Tensor | None], Tensor | None]  # the use and its result, if known -> the result to continue with

OnOther = Callable[[Any, Any, Any, Any], None]  # any other function, its arguments and its result

Before = Callable[[Sequence[Use]], None]  # the uses that are computed next: one, or those of query, key and value


class UseReader(TorchFunctionMode):
    """Calls ``on_use`` for every use of the weights of some layers, and ``before`` in advance (not for recurrent cells)."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        on_use: OnUse,
        on_other: OnOther | None = None,
        before: Before | None = None,
    ) -> None:
        super().__init__()
        self.on_use, self.on_other, self.before = on_use, on_other, before
        self.layers = layers
        self.indices: dict[int, int] = {}  # id of a weight -> index of its layer
        self.modules: list[tuple[nn.Module, dict[str, int]]] = []  # modules that do not call a layer function
        for index, layer in enumerate(layers):
            for module_name, attribute in layer.sites:
                module = model.get_submodule(module_name)
                self.indices[id(module._parameters[attribute])] = index
                if is_conv1d(module) or isinstance(module, nn.RNNCellBase):
                    self.modules.append((module, {attribute: index}))
        self.handles: list[Any] = []

    def __enter__(self) -> UseReader:
        for module, indices in self.modules:
            hook = self._read_cell if isinstance(module, nn.RNNCellBase) else self._read_conv1d
            self.handles.append(module.register_forward_hook(hook(indices), with_kwargs=True))
            if self.before is not None and not isinstance(module, nn.RNNCellBase):
                self.handles.append(module.register_forward_pre_hook(self._announce_conv1d(indices), with_kwargs=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return self._attention(func, args, kwargs)
        if func in LAYER_FUNCTIONS:
            weight = args[1] if len(args) > 1 else kwargs.get("weight")
            index = self.indices.get(id(weight))
            if index is not None:
                return self._layer(index, func, args, kwargs)
        out = func(*args, **kwargs)
        if self.on_other is not None:
            self.on_other(func, args, kwargs, out)
        return out

    # -- layers -----------------------------------------------------------------------------------------------------------

    def _layer(self, index: int, func: Any, args: Any, kwargs: Any) -> Any:
        every = slice(0, self.layers[index].grid.axes[0].parts)
        x = args[0] if args else kwargs["input"]
        geometry = None if func is F.linear else _geometry(func, args, kwargs)
        use = Use(index, every, -1 if geometry is None else x.dim() - len(geometry.kernel) - 1, x, geometry)
        self._announce([use])
        return self.on_use(use, func(*args, **kwargs))

    def _announce(self, uses: Sequence[Use]) -> None:
        if self.before is not None and uses:
            self.before(uses)

    def _linear(self, use: Use | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = F.linear(x, weight, bias)
        result = out if use is None else self.on_use(use, out)
        assert result is not None
        return result

    def _attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Attention whose projections are computed here: it runs with identities in their place."""
        call = _bind(func, args, kwargs)
        width = call["embed_dim_to_check"]
        sources = ("query", "key", "value")
        if call.get("use_separate_proj_weight"):
            weights = [call[f"{name}_proj_weight"] for name in "qkv"]
            indices = [self.indices.get(id(weight)) for weight in weights]
            parts = [slice(0, 1)] * 3
        else:
            packed = call["in_proj_weight"]
            weights, indices = list(packed.chunk(3)), [self.indices.get(id(packed))] * 3
            parts = [slice(i, i + 1) for i in range(3)]
        last = self.indices.get(id(call["out_proj_weight"]))
        if last is None and all(index is None for index in indices):
            return func(*args, **kwargs)
        bias = call.get("in_proj_bias")
        biases = [None] * 3 if bias is None else list(bias.chunk(3))
        eye = torch.eye(width, dtype=weights[0].dtype, device=weights[0].device)
        uses = [
            None if index is None else Use(index, part, -1, call[name], None)
            for name, index, part in zip(sources, indices, parts, strict=True)
        ]
        for group in [uses] if call["in_proj_weight"] is not None else [[use] for use in uses]:
            self._announce([use for use in group if use is not None])
        for name, use, weight, offset in zip(sources, uses, weights, biases, strict=True):
            call[name] = self._linear(use, call[name], weight, offset)
        call |= {f"{name}_proj_weight": eye for name in "qkv"}
        call |= {"in_proj_weight": None, "in_proj_bias": None, "use_separate_proj_weight": True}
        weight, bias = call["out_proj_weight"], call["out_proj_bias"]
        call |= {"out_proj_weight": eye, "out_proj_bias": None}
        out, attention = func(**call)
        use = None if last is None else Use(last, slice(0, 1), -1, out, None)
        self._announce([] if use is None else [use])
        return self._linear(use, out, weight, bias), attention

    def _read_conv1d(self, indices: dict[str, int]) -> Any:
        def read(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor | None:
            return self.on_use(_conv1d_use(indices, args, kwargs), out)

        return read

    def _announce_conv1d(self, indices: dict[str, int]) -> Any:
        def announce(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._announce([_conv1d_use(indices, args, kwargs)])

        return announce

    def _read_cell(self, indices: dict[str, int]) -> Any:
        def read(module: nn.RNNCellBase, args: Any, kwargs: Any, out: Any) -> None:
            values = _bind(type(module).forward, (module, *args), kwargs)
            x, state = values["input"], values.get("hx")
            hidden = state[0] if isinstance(state, tuple) else state
            for attribute, index in indices.items():
                read_by = x if attribute == CELL_WEIGHTS[0] else hidden
                if read_by is not None:
                    self.on_use(Use(index, slice(0, self.layers[index].grid.axes[0].parts), -1, read_by, None), None)

        return read


def _conv1d_use(indices: dict[str, int], args: Any, kwargs: Any) -> Use:
    return Use(indices["weight"], slice(0, 1), -1, args[0] if args else next(iter(kwargs.values())), None)


@cache
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)


def _bind(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(_signature(func).bind(*args, **kwargs).arguments)


CONV_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


def _geometry(func: Any, args: Any, kwargs: Any) -> Geometry:
    transposed = func in TRANSPOSED_FUNCTIONS
    call = {**dict(zip(TRANSPOSED_ARGUMENTS if transposed else CONV_ARGUMENTS, args, strict=False)), **kwargs}
    kernel = tuple(call["weight"].shape[2:])
    axes = len(kernel)
    stride, dilation = _per_axis(call.get("stride", 1), axes), _per_axis(call.get("dilation", 1), axes)
    reach = [step * (k - 1) for k, step in zip(kernel, dilation, strict=True)]
    given = call.get("padding", 0)
    if given == "same":
        padding = [(size // 2, size - size // 2) for size in reach]
    elif given == "valid":
        padding = [(0, 0)] * axes
    else:
        padding = [(size, size) for size in _per_axis(given, axes)]
    if transposed:
        more = _per_axis(call.get("output_padding", 0), axes)
        padding = [(size - a, size - b + extra) for size, (a, b), extra in zip(reach, padding, more, strict=True)]
    return Geometry(kernel, stride, tuple(padding), dilation, int(call.get("groups", 1)), transposed)


def _per_axis(value: Any, axes: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return tuple(int(v) for v in (values * axes if len(values) == 1 else values))


def run_with(model: nn.Module, batch: Any, *contexts: AbstractContextManager[Any]) -> Any:
    """The outputs of the model in eval mode within these contexts. Attention runs without its fused operations."""
    with without_fused_attention():
        return run_example(model, batch, _Together(contexts), "batches")


@contextmanager
def without_fused_attention() -> Iterator[None]:
    """Attention calls its projections one by one."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


class _Together(ExitStack):
    """Enters several contexts."""

    def __init__(self, contexts: Sequence[AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.contexts = contexts

    def __enter__(self) -> _Together:
        super().__enter__()
        for context in self.contexts:
            self.enter_context(context)
        return self
