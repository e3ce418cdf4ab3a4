"""The accelerated model: a module that runs native programs where it can and torch where it must."""

from __future__ import annotations

import copy
import operator
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from ..errors import SmartpruneError
from . import native
from .lower import Shape, Step, fuse, lower
from .program import Program

CHECKED = 1e-3  # how far the first result of a plan may lie from torch's, as a share of its largest number
CHECKED_INT8 = 0.5  # int8 has its own error, and random deep networks blow it up; beyond this something is wrong


@dataclass(frozen=True)
class Options:
    """How a model is run; what :func:`smartprune.accelerate` was given."""

    dtype: str
    threads: int
    reference: bool


class Accelerated(nn.Module):
    """Computes what the model computed in eval mode; for inference only. Made by :func:`smartprune.accelerate`.

    Plans are made per input shape, at the first call with it. Calls from several threads take turns. Copies and pickles
    carry the model and plan anew.
    """

    def __init__(self, model: nn.Module, options: Options, ranges: dict[str, tuple[float, float]] | None) -> None:
        super().__init__()
        self.options, self.ranges = options, ranges
        self._model = [model]  # in a list, so that it is no submodule: the parameters are the packed ones, not these
        self._traced = [trace(model)]
        places = [node for node in self._traced[0].graph.nodes if node.op == "placeholder"]
        self._inputs = [(str(node.target), node.args) for node in places]  # name, default value if there is one
        self._plans: dict[Any, Plan] = {}
        self._packed: dict[Any, Any] = {}
        self._lock = threading.Lock()
        self._library: native.Library | None = None
        self._pool, self._pool_lock = 0, threading.Lock()
        if not options.reference:
            self._library = native.load(options.dtype == "int8")
            self._pool, self._pool_lock = pool(self._library, options.threads)
        super().train(False)

    def train(self, mode: bool = True) -> Accelerated:
        """Stays in eval mode, whatever a surrounding model does."""
        return self

    def __reduce__(self) -> Any:
        return Accelerated, (self._model[0], self.options, self.ranges)

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerated:
        return Accelerated(self._model[0], self.options, self.ranges)  # nothing writes to the model

    def extra_repr(self) -> str:
        isa = self._library.isa if self._library else "reference"
        return f"{type(self._model[0]).__name__}, {self.options.dtype}, {isa}, threads={self.options.threads}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            values = self._bind(args, kwargs)
            key = shape_key(values)
            with self._lock, self._pool_lock:
                plan = self._plans.get(key)
                if plan is None:
                    plan = self._plans[key] = self._plan(values)
                return plan.run(values)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these inputs, made if there is none yet."""
        self(*args, **kwargs)
        return self._plans[shape_key(self._bind(args, kwargs))]

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        out = []
        rest = dict(kwargs)
        for i, (name, default) in enumerate(self._inputs):
            if i < len(args):
                value = args[i]
            elif name in rest:
                value = rest.pop(name)
            elif default:
                value = default[0]
            else:
                raise SmartpruneError(f"accelerated model: the input {name!r} is missing")
            if isinstance(value, Tensor):
                if value.device.type != "cpu":
                    raise SmartpruneError(f"accelerated model: the input {name!r} is on {value.device}; this one runs on the CPU")
                if value.is_floating_point() and value.dtype != torch.float32:
                    value = value.float()
            out.append(value)
        if rest or len(args) > len(out):
            raise SmartpruneError(f"accelerated model: takes {len(out)} inputs; {len(args) + len(kwargs)} were given")
        return out

    def _plan(self, values: list[Any]) -> Plan:
        plan = Plan(self._traced[0], values, self.options, self._library, self._pool, self._packed, self.ranges)
        plan.check(values, self._model[0](*values))
        return plan


class Plan:
    """What is run for inputs of one shape: programs and, between them, nodes of torch."""

    def __init__(
        self,
        traced: fx.GraphModule,
        values: Sequence[Any],
        options: Options,
        library: native.Library | None,
        pool: int,
        packed: dict[Any, Any],
        ranges: Mapping[str, tuple[float, float]] | None,
    ) -> None:
        self._traced, self._pool, self._options = traced, pool, options
        self._modules = dict(traced.named_modules())
        watch = Watch(traced)
        watch.run(*values)
        shapes = watch.shapes
        self._placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
        self._result = next(n for n in traced.graph.nodes if n.op == "output")
        by_node = None
        if ranges is not None:
            by_node = {node: ranges[node.name] for node in traced.graph.nodes if node.name in ranges}
        self.parts: list[fx.Node | Program] = []
        if library is None:
            self.parts = [n for n in traced.graph.nodes if n.op not in ("placeholder", "output")]
        else:
            steps = lower(traced, shapes)
            for part in segments(traced.graph, steps):
                if isinstance(part, fx.Node):
                    self.parts.append(part)
                    continue
                inputs, outputs, body = part
                fused = fuse(body, set(outputs))
                self.parts.append(Program(fused, inputs, outputs, shapes, library, options.threads, packed, by_node))
        self._whole: Program | None = None  # the program, if there is nothing else, and one output
        first = self.parts[0] if len(self.parts) == 1 else None
        if isinstance(first, Program) and first.inputs == self._placeholders and [self._result.args[0]] == first.outputs:
            self._whole = first

    @property
    def programs(self) -> list[Program]:
        return [part for part in self.parts if isinstance(part, Program)]

    def run(self, values: Sequence[Any]) -> Any:
        if self._whole is not None:
            return self._whole.run(self._pool, values)[0]
        env: dict[fx.Node, Any] = dict(zip(self._placeholders, values, strict=True))
        for part in self.parts:
            if isinstance(part, Program):
                out = part.run(self._pool, [env[node] for node in part.inputs])
                env.update(zip(part.outputs, out, strict=True))
            else:
                env[part] = self._torch(part, env)
        return fx.node.map_arg(self._result.args[0], lambda node: env[node])

    def _torch(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
        if node.op == "call_module":
            return self._modules[str(node.target)](*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self._traced)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def check(self, values: Sequence[Any], expected: Any) -> None:
        """Compares the first result with the model's own: neither the trace nor the program is taken on trust."""
        share = CHECKED if self._options.dtype == "float32" else CHECKED_INT8
        for ours, theirs in zip(tensors(self.run(values)), tensors(expected), strict=True):
            if not theirs.is_floating_point() or not theirs.numel() or not theirs.isfinite().all():
                continue
            error, scale = float((ours - theirs).abs().max()), float(theirs.abs().max())
            if not error <= share * max(scale, 1e-6):
                why = "the model may keep state from call to call, change its inputs, or draw random numbers"
                if self._options.dtype == "int8":
                    why = "int8 is too coarse for it, or the example does not look like this input; use float32"
                raise SmartpruneError(
                    f"accelerate: the result lies up to {error:g} from the model's own, whose largest number is {scale:g}; {why}"
                )

    def profile(self, values: Sequence[Any], repeat: int = 20) -> list[tuple[str, float]]:
        """Seconds of every operation of every program, the least of ``repeat`` runs."""
        out: list[tuple[str, float]] = []
        env: dict[fx.Node, Any] = dict(zip(self._placeholders, values, strict=True))
        for part in self.parts:
            if isinstance(part, Program):
                best = np.full(len(part.names), np.inf)
                for _ in range(repeat):
                    seconds = np.zeros(len(part.names))
                    result = part.run(self._pool, [env[node] for node in part.inputs], seconds)
                    best = np.minimum(best, seconds)
                env.update(zip(part.outputs, result, strict=True))
                out += zip(part.names, best.tolist(), strict=True)
            else:
                env[part] = self._torch(part, env)
        return out


