"""Layers: which weights of a model are cut into blocks, which are not, and why not."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from .block import Block, Grid
from .errors import SmartpruneError
from .shards import is_sharded, whole

Pattern = str | type[nn.Module]
Patterns = Pattern | Sequence[Pattern]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
TRANSPOSING = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
COMPUTING = (F.linear, F.conv1d, F.conv2d, F.conv3d, *TRANSPOSING)
SMALLEST_SHARE = 1e-12
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
        # a masked layer's class is a stand-in for the user's: show the user's
        cls = getattr(type(self.module), "_smartprune_class", type(self.module))
        return cls.__name__

    @property
    def cuttable(self) -> bool:
        if isinstance(self.module, nn.MultiheadAttention):
            return self.attribute == "in_proj_weight"
        return self.attribute == "weight" and isinstance(self.module, (*CONVOLUTIONS, *TRANSPOSED, nn.Linear))

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


def find(
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
            elif not zeros_stay(c.module):
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
    if isinstance(c.module, (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)) and not c.cuttable:
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


def zeros_stay(module: nn.Module) -> bool:
    """Whether a zero in a layer's weight is a zero in what the layer computes with. Code that first subtracts a mean, say,
    makes another number of it. Tried on a copy, with a weight whose first input channel is all zero."""
    cls = getattr(type(module), "_smartprune_class", type(module))
    stored = module._parameters.get("weight")
    if cls.__module__.startswith("torch.") or module._modules or stored is None or stored.is_meta or is_sharded(stored):
        return True
    axis, used = 0 if isinstance(module, TRANSPOSED) else 1, _Used()
    try:
        probe = copy.copy(module)
        held = vars(module).items()  # a layer that keeps what it made in a dictionary, say, must not find what was made here
        probe.__dict__.update({name: copy.copy(value) for name, value in held if isinstance(value, (dict, list, set))})
        probe.__class__, probe.training = cls, False
        probe._buffers = {name: None if value is None else value.clone() for name, value in module._buffers.items()}
        weight = torch.linspace(1, 2, stored.numel()).reshape(stored.shape).to(stored)
        weight.select(axis, 0).zero_()
        others = {name: value for name, value in module._parameters.items() if value is not None}
        ones = {name: nn.Parameter(torch.ones_like(value)) for name, value in others.items()}  # a gain may start at zero
        probe._parameters = {**module._parameters, **ones, "weight": nn.Parameter(weight)}
        sizes = zip(getattr(probe, "kernel_size", ()), getattr(probe, "dilation", ()), strict=True)
        x = weight.new_ones(1, getattr(probe, "in_channels", stored.shape[1]), *(1 + (size - 1) * step for size, step in sizes))
        with torch.no_grad(), torch.random.fork_rng([stored.device] if stored.is_cuda else []), used:
            cls.forward(probe, x)
    except Exception:  # whatever the layer's own code raises when it is not called as it is used to
        return True
    made = [bool(weight.select(axis, 0).any()) for weight in used.weights if weight.shape == stored.shape]
    return not made or not all(made)  # others of that shape may be parameters of the layer's own


class _Used(TorchFunctionMode):
    """Notes the weights that linear layers and convolutions are computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in COMPUTING:
            self.weights.append(args[1] if len(args) > 1 else kwargs["weight"])
        return func(*args, **kwargs)


