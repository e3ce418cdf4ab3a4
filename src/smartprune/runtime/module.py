"""The accelerated model: a module that runs compiled programs where it can, and torch elsewhere."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import prune
from torch.utils._pytree import TreeSpec

from ..artifacts.source import copy_of
from ..errors import SmartpruneError
from . import choice
from .arguments import Call, check_arguments, check_memory, in_order, names_of
from .check import ResultMismatch, compare, random_like
from .choice import Timing
from .cpu import build
from .cpu.pool import shared_pool
from .forks import ForkLock
from .partition import Plan
from .trace.exported import export
from .trace.inputs import UnsupportedInput, call_key, graph_key, map_leaves
from .trace.tracer import Opaque, Recorder, describe, trace, version

TOLERANCE = 1e-3  # largest difference of the first result of a plan from torch's, as a share of its largest number
TOLERANCES = {"float32": TOLERANCE, "float16": 3e-2, "int8": 0.5}  # int8 errors add up in random deep networks
PERTURBATIONS = (1e-7, 1e-6, 1e-5)  # relative changes of weights, about as large as rounding errors
MOST_PLANS, MOST_GRAPHS = 32, 8  # kept at a time; the least recently used ones are dropped
MOST_EXPORTS = 4  # exported graphs hold for one shape and take seconds: calls with more shapes run the model's own code
STATE_HINT = "the model may keep state between calls, change its inputs, or draw random numbers"

Ranges = dict[str, dict[str, tuple[float, float]]]  # per graph and node: the smallest and the largest number


@dataclass(frozen=True)
class Options:
    """How a model runs: settings of :func:`smartprune.accelerate`."""

    dtype: str
    threads: int
    reference: bool
    timed: bool = False  # whether torch runs what it computes faster than the kernels

    @property
    def is_float32(self) -> bool:
        """Other types need the ranges of activations, and the model's own code does not run instead of a graph."""
        return self.dtype == "float32"


@dataclass(eq=False)
class TracedGraph:
    """The graph of calls that differ only in shapes and dtypes, and the packed weights that its plans share."""

    traced: fx.GraphModule
    result: TreeSpec | None
    packed: dict[Any, Any]