class Watch(fx.Interpreter):
    """Runs the network in torch and notes the shape of every tensor, and its smallest and largest number if asked."""

    def __init__(self, traced: fx.GraphModule, ranges: dict[str, tuple[float, float]] | None = None) -> None:
        super().__init__(traced)
        self.shapes: dict[fx.Node, Shape] = {}
        self.ranges = ranges

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if isinstance(out, Tensor) and out.dtype == torch.float32 and n.op != "output":
            self.shapes[n] = tuple(out.shape)
            if self.ranges is not None and out.numel():
                low, high = (float(v) for v in out.aminmax())
                before = self.ranges.get(n.name, (low, high))
                self.ranges[n.name] = min(low, before[0]), max(high, before[1])
        return out


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


def trace(model: nn.Module) -> fx.GraphModule:
    """The network as a graph. What is changed in place is read, from there on, under its new name."""
    if type(model).__module__.startswith("torch.nn.") and not any(True for _ in model.children()):
        model = nn.Sequential(model)  # a single layer: its inside is not to be traced
    traced = fx.symbolic_trace(model)
    order = {node: i for i, node in enumerate(traced.graph.nodes)}
    for node in traced.graph.nodes:
        target = str(getattr(node.target, "__name__", node.target))
        module = traced.get_submodule(target) if node.op == "call_module" else None
        in_place = node.kwargs.get("inplace") is True or getattr(module, "inplace", False)
        in_place |= node.op == "call_method" and target.endswith("_") and not target.endswith("__")
        in_place |= node.target in (operator.iadd, operator.imul, operator.isub)
        if in_place and node.args and isinstance(node.args[0], fx.Node):
            changed = node.args[0]
            for user in list(changed.users):
                if order[user] > order[node]:
                    user.replace_input_with(changed, node)
    return traced


