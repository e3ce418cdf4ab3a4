"""Layers: which weights of a model are cut into blocks, which are not, and why not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..errors import SmartpruneError
from .block import Block, Grid
from .kinds import CONVOLUTIONS, LAYER_TYPES, TRANSPOSED, user_class
from .transforms import zeros_survive

Pattern = str | type[nn.Module]
Patterns = Pattern | Sequence[Pattern]

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # what these put into names of weights
IMAGE_CHANNELS = 4  # a first convolution that reads at most this many channels is taken for the stem


@dataclass(frozen=True)
class Layer:
    """One weight that is cut into blocks. ``sites`` are all places that use it (tied weights have several)."""

    name: str
    kind: str
    grid: Grid
    start: int
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
        module, attribute = self.sites[0]
        return f"{module}.{attribute}" if module else attribute

    @property
    def params(self) -> int:
        return math.prod(self.grid.weight_shape)


@dataclass(frozen=True)
class Skipped:
    """One weight that is left alone, and the reason."""

    name: str
    kind: str
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Candidate:
    module_name: str
    attribute: str
    module: nn.Module
    weight: nn.Parameter

    @property
    def name(self) -> str:
        if self.attribute == "weight":
            return self.module_name or "weight"
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute

    @property
    def kind(self) -> str:
        return user_class(self.module).__name__

    @property
    def cuttable(self) -> bool:
        if isinstance(self.module, nn.MultiheadAttention):
            return self.attribute == "in_proj_weight"
        return self.attribute == "weight" and isinstance(self.module, LAYER_TYPES)

    @property
    def transposed(self) -> bool:
        return isinstance(self.module, TRANSPOSED)

    @property
    def parts(self) -> int:
        """How many stretches of the first stored axis no block may cross: groups, or query, key and value."""
        if isinstance(self.module, nn.MultiheadAttention):
            return 3
        return int(getattr(self.module, "groups", 1))

    def matches(self, patterns: Sequence[Pattern]) -> bool:
        for pattern in patterns:
            if isinstance(pattern, str):
                if fnmatchcase(self.name, pattern) or fnmatchcase(self.module_name, pattern):
                    return True
            elif isinstance(self.module, pattern):
                return True
        return False


def find_layers(
    model: nn.Module, block: Block, include: Patterns = (), skip: Patterns = ()
) -> tuple[tuple[Layer, ...], tuple[Skipped, ...]]:
    """All weights with two axes or more: those to be cut, in definition order, and those left alone, with the reason.

    Left alone unless ``include`` names them (by glob such as ``"head.*"`` or by type): grouped and depthwise
    convolutions, the stem that reads the image (the first convolution, if it reads at most 4 channels), the
    classifier (the last layer), layers whose own code makes other numbers of zeros (weight standardization), and what a
    module of the model lists in ``smartprune_skip`` (names within that module, globs allowed). ``skip`` takes layers out,
    and wins over ``include``.
    """
    wanted, unwanted = as_patterns(include, "include"), as_patterns(skip, "skip")
    sites: dict[int, list[Candidate]] = {}
    for candidate in candidates(model):
        sites.setdefault(id(candidate.weight), []).append(candidate)
    firsts = [same[0] for same in sites.values()]
    cuttable = [c for c in firsts if c.cuttable]
    stem = next((c for c in cuttable if isinstance(c.module, CONVOLUTIONS)), None)
    if stem is not None and (_lazy(stem.weight) or stem.weight.shape[1] > IMAGE_CHANNELS):
        stem = None
    last = cuttable[-1] if cuttable else None
    spared = _spared(model)
    for pattern in (*wanted, *unwanted):
        if not any(c.matches([pattern]) for same in sites.values() for c in same):
            raise SmartpruneError(
                f"include/skip: {_shown(pattern)} matches no layer of the model; it has: "
                f"{', '.join(c.name for c in firsts[:12])}{', ...' if len(firsts) > 12 else ''}"
            )
    layers: list[Layer] = []
    skipped: list[Skipped] = []
    start = 0
    for same in sites.values():
        c = same[0]
        reason = _refusal(c) or _mismatch(same)
        if reason is None and any(other.matches(unwanted) for other in same):
            reason = "named by skip"
        if reason is None and not any(other.matches(wanted) for other in same):
            if id(c.weight) in spared:
                reason = "the model asks to leave it alone"
            elif c.parts > 1 and not isinstance(c.module, nn.MultiheadAttention):
                reason = "depthwise convolution" if c.weight.shape[1] == 1 else f"grouped convolution ({c.parts} groups)"
            elif c is last:
                reason = "last layer, taken for the classifier"
            elif c is stem:
                reason = f"stem: reads the image ({c.weight.shape[1]} channels)"
            elif not zeros_survive(c.module):
                reason = "computes with numbers that are not zero where its weight is (weight standardization?)"
        if reason is None:
            try:
                grid = block.grid(tuple(c.weight.shape), c.parts, c.transposed)
            except SmartpruneError as error:
                reason = str(error)
        if reason is None:
            layers.append(Layer(c.name, c.kind, grid, start, c.transposed, tuple((s.module_name, s.attribute) for s in same)))
            start += grid.n
        else:
            skipped.append(Skipped(c.name, c.kind, () if _lazy(c.weight) else tuple(c.weight.shape), reason))
    return tuple(layers), tuple(skipped)


def candidates(model: nn.Module) -> Iterator[Candidate]:
    """Every parameter with two axes or more, once per module that holds it."""
    for module_name, module in model.named_modules():
        for attribute, weight in module._parameters.items():
            if weight is not None and (isinstance(weight, nn.UninitializedParameter) or weight.dim() > 1):
                yield Candidate(module_name, attribute, module, weight)


def _spared(model: nn.Module) -> set[int]:
    """The ids of all weights that a module lists in ``smartprune_skip``. A pattern may match nothing: heads come and go."""
    out: set[int] = set()
    for name, module in model.named_modules():
        where = f"{name}.smartprune_skip" if name else "smartprune_skip"
        if patterns := as_patterns(getattr(module, "smartprune_skip", ()), where):
            out |= {id(c.weight) for c in candidates(module) if c.matches(patterns)}
    return out


def as_patterns(value: Patterns, where: str) -> tuple[Pattern, ...]:
    out = tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, type)) else (value,)
    for pattern in out:
        if not (isinstance(pattern, str) or (isinstance(pattern, type) and issubclass(pattern, nn.Module))):
            raise SmartpruneError(f"{where}: {pattern!r} is neither a layer name (globs allowed) nor a module type")
    return out


def _shown(pattern: Pattern) -> str:
    return repr(pattern) if isinstance(pattern, str) else pattern.__name__


def _lazy(weight: nn.Parameter) -> bool:
    return isinstance(weight, nn.UninitializedParameter)


def _refusal(c: Candidate) -> str | None:
    """Why a weight cannot be cut at all, whatever the user asks for."""
    if _lazy(c.weight):
        return "lazy layer without a shape yet: run one forward pass first"
    if isinstance(c.module, torch.jit.ScriptModule):
        return "scripted module: prune the model before scripting it"
    if isinstance(c.module, parametrize.ParametrizationList):
        return "already parametrized: remove the parametrization first"
    if isinstance(c.module, nn.MultiheadAttention) and not c.cuttable:
        return "attention with separate query, key and value weights"
    if isinstance(c.module, LAYER_TYPES) and not c.cuttable:
        return f"not the layer's weight: {c.attribute} is what it is made from, or a parameter of its own"
    if not c.cuttable:
        return f"{c.kind} is neither a convolution nor a linear layer"
    if not c.weight.is_floating_point():
        return f"{c.weight.dtype} weights cannot be trained"
    if c.weight.layout is not torch.strided:
        return f"{c.weight.layout} weights are not dense"
    if c.weight.numel() == 0:
        return "no weights"
    return None


def _mismatch(same: Sequence[Candidate]) -> str | None:
    """Why a tied weight cannot be cut: its users must agree on what an output and an input channel is."""
    first = same[0]
    for other in same[1:]:
        if not other.cuttable or (other.parts, other.transposed) != (first.parts, first.transposed):
            return f"tied to {other.name} ({other.kind}), which reads its axes differently"
    return None


def plain_name(name: str) -> str:
    """The name of a tensor without what wrappers put into it: those of data-parallel, compiled and checkpointed models."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)
