"""The graph of a model that is to be compacted, and what is known about the tensors in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import text
from ..errors import SmartpruneError
from .compact_labels import STAYS, Labels
from .decompose import decompose

TORCH_FILES = ("/torch/", "\\torch\\")


@dataclass
class Known:
    """What is known about a tensor of the graph, entry by entry.

    The four tensors have the rank of the tensor. An axis along which all entries are alike has size 1 in them.
    """

    shape: tuple[int, ...]  # of the tensor itself
    label: Tensor  # int64: entries with one label can only be removed together
    constant: Tensor  # bool: whether it has the same value for every input of the model
    value: Tensor  # that value, where it is constant
    live: Tensor  # bool: whether an output of the model may depend on it
    where: str = ""  # the module that computes it
    keep: dict[int, Tensor] = field(default_factory=dict)  # by axis: positions that must not be removed as a whole

    def axes(self) -> list[int]:
        """The axes along which labels differ."""
        return [axis for axis, size in enumerate(self.label.shape) if size > 1]

    def vector(self, values: Tensor, axis: int) -> Tensor:
        """One entry per position of an axis, of a tensor in which only this axis differs."""
        return values.reshape(-1).expand(self.shape[axis])

    def keep_positions(self, axis: int, positions: Tensor) -> None:
        """Remembers positions of an axis, bool [size], that must not be removed as a whole."""
        self.keep[axis] = self.keep[axis] | positions if axis in self.keep else positions


def known(shape: Sequence[int], label: Tensor, constant: Tensor, value: Tensor) -> Known:
    """A tensor of the graph, whose parts are brought to a common size."""
    constant = constant & value.isfinite()
    label, constant, value = torch.broadcast_tensors(label, constant, value)
    value = torch.where(constant, value, torch.zeros_like(value))
    live = torch.zeros(label.shape, dtype=torch.bool)
    return Known(tuple(shape), label.clone(), constant.clone(), value, live)


def opaque(tensor: Tensor) -> Known:
    """A tensor about which nothing is known, and whose entries all stay."""
    ones = (1,) * tensor.dim()
    dtype = tensor.dtype
    return known(tensor.shape, torch.full(ones, STAYS), torch.zeros(ones, dtype=torch.bool), torch.zeros(ones, dtype=dtype))


def by_position(values: Tensor, axis: int) -> Tensor:
    """A matrix with one row per position of an axis."""
    return values.movedim(axis, 0).reshape(values.shape[axis], -1)


def reduce_axes(values: Tensor) -> list[int]:
    """The axes along which all entries are equal."""
    return [axis for axis in range(values.dim()) if values.shape[axis] > 1 and bool((values == values.narrow(axis, 0, 1)).all())]


def shrink(values: Tensor, axes: Sequence[int]) -> Tensor:
    """The first entry along each of these axes, which keep the size 1."""
    for axis in axes:
        values = values.narrow(axis, 0, 1)
    return values


@dataclass
class Reader:
    """A layer that multiplies channels by a weight, and what its outputs lose with each channel."""

    node: fx.Node
    weight: str
    bias: str | None
    data: Known
    out: Known
    label: Tensor  # [inputs], of the channels that it reads
    constant: Tensor  # bool [inputs]
    value: Tensor  # [inputs]
    reads: Tensor  # bool [outputs, inputs]: whether the weight is not zero
    axes: tuple[int, int]  # of the weight: outputs, inputs
    groups: int
    border: bool  # whether constant channels can give different outputs at different positions

    @property
    def out_axis(self) -> int:
        """The axis of the outputs in the weight, as the graph labels it."""
        return 0 if self.groups > 1 else self.axes[0]

    def live_outputs(self) -> Tensor:
        """The outputs that a later operation may depend on, bool [outputs]."""
        return self.out.live.reshape(-1)

    def constants(self) -> Tensor:
        """The constant inputs that outputs depend on, bool [inputs]. An output that is constant counts as well."""
        outputs = (self.out.live | self.out.constant).reshape(-1)
        return (self.reads & outputs[:, None]).any(0) & self.constant & (self.value != 0)

    def group(self, channel: int) -> int:
        """The group of a grouped convolution that an input belongs to."""
        return channel * self.groups // self.reads.shape[1]

    def kernels(self, weight: Tensor, channel: int) -> Tensor:
        """The part of the weight that an input is multiplied by, as a view."""
        if self.groups == 1:
            return weight.movedim(self.axes, (0, 1))[:, channel]
        rows, per_group = self.reads.shape[0] // self.groups, self.reads.shape[1] // self.groups
        group = self.group(channel)
        return weight[group * rows : (group + 1) * rows, channel - group * per_group]

    def response(self, weight: Tensor, value: Tensor) -> Tensor:
        """What channels of these values add to the outputs, double [outputs]. Values are [inputs], mostly zero."""
        kernels = weight.movedim(self.axes, (0, 1)) if self.groups == 1 else weight
        columns = value.nonzero().flatten()
        if self.groups == 1 and len(columns):
            sums = kernels[:, columns].double().reshape(len(kernels), len(columns), -1).sum(2)
            return sums @ value[columns].double()
        out = torch.zeros(self.reads.shape[0], dtype=torch.double)
        rows, per_group = len(out) // self.groups, self.reads.shape[1] // self.groups
        kernels = kernels.reshape(len(out), per_group, -1)
        for column in columns.tolist():
            group = column // per_group
            part = slice(group * rows, (group + 1) * rows)
            out[part] += kernels[part, column - group * per_group].double().sum(1) * float(value[column])
        return out


@dataclass
class Graph:
    """The operations of one run of a model."""

    model: nn.Module
    nodes: list[fx.Node]
    names: dict[str, str]  # name of a node -> name of the parameter or buffer
    constants: dict[str, Any]  # name of a node -> a tensor that the code of the model holds
    labels: Labels = field(default_factory=Labels)
    values: dict[str, Any] = field(default_factory=dict)  # name of a node -> Known, or a list of them
    weights: dict[str, dict[int, Tensor]] = field(default_factory=dict)  # parameter -> axis -> labels [size]
    groups: dict[str, tuple[int, Tensor]] = field(default_factory=dict)  # weight of a grouped convolution: groups, labels of inputs
    backward: list[Callable[[], None]] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    products: list[Callable[[], Tensor]] = field(default_factory=list)  # labels that a product of two activations needs
    forms: dict[str, Known] = field(default_factory=dict)  # parameters that are read as they are, entry by entry
    alike: list[list[tuple[Known, int]]] = field(default_factory=list)  # axes that lose the same positions
    balanced: list[list[Tensor]] = field(default_factory=list)  # parts that must lose equally many entries
    reshapes: dict[str, list[Known]] = field(default_factory=dict)  # line of code -> results whose sizes it may state
    widths: dict[str, Tensor] = field(default_factory=dict)  # normalization without parameters -> labels of its channels
    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first: dict[int, str] = {}
        for name, tensor in (
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ):
            self.aliases[name] = first.setdefault(id(tensor), name)
            self.tensors[name] = tensor.detach()

    def parameter(self, node: object) -> str | None:
        """The name of the parameter or buffer that an argument is."""
        name = self.names.get(node.name) if isinstance(node, fx.Node) else None
        return None if name is None else self.aliases.get(name)

    def axis_labels(self, name: str, axis: int) -> Tensor:
        """The labels of the positions of an axis of a parameter."""
        axes = self.weights.setdefault(name, {})
        if axis not in axes:
            axes[axis] = self.labels.fresh(self.tensors[name].shape[axis])
        return axes[axis]

    def fix(self, value: Known, reason: str) -> None:
        """Keeps all entries of a tensor."""
        self.labels.fix(value.label, reason)

    def fix_parameter(self, name: str, reason: str) -> None:
        for axis in range(self.tensors[name].dim()):
            self.labels.fix(self.axis_labels(name, axis), reason)
        if name in self.groups:
            self.labels.fix(self.groups[name][1], reason)


def call_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of the model, on the CPU."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example, Tensor):
        args = (example,)
    elif isinstance(example, Mapping):
        kwargs = dict(example)
    elif isinstance(example, (tuple, list)):
        args = tuple(example)
    else:
        raise SmartpruneError(f"compact: example is a {type(example).__name__}; give a tensor, or a tuple or dict of arguments")
    if any(isinstance(x, Tensor) and x.is_meta for x in torch.utils._pytree.tree_leaves((args, kwargs))):
        raise SmartpruneError("compact: the example is on the meta device and has no values; give an input with values")
    move = torch.utils._pytree.tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, (args, kwargs))
    out: tuple[tuple[Any, ...], dict[str, Any]] = move
    return out


def export(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Graph:
    """The graph of a model in eval mode, as ``torch.export`` records it."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the fused operation of a whole layer would hide its weights
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            exported = torch.export.export(model, args, dict(kwargs), strict=False)
            program = decompose(exported)
    except Exception as error:  # the code of the model and torch.export raise many types of errors
        line = (str(error).strip().splitlines() or [""])[0]
        remedy = "remove control flow that depends on values of the input"
        if "in output, which is not a known type" in line:
            remedy = "let it return tensors, or tuples, lists or dictionaries of them"
        raise SmartpruneError(
            f"compact: torch.export cannot record the model ({type(error).__name__}: {text.escape(line[:200])}); {remedy}"
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    signature = program.graph_signature
    written = set(signature.buffers_to_mutate.values())
    buffers = {node: name for node, name in signature.inputs_to_buffers.items() if name not in written}
    names = {**signature.inputs_to_parameters, **buffers}
    constants = {node: program.constants[name] for node, name in signature.inputs_to_lifted_tensor_constants.items()}
    return Graph(model, list(program.graph.nodes), names, constants)


def where_of(node: fx.Node) -> str:
    """The name of the module that an operation belongs to."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(next(reversed(stack.values()))[0]) if stack else ""


def classes_of(node: fx.Node) -> Iterator[str]:
    """The classes of the modules that an operation lies in."""
    for _, cls in (node.meta.get("nn_module_stack") or {}).values():
        yield cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"


def line_of(node: fx.Node) -> str:
    """The innermost line of code outside torch that runs an operation."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File ")]
    model_lines = [line for line in lines if not any(part in line for part in TORCH_FILES)]
    return (model_lines or lines or [node.name])[-1]
