"""Tracing a network with torch.export, for models that torch.fx cannot trace: their code branches on shapes or builds masks.

The exported graph has one node for every ATen operation. Those that the kernels know are written as the modules and functions of
torch that they come from, so that the rest of the runtime is the same for both tracers.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from ..forks import ForkLock
from .inputs import map_leaves
from .tracer import read_changed_values

ATEN = torch.ops.aten
CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range", "sym_constrain_range_for_size")
_EXPORTING = ForkLock()  # warnings and log levels are settings of the process


class _Result:
    """Holds the structure of a result. torch.export restores attributes of modules, also lists, but not attributes of other
    objects."""

    spec: TreeSpec | None = None


class _Leaves(nn.Module):
    """A call of a model as a function of its tensors that returns a flat tuple. Everything else in the call is constant."""

    def __init__(self, model: nn.Module, call: tuple[Any, Any]) -> None:
        super().__init__()
        self.model, self._call = model, call
        self.result = _Result()

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        rest = iter(tensors)
        args, kwargs = map_leaves(lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf, self._call)
        leaves, spec = tree_flatten(self.model(*args, **kwargs))
        self.result.spec = None if spec.is_leaf() else spec
        return tuple(leaves)


def export(model: nn.Module, call: tuple[Any, Any]) -> tuple[fx.GraphModule, TreeSpec | None]:
    """The graph of a network for inputs of exactly these shapes, and the structure of its result.

    As with :func:`smartprune.runtime.trace.tracer.trace`, every tensor and number of the call is a placeholder.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    flat = _Leaves(copy.deepcopy(model, shared), call)  # a copy, because a model may store what it computes
    leaves: list[Any] = []
    map_leaves(leaves.append, call)
    tensors = tuple(leaf.clone() for leaf in leaves if isinstance(leaf, Tensor))
    with _EXPORTING.lock, _silence():
        source = torch.export.export(flat, tensors, strict=False).module()
    return _Conversion(source, leaves).traced, flat.result.spec


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Hides warnings of the exporter that do not matter here, for example about attributes that the model sets."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


class _Conversion:
    """Writes an exported graph with modules and functions of torch."""

    def __init__(self, source: fx.GraphModule, leaves: list[Any]) -> None:
        self.source, self.root, self.graph = source, nn.Module(), fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.known: dict[str, str] = {}  # attributes of the source -> of the root
        given = (node for node in source.graph.nodes if node.op == "placeholder")
        for number, leaf in enumerate(leaves, 1):
            placeholder = self.graph.placeholder(f"input{number}")
            if isinstance(leaf, Tensor):
                self.new[next(given)] = placeholder
        for node in source.graph.nodes:
            if node.op == "output":
                (outputs,) = node.args
                self.graph.output(fx.node.map_arg(tuple(outputs), self.new.__getitem__))
            elif node.op != "placeholder" and not _is_check(node):
                self.new[node] = self._convert(node)
        self.traced = fx.GraphModule(self.root, self.graph).eval()
        self.traced.graph.eliminate_dead_code()
        read_changed_values(self.traced)

    def _convert(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            return self.graph.get_attr(self._constant(str(node.target)))
        if node.op != "call_function":
            raise TypeError(f"torch.export made a node of the kind {node.op}")
        make, place = LAYERS.get(node.target, (None, 0))
        layer = None if make is None else make(self, *node.args, **node.kwargs)
        if layer is not None:
            name = f"layer{len(self.root._modules)}"
            self.root.add_module(name, layer.eval())
            return self.graph.call_module(name, (self.new[node.args[place]],))  # type: ignore[index]
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self.new.__getitem__)
        plain = FUNCTIONS.get(node.target)
        written = None if plain is None else plain(*args, **kwargs)
        target: Any = node.target
        return self.graph.call_function(*((target, args, kwargs) if written is None else written))

    def _constant(self, path: str) -> str:
        """The name of an attribute of the source in the root."""
        if path not in self.known:
            value = operator.attrgetter(path)(self.source)
            name = self.known[path] = f"constant{len(self.known)}"
            if isinstance(value, Tensor):
                self.root.register_buffer(name, value.detach() if isinstance(value, nn.Parameter) else value)
            else:
                setattr(self.root, name, value)
        return self.known[path]

    def tensor(self, node: object) -> Tensor | None:
        """The weight that a node is, if it is one."""
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return None
        value = operator.attrgetter(str(node.target))(self.source)
        return value if isinstance(value, Tensor) else None


def _is_check(node: fx.Node) -> bool:
    """Whether a node only checks what is the same in all calls of one shape."""
    if node.op == "call_module":
        return str(node.target) == "_guards_fn"
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name.removeprefix("aten::") in CHECKS


# ---- layers with weights


