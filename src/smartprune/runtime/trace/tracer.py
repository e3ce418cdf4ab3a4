"""The network as a graph, and one run of it that notes what the plan needs to know."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from ..lower.steps import Shape
from .inplace import Aliases
from .inputs import filled

_TRACING = threading.RLock()  # torch.fx patches torch.nn.Module while it traces: one at a time
PLAIN = (int, float, bool, str, type(None))


class Opaque(nn.Module):
    """A module that is traced as one node, whatever is in it."""


class Symbol(fx.Proxy):
    """A symbol for a value that knows ``y += z`` from ``y = y + z``: other names of y see the first."""


def _augmented(target: Callable[..., Any]) -> Callable[[fx.Proxy, Any], Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", target, (self, other), {})


AUGMENTED = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor")
for _name in AUGMENTED:
    setattr(Symbol, f"__{_name}__", _augmented(getattr(operator, _name)))


class Tracer(fx.Tracer):
    """Traces a call with the given inputs: a placeholder for every tensor and number, everything else as it is given.

    Modules that other threads call meanwhile are not its business.
    """

    def __init__(self, call: tuple[Any, Any] | None = None, fixed: bool = False) -> None:
        super().__init__()
        self._given, self._fixed = call, fixed
        self._thread = threading.get_ident()
        self.result: TreeSpec | None = None  # how the tensors of the result are nested; None: it is one tensor

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        if self._given is None:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        count = 0

        def place(leaf: Any) -> Any:
            nonlocal count
            count += 1
            proxy = self.create_proxy("placeholder", f"input{count}", (), {})
            return leaf if self._fixed and not isinstance(leaf, Tensor) else proxy

        args, kwargs = filled(self._given, place)
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
    """The network as a graph, and how its result is nested. What is changed in place is read, from there on, under its new
    name. ``call``: the arguments and named arguments to trace it with; ``fixed``: numbers among them are constants."""
    if type(model).__module__.startswith("torch.nn.") and not any(True for _ in model.children()):
        model = nn.Sequential(model)  # a single layer: its inside is not to be traced
    with _TRACING:
        tracer = Tracer(call, fixed)
        traced = fx.GraphModule(model, tracer.trace(model))
    order = {node: i for i, node in enumerate(traced.graph.nodes)}
    for node in traced.graph.nodes:
        if _in_place(traced, node) and node.args and isinstance(node.args[0], fx.Node):
            changed = node.args[0]
            for user in list(changed.users):
                if order[user] > order[node]:
                    user.replace_input_with(changed, node)
                    node.meta["changes"] = changed
    return traced, tracer.result


def _in_place(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node looks as if it changed its first argument and gave it back; :class:`Watch` sees if it does."""
    if node.kwargs.get("inplace") is True:
        return True
    if node.op == "call_module":
        return getattr(traced.get_submodule(str(node.target)), "inplace", False) is True
    name = str(getattr(node.target, "__name__", node.target))
    if name in AUGMENTED:
        return node.target is getattr(operator, name) and not _is_size(node.args[0])
    return node.op in ("call_method", "call_function") and name.endswith("_") and not name.endswith("__")


def _is_size(value: object) -> bool:
    """Whether a value is a size or made of sizes, which are numbers and never change."""
    if not isinstance(value, fx.Node):
        return isinstance(value, (int, float))
    if value.target is getattr:
        return value.args[1] in ("shape", "ndim")
    if value.op == "call_method":
        return value.target in ("size", "dim", "numel")
    if value.op != "call_function" or getattr(value.target, "__module__", "") != "_operator":
        return False
    return all(_is_size(source) for source in value.all_input_nodes)


def form_of(graph: fx.Graph) -> str:
    """A text that is the same for graphs of the same nodes, whatever constants they have."""
    return " ".join(f"{node.op}:{node.name}:{getattr(node.target, '__name__', node.target)}" for node in graph.nodes)


class Watch(fx.Interpreter):
    """Runs the network in torch and notes the shape of every tensor, what is plain Python, who changes whose memory, and the
    smallest and largest number of every tensor if asked."""

    def __init__(self, traced: fx.GraphModule, ranges: dict[str, tuple[float, float]] | None = None) -> None:
        super().__init__(traced)
        self.shapes: dict[fx.Node, Shape] = {}
        self.plain: dict[fx.Node, Any] = {}
        self.aliases = Aliases()
        self.ranges = ranges

    def run_node(self, n: fx.Node) -> Any:
        sources = [(node, tensor) for node in n.all_input_nodes for tensor in tensors(self.env[node])]
        versions = [version(tensor) for _, tensor in sources]
        out = super().run_node(n)
        if n.op == "output":
            return out
        changed = {node for (node, tensor), before in zip(sources, versions, strict=True) if version(tensor) != before}
        self.aliases.note(n, list(tensors(out)), changed, "changes" not in n.meta or out is self.env[n.meta["changes"]])
        if is_plain(out):
            self.plain[n] = out
        elif isinstance(out, Tensor) and out.dtype == torch.float32:
            self.shapes[n] = tuple(out.shape)
            if self.ranges is not None and out.numel():
                low, high = (float(v) for v in out.aminmax())
                before = self.ranges.get(n.name, (low, high))
                self.ranges[n.name] = min(low, before[0]), max(high, before[1])
        return out


def version(tensor: Tensor) -> int:
    """Counts the changes of a tensor's memory."""
    return 0 if tensor.is_inference() else tensor._version


def is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(is_plain(item) for item in value)
    return isinstance(value, PLAIN)


def tensors(result: Any) -> Iterator[Tensor]:
    """All tensors of a nested result."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from tensors(value)
    elif isinstance(result, (tuple, list)):
        for value in result:
            yield from tensors(value)
