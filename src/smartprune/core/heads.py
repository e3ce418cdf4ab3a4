"""Output layers: those whose result reaches an output of the model, found in a trace or, without one, by position and name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import nn

from .kinds import is_conv1d
from .trace import MERGE, Node, Trace, operations

NORMS = operations(
    "native_batch_norm batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update "
    "_batch_norm_no_update cudnn_batch_norm miopen_batch_norm native_layer_norm layer_norm native_group_norm group_norm "
    "_fused_rms_norm rms_norm"
)
HIDDEN_ACTIVATIONS = operations(  # those that follow hidden layers; sigmoid, tanh and softmax also follow output layers
    "relu gelu silu hardswish hardtanh leaky_relu elu celu selu mish threshold _prelu_kernel prelu relu6 rrelu"
)
CONCATENATIONS = operations(f"{MERGE} cat concat stack copy index_put _index_put_impl slice_scatter select_scatter where")
SELECTIONS = operations("gather index index_select take take_along_dim")  # their first argument has the values
HEAD_WORDS = {"head", "heads", "classifier", "classifiers", "cls", "logits", "predictor"}


# -- with an example ------------------------------------------------------------------------------------------------------


def heads_in_trace(trace: Trace, constants: Set[int], narrow: Set[int], named: Set[int]) -> set[int]:
    """The parameters, by id, of the layers whose result reaches an output of the model, and no other layer.

    Element-wise and shape operations, resampling and normalization may follow. Where the results of several layers are added or
    concatenated, they are output layers only if none of them is followed by a normalization or a hidden activation, and, if they
    are added, only if they are equally deep or have fewer outputs than inputs: then they are not the end of a residual block.

    ``constants`` are frozen parameters that are not learned, ``narrow`` those with fewer outputs than inputs, and ``named``
    those that have the name of an output layer: they may be added to anything.
    """
    return _Walk(trace, constants, narrow, named).heads()


class _Walk:
    """Walks from the outputs of a model back to its layers."""

    def __init__(self, trace: Trace, constants: Set[int], narrow: Set[int], named: Set[int]) -> None:
        self.nodes, self.outputs = trace.nodes, trace.outputs
        self.constants, self.narrow, self.named = constants, narrow, named
        self.used: set[int] = set()  # layers whose result another layer reads
        self.depth: list[int] = []  # of each node: most layers on a path to it
        self.sources: list[Mapping[int, bool]] = []  # of each node: the layers it is computed from -> whether a hidden layer's
        for number, node in enumerate(self.nodes):
            self._visit(number, node)

    def _visit(self, number: int, node: Node) -> None:
        depth = max((self.depth[i] for i in node.inputs), default=0)
        if self._is_layer(node):
            self.used.update(*(self.sources[i] for i in node.inputs))
            self.depth.append(depth + 1)
            self.sources.append({number: False})
            return
        self.depth.append(depth)
        sources = _joined([self.sources[i] for i in node.inputs])
        hidden = node.op.rstrip("_") in HIDDEN_ACTIVATIONS or node.op in NORMS
        self.sources.append(dict.fromkeys(sources, True) if hidden and sources else sources)

    def _is_layer(self, node: Node) -> bool:
        return bool(node.weights) and not node.weights <= self.constants

    def heads(self) -> set[int]:
        heads: set[int] = set()
        stack, seen = list(self.outputs), set[int]()
        while stack:
            number = stack.pop()
            if number in seen:
                continue
            seen.add(number)
            node = self.nodes[number]
            if self._is_layer(node):
                heads |= node.weights if number not in self.used else set()
                continue
            inputs = node.inputs[:1] if node.op in SELECTIONS else node.inputs
            inputs = tuple(i for i in inputs if self.sources[i])
            paths = [self.sources[i] for i in inputs]
            if all(path.keys() == paths[0].keys() for path in paths) or self._are_outputs(node, _joined(paths)):
                stack.extend(inputs)
            else:
                stack.extend(source for path in paths for source in path if self.nodes[source].weights & self.named)
        return heads

    def _are_outputs(self, node: Node, layers: Mapping[int, bool]) -> bool:
        """Whether several layers whose results are joined are all output layers."""
        if any(layer in self.used or hidden for layer, hidden in layers.items()):
            return False
        if node.op.rstrip("_") in CONCATENATIONS:
            return True
        narrow = all(self.nodes[layer].weights & self.narrow for layer in layers)
        return narrow or len({self.depth[layer] for layer in layers}) == 1


def _joined(paths: Sequence[Mapping[int, bool]]) -> Mapping[int, bool]:
    paths = [path for path in paths if path]
    if len(paths) < 2:
        return paths[0] if paths else {}
    joined: dict[int, bool] = {}
    for path in paths:
        for layer, hidden in path.items():
            joined[layer] = hidden or joined.get(layer, False)
    return joined


# -- by position and name -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Position:
    """A layer, by the name of its module. ``fixed`` layers cannot be chosen: they are frozen, for example."""

    name: str
    module: nn.Module
    fixed: bool


def heads_by_position(layers: Sequence[Position], model: nn.Module) -> dict[str, str]:
    """The layers that are assumed to be output layers, by name, with the reason. ``layers`` is in definition order."""
    free = [layer for layer in layers if not layer.fixed]
    if not free:
        return {}
    last = free[-1].name
    reasons = {layer.name: "output layer, by its name" for layer in _last_of_named_modules(free)}
    reasons |= dict.fromkeys(_parallel(last, free, model), f"output layer, parallel to {last}")
    return reasons | {last: "last layer, assumed to be the classifier"}


def has_head_name(name: str) -> bool:
    """Whether a module name has a word for output layers, and no number before it: numbers count hidden layers."""
    return any(_words(part) & HEAD_WORDS for part in _before_numbers(name))


def _words(part: str) -> set[str]:
    return set(re.split(r"[_\d]+", part.lower()))


def _before_numbers(name: str) -> list[str]:
    parts = name.split(".")
    return parts[: next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))]


def _last_of_named_modules(layers: Iterable[Position]) -> list[Position]:
    """The last layer in each module whose name has a word for output layers."""
    last: dict[str, Position] = {}
    for layer in layers:
        parts = _before_numbers(layer.name)
        for i, part in enumerate(parts):
            if _words(part) & HEAD_WORDS:
                last[".".join(parts[: i + 1])] = layer
    return list(last.values())


def _parallel(name: str, layers: Sequence[Position], model: nn.Module) -> set[str]:
    """The layers that end other branches of a list of parallel branches, of which ``name`` ends one.

    The branches of a list are parallel if they do not fit behind each other: one has other outputs than the next has inputs.
    Lists of the same length in the same module are parallel to each other.
    """
    parts = name.split(".")
    out: set[str] = set()
    for i in range(len(parts) - 1, 0, -1):
        owner = model.get_submodule(".".join(parts[: i - 1]))
        branches = getattr(owner, parts[i - 1], None)
        if not isinstance(branches, nn.ModuleList) or len(branches) < 2:
            continue
        prefix = ".".join(parts[: i - 1])
        for sibling, other in owner.named_children():
            if isinstance(other, nn.ModuleList) and len(other) == len(branches):
                ends = _ends(f"{prefix}.{sibling}" if prefix else sibling, len(other), layers)
                out |= {layer.name for layer in ends} if ends else set()
        return out - {name} if name in out else set()
    return set()


def _ends(prefix: str, count: int, layers: Sequence[Position]) -> list[Position]:
    """The last layers of the branches of a list, if the branches are parallel and have the same structure."""
    ends: list[Position] = []
    shapes: list[tuple[int, int]] = []
    for i in range(count):
        inside = [layer for layer in layers if layer.name == f"{prefix}.{i}" or layer.name.startswith(f"{prefix}.{i}.")]
        if not inside:
            return []
        ends.append(inside[-1])
        shapes.append((_sizes(inside[0].module)[0], _sizes(inside[-1].module)[1]))
    same_place = len({end.name.removeprefix(f"{prefix}.{i}") for i, end in enumerate(ends)}) == 1
    chain = all(shapes[i][1] == shapes[i + 1][0] for i in range(count - 1))
    return ends if same_place and not chain else []


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a layer."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if is_conv1d(module):
        inputs, outputs = module._parameters["weight"].shape  # type: ignore[union-attr]
        return inputs, outputs
    return getattr(module, "in_channels", 0), getattr(module, "out_channels", 0)
