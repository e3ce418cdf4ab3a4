"""The plan for inputs of one structure, shape and dtype: the graph, partitioned into programs and nodes that torch runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx
from torch.utils._pytree import tree_unflatten

from . import choice
from .choice import Timing
from .cpu.build import Library
from .cpu.program import InputMismatch, Program
from .lower import lower
from .lower.fuse import fuse
from .lower.steps import Step
from .trace.tracer import Recorder

if TYPE_CHECKING:
    from .module import Options, TracedGraph

Segment = tuple[list[fx.Node], list[fx.Node], list[Step]]


class Plan:
    """What runs for inputs of one shape: programs, and nodes of torch between them.

    A value inside the network may have another shape in another call, for example rows that are selected by their numbers. A
    program does not run on such a value; torch runs its nodes instead.
    """

    def __init__(
        self,
        graph: TracedGraph,
        values: Sequence[Any],
        options: Options,
        library: Library | None,
        pool: int,
        ranges: Mapping[str, tuple[float, float]] | None,
    ) -> None:
        self._traced, self._structure, self._pool = graph.traced, graph.result, pool
        self._modules = dict(graph.traced.named_modules())
        nodes = graph.traced.graph.nodes
        result: Any = next(n for n in nodes if n.op == "output").args[0]
        self._leaves = tuple(result)
        self._only_nodes = all(isinstance(leaf, fx.Node) for leaf in self._leaves)
        places = range(len(self._leaves))
        nested = None if graph.result is None else tree_unflatten(list(places), graph.result)
        self._is_flat_tuple = type(nested) is tuple and nested == tuple(places)
        recorder = Recorder(graph.traced)
        self.recorded: Any = self._nest(list(recorder.run(*values)))  # the result of the graph in torch
        self._copies = recorder.aliases.required_copies(graph.traced.graph)
        self._placeholders = [n for n in nodes if n.op == "placeholder"]
        self.parts: list[fx.Node | Program] = []
        self._nodes: dict[Program, list[fx.Node]] = {}  # what a program computes, for torch
        self._scalars: dict[Program, list[tuple[fx.Node, Any]]] = {}  # sizes and other numbers that a program depends on
        if library is None:
            self.parts = [n for n in nodes if n.op not in ("placeholder", "output")]
        else:
            by_node = None if ranges is None else {node: ranges[node.name] for node in nodes if node.name in ranges}
            self._compile(recorder, options, library, graph.packed, by_node)
        self.in_torch: list[Timing] = []  # one for each part with kernels that torch runs, because it is faster
        self._only_program: Program | None = None  # if there is nothing else, and one output
        first = self.parts[0] if len(self.parts) == 1 else None
        if isinstance(first, Program) and first.inputs == self._placeholders and self._structure is None:
            self._only_program = first if list(self._leaves) == first.outputs else None

    def _compile(
        self,
        recorder: Recorder,
        options: Options,
        library: Library,
        packed: dict[Any, Any],
        ranges: Mapping[fx.Node, tuple[float, float]] | None,
    ) -> None:
        steps = lower(self._traced, recorder.shapes)
        sides = {
            node: [n for n in node.all_input_nodes if n not in step.inputs and n.op != "get_attr"] for node, step in steps.items()
        }
        steps = {node: step for node, step in steps.items() if all(side in recorder.scalars for side in sides[node])}
        for part in segments(self._traced.graph, steps):
            if isinstance(part, fx.Node):
                self.parts.append(part)
                continue
            inputs, outputs, body = part
            nodes = [step.node for step in body]
            fused = fuse(body, set(outputs))
            settings = (library, options.threads, packed, options.dtype, ranges)
            program = Program(fused, inputs, outputs, recorder.shapes, *settings)
            self.parts.append(program)
            self._nodes[program] = nodes
            used = dict.fromkeys(side for node in nodes for side in sides[node])
            self._scalars[program] = [(side, recorder.scalars[side]) for side in used]

    def __str__(self) -> str:
        """What torch runs because it is faster; empty if there is nothing."""
        if not self.in_torch:
            return ""
        return f"torch runs {len(self.in_torch)} of {len(self.in_torch) + len(self.programs)} parts, because it is faster there"

    @property
    def programs(self) -> list[Program]:
        return [part for part in self.parts if isinstance(part, Program)]

    def run(self, values: Sequence[Any]) -> Any:
        if self._only_program is not None:
            try:
                return self._only_program.run(self._pool, values)[0]
            except InputMismatch:  # torch runs the nodes
                return self._run_parts(values)
        return self._run_parts(values)

    def _run_parts(self, values: Sequence[Any]) -> Any:
        env: dict[fx.Node, Any] = dict(zip(self._placeholders, values, strict=True))
        for part in self.parts:
            if isinstance(part, Program):
                self._run_program(part, env)
            else:
                env[part] = self._run_node(part, env)
        if self._only_nodes:
            return self._nest([env[node] for node in self._leaves])
        return self._nest(fx.node.map_arg(self._leaves, env.__getitem__))

    def run_in_torch(self, values: Sequence[Any]) -> Any:
        """The result of the graph without programs."""
        return self._nest(list(fx.Interpreter(self._traced).run(*values)))

    def run_faster_parts_in_torch(self, values: Sequence[Any]) -> None:
        """Times every program, and the same nodes in torch. Where torch is faster, it runs the nodes from now on."""
        env: dict[fx.Node, Any] = dict(zip(self._placeholders, values, strict=True))
        parts: list[fx.Node | Program] = []
        for part in self.parts:
            if not isinstance(part, Program):
                env[part] = self._run_node(part, env)
                parts.append(part)
                continue
            timing = choice.time_both(*self._both_ways(part, env))
            self._run_program(part, env)
            if timing.torch_is_faster:
                self.in_torch.append(timing)
                parts += self._nodes.pop(part)
                del self._scalars[part]
            else:
                parts.append(part)
        self.parts = parts

    def _both_ways(self, program: Program, env: Mapping[fx.Node, Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """A program, and the same nodes in torch, for the values of ``env``. Nodes may change copies of these in place."""
        nodes = self._nodes[program]
        needed = {source: env[source] for node in nodes for source in node.all_input_nodes if source in env}
        copies = {node: value.clone() if isinstance(value, Tensor) else value for node, value in needed.items()}
        inputs = [env[node] for node in program.inputs]

        def in_torch() -> None:
            values = dict(copies)
            for node in nodes:
                values[node] = self._run_node(node, values)

        return lambda: program.run(self._pool, inputs), in_torch

    def _nest(self, leaves: Any) -> Any:
        if self._structure is None:
            return leaves[0]
        return tuple(leaves) if self._is_flat_tuple else tree_unflatten(list(leaves), self._structure)

    def _run_program(self, program: Program, env: dict[fx.Node, Any]) -> None:
        try:
            for node, value in self._scalars[program]:
                if env[node] != value:
                    raise InputMismatch
            out = program.run(self._pool, [env[node] for node in program.inputs])
        except InputMismatch:
            for node in self._nodes[program]:
                env[node] = self._run_node(node, env)
        else:
            env.update(zip(program.outputs, out, strict=True))

    def _run_node(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        read: Callable[[fx.Node], Any] = env.__getitem__
        if node in self._copies:  # it changes arguments in place that other nodes still read
            cloned = self._copies[node]

            def read(n: fx.Node) -> Any:
                return env[n].clone() if n in cloned and isinstance(env[n], Tensor) else env[n]

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), read)
        if node.op == "call_module":
            return self._modules[str(node.target)](*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self._traced)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def segments(graph: fx.Graph, steps: Mapping[fx.Node, Step]) -> Iterator[fx.Node | Segment]:
    """All nodes, in an order with long sequences of steps: sequences as (inputs, outputs, steps), other nodes as they are."""
    waiting = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    ready = {n for n in graph.nodes if n.op == "placeholder"}
    takes_steps = True
    sequence: list[fx.Node] = []
    while waiting or sequence:
        taken = None
        for i, node in enumerate(waiting):
            if (node in steps) == takes_steps and all(source in ready for source in node.all_input_nodes):
                taken = waiting.pop(i)
                break
        if taken is not None:
            ready.add(taken)
            if takes_steps:
                sequence.append(taken)
            else:
                yield taken
            continue
        if sequence:
            yield _segment(sequence, steps)
            sequence = []
        takes_steps = not takes_steps


def _segment(nodes: list[fx.Node], steps: Mapping[fx.Node, Step]) -> Segment:
    inside = set(nodes)
    inputs = list(dict.fromkeys(s for node in nodes for s in steps[node].inputs if s not in inside))
    outputs = [node for node in nodes if any(user not in inside for user in node.users) or not node.users]
    return inputs, outputs, [steps[node] for node in nodes]