@dataclass(eq=False)
class Fallback:
    """Takes the place of a plan for calls that run the model's own code, with replaced layers or, if torch is faster, as it is."""

    reason: str
    expected: Any = None  # the model's own result for the first such call, until it is compared
    timing: Timing | None = None  # if torch is faster

    def __str__(self) -> str:
        if self.timing is not None:
            return f"torch runs the model, because it is faster for these inputs: {self.timing}"
        return f"runs the model's own code with replaced layers: {self.reason}"


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
        self._names = names_of(model)
        self._plans: OrderedDict[Any, Plan | Fallback] = OrderedDict()
        self._graphs: OrderedDict[Any, TracedGraph] = OrderedDict()
        self._exports = 0
        self._own = ForkLock(threading.Lock)
        self._library = None if options.reference else build.load(options.dtype)
        self._pool = shared_pool(self._library, options.threads)
        super().train(False)

    def train(self, mode: bool = True) -> Accelerated:
        """Has no effect: the module stays in eval mode."""
        return self

    def __reduce__(self) -> Any:
        return type(self), (self._model[0], self.options, self.ranges)

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerated:
        return type(self)(self._model[0], self.options, self.ranges)  # copies share the model, which never changes

    def __getattr__(self, name: str) -> Any:
        """Attributes of the model, such as a config. Its methods run with replaced layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_model")
            if model is None or name.startswith("__") or not hasattr(model[0], name):
                raise
        is_layer = not any(True for _ in model[0].children())
        return getattr(model[0] if is_layer else self._make_replaced(), name)

    def extra_repr(self) -> str:
        isa = self._library.isa.name if self._library else "reference"
        out = f"{type(self._model[0]).__name__}, {self.options.dtype}, {isa}, threads={self.options.threads}"
        notes = dict.fromkeys(note for plan in self._plans.values() if (note := str(plan)))
        exported = ["traced by torch.export"] if any(tracer == "export" for _, tracer in self._graphs) else []
        return ", ".join((out, *exported, *notes))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            if kwargs:
                args, kwargs = in_order(self._names, args, kwargs)
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
        args, kwargs = in_order(self._names, args, kwargs)
        plan = self._plans[call_key((args, kwargs) if kwargs else args, [])]
        if isinstance(plan, Fallback):
            raise SmartpruneError(f"accelerated model: there is no plan, because the model's own code runs: {plan}")
        return plan

    def measure(self, calls: Sequence[Call]) -> None:
        """Records the range of every activation, for int8 and float16."""
        assert self.ranges is not None
        for given in calls:
            call = in_order(self._names, *given)
            values: list[Any] = []
            with torch.no_grad():
                try:
                    call_key(call, values)
                    traced = self._trace(call)
                except Exception as error:  # model code may raise anything when it gets a symbol instead of a tensor
                    raise SmartpruneError(
                        f"accelerate: neither torch.fx nor torch.export can trace the model, and {self.options.dtype} needs that "
                        f"({type(error).__name__}: {error}); use float32"
                    ) from error
                try:
                    Recorder(traced, self.ranges.setdefault(describe(traced.graph), {})).run(*clone_tensors(values))
                except Exception as error:
                    self._run_model(self._model[0], call, clone_tensors(values))  # an error of the model itself comes first
                    first_line = next(iter(str(error).splitlines()), "")
                    raise SmartpruneError(
                        f"accelerate: the traced graph does not run ({type(error).__name__}: {first_line}), and "
                        f"{self.options.dtype} needs it; use float32"
                    ) from error

    def _trace(self, call: Call) -> fx.GraphModule:
        for tracer in ("fx", "fixed"):
            try:
                return self._graph(call, tracer).traced
            except Exception:  # control flow may depend on numbers among the inputs, or on their shapes
                continue
        return self._graph(call, "export").traced

    # ---- making a plan

    def _make_plan(self, call: Call, values: list[Any]) -> Plan | Fallback:
        check_arguments(self._model[0], *call)
        # Version counters do not work in inference mode, and results are compared in float32.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            inputs = clone_tensors(values)
            versions = [version(x) for x in state_of(self._model[0])]
            expected = self._run_model(self._model[0], call, inputs)  # raises the model's own errors
            failure: Exception | None = None
            attempts: tuple[str, ...] = ("fx", "fixed") if any(not isinstance(x, Tensor) for x in values) else ("fx",)
            attempts += ("export",) if self._can_export(call) else ()
            changes_state = versions != [version(x) for x in state_of(self._model[0])]
            if changes_state or any(isinstance(x, Tensor) and version(x) for x in inputs):
                attempts, reason = (), "the model changes its " + ("buffers" if changes_state else "inputs")
            for tracer in attempts:
                try:
                    plan = self._checked_plan(call, values, tracer, expected)
                    return self._faster(plan, call, values)
                except SmartpruneError as error:
                    if not self.options.is_float32:
                        raise
                    failure = error
                except Exception as error:  # tracing and lowering arbitrary models may raise anything
                    failure = error
                reason = f"{type(failure).__name__}: {failure}"
            if not attempts or isinstance(failure, ResultMismatch):
                self._check_deterministic(call, values, expected)
        if not self.options.is_float32:
            raise SmartpruneError(
                f"accelerate: {self.options.dtype} needs a model that can be traced ({reason}); use float32"
            ) from failure
        return Fallback(reason, expected)

    def _can_export(self, call: Call) -> bool:
        """Whether calls of this shape have an exported graph, or may get one. Types other than float32 need the graph
        whose ranges were measured."""
        if not self.options.is_float32 and any((graph_key(call, t == "fixed"), t) in self._graphs for t in ("fx", "fixed")):
            return False
        return self._exports < MOST_EXPORTS or (call_key(call, []), "export") in self._graphs

    def _graph(self, call: Call, tracer: str) -> TracedGraph:
        """The graph that one of the tracers records. ``fixed`` makes numbers constants; ``export`` is for one shape."""
        key = call_key(call, []) if tracer == "export" else graph_key(call, tracer == "fixed"), tracer
        if key not in self._graphs:
            if tracer == "export":
                self._exports += 1
                recorded = export(self._model[0], call)
            else:
                recorded = trace(self._model[0], call, tracer == "fixed")
            self._graphs[key] = TracedGraph(*recorded, {})
            while len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _faster(self, plan: Plan, call: Call, values: list[Any]) -> Plan | Fallback:
        """The plan, with those parts in torch that are faster there, or the model's own code if that is faster."""
        if not self.options.timed or not plan.programs:
            return plan
        if len(plan.parts) > 1:
            plan.run_faster_parts_in_torch(clone_tensors(values))
        inputs = clone_tensors(values)
        timing = choice.time_both(lambda: plan.run(inputs), lambda: self._run_model(self._model[0], call, inputs))
        return Fallback("", timing=timing) if timing.torch_is_faster else plan

    def _checked_plan(self, call: Call, values: list[Any], tracer: str, expected: Any) -> Plan:
        """A plan whose first results agree with the model's own, for these inputs and for random ones: an example of zeros
        would hide many errors."""
        graph = self._graph(call, tracer)
        plan = Plan(graph, clone_tensors(values), self.options, self._library, self._pool.address, self._ranges_of(graph))
        compare(plan.recorded, expected, TOLERANCE)
        plan.recorded = None
        try:
            compare(plan.run(clone_tensors(values)), expected, TOLERANCES[self.options.dtype])
        except ResultMismatch as mismatch:
            if self.options.is_float32:
                raise
            raise SmartpruneError(
                f"accelerate: {mismatch}; {self.options.dtype} is too coarse for the model, or the example differs from this "
                "input; use float32"
            ) from mismatch
        noise = random_like(values)
        if noise is not None:
            try:
                expected = self._run_model(self._model[0], call, clone_tensors(noise))
            except Exception:  # the model does not accept random numbers
                return plan
            if not self.options.is_float32:  # its scales are not made for such numbers: compare only the graph
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
                f"accelerated model: {self.options.dtype} needs an example for every kind of call, and no example had inputs like "
                "these; add one to example="
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
        """The model with replaced layers, if a call needed it and it is not slower than the model."""
        in_torch = any(isinstance(plan, Fallback) and plan.timing is not None for plan in self._plans.values())
        return self._replaced[0] if self._replaced and not in_torch else None

    def _make_replaced(self) -> nn.Module:
        with self._own.lock:
            if not self._replaced:
                from .fallback import replace_layers  # imports this module

                model = self._model[0]
                shared = {id(p): p for p in model.parameters()}
                self._replaced.append(replace_layers(copy.deepcopy(model, shared), self.options))
            return self._replaced[0]

    def _run_fallback(self, fallback: Fallback, call: Call, values: Sequence[Any], is_first: bool) -> Any:
        if fallback.timing is not None:
            return self._run_model(self._model[0], call, values)
        model = self._make_replaced()
        if is_first:  # only in the thread that made it, whose inputs gave the expected result
            try:
                compare(self._run_model(model, call, clone_tensors(values)), fallback.expected, TOLERANCE)
            except ResultMismatch as mismatch:
                if not self._is_unstable(call, values, fallback.expected):
                    raise SmartpruneError(f"accelerate: {mismatch}; {STATE_HINT}") from mismatch
            fallback.expected = None
            if self.options.timed:
                inputs = clone_tensors(values)
                calls = [lambda m=m: self._run_model(m, call, inputs) for m in (model, self._model[0])]
                timing = choice.time_both(*calls)
                fallback.timing = timing if timing.torch_is_faster else None
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
        if not self.options.is_float32:
            raise SmartpruneError(
                f"accelerated model: an input is {error}, which {self.options.dtype} does not support; use float32"
            )
        return self._make_replaced()(*args, **kwargs)


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
