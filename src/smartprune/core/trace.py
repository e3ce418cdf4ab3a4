"""Traces: the graph of all tensor operations of one run of a model, and which parameters each operation reads.

The graph is recorded at run time, below autograd, so it exists for every model that runs. Tensors are held weakly: a trace needs
little memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from .example import run_example


def operations(names: str) -> frozenset[str]:
    """A set of operations, by their names without namespace and overload."""
    return frozenset(names.split())


# operations that multiply tensors: one that reads a parameter, or something computed from parameters, is a layer
PRODUCTS = operations(
    "convolution _convolution convolution_overrideable mkldnn_convolution cudnn_convolution conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d mm addmm bmm baddbmm addbmm mv addmv matmul linear mkldnn_linear _trilinear bilinear addr "
    "dot vdot _scaled_mm _grouped_mm _addmm_activation mkldnn_rnn_layer lstm gru rnn_tanh rnn_relu _cudnn_rnn miopen_rnn "
    "_native_multi_head_attention _transformer_encoder_layer_fwd embedding embedding_bag _embedding_bag "
    "_embedding_bag_forward_only"
)
COPIES = operations("clone _to_copy to contiguous _unsafe_view reshape _reshape_copy lift_fresh_copy")
MODULATIONS = operations("mul div mul_ div_")  # may scale a weight by a value that depends on the data
CREATIONS = operations(  # they read only the shape of their argument
    "new_empty new_zeros new_ones new_full new_empty_strided empty_like zeros_like ones_like full_like rand_like randn_like "
    "randint_like"
)
CONTROL = operations("nonzero _local_scalar_dense masked_select unique _unique2 unique_dim is_nonzero item")
MERGE = "merge"  # a tensor that was written in parts, through views
OBJECT_DEPTH = 4  # outputs are looked for in this many levels of nested objects that are not containers


@dataclass(frozen=True)
class Node:
    """What one operation returns, or a tensor that no operation has made. Its number is its index in the trace."""

    op: str  # without namespace and overload: "convolution"; empty for tensors that no operation has made
    inputs: tuple[int, ...]  # what it reads, in the order of the arguments
    data: bool  # whether it depends on the inputs of the model
    params: frozenset[int]  # parameters that it is computed from, by id, if it is itself some form of a weight
    exact: bool  # whether all its values are unchanged values of these parameters
    weights: frozenset[int] = frozenset()  # parameters, by id, that this operation multiplies by


@dataclass(frozen=True)
class Form:
    """A weight that a layer computes with and that is calculated from parameters."""

    params: frozenset[int]  # by id
    elements: int
    zeros: int | None  # how many of its elements are zero, if they were counted


@dataclass
class Trace:
    """The graph of one run."""

    nodes: list[Node] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    reached: set[int] = field(default_factory=set)  # parameters, by id, that something is computed from
    forms: list[Form] = field(default_factory=list)  # the weights that layers compute with, that are not parameters themselves
    depends_on_values: bool = False  # whether a value decided what runs, as in the routing of experts


def trace(model: nn.Module, example: Any, count_zeros: bool = False) -> Trace:
    """Runs the model once on ``example``, in eval mode, and returns what it did. ``count_zeros`` counts the zeros of forms."""
    recorder = _Recorder(model, count_zeros)
    for tensor in tensors_in(example):
        recorder.add_input(tensor)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the fused operation of a whole layer would hide its weights
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            out = run_example(model, example, recorder)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    recorder.trace.outputs = list(dict.fromkeys(recorder.read(tensor) for tensor in tensors_in(out)))
    return recorder.trace


def tensors_in(value: Any, depth: int = OBJECT_DEPTH) -> Iterator[Tensor]:
    """All tensors in nested containers, data classes and other objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item, depth)
    elif depth and not isinstance(value, (type, nn.Module, str, bytes)) and not callable(value):
        names = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else vars_of(value)
        for name in names:
            yield from tensors_in(getattr(value, name, None), depth - 1)


def vars_of(value: Any) -> list[str]:
    return list(getattr(value, "__dict__", ()))


@dataclass(frozen=True)
class _Operation:
    """What the schema of an operation says."""

    name: str
    native: bool  # whether it is one of torch
    view: bool  # whether its outputs share memory with its first input
    writes: tuple[tuple[int, str], ...]  # position and name of the arguments that it writes to


@cache
def _operation(func: Any) -> _Operation:
    schema = func._schema
    namespace, _, name = schema.name.rpartition("::")
    writes = tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return _Operation(name, namespace in ("aten", "prims", "prim"), view, writes)


@dataclass
class _Tensor:
    """What is known about a tensor while it lives."""

    node: int
    memory: list[tuple[int, int]]  # writes to the memory it shares with its views: time, node
    time: int  # when ``node`` was its value