Segment = tuple[list[fx.Node], list[fx.Node], list[Step]]


def segments(graph: fx.Graph, steps: Mapping[fx.Node, Step]) -> Iterator[fx.Node | Segment]:
    """All nodes in an order in which as many native steps as possible follow each other: those as (inputs, outputs,
    steps), the others as they are."""
    waiting = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    ready = {n for n in graph.nodes if n.op == "placeholder"}
    native_turn = True
    run: list[fx.Node] = []
    while waiting or run:
        took = None
        for i, node in enumerate(waiting):
            if (node in steps) == native_turn and all(source in ready for source in node.all_input_nodes):
                took = waiting.pop(i)
                break
        if took is not None:
            ready.add(took)
            if native_turn:
                run.append(took)
            else:
                yield took
            continue
        if run:
            yield _segment(run, steps)
            run = []
        native_turn = not native_turn


def _segment(run: list[fx.Node], steps: Mapping[fx.Node, Step]) -> Segment:
    inside = set(run)
    inputs = list(dict.fromkeys(s for node in run for s in steps[node].inputs if s not in inside))
    outputs = [node for node in run if any(user not in inside for user in node.users) or not node.users]
    return inputs, outputs, [steps[node] for node in run]


_POOLS: dict[tuple[str, int, int], tuple[int, threading.Lock]] = {}


def pool(library: native.Library, threads: int) -> tuple[int, threading.Lock]:
    """The threads of a library and the lock for using them. All models of this process share them, so that ten models do
    not start ten pools; a forked process starts its own. A single thread is nothing to share."""
    key = (library.code._name, threads, os.getpid())
    if key not in _POOLS:
        made = library.code.sp_pool_new(threads)
        if not made:
            raise SmartpruneError("accelerate: no memory for a pool of threads")
        _POOLS[key] = made, threading.Lock()
    return _POOLS[key] if threads > 1 else (_POOLS[key][0], threading.Lock())


def shape_key(values: Sequence[Any]) -> tuple[Any, ...]:
    """What a plan depends on: shapes of tensors, and everything else by what it prints."""
    return tuple(v.shape if isinstance(v, Tensor) else repr(v) for v in values)


def layered(model: nn.Module, options: Options) -> nn.Module:
    """A model that cannot be traced: each of its convolutions and linear layers becomes an accelerated one."""
    made: dict[int, Accelerated] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) in (nn.Conv2d, nn.Linear) and name:
            if id(module) not in made:
                made[id(module)] = Accelerated(nn.Sequential(module), options, None)
            model.set_submodule(name, made[id(module)])
    return model


def copied(model: nn.Module) -> nn.Module:
    """A copy in float32 and eval mode on the CPU, that shares nothing with the model."""
    return copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
