"""Layers: which weights of a model are divided into blocks, which are not, and why not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..errors import SmartpruneError
from ..text import show
from .block import Block, Grid
from .heads import Position, heads_by_position
from .kinds import CONVOLUTIONS, is_convolution, is_layer, stores_inputs_first, user_class, weight_parts
from .memory import check_memory, overlaps
from .transforms import zeros_survive

if TYPE_CHECKING:
    from .observe import Facts

Pattern = str | type[nn.Module]
Patterns = Pattern | Sequence[Pattern]

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # names that wrappers insert into weight names
SPREAD = (nn.DataParallel, nn.parallel.DistributedDataParallel)
OUTPUT, FROZEN, UNREACHED, TRANSFORMED = ("output layer", "frozen", "never used", "transformed")
IMAGE_CHANNELS = 4  # the first convolution is the stem if it reads at most this many channels


@dataclass(frozen=True)
class Layer:
    """One weight that is divided into blocks. ``sites`` lists every module that holds it: a tied weight has several."""

    name: str
    kind: str
    grid: Grid
    start: int  # index of its first block in the block vector
    transposed: bool
    sites: tuple[tuple[str, str], ...]  # (module name, attribute)

    @property
    def n(self) -> int:
        return self.grid.n

    @property
    def stop(self) -> int:
        return self.start + self.grid.n

    @property
    def weight(self) -> str:
        """The name of the weight in ``named_parameters()`` and ``state_dict()``."""
        return weight_name(*self.sites[0])

    @property
    def params(self) -> int:
        return math.prod(self.grid.weight_shape)


@dataclass(frozen=True)
class Skipped:
    """One weight that is not pruned, and the reason."""

    name: str
    kind: str
    shape: tuple[int, ...]
    reason: str
    cause: str = ""  # OUTPUT, FROZEN, UNREACHED or TRANSFORMED; empty for other reasons


@dataclass(frozen=True)
class Reason:
    """Why a weight is not pruned."""

    text: str
    cause: str = ""


@dataclass(frozen=True)
class Candidate:
    """A parameter with two axes or more, in one of the modules that hold it."""

    module_name: str
    attribute: str
    module: nn.Module
    weight: nn.Parameter

    @property
    def name(self) -> str:
        if self.attribute == "weight":
            return self.module_name or "weight"
        return weight_name(self.module_name, self.attribute)

    @property
    def weight_name(self) -> str:
        return weight_name(self.module_name, self.attribute)

    @property
    def kind(self) -> str:
        return user_class(self.module).__name__

    @property
    def in_attention(self) -> bool:
        return isinstance(self.module, nn.MultiheadAttention)

    @property
    def supported(self) -> bool:
        """Whether it is the weight of a layer that can be divided into blocks."""
        return weight_parts(self.module, self.attribute) is not None

    @property
    def lazy(self) -> bool:
        return isinstance(self.weight, nn.UninitializedParameter)

    @property
    def transposed(self) -> bool:
        return stores_inputs_first(self.module)

    @property
    def parts(self) -> int:
        """Segments of the first stored axis that no block crosses: groups, or query, key and value."""
        return weight_parts(self.module, self.attribute) or 1

    def matches(self, patterns: Sequence[Pattern]) -> bool:
        for pattern in patterns:
            if isinstance(pattern, str):
                if fnmatchcase(self.name, pattern) or fnmatchcase(self.module_name, pattern):
                    return True
            elif isinstance(self.module, pattern):
                return True
        return False


def find_layers(
    model: nn.Module, block: Block, include: Patterns = (), skip: Patterns = (), facts: Facts | None = None
) -> tuple[tuple[Layer, ...], tuple[Skipped, ...]]:
    """All weights with two axes or more: those to prune, in definition order, and those to skip, with the reason.

    The following are skipped unless ``include`` names them (by a glob such as ``"head.*"``, or by type): grouped and
    depthwise convolutions, the stem (the first convolution, if it reads at most 4 channels), output layers, frozen
    weights, weights that inference never uses, and weights that a module lists in ``smartprune_skip`` (names within that
    module, globs allowed). ``skip`` skips more layers, and takes precedence over ``include``.

    Weights that are transformed before use, as in weight standardization, are always skipped: their zeros do not survive. So are
    weights that share memory with another parameter: zeros of one would appear in the other.
    ``facts`` come from a run of an example. They say which weights are used and transformed, and which layers are output layers.
    Without them, output layers are found by position and name.
    """
    included, excluded = as_patterns(include, "include"), as_patterns(skip, "skip")
    weights = _weights(model)
    _check_matches((*included, *excluded), weights)
    defaults = _default_reasons(model, weights, facts)
    shared = _shared_memory(weights)

    def reason(users: Sequence[Candidate]) -> Reason | None:
        always = _unprunable(users) or shared.get(id(users[0].weight))
        always = always or _named_in_skip(users, excluded) or _transformed(users, included, facts)
        if always is not None or any(user.matches(included) for user in users):
            return always
        return defaults.get(id(users[0].weight))

    return _divide(weights, block, reason)


def every_layer(model: nn.Module, block: Block) -> tuple[tuple[Layer, ...], tuple[Skipped, ...]]:
    """All weights that can be divided into blocks, also those that are not pruned by default, and those that cannot."""
    return _divide(_weights(model), block, _unprunable)


def _weights(model: nn.Module) -> list[list[Candidate]]:
    """All weights with two axes or more, each with the modules that hold it."""
    by_weight: dict[int, list[Candidate]] = {}
    for candidate in candidates(model):
        by_weight.setdefault(id(candidate.weight), []).append(candidate)
    return list(by_weight.values())


def _divide(
    weights: Sequence[Sequence[Candidate]], block: Block, why_not: Callable[[Sequence[Candidate]], Reason | None]
) -> tuple[tuple[Layer, ...], tuple[Skipped, ...]]:
    layers: list[Layer] = []
    skipped: list[Skipped] = []
    start = 0
    for users in weights:
        first, reason = users[0], why_not(users)
        if reason is None:
            try:
                grid = block.grid(tuple(first.weight.shape), first.parts, first.transposed)
            except SmartpruneError as error:
                reason = Reason(str(error))
        if reason is None:
            check_memory(first.weight, first.weight_name)
            sites = tuple((user.module_name, user.attribute) for user in users)
            layers.append(Layer(first.name, first.kind, grid, start, first.transposed, sites))
            start += grid.n
        else:
            shape = () if first.lazy else tuple(first.weight.shape)
            skipped.append(Skipped(first.name, first.kind, shape, reason.text, reason.cause))
    return tuple(layers), tuple(skipped)


def candidates(model: nn.Module) -> Iterator[Candidate]:
    """Every parameter with two axes or more, once for each module that holds it."""
    for module_name, module in model.named_modules():
        for attribute, weight in module._parameters.items():
            if weight is not None and (isinstance(weight, nn.UninitializedParameter) or weight.dim() > 1):
                yield Candidate(module_name, attribute, module, weight)


def as_patterns(value: Patterns, where: str) -> tuple[Pattern, ...]:
    """One pattern or several as a tuple. Raises for values that are neither names nor module types."""
    patterns = tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, type)) else (value,)
    for pattern in patterns:
        if not (isinstance(pattern, str) or (isinstance(pattern, type) and issubclass(pattern, nn.Module))):
            raise SmartpruneError(f"{where}: {show(pattern)} is neither a layer name (globs allowed) nor a module type")
    return patterns


def _check_matches(patterns: Sequence[Pattern], weights: Sequence[Sequence[Candidate]]) -> None:
    """Raises if a pattern matches no weight: it is probably misspelled."""
    for pattern in patterns:
        if not any(user.matches([pattern]) for users in weights for user in users):
            shown = repr(pattern) if isinstance(pattern, str) else pattern.__name__
            raise SmartpruneError(
                f"include/skip: {shown} matches no layer of the model; it has: "
                f"{', '.join(users[0].name for users in weights[:12])}{', ...' if len(weights) > 12 else ''}"
            )


def _default_reasons(model: nn.Module, weights: Sequence[Sequence[Candidate]], facts: Facts | None) -> dict[int, Reason]:
    """Why weights are skipped unless ``include`` names them, by the id of the weight. Later reasons replace earlier ones."""
    reasons: dict[int, Reason] = {}
    supported = [users[0] for users in weights if users[0].supported]
    stem = next((weight for weight in supported if isinstance(weight.module, CONVOLUTIONS)), None)
    if stem is not None and not stem.lazy and stem.weight.shape[1] <= IMAGE_CHANNELS:
        channels = stem.weight.shape[1]
        reasons[id(stem.weight)] = Reason(f"stem: reads the image ({channels} channel{'' if channels == 1 else 's'})")
    reasons |= _output_layers(model, weights, facts)
    for weight in supported:
        if weight.parts > 1 and is_convolution(weight.module) and not weight.lazy:
            depthwise = weight.weight.shape[1] == 1
            kind = "depthwise convolution" if depthwise else f"grouped convolution ({weight.parts} groups)"
            reasons[id(weight.weight)] = Reason(kind)
    for weight in supported:
        if not weight.weight.requires_grad:
            reasons[id(weight.weight)] = Reason("frozen: requires_grad is False", FROZEN)
        if facts is not None and id(weight.weight) in facts.unreached:
            reasons[id(weight.weight)] = Reason("inference on the example never uses it", UNREACHED)
    for name, module in model.named_modules():
        where = f"{name}.smartprune_skip" if name else "smartprune_skip"
        if patterns := as_patterns(getattr(module, "smartprune_skip", ()), where):  # a pattern need not match: heads are optional
            reasons |= {id(c.weight): Reason("listed in smartprune_skip") for c in candidates(module) if c.matches(patterns)}
    return reasons


def _output_layers(model: nn.Module, weights: Sequence[Sequence[Candidate]], facts: Facts | None) -> dict[int, Reason]:
    if facts is not None:
        return dict.fromkeys(facts.heads, Reason("output layer: no other layer reads its result", OUTPUT))
    users = {user.module_name: user for user in candidates(model) if user.supported}  # a tied weight has several
    trained = any(user.weight.requires_grad for user in users.values())
    positions = [Position(name, user.module, trained and not user.weight.requires_grad) for name, user in users.items()]
    return {id(users[name].weight): Reason(text, OUTPUT) for name, text in heads_by_position(positions, model).items()}


def _unprunable(users: Sequence[Candidate]) -> Reason | None:
    """Why a weight cannot be pruned even if ``include`` names it."""
    first = users[0]
    layers = [user for user in users if user.supported]
    if isinstance(first.module, nn.Embedding) and layers:
        return Reason(f"embedding, tied to the output layer {layers[-1].name}", OUTPUT)
    text = _unsupported(first) or _tie_mismatch(users)
    return None if text is None else Reason(text)


def _shared_memory(weights: Sequence[Sequence[Candidate]]) -> dict[int, Reason]:
    """Why weights cannot be pruned whose numbers are also those of another parameter, by the id of the weight."""
    first = [users[0] for users in weights if not users[0].lazy]
    reasons: dict[int, Reason] = {}
    for i, j in overlaps([candidate.weight.detach() for candidate in first]):
        for one, other in ((first[i], first[j]), (first[j], first[i])):
            text = f"shares memory with {other.weight_name}, but is another parameter: assign one parameter to both"
            text = "several of its numbers share one place in memory: clone it" if one is other else text
            reasons[id(one.weight)] = Reason(text)
    return reasons


def _named_in_skip(users: Sequence[Candidate], excluded: Sequence[Pattern]) -> Reason | None:
    return Reason("named in skip") if any(user.matches(excluded) for user in users) else None


def _transformed(users: Sequence[Candidate], included: Sequence[Pattern], facts: Facts | None) -> Reason | None:
    """Why zeros of a weight do not survive, or None if they do. Raises if ``include`` gives its full name."""
    weight = users[0]
    if facts is not None and id(weight.weight) in facts.transformed:
        text = "the model transforms this weight before use, so zeros do not survive"
    elif not all(zeros_survive(user.module) for user in users):
        text = "transforms its weight (weight standardization?), so zeros do not survive"
    else:
        return None
    names = [pattern for pattern in included if isinstance(pattern, str) and not set(pattern) & set("*?[")]
    if any(user.matches(names) for user in users):
        raise SmartpruneError(
            f"include: {weight.name} cannot be pruned: {text}, and the receipt would count zeros that inference does not have; "
            "leave it out of include, or make the layer compute with its weight itself"
        )
    return Reason(text, TRANSFORMED)


def _unsupported(candidate: Candidate) -> str | None:
    """Why a weight cannot be pruned even if ``include`` names it."""
    weight = candidate.weight
    if candidate.lazy:
        return "lazy layer without a shape yet: run one forward pass first"
    if isinstance(candidate.module, torch.jit.ScriptModule):
        return "scripted module: prune the model before scripting it"
    if isinstance(candidate.module, parametrize.ParametrizationList):
        return "already parametrized: remove the parametrization first"
    if is_layer(candidate.module) and not candidate.supported:
        return f"{candidate.attribute} is not the layer's weight (the weight may be computed from it)"
    if not candidate.supported:
        return _no_layer(candidate)
    if not weight.is_floating_point():
        return f"{weight.dtype} weights cannot be trained"
    if weight.layout is not torch.strided:
        return f"{weight.layout} weights are not dense"
    if weight.numel() == 0:
        return "no weights"
    return None


def _no_layer(candidate: Candidate) -> str:
    """Why a parameter is not the weight of a layer with blocks, and a replacement if there is one."""
    kind, attribute = candidate.kind, candidate.attribute
    if isinstance(candidate.module, nn.RNNBase):
        return f"{kind} passes its weights to torch as a list, so they cannot be masked: use {kind}Cell to prune them"
    if candidate.weight.dim() == 3 and "expert" in f"{candidate.module_name}.{attribute} {kind}".lower():
        return f"stack of {candidate.weight.shape[0]} experts: use one nn.Linear for each expert to prune them"
    if candidate.in_attention:
        return f"{attribute} is a bias of attention, not a weight"
    return f"{kind} is neither a convolution nor a linear layer"


def _tie_mismatch(users: Sequence[Candidate]) -> str | None:
    """Why a tied weight cannot be pruned: all modules that hold it must interpret its axes in the same way."""
    first = users[0]
    for other in users[1:]:
        if not other.supported or (other.parts, other.transposed) != (first.parts, first.transposed):
            return f"tied to {other.name} ({other.kind}), which reads its axes differently"
    return None


def weight_name(module_name: str, attribute: str) -> str:
    """The name of a weight in ``named_parameters()`` and ``state_dict()``."""
    return f"{module_name}.{attribute}" if module_name else attribute


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers for compilation and data parallelism."""
    while isinstance(model, SPREAD) or "_orig_mod" in model._modules:
        model = model.get_submodule("module" if isinstance(model, SPREAD) else "_orig_mod")
    return model


def plain_name(name: str) -> str:
    """A weight name without what wrappers insert: DataParallel, torch.compile, checkpointing and FSDP."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)