class _Recorder(TorchDispatchMode):
    """Records every operation below autograd."""

    def __init__(self, model: nn.Module, count_zeros: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.model, self.count_zeros = model, count_zeros
        self.time = 0
        self.tensors: Any = WeakTensorKeyDictionary()
        self.params: dict[int, int] = {}  # id of a parameter, or of the form that a sharded one takes in a run -> id of the stored
        self.nodes_of_params: dict[int, _Tensor] = {}
        self.storages: dict[int, list[nn.Parameter]] = {}
        self.keep: list[Tensor] = []  # unsharded parameters whose ids are in `params`
        for parameter in model.parameters():
            self.params[id(parameter)] = id(parameter)
            if (storage := _storage(parameter)) is not None:
                self.storages.setdefault(storage, []).append(parameter)
        self.stored = [
            (module, {name: id(value) for name, value in module._parameters.items() if value is not None})
            for module in model.modules()
        ]

    def add_input(self, tensor: Tensor) -> None:
        self.tensors[tensor] = self._leaf(data=True)

    def _add(self, node: Node) -> int:
        self.trace.nodes.append(node)
        return len(self.trace.nodes) - 1

    def _leaf(self, data: bool = False, param: int | None = None) -> _Tensor:
        node = self._add(Node("", (), data, frozenset() if param is None else frozenset([param]), exact=True))
        return _Tensor(node, [], self.time)

    def read(self, tensor: Tensor) -> int:
        """The node of a tensor as it is now."""
        known = self._known(tensor)
        later = [node for time, node in known.memory if time > known.time]
        if later:
            nodes = [self.trace.nodes[i] for i in (known.node, *later)]
            params = frozenset[int]().union(*(node.params for node in nodes))
            merged = Node(MERGE, (known.node, *later), any(node.data for node in nodes), params, exact=False)
            known.node, known.time = self._add(merged), self.time
        return known.node

    def _known(self, tensor: Tensor) -> _Tensor:
        known = self.tensors.get(tensor)
        if known is None:
            param = self._parameter(tensor)
            if param is None:
                known = self._leaf()
            else:  # its views, such as `weight.data`, share the node
                known = self.nodes_of_params.get(param) or self.nodes_of_params.setdefault(param, self._leaf(param=param))
            self.tensors[tensor] = known
        out: _Tensor = known
        return out

    def _parameter(self, tensor: Tensor) -> int | None:
        """The id of the stored parameter that an unknown tensor is, if any."""
        if id(tensor) in self.params:
            return self.params[id(tensor)]
        if isinstance(tensor, nn.Parameter):  # FSDP replaces sharded parameters while a module runs
            for module, stored in self.stored:
                for name, value in module._parameters.items():
                    if value is tensor and name in stored:
                        self.keep.append(tensor)
                        self.params[id(tensor)] = stored[name]
                        return self.params[id(tensor)]
        storage = _storage(tensor)
        shared = [] if storage is None else self.storages.get(storage, [])
        return id(shared[0]) if len(shared) == 1 else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = _operation(func)
        tensors = [] if operation.name in CREATIONS else list(_tensors_of((args, kwargs)))
        inputs = tuple(dict.fromkeys(map(self.read, tensors)))
        node = self._add(self._node(operation, inputs, tensors))
        if self.trace.nodes[node].weights:
            self._record_forms(tensors)
        out = func(*args, **kwargs)
        self.time += 1
        written = [args[i] if i < len(args) else kwargs.get(name) for i, name in operation.writes]
        for tensor in _tensors_of(written):
            known = self._known(tensor)
            known.node, known.time = node, self.time
            known.memory.append((self.time, node))
        source = self._known(tensors[0]) if operation.view and tensors else None
        for tensor in _tensors_of(out):
            if self.tensors.get(tensor) is None:
                self.tensors[tensor] = _Tensor(node, [] if source is None else source.memory, self.time)
        return out

    def _node(self, operation: _Operation, inputs: tuple[int, ...], tensors: list[Tensor]) -> Node:
        read = [self.trace.nodes[i] for i in inputs]
        data = any(node.data for node in read)
        params = frozenset[int]().union(*(node.params for node in read))
        exact = operation.view or operation.name in COPIES
        if data and operation.name in CONTROL:
            self.trace.depends_on_values = True
        if params and not exact:
            self.trace.reached |= params
        product = operation.name in PRODUCTS or (not operation.native and any(t.dim() > 1 for t in self._forms(tensors)))
        if params and product:
            return Node(operation.name, inputs, data, frozenset(), exact=False, weights=params)
        if data and params and not (operation.name in MODULATIONS and self._scales_a_weight(tensors)):
            params = frozenset()
        return Node(operation.name, inputs, data, params, exact and all(node.exact for node in read))

    def _forms(self, tensors: list[Tensor]) -> list[Tensor]:
        """Those of the tensors that are some form of a weight."""
        return [tensor for tensor in tensors if self.trace.nodes[self.read(tensor)].params]

    def _scales_a_weight(self, tensors: list[Tensor]) -> bool:
        """Whether the larger factor is a weight, and the smaller one depends on the data."""
        forms = self._forms(tensors)
        return max((t.dim(), t.numel()) for t in forms) >= max((t.dim(), t.numel()) for t in tensors) and forms[0].dim() > 1

    def _record_forms(self, tensors: list[Tensor]) -> None:
        for tensor in self._forms(tensors):
            node = self.trace.nodes[self.read(tensor)]
            if not node.exact:
                zeros = int((tensor == 0).sum()) if self.count_zeros else None
                self.trace.forms.append(Form(node.params, tensor.numel(), zeros))


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors among arguments of an operation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_of(item)
    elif isinstance(value, dict):
        yield from _tensors_of(tuple(value.values()))


def _storage(tensor: Tensor) -> int | None:
    """A number for the memory of a plain tensor. None for sharded, sparse and other special tensors."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    return int(tensor.untyped_storage()._cdata)
