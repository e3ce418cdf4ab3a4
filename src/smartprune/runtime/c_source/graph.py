"""From a model to one network for the kernels: tracing, lowering, and the ranges of activations for int8 and float16."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...artifacts.onnx_inputs import Arguments, Batch
from ...errors import SmartpruneError
from ...text import first_line, some_names
from ..check import compare
from ..cpu.compiled import Compiled
from ..cpu.instruction_sets import InstructionSet
from ..lower import lower
from ..lower.fuse import fuse
from ..lower.steps import Step
from ..trace.exported import export
from ..trace.inputs import map_leaves
from ..trace.tracer import Recorder, trace
from .network import Network
from .rewrite import rewrite

WHERE = "export_c"
TOLERANCE = 1e-3  # of the traced graph, as for accelerated models


class Graph:
    """The graph of a model for inputs of one shape, all of whose nodes have kernels."""

    def __init__(self, model: nn.Module, arguments: Arguments, batch: Batch) -> None:
        self.arguments = arguments
        self.ranges: dict[str, tuple[float, float]] = {}
        expected = arguments.call(model, batch)
        self.traced, self.recorder = self._trace(model, batch, expected)
        nodes = self.traced.graph.nodes
        leaves = next(n for n in nodes if n.op == "output").args[0]
        self._leaves = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        self.outputs: list[fx.Node] = list(dict.fromkeys(self._leaves))
        self.steps = self._lower()
        read = {source for step in self.steps for source in step.inputs}
        placeholders = [n for n in nodes if n.op == "placeholder"]
        self.inputs = [n for n in placeholders if n in read]
        self._positions = [placeholders.index(n) for n in self.inputs]

    def measure(self, batches: Sequence[Batch]) -> None:
        """Records the range of every activation, for int8 and float16."""
        for batch in batches:
            Recorder(self.traced, self.ranges).run(*self._values(batch))

    def network(self, isa: InstructionSet, dtype: str = "float32") -> Network:
        """The network for an instruction set. Types other than float32 need measured ranges."""
        shapes = self.recorder.shapes
        ranges = {node: self.ranges[node.name] for node in shapes if node.name in self.ranges} if self.ranges else None
        fused = fuse(self.steps, set(self.outputs))
        compiled = Compiled(fused, self.inputs, self.outputs, shapes, isa, 1, {}, dtype, ranges)
        inputs, outputs = ([(node, shapes[node]) for node in nodes] for nodes in (self.inputs, self.outputs))
        return Network(compiled, isa, inputs, outputs)

    def tensors(self, batch: Batch) -> list[Tensor]:
        """The tensors of a batch that the network reads, in the order of its inputs."""
        tensors = list(batch.values())
        return [tensors[position] for position in self._positions]

    def arranged(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of the network as the model returns them: a tensor that it returns twice is there twice."""
        return [outputs[self.outputs.index(leaf)] for leaf in self._leaves]

    def _values(self, batch: Batch) -> list[Any]:
        values: list[Any] = []
        map_leaves(lambda leaf: values.append(leaf.clone() if isinstance(leaf, Tensor) else leaf), self._call(batch))
        return values

    def _call(self, batch: Batch) -> tuple[Any, Any]:
        return self.arguments.positional(batch), self.arguments.keywords(batch)

    def _trace(self, model: nn.Module, batch: Batch, expected: Any) -> tuple[fx.GraphModule, Recorder]:
        failures: list[str] = []
        tracers: tuple[Callable[..., Any], ...] = (partial(trace, fixed=True), export)
        for tracer in tracers:
            try:
                traced, _ = tracer(model, self._call(batch))
                traced.graph.eliminate_dead_code()
                traced.recompile()
                recorder = self._record(traced, batch, expected)
                if rewrite(traced, recorder.shapes):
                    recorder = self._record(traced, batch, expected)
            except Exception as error:  # tracing arbitrary models may raise anything
                failures.append(first_line(error))
                continue
            write_numbers(traced.graph, recorder.scalars)
            return traced, recorder
        raise SmartpruneError(
            f"{WHERE}: neither torch.fx nor torch.export can trace the model ({'; '.join(failures)}); export_c needs a graph "
            "without control flow that depends on numbers: use export_onnx for this model"
        )

    def _record(self, traced: fx.GraphModule, batch: Batch, expected: Any) -> Recorder:
        """One run of the graph, whose outputs must be those of the model."""
        recorder = Recorder(traced)
        compare(list(recorder.run(*self._values(batch))), expected, TOLERANCE)
        recorder.aliases.required_copies(traced.graph)  # raises if values change in an order that cannot be kept
        return recorder

    def _lower(self) -> list[Step]:
        steps = lower(self.traced, self.recorder.shapes, everything=True)
        missing = [node.name for node in self.outputs if node.op == "placeholder"]
        if missing or not self.outputs:
            raise SmartpruneError(
                f"{WHERE}: the model returns {some_names(missing) or 'no tensor'}, which no operation computes; every output "
                "must be the result of an operation on the inputs"
            )
        needed, left = set(self.outputs), []
        for node in reversed(self.traced.graph.nodes):
            if node in needed and node.op not in ("placeholder", "output"):
                if node in steps:
                    needed.update(steps[node].inputs)
                else:
                    needed.update(node.all_input_nodes)
                    left.append(node)
        if left:
            shown = some_names([describe(self.traced, node) for node in reversed(left) if node.op != "get_attr"])
            raise SmartpruneError(
                f"{WHERE}: the kernels do not have these operations: {shown}; remove them from the model, for example by "
                "exporting its backbone, or use export_onnx"
            )
        return [steps[node] for node in self.traced.graph.nodes if node in needed and node in steps]


def write_numbers(graph: fx.Graph, scalars: Mapping[fx.Node, Any]) -> None:
    """Writes sizes and other numbers into the graph, and removes the nodes that computed them: shapes are fixed."""
    numbers = {node: value for node, value in scalars.items() if node.op not in ("placeholder", "output")}

    def written(node: fx.Node) -> Any:
        return numbers.get(node, node)

    for node in graph.nodes:
        node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), written)
    for node in reversed(numbers):
        graph.erase_node(node)


def describe(traced: fx.GraphModule, node: fx.Node) -> str:
    """An operation as a reader knows it: the class of its module, or the name of its function."""
    if node.op == "call_module":
        return f"{type(traced.get_submodule(str(node.target))).__name__} {node.target}"
    return f"{getattr(node.target, '__name__', node.target)} ({node.name})"


def on_cpu(batch: Batch) -> Batch:
    """The batch, if the kernels can read it."""
    for name, x in batch.items():
        if x.dtype is not torch.float32:
            raise SmartpruneError(f"{WHERE}: the input {name} is {x.dtype}; the kernels read float32: give float32 inputs")
    return batch
