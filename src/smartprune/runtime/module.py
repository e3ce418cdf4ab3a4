"""The accelerated model: a module that runs compiled programs where it can, and torch elsewhere."""

from __future__ import annotations

import copy
import inspect
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import prune
from torch.utils._pytree import TreeSpec

from ..artifacts.source import copy_of
from ..core.memory import NoMemoryError, address_of
from ..errors import SmartpruneError
from .check import ResultMismatch, compare, random_like
from .cpu import build
from .cpu.pool import shared_pool
from .forks import ForkLock
from .partition import Plan
from .trace.inputs import UnsupportedInput, call_key, graph_key, map_leaves
from .trace.tracer import Opaque, Recorder, describe, trace, version

TOLERANCE = 1e-3  # largest difference of the first result of a plan from torch's, as a share of its largest number
TOLERANCE_INT8 = 0.5  # quantization errors add up in random deep networks; larger ones are a fault
PERTURBATIONS = (1e-7, 1e-6, 1e-5)  # relative changes of weights, as large as those of rounding
MOST_PLANS, MOST_GRAPHS = 32, 8  # kept at a time; the least recently used ones are dropped
STATE_HINT = "the model may keep state between calls, change its inputs, or draw random numbers"

Call = tuple[Any, Any]  # positional and keyword arguments
Ranges = dict[str, dict[str, tuple[float, float]]]  # per graph and node: the smallest and the largest number


@dataclass(frozen=True)
class Options:
    """How a model runs: settings of :func:`smartprune.accelerate`."""

    dtype: str
    threads: int
    reference: bool


@dataclass(eq=False)
class TracedGraph:
    """The graph of calls that differ only in shapes and dtypes, and the packed weights that its plans share."""

    traced: fx.GraphModule
    result: TreeSpec | None
    packed: dict[Any, Any]


@dataclass(eq=False)
class Fallback:
    """Takes the place of a plan for calls that run the model's own code with replaced layers."""

    reason: str
    expected: Any  # the model's own result for the first such call, until it is compared


