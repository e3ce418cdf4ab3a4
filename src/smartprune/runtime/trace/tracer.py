"""Tracing a network with torch.fx, and recording one run of its graph."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from ..forks import ForkLock
from ..lower.steps import Shape
from .inplace import Aliases
from .inputs import map_leaves

_TRACING = ForkLock()  # torch.fx patches torch.nn.Module while it traces, so only one thread may trace
SCALARS = (int, float, bool, str, type(None))


class Opaque(nn.Module):
    """A module that is traced as one node."""


class Symbol(fx.Proxy):
    """A symbol that distinguishes ``y += z`` from ``y = y + z``: other names of y see the former."""


def _augmented(target: Callable[..., Any]) -> Callable[[fx.Proxy, Any], Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", target, (self, other), {})


AUGMENTED = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor")
for _name in AUGMENTED:
    setattr(Symbol, f"__{_name}__", _augmented(getattr(operator, _name)))


class Tracer(fx.Tracer):
    """Traces a call with these inputs. Tensors and numbers become placeholders, everything else stays as it is.

    Modules that other threads call in the meantime run normally.
    """

    def __init__(self, call: tuple[Any, Any] | None = None, fixed: bool = False) -> None:
        super().__init__()
        self._call, self._fixed = call, fixed
        self._thread = threading.get_ident()
        self.result: TreeSpec | None = None  # the structure of the result; None if it is one tensor

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        if self._call is None:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        count = 0

        def placeholder(leaf: Any) -> Any:
            nonlocal count
            count += 1
            proxy = self.create_proxy("placeholder", f"input{count}", (), {})
            return leaf if self._fixed and not isinstance(leaf, Tensor) else proxy

        args, kwargs = map_leaves(placeholder, self._call)
        return (lambda: self._leaves(self.root(*args, **kwargs))), []

    def _leaves(self, out: Any) -> tuple[Any, ...]:
        if isinstance(out, fx.Proxy):
            return (out,)
        leaves, self.result = tree_flatten(out)
        return tuple(leaves)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Symbol(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Opaque) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if m is self.root or threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


def trace(model: nn.Module, call: tuple[Any, Any] | None = None, fixed: bool = False) -> tuple[fx.GraphModule, TreeSpec | None]:
    """The graph of a network, and the structure of its result.

    ``call`` holds the positional and keyword arguments to trace with; ``fixed`` makes numbers among them constants.
    """
    if type(model).__module__.startswith("torch.nn.") and not any(True for _ in model.children()):
        model = nn.Sequential(model)  # so that a single layer becomes one node
    with _TRACING.lock:
        tracer = Tracer(call, fixed)
        traced = fx.GraphModule(model, tracer.trace(model))
    read_changed_values(traced)
    return traced, tracer.result


def read_changed_values(traced: fx.GraphModule) -> None:
    """After an operation changed a value in place, all later nodes read the result of that operation."""
    order = {node: i for i, node in enumerate(traced.graph.nodes)}
    for node in traced.graph.nodes:
        if _is_named_in_place(traced, node) and node.args and isinstance(node.args[0], fx.Node):
            changed = node.args[0]
            for user in list(changed.users):
                if order[user] > order[node]:
                    user.replace_input_with(changed, node)
                    node.meta["changes"] = changed


def _is_named_in_place(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node seems to change its first argument and return it. :class:`Recorder` checks that it does."""
    if node.kwargs.get("inplace") is True:
        return True
    if node.op == "call_module":
        return getattr(traced.get_submodule(str(node.target)), "inplace", False) is True
    name = _function_name(node)
    if name in AUGMENTED:
        return node.target is getattr(operator, name) and not _is_size(node.args[0])
    return node.op in ("call_method", "call_function") and name.endswith("_") and not name.endswith("__")


def _function_name(node: fx.Node) -> str:
    """The name of the function or method that a node calls. That of an ATen operation lacks its overload: ``add_.Tensor``."""
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def _is_size(value: object) -> bool:
    """Whether a value is a size or computed from sizes, which are numbers and cannot change in place."""
    if not isinstance(value, fx.Node):
        return isinstance(value, (int, float))
    if value.target is getattr:
        return value.args[1] in ("shape", "ndim")
    if value.op == "call_method":
        return value.target in ("size", "dim", "numel")
    if value.op != "call_function" or getattr(value.target, "__module__", "") != "_operator":
        return False
    return all(_is_size(source) for source in value.all_input_nodes)


def describe(graph: fx.Graph) -> str:
    """A text that is the same for graphs with the same nodes, whatever their constants are."""
    return " ".join(f"{node.op}:{node.name}:{getattr(node.target, '__name__', node.target)}" for node in graph.nodes)


class Recorder(fx.Interpreter):
    """Runs a graph in torch and records what a plan needs: the shape of every float32 tensor, all values that are not tensors,
    who changes whose memory, and optionally the range of every float32 tensor."""

    def __init__(self, traced: fx.GraphModule, ranges: dict[str, tuple[float, float]] | None = None) -> None:
        super().__init__(traced)
        self.shapes: dict[fx.Node, Shape] = {}
        self.scalars: dict[fx.Node, Any] = {}  # also tuples and lists of scalars
        self.aliases = Aliases()
        self.ranges = ranges

    def run_node(self, n: fx.Node) -> Any:
        sources = [(node, tensor) for node in n.all_input_nodes for tensor in iter_tensors(self.env[node])]
        versions = [version(tensor) for _, tensor in sources]
        out = super().run_node(n)
        if n.op == "output":
            return out
        changed = {node for (node, tensor), before in zip(sources, versions, strict=True) if version(tensor) != before}
        as_expected = "changes" not in n.meta or out is self.env[n.meta["changes"]]
        self.aliases.record(n, list(iter_tensors(out)), changed, as_expected)
        if _is_scalar(out):
            self.scalars[n] = out
        elif isinstance(out, Tensor) and out.dtype == torch.float32:
            self.shapes[n] = tuple(out.shape)
            if self.ranges is not None and out.numel():
                low, high = (float(v) for v in out.aminmax())
                before = self.ranges.get(n.name, (low, high))
                self.ranges[n.name] = min(low, before[0]), max(high, before[1])
        return out


def version(tensor: Tensor) -> int:
    """The number of in-place changes of a tensor's memory."""
    return 0 if tensor.is_inference() else tensor._version


def _is_scalar(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_scalar(item) for item in value)
    return isinstance(value, SCALARS)


def iter_tensors(result: Any) -> Iterator[Tensor]:
    """All tensors of a nested result."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from iter_tensors(value)
    elif isinstance(result, (tuple, list)):
        for value in result:
            yield from iter_tensors(value)