def _with_weights(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
    return layer


def _convolution(
    conversion: _Conversion,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> nn.Module | None:
    w, b = conversion.tensor(weight), conversion.tensor(bias)
    if w is None or (b is None) != (bias is None) or not w.is_floating_point():
        return None
    stride, padding, dilation = (_pair(value) for value in (stride, padding, dilation))
    kernel = w.shape[2], w.shape[3]
    layer = nn.Conv2d(w.shape[1] * groups, w.shape[0], kernel, stride, padding, dilation, groups, b is not None, device="meta")
    return _with_weights(layer, w, b)


def _pair(value: Any) -> Any:
    """One number for all axes is a list with one element."""
    if isinstance(value, (list, tuple)):
        return tuple(value) * (2 if len(value) == 1 else 1)
    return value


def _linear(conversion: _Conversion, x: Any, weight: Any, bias: Any = None) -> nn.Module | None:
    w, b = conversion.tensor(weight), conversion.tensor(bias)
    if w is None or w.dim() != 2 or (b is None) != (bias is None) or not w.is_floating_point():
        return None
    return _with_weights(nn.Linear(w.shape[1], w.shape[0], b is not None, device="meta"), w, b)


def _product(conversion: _Conversion, bias: Any, x: Any, weight: Any, *, beta: Any = 1, alpha: Any = 1) -> nn.Module | None:
    """The linear layer of a Conv1D: its weight is (in, out)."""
    w, b = conversion.tensor(weight), conversion.tensor(bias)
    if w is None or b is None or b.dim() != 1 or not w.is_floating_point() or (beta, alpha) != (1, 1):
        return None
    return _with_weights(nn.Linear(w.shape[0], w.shape[1], device="meta"), w.t(), b)


BATCH_NORMS = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}  # by the number of axes of the input; others take nn.BatchNorm1d


def _batch_norm(
    conversion: _Conversion,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> nn.Module | None:
    w, b, m, v = (conversion.tensor(value) for value in (weight, bias, mean, variance))
    if training or m is None or v is None or (w is None) != (weight is None) or (b is None) != (bias is None):
        return None
    if (w is None) != (b is None):
        return None
    kind = BATCH_NORMS.get(x.meta["val"].dim(), nn.BatchNorm1d)
    layer = kind(len(m), eps, affine=w is not None)
    if w is not None:
        _with_weights(layer, w, b)
    layer.running_mean, layer.running_var = m, v
    return layer


LAYERS: dict[Any, tuple[Callable[..., nn.Module | None], int]] = {  # with the position of the input among the arguments
    ATEN.conv2d.default: (_convolution, 0),
    ATEN.conv2d.padding: (_convolution, 0),
    ATEN.linear.default: (_linear, 0),
    ATEN.addmm.default: (_product, 1),
    ATEN.batch_norm.default: (_batch_norm, 0),
}

# ---- functions: (what is called, its arguments, its keyword arguments), or None where the operation stays as it is

Written = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _as(function: Any, **fixed: Any) -> Callable[..., Written | None]:
    return lambda *args, **kwargs: (function, args, kwargs | fixed)


def _binary(function: Any) -> Callable[..., Written | None]:
    def write(a: Any, b: Any, alpha: Any = 1) -> Written | None:
        return (function, (a, b), {}) if alpha == 1 else None

    return write


def _average_pool(x: Any, kernel: Any, stride: Any = (), *rest: Any, **kwargs: Any) -> Written | None:
    return F.avg_pool2d, (x, kernel, stride or None, *rest), kwargs


def _max_pool(x: Any, kernel: Any, stride: Any = (), *rest: Any, **kwargs: Any) -> Written | None:
    return F.max_pool2d, (x, kernel, stride or None, *rest), kwargs


def _dropout(x: Any, p: float, train: bool) -> Written | None:
    return None if train else (F.dropout, (x, p, False), {})


def _nearest(x: Any, size: Any, factors: Any = None) -> Written | None:
    return F.interpolate, (x, size, factors if factors is None else tuple(factors)), {"mode": "nearest"}


def _bilinear(x: Any, size: Any, align_corners: bool, factors: Any = None) -> Written | None:
    arguments = {"mode": "bilinear", "align_corners": align_corners}
    return F.interpolate, (x, size, factors if factors is None else tuple(factors)), arguments


def _view(x: Any, size: Any) -> Written | None:
    return torch.reshape, (x, size), {}


FUNCTIONS: dict[Any, Callable[..., Written | None]] = {
    ATEN.relu.default: _as(torch.relu),
    ATEN.relu_.default: _as(torch.relu_),
    ATEN.relu6.default: _as(F.relu6),
    ATEN.silu.default: _as(F.silu),
    ATEN.silu_.default: _as(F.silu, inplace=True),
    ATEN.sigmoid.default: _as(torch.sigmoid),
    ATEN.hardswish.default: _as(F.hardswish),
    ATEN.hardswish_.default: _as(F.hardswish, inplace=True),
    ATEN.hardsigmoid.default: _as(F.hardsigmoid),
    ATEN.hardtanh.default: _as(F.hardtanh),
    ATEN.hardtanh_.default: _as(F.hardtanh, inplace=True),
    ATEN.leaky_relu.default: _as(F.leaky_relu),
    ATEN.leaky_relu_.default: _as(F.leaky_relu, inplace=True),
    ATEN.gelu.default: _as(F.gelu),
    ATEN.clamp.default: _as(torch.clamp),
    ATEN.dropout.default: _dropout,
    ATEN.add.Tensor: _binary(torch.add),
    ATEN.add_.Tensor: _binary(operator.iadd),
    ATEN.mul.Tensor: _binary(torch.mul),
    ATEN.mul_.Tensor: _binary(operator.imul),
    ATEN.cat.default: _as(torch.cat),
    ATEN.flatten.using_ints: _as(torch.flatten),
    ATEN.view.default: _view,
    ATEN.reshape.default: _view,
    ATEN.mean.dim: _as(torch.mean),
    ATEN.max_pool2d.default: _max_pool,
    ATEN.avg_pool2d.default: _average_pool,
    ATEN.adaptive_avg_pool2d.default: _as(F.adaptive_avg_pool2d),
    ATEN.upsample_nearest2d.vec: _nearest,
    ATEN.upsample_bilinear2d.vec: _bilinear,
}