class Accelerated(Opaque):
    """Computes what the model computes in eval mode, for inference only. Made by :func:`smartprune.accelerate`.

    The first call with new structure, shapes and dtypes of the inputs makes a plan. Calls from several threads take turns.
    Copies and pickles contain the model, and make new plans.
    """

    def __init__(self, model: nn.Module, options: Options, ranges: Ranges | None) -> None:
        super().__init__()
        self.options, self.ranges = options, ranges
        self._model = [model]  # in a list, so that it is not a submodule: plans use copies of its parameters
        self._replaced: list[nn.Module] = []  # the model with replaced layers, once a call needs it
        self._names = [p.name for p in signature_of(model) if p.kind is p.POSITIONAL_OR_KEYWORD]
        self._plans: OrderedDict[Any, Plan | Fallback] = OrderedDict()
        self._graphs: OrderedDict[Any, TracedGraph] = OrderedDict()
        self._own = ForkLock(threading.Lock)
        self._library = None if options.reference else build.load(options.dtype == "int8")
        self._pool = shared_pool(self._library, options.threads)
        super().train(False)

    def train(self, mode: bool = True) -> Accelerated:
        """Has no effect: the module stays in eval mode."""
        return self

    def __reduce__(self) -> Any:
        return type(self), (self._model[0], self.options, self.ranges)

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerated:
        return type(self)(self._model[0], self.options, self.ranges)  # copies share the model, which never changes

    def extra_repr(self) -> str:
        isa = self._library.isa.name if self._library else "reference"
        out = f"{type(self._model[0]).__name__}, {self.options.dtype}, {isa}, threads={self.options.threads}"
        reason = next((plan.reason for plan in self._plans.values() if isinstance(plan, Fallback)), None)
        return out if reason is None else f"{out}, runs the model's own code with replaced layers: {reason}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            if kwargs:
                args, kwargs = self._in_order(args, kwargs)
            values: list[Any] = []
            try:
                key = call_key((args, kwargs) if kwargs else args, values)
                if key not in self._plans:
                    check_memory(values)
            except UnsupportedInput as error:
                return self._run_unsupported(error, args, kwargs)
            with self._pool.lock.lock, self._own.lock:  # in this order: the model may contain another one with the same pool
                plan = self._plans.get(key)
                is_first = plan is None
                if plan is None:
                    plan = self._make_plan((args, kwargs), values)
                    self._plans[key] = plan
                    while len(self._plans) > MOST_PLANS:
                        self._plans.popitem(last=False)
                else:
                    self._plans.move_to_end(key)
                if isinstance(plan, Plan):
                    return plan.run(values)
            try:
                return self._run_fallback(plan, (args, kwargs), values, is_first)
            except SmartpruneError:
                self._plans.pop(key, None)
                raise

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these inputs."""
        self(*args, **kwargs)
        args, kwargs = self._in_order(args, kwargs)
        plan = self._plans[call_key((args, kwargs) if kwargs else args, [])]
        if isinstance(plan, Fallback):
            raise SmartpruneError(f"accelerated model: there is no plan, because the model's own code runs: {plan.reason}")
        return plan

    def measure(self, calls: Sequence[tuple[Any, ...]]) -> None:
        """Records the range of every activation, for int8."""
        assert self.ranges is not None
        for args in calls:
            values: list[Any] = []
            with torch.no_grad():
                try:
                    call_key(args, values)
                    traced = self._trace(args)
                except Exception as error:  # model code may raise anything when it gets a symbol instead of a tensor
                    raise SmartpruneError(
                        "accelerate: torch.fx cannot trace the model, and int8 needs that "
                        f"({type(error).__name__}: {error}); use float32"
                    ) from error
                try:
                    Recorder(traced, self.ranges.setdefault(describe(traced.graph), {})).run(*clone_tensors(values))
                except Exception as error:
                    self._run_model(self._model[0], (args, {}), clone_tensors(values))  # an error of the model itself comes first
                    first_line = next(iter(str(error).splitlines()), "")
                    raise SmartpruneError(
                        f"accelerate: the graph that torch.fx traced does not run ({type(error).__name__}: {first_line}), and int8 "
                        "needs it; use float32"
                    ) from error

    def _trace(self, args: tuple[Any, ...]) -> fx.GraphModule:
        try:
            return self._graph((args, {}), fixed=False).traced
        except Exception:  # control flow may depend on numbers among the inputs
            return self._graph((args, {}), fixed=True).traced

    # ---- making a plan

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Keyword arguments as positional ones, as far as possible, so that equal calls have equal keys."""
        rest = dict(kwargs)
        for name in self._names[len(args) :]:
            if name not in rest:
                break
            args = (*args, rest.pop(name))
        return args, rest

    def _make_plan(self, call: Call, values: list[Any]) -> Plan | Fallback:
        check_arguments(self._model[0], *call)
        # Version counters do not work in inference mode, and results are compared in float32.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            inputs = clone_tensors(values)
            versions = [version(x) for x in state_of(self._model[0])]
            expected = self._run_model(self._model[0], call, inputs)  # raises the model's own errors
            failure: Exception | None = None
            attempts: tuple[bool, ...] = (False, True) if any(not isinstance(x, Tensor) for x in values) else (False,)
            changes_state = versions != [version(x) for x in state_of(self._model[0])]
            if changes_state or any(isinstance(x, Tensor) and version(x) for x in inputs):
                attempts, reason = (), "the model changes its " + ("buffers" if changes_state else "inputs")
            for fixed in attempts:
                try:
                    return self._checked_plan(call, values, fixed, expected)
                except SmartpruneError as error:
                    if self.options.dtype == "int8":
                        raise
                    failure = error
                except Exception as error:  # tracing and lowering arbitrary models may raise anything
                    failure = error
                reason = f"{type(failure).__name__}: {failure}"
            if not attempts or isinstance(failure, ResultMismatch):
                self._check_deterministic(call, values, expected)
        if self.options.dtype == "int8":
            raise SmartpruneError(f"accelerate: int8 needs a model that torch.fx can trace ({reason}); use float32") from failure
        return Fallback(reason, expected)

    def _graph(self, call: Call, fixed: bool) -> TracedGraph:
        key = graph_key(call, fixed), fixed
        if key not in self._graphs:
            self._graphs[key] = TracedGraph(*trace(self._model[0], call, fixed), {})
            while len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _checked_plan(self, call: Call, values: list[Any], fixed: bool, expected: Any) -> Plan:
        """A plan whose first results agree with the model's own, for these inputs and for random ones: an example of zeros
        would hide many errors."""
        graph = self._graph(call, fixed)
        plan = Plan(graph, clone_tensors(values), self.options, self._library, self._pool.address, self._ranges_of(graph))
        compare(plan.recorded, expected, TOLERANCE)
        plan.recorded = None
        try:
            compare(plan.run(clone_tensors(values)), expected, TOLERANCE_INT8 if self.options.dtype == "int8" else TOLERANCE)
        except ResultMismatch as mismatch:
            if self.options.dtype != "int8":
                raise
            raise SmartpruneError(
                f"accelerate: {mismatch}; int8 is too coarse for the model, or the example differs from this input; use float32"
            ) from mismatch
        noise = random_like(values)
        if noise is not None:
            try:
                expected = self._run_model(self._model[0], call, clone_tensors(noise))
            except Exception:  # the model does not accept random numbers
                return plan
            if self.options.dtype == "int8":  # its scales are not made for such numbers: compare only the graph
                compare(plan.run_in_torch(clone_tensors(noise)), expected, TOLERANCE)
            else:
                compare(plan.run(clone_tensors(noise)), expected, TOLERANCE)
        return plan

    def _ranges_of(self, graph: TracedGraph) -> dict[str, tuple[float, float]] | None:
        if self.ranges is None:
            return None
        ranges = self.ranges.get(describe(graph.traced.graph))
        if ranges is None:
            raise SmartpruneError(
                "accelerated model: int8 needs an example for every kind of call, and no example had inputs like these; "
                "add one to example="
            )
        return ranges

    def _check_deterministic(self, call: Call, values: list[Any], expected: Any) -> None:
        try:
            compare(self._run_model(self._model[0], call, clone_tensors(values)), expected, TOLERANCE)
        except ResultMismatch as mismatch:
            raise SmartpruneError(f"accelerate: {mismatch}; {STATE_HINT}") from mismatch

    # ---- the model's own code

    def _run_model(self, model: nn.Module, call: Call, values: Sequence[Any]) -> Any:
        leaves = iter(values)
        args, kwargs = map_leaves(lambda _: next(leaves), call)
        return model(*args, **kwargs)

    def replaced_model(self) -> nn.Module | None:
        """The model with replaced layers, if a call needed it."""
        return self._replaced[0] if self._replaced else None

    def _make_replaced(self) -> nn.Module:
        with self._own.lock:
            if not self._replaced:
                from .fallback import replace_layers  # imports this module

                model = self._model[0]
                shared = {id(p): p for p in model.parameters()}
                self._replaced.append(replace_layers(copy.deepcopy(model, shared), self.options))
            return self._replaced[0]

    def _run_fallback(self, fallback: Fallback, call: Call, values: Sequence[Any], is_first: bool) -> Any:
        model = self._make_replaced()
        if is_first:  # only in the thread that made it, whose inputs gave the expected result
            try:
                compare(self._run_model(model, call, clone_tensors(values)), fallback.expected, TOLERANCE)
            except ResultMismatch as mismatch:
                if not self._is_unstable(call, values, fallback.expected):
                    raise SmartpruneError(f"accelerate: {mismatch}; {STATE_HINT}") from mismatch
            fallback.expected = None
        return self._run_model(model, call, values)

    def _is_unstable(self, call: Call, values: Sequence[Any], expected: Any) -> bool:
        """Whether rounding alone changes the model's own result as much, because it sorts or selects almost equal numbers, as
        detectors do. Then only the results of the replaced layers can be compared."""
        self._check_deterministic(call, list(values), expected)
        for size in PERTURBATIONS:
            try:
                compare(self._run_model(perturbed(self._model[0], size), call, clone_tensors(values)), expected, TOLERANCE)
            except ResultMismatch:
                return True
        return False

    def _run_unsupported(self, error: UnsupportedInput, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.options.dtype == "int8":
            raise SmartpruneError(f"accelerated model: an input is {error}, which int8 does not support; use float32")
        return self._make_replaced()(*args, **kwargs)


def check_memory(values: Sequence[Any]) -> None:
    """Raises :class:`UnsupportedInput` for tensors whose numbers are not in their memory, and an error for freed memory."""
    for value in values:
        if isinstance(value, Tensor):
            try:
                address_of(value, "accelerated model")
            except NoMemoryError:
                raise UnsupportedInput(f"a {type(value).__name__} without memory of its own") from None


def clone_tensors(values: Sequence[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in values]


def perturbed(model: nn.Module, size: float) -> nn.Module:
    """A copy with weights that differ from the model's by about ``size``, relative."""
    out = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for weight in out.parameters():
        if weight.is_floating_point():
            weight.data *= 1 + size * torch.randn(weight.shape, generator=generator, device="cpu")
    return out


def state_of(model: nn.Module) -> list[Tensor]:
    """All tensors that a model can write to."""
    return [*model.parameters(), *model.buffers()]


def signature_of(model: nn.Module) -> list[inspect.Parameter]:
    """The parameters of the model's forward, or none if they are unknown."""
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return []


def check_arguments(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises if an input is missing, or if there are too many."""
    known = signature_of(model)
    try:
        inspect.Signature(known).bind(*args, **kwargs)
    except TypeError as error:
        for place, p in enumerate(known):
            is_single = p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            if is_single and p.default is p.empty and place >= len(args) and p.name not in kwargs:
                raise SmartpruneError(f"accelerated model: the input {p.name!r} is missing") from error
        count = len(args) + len(kwargs)
        raise SmartpruneError(f"accelerated model: takes {len(known)} inputs, and got {count} ({error})") from error


def inference_copy(model: nn.Module) -> nn.Module:
    """An independent copy in float32 and eval mode on the CPU. Masks of torch.nn.utils.prune are applied to its weights."""
    out = copy_of(model, "accelerate")
    for module in out.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, prune.BasePruningMethod):
                name = f"{hook._tensor_name}_orig"
                setattr(module, name, nn.Parameter(getattr(module, name), False))  # other modules may share it unmasked
                prune.remove(module, hook._tensor_name)
    return out.float().requires_grad_(False)
