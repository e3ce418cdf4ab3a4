"""The plan for inputs of one structure, shape and dtype: programs and, between them, nodes that torch runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, fx
from torch.utils._pytree import tree_unflatten

from .cpu import build
from .cpu.program import InputMismatch, Program
from .lower.steps import Step, fuse, lower
from .trace.tracer import Watch

if TYPE_CHECKING:
    from .module import Form, Options

Segment = tuple[list[fx.Node], list[fx.Node], list[Step]]


class Plan:
    """What is run for inputs of one shape: programs and, between them, nodes of torch.

    A value inside the network can have another shape next time (rows chosen by their numbers). A program that is given such a
    value does not run; torch runs its nodes instead.
    """

    def __init__(
        self,
        form: Form,
        values: Sequence[Any],
        options: Options,
        library: build.Library | None,
        pool: int,
        ranges: Mapping[str, tuple[float, float]] | None,
    ) -> None:
        self._traced, self._nesting, self._pool = form.traced, form.result, pool
        self._modules = dict(form.traced.named_modules())
        graph = form.traced.graph
        result: Any = next(n for n in graph.nodes if n.op == "output").args[0]
        self._leaves = tuple(result)
        self._simple = all(isinstance(leaf, fx.Node) for leaf in self._leaves)
        places = range(len(self._leaves))
        shown = None if form.result is None else tree_unflatten(list(places), form.result)
        self._tuple = type(shown) is tuple and shown == tuple(places)  # nothing is nested in it
        watch = Watch(form.traced)
        self.watched: Any = self._nested(list(watch.run(*values)))  # the graph's result, in torch
        self._copied = watch.aliases.settle(graph)
        self._placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        by_node = None
        if ranges is not None:
            by_node = {node: ranges[node.name] for node in graph.nodes if node.name in ranges}
        self.parts: list[fx.Node | Program] = []
        self._nodes: dict[Program, list[fx.Node]] = {}  # what a program does, for torch
        self._given: dict[Program, list[tuple[fx.Node, Any]]] = {}  # sizes and the like that a program was made for
        if library is None:
            self.parts = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
        else:
            self._programs(watch, options, library, form.packed, by_node)
        self._whole: Program | None = None  # the program, if there is nothing else, and one output
        first = self.parts[0] if len(self.parts) == 1 else None
        if isinstance(first, Program) and first.inputs == self._placeholders and self._nesting is None:
            self._whole = first if list(self._leaves) == first.outputs else None

    def _programs(
        self,
        watch: Watch,
        options: Options,
        library: build.Library,
        packed: dict[Any, Any],
        ranges: Mapping[fx.Node, tuple[float, float]] | None,
    ) -> None:
        graph = self._traced.graph
        steps = lower(self._traced, watch.shapes)
        sides = {node: [n for n in node.all_input_nodes if n not in step.inputs] for node, step in steps.items()}
        steps = {node: step for node, step in steps.items() if all(side in watch.plain for side in sides[node])}
        for part in segments(graph, steps):
            if isinstance(part, fx.Node):
                self.parts.append(part)
                continue
            inputs, outputs, body = part
            nodes = [step.node for step in body]
            program = Program(fuse(body, set(outputs)), inputs, outputs, watch.shapes, library, options.threads, packed, ranges)
            self.parts.append(program)
            self._nodes[program] = nodes
            used = dict.fromkeys(side for node in nodes for side in sides[node])
            self._given[program] = [(side, watch.plain[side]) for side in used]

    @property
    def programs(self) -> list[Program]:
        return [part for part in self.parts if isinstance(part, Program)]

    def run(self, values: Sequence[Any]) -> Any:
        if self._whole is not None:
            return self._whole.run(self._pool, values)[0]
        env: dict[fx.Node, Any] = dict(zip(self._placeholders, values, strict=True))
        for part in self.parts:
            if isinstance(part, Program):
                self._run(part, env)
            else:
                env[part] = self._torch(part, env)
        if self._simple:
            return self._nested([env[node] for node in self._leaves])
        return self._nested(fx.node.map_arg(self._leaves, env.__getitem__))

    def in_torch(self, values: Sequence[Any]) -> Any:
        """The result of the graph without any program."""
        return self._nested(list(fx.Interpreter(self._traced).run(*values)))

    def _nested(self, leaves: Any) -> Any:
        if self._nesting is None:
            return leaves[0]
        return tuple(leaves) if self._tuple else tree_unflatten(list(leaves), self._nesting)

    def _run(self, program: Program, env: dict[fx.Node, Any], seconds: Any = None) -> None:
        try:
            for node, value in self._given[program]:
                if env[node] != value:
                    raise InputMismatch
            out = program.run(self._pool, [env[node] for node in program.inputs], seconds)
        except InputMismatch:
            for node in self._nodes[program]:
                env[node] = self._torch(node, env)
        else:
            env.update(zip(program.outputs, out, strict=True))

    def _torch(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        read: Callable[[fx.Node], Any] = env.__getitem__
        if node in self._copied:  # it changes what others still read
            fresh = self._copied[node]

            def read(n: fx.Node) -> Any:
                return env[n].clone() if n in fresh and isinstance(env[n], Tensor) else env[n]

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), read)
        if node.op == "call_module":
            return self._modules[str(node.target)](*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self._traced)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def profile(self, values: Sequence[Any], repeat: int = 20) -> list[tuple[str, float]]:
        """Seconds of every operation of every program, the least of ``repeat`` runs."""
        out: list[tuple[str, float]] = []
        env: dict[fx.Node, Any] = dict(zip(self._placeholders, values, strict=True))
        for part in self.parts:
            if isinstance(part, Program):
                best = np.full(len(part.names), np.inf)
                for _ in range(repeat):
                    seconds = np.zeros(len(part.names))
                    self._run(part, env, seconds)
                    best = np.minimum(best, seconds)
                out += zip(part.names, best.tolist(), strict=True)
            else:
                env[part] = self._torch(part, env)
        return out


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