def plain_name(name: str) -> str:
    """The name of a tensor without what wrappers put into it: those of data-parallel, compiled and checkpointed models."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


class Blocks:
    """All blocks of a model as one flat vector of ``n`` entries: what a method sees.

    ``cost`` [n] and ``limit`` are the budget (``sum(cost * mask) <= limit``), ``layer`` [n] the number of each block's
    layer, ``sizes`` [n] its real elements, ``counts`` [number of layers] the blocks of each layer; all are where the weights
    are. ``weights`` are the model's own parameters, in the order of ``layers``.
    """

    def __init__(
        self, model: nn.Module, layers: tuple[Layer, ...], cost: Tensor | None, limit: int, min_keep: Tensor | None
    ) -> None:
        self.model = model
        self.layers = layers
        self.n = layers[-1].stop if layers else 0
        self.total = self.n if cost is None else int(cost.sum())  # what all blocks together cost
        self._cost = cost
        self._soft_cost = None if cost is None else cost.to(torch.float32)
        self.limit = limit
        self.min_keep = min_keep  # [number of layers], or None without a floor
        self._owners = [(model.get_submodule(layer.sites[0][0]), layer.sites[0][1]) for layer in layers]
        self.sizes = torch.cat([layer.grid.sizes() for layer in layers])
        self.layer = torch.repeat_interleave(torch.tensor([layer.n for layer in layers], device="cpu"))
        self.to(self.device)

    def to(self, device: torch.device) -> None:
        """Takes along what methods read: a copy from the host's memory at every step would be waited for."""
        self.sizes, self.layer = self.sizes.to(device), self.layer.to(device)
        self.counts = torch.tensor([layer.n for layer in self.layers], device=device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "counts" not in state:  # saved before there were any
            self.to(self.layer.device)

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights as stored, unmasked."""
        return [self.weights_at(index) for index in range(len(self._owners))]

    def weights_at(self, index: int) -> nn.Parameter:
        """The weight of layer ``index`` as stored."""
        owner, name = self._owners[index]
        weight = owner._parameters.get(name)
        if weight is None:
            raise SmartpruneError(
                f"layer {self.layers[index].name} has no parameter {name!r} any more: it was taken away or replaced (by "
                "weight_norm, a parametrization or torch.nn.utils.prune, say) after attach; do that before you attach"
            )
        return weight

    @property
    def device(self) -> torch.device:
        return self.weights_at(0).device

    @property
    def cost(self) -> Tensor | None:
        """Cost of every block in integers, on the weights' device; None where every block costs one."""
        if self._cost is not None and self._cost.device != self.device:
            self._cost = _moved(self._cost, self.device)
        return self._cost

    @property
    def soft_cost(self) -> Tensor | None:
        """The same in float32, for the soft top-k."""
        if self._soft_cost is not None and self._soft_cost.device != self.device:
            self._soft_cost = _moved(self._soft_cost, self.device)
        return self._soft_cost

    def sum(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Sum of ``function(weight)``, of a float32 weight, over every block, [n] on the weights' device."""
        with torch.no_grad():
            pairs = zip(self.layers, self.weights, strict=True)
            parts = [layer.grid.sum(function(whole(w.detach()).float())) for layer, w in pairs]
            return torch.cat([part.to(self.device) for part in parts])

    def mean(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Mean of ``function(weight)``, of a float32 weight, over every block's real elements, [n]."""
        return self.sum(function) / self.sizes.to(self.device)

    def norms(self) -> Tensor:
        """L2 norm of every block, float32 [n]; squares are added in float64, which has room for those of every float32."""
        return self.sum(_squared).sqrt().float()

    def share(self) -> Tensor:
        """Logarithm of every block's share of its layer: its mean square over the sum of those that are not smaller, float32 [n].

        The largest block of any layer has 0, so that among all layers no layer's best is far down; and the scale of a layer,
        which a batch norm behind it hides from the loss, has no say (LAMP, Lee et al. 2021, on blocks). A layer of zeros
        has the lowest value there is.
        """
        squares = self.mean(_squared)
        layer = self.layer.to(squares.device)
        largest = squares.new_zeros(len(self.layers)).scatter_reduce_(0, layer, squares, "amax")
        squares = squares / torch.where(largest > 0, largest, 1.0)[layer]  # sums run over all layers: none may drown another
        order = squares.argsort(descending=True, stable=True)
        order = order[layer[order].argsort(stable=True)]  # by layer, and within it from the largest
        # integers add to the same bits in any order, as a parallel running sum of floats does not; no sum reaches 2 ** 62
        unit = 2.0 ** (62 - self.n.bit_length())
        running = (squares[order] * unit).round().long().cumsum(0)
        counts = self.counts.to(squares.device)
        first = counts.cumsum(0) - counts
        before = torch.where(first > 0, running[first - 1], 0)
        larger = torch.empty_like(squares)
        larger[order] = (running - before[layer[order]]).double() / unit
        return torch.where(squares == 0, 0.0, squares / larger).clamp(min=SMALLEST_SHARE).log().float()

    def squares(self) -> Tensor:
        """Sum of squared weights of every block, float32 [n]; gradients reach the weights."""
        pairs = zip(self.layers, self.weights, strict=True)
        return torch.cat([layer.grid.sum(weight.float().square()) for layer, weight in pairs])

    def per_layer(self, values: Tensor) -> Tensor:
        """Sum of a value per block over each layer, [number of layers]."""
        index = self.layer.to(values.device)
        return values.new_zeros(len(self.layers)).index_add_(0, index, values)


def _squared(weight: Tensor) -> Tensor:
    return weight.double().square()


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On another device, to stay: what is made in inference mode is of no use to a backward pass later."""
    with torch.inference_mode(False):
        return tensor.to(device)
