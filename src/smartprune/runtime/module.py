"""The accelerated model: a module that runs native programs where it can and torch where it must."""

from __future__ import annotations

import copy
import inspect
import os
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
from ..errors import SmartpruneError
from .check import Apart, at_random, compare
from .cpu import build
from .partition import Plan
from .trace.inputs import Unknown, described, filled, form
from .trace.tracer import Opaque, Watch, form_of, trace, version

CHECKED = 1e-3  # how far the first result of a plan may lie from torch's, as a share of its largest number
CHECKED_INT8 = 0.5  # int8 has its own error, and random deep networks blow it up; beyond this something is wrong
NUDGES = (1e-7, 1e-6, 1e-5)  # of a weight, relative: what rounding does to it
MOST_PLANS, MOST_FORMS = 32, 8  # kept at a time; those not used for longest go
STATE = "the model may keep state from call to call, change its inputs, or draw random numbers"

Ranges = dict[str, dict[str, tuple[float, float]]]  # per form of graph and node: the smallest and the largest number


@dataclass(frozen=True)
class Options:
    """How a model is run; what :func:`smartprune.accelerate` was given."""

    dtype: str
    threads: int
    reference: bool


@dataclass(eq=False)
class Form:
    """The graph of calls that differ in shapes and dtypes alone, and what its plans share."""

    traced: fx.GraphModule
    result: TreeSpec | None
    packed: dict[Any, Any]


@dataclass(eq=False)
class OwnCode:
    """Stands where a plan would: such calls run the model's own code, with its layers replaced."""

    why: str
    expected: Any  # the model's own result for the first such call, until it has been compared


class Accelerated(Opaque):
    """Computes what the model computed in eval mode; for inference only. Made by :func:`smartprune.accelerate`.

    Plans are made per structure, shapes and dtypes of the inputs, at the first call with them. Calls from several threads
    take turns. Copies and pickles carry the model and plan anew.
    """

    def __init__(self, model: nn.Module, options: Options, ranges: Ranges | None) -> None:
        super().__init__()
        self.options, self.ranges = options, ranges
        self._model = [model]  # in a list, so that it is no submodule: the parameters are the packed ones, not these
        self._own: list[nn.Module] = []  # the form that keeps the model's code, once it is needed
        self._names = [p.name for p in parameters(model) if p.kind is p.POSITIONAL_OR_KEYWORD]
        self._plans: OrderedDict[Any, Plan | OwnCode] = OrderedDict()
        self._forms: OrderedDict[Any, Form] = OrderedDict()
        self._lock = threading.Lock()
        self._library: build.Library | None = None
        self._pool, self._pool_lock = 0, threading.RLock()
        if not options.reference:
            self._library = build.load(options.dtype == "int8")
            self._pool, self._pool_lock = pool(self._library, options.threads)
        super().train(False)

    def train(self, mode: bool = True) -> Accelerated:
        """Stays in eval mode, whatever a surrounding model does."""
        return self

    def __reduce__(self) -> Any:
        return type(self), (self._model[0], self.options, self.ranges)

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerated:
        return type(self)(self._model[0], self.options, self.ranges)  # nothing writes to the model

    def extra_repr(self) -> str:
        isa = self._library.isa.name if self._library else "reference"
        out = f"{type(self._model[0]).__name__}, {self.options.dtype}, {isa}, threads={self.options.threads}"
        why = next((plan.why for plan in self._plans.values() if isinstance(plan, OwnCode)), None)
        return out if why is None else f"{out}, own code with its layers replaced: {why}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            if kwargs:
                args, kwargs = self._in_order(args, kwargs)
            values: list[Any] = []
            try:
                key = described((args, kwargs) if kwargs else args, values)
            except Unknown as unknown:
                return self._unknown(unknown, args, kwargs)
            with self._pool_lock, self._lock:  # in this order: a model may hold another one that has the same pool
                plan = self._plans.get(key)
                first = plan is None
                if plan is None:
                    plan = self._plan((args, kwargs), values)
                    self._plans[key] = plan
                    while len(self._plans) > MOST_PLANS:
                        self._plans.popitem(last=False)
                else:
                    self._plans.move_to_end(key)
                if isinstance(plan, Plan):
                    return plan.run(values)
            try:
                return self._run_own(plan, (args, kwargs), values, first)
            except SmartpruneError:
                self._plans.pop(key, None)
                raise

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these inputs, made if there is none yet."""
        self(*args, **kwargs)
        args, kwargs = self._in_order(args, kwargs)
        found = self._plans[described((args, kwargs) if kwargs else args, [])]
        if isinstance(found, OwnCode):
            raise SmartpruneError(f"accelerated model: there is no plan, the model's own code is run: {found.why}")
        return found

    def measure(self, calls: Sequence[tuple[Any, ...]]) -> None:
        """Notes how large every activation becomes, for int8."""
        assert self.ranges is not None
        for args in calls:
            values: list[Any] = []
            with torch.no_grad():
                try:
                    described(args, values)
                    run = self._graph(args)
                except Exception as error:  # whatever the model's own code raises when it meets a symbol instead of a tensor
                    raise SmartpruneError(
                        "accelerate: torch.fx cannot trace the model, which int8 needs "
                        f"({type(error).__name__}: {error}); use float32"
                    ) from error
                try:
                    Watch(run, self.ranges.setdefault(form_of(run.graph), {})).run(*copies(values))
                except Exception as error:  # whatever the graph does that the model's own code does not
                    self._run_model(self._model[0], (args, {}), copies(values))  # raises what the model raises
                    first = next(iter(str(error).splitlines()), "")
                    raise SmartpruneError(
                        f"accelerate: the graph that torch.fx traces, which int8 needs, does not run ({type(error).__name__}: "
                        f"{first}); use float32"
                    ) from error

    def _graph(self, args: tuple[Any, ...]) -> fx.GraphModule:
        try:
            return self._form((args, {}), fixed=False).traced
        except Exception:  # perhaps because of its numbers
            return self._form((args, {}), fixed=True).traced

    # ---- making a plan

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs given by name at their places, as far as that goes: a call has one key, however it is written."""
        rest = dict(kwargs)
        for name in self._names[len(args) :]:
            if name not in rest:
                break
            args = (*args, rest.pop(name))
        return args, rest

    def _plan(self, call: tuple[Any, Any], values: list[Any]) -> Plan | OwnCode:
        expect_inputs(self._model[0], *call)
        # tensors of inference mode do not tell when they are changed; what is compared is float32
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            mine = copies(values)
            before = [version(x) for x in state(self._model[0])]
            expected = self._run_model(self._model[0], call, mine)  # raises what the model raises
            failure: Exception | None = None
            tries: tuple[bool, ...] = (False, True) if any(not isinstance(x, Tensor) for x in values) else (False,)
            changed = before != [version(x) for x in state(self._model[0])]
            if changed or any(isinstance(x, Tensor) and version(x) for x in mine):
                tries, why = (), "the model changes its " + ("buffers" if changed else "inputs")
            for fixed in tries:
                try:
                    return self._checked(call, values, fixed, expected)
                except SmartpruneError as error:
                    if self.options.dtype == "int8":
                        raise
                    failure = error
                except Exception as error:  # the trace, the lowering or the run of something nobody thought of
                    failure = error
                why = f"{type(failure).__name__}: {failure}"
            if not tries or isinstance(failure, Apart):
                self._expect_no_state(call, values, expected)
        if self.options.dtype == "int8":
            raise SmartpruneError(f"accelerate: int8 needs a model that torch.fx can trace ({why}); use float32") from failure
        return OwnCode(why, expected)

    def _form(self, call: tuple[Any, Any], fixed: bool) -> Form:
        key = form(call, fixed), fixed
        if key not in self._forms:
            self._forms[key] = Form(*trace(self._model[0], call, fixed), {})
            while len(self._forms) > MOST_FORMS:
                self._forms.popitem(last=False)
        self._forms.move_to_end(key)
        return self._forms[key]

    def _checked(self, call: tuple[Any, Any], values: list[Any], fixed: bool, expected: Any) -> Plan:
        """A plan whose first results were compared with the model's own: neither the trace nor the program is taken on
        trust. It is compared on random numbers too, for an example of zeros shows little."""
        form = self._form(call, fixed)
        plan = Plan(form, copies(values), self.options, self._library, self._pool, self._ranges(form))
        compare(plan.watched, expected, CHECKED)
        plan.watched = None
        try:
            compare(plan.run(copies(values)), expected, CHECKED_INT8 if self.options.dtype == "int8" else CHECKED)
        except Apart as apart:
            if self.options.dtype != "int8":
                raise
            why = "int8 is too coarse for it, or the example does not look like this input; use float32"
            raise SmartpruneError(f"accelerate: {apart}; {why}") from apart
        noise = at_random(values)
        if noise is not None:
            try:
                theirs = self._run_model(self._model[0], call, copies(noise))
            except Exception:  # not made for random numbers
                return plan
            if self.options.dtype == "int8":  # its scales were not measured on such numbers: the graph alone
                compare(plan.in_torch(copies(noise)), theirs, CHECKED)
            else:
                compare(plan.run(copies(noise)), theirs, CHECKED)
        return plan

    def _ranges(self, form: Form) -> dict[str, tuple[float, float]] | None:
        if self.ranges is None:
            return None
        found = self.ranges.get(form_of(form.traced.graph))
        if found is None:
            raise SmartpruneError("accelerated model: no example had inputs like these, which int8 needs; give one in example=")
        return found

    def _expect_no_state(self, call: tuple[Any, Any], values: list[Any], expected: Any) -> None:
        try:
            compare(self._run_model(self._model[0], call, copies(values)), expected, CHECKED)
        except Apart as apart:
            raise SmartpruneError(f"accelerate: {apart}; {STATE}") from apart

    # ---- the model's own code

    def _run_model(self, model: nn.Module, call: tuple[Any, Any], values: Sequence[Any]) -> Any:
        following = iter(values)
        args, kwargs = filled(call, lambda _: next(following))
        return model(*args, **kwargs)

    def own_code(self) -> nn.Module | None:
        """The model with its layers replaced, if a call needed it."""
        return self._own[0] if self._own else None

    def _made_own(self) -> nn.Module:
        with self._lock:
            if not self._own:
                from .fallback import layered  # it replaces layers with what is defined here

                model = self._model[0]
                shared = {id(p): p for p in model.parameters()}
                self._own.append(layered(copy.deepcopy(model, shared), self.options))
            return self._own[0]

    def _run_own(self, found: OwnCode, call: tuple[Any, Any], values: Sequence[Any], first: bool) -> Any:
        own = self._made_own()
        if first:  # by the call that made it: what is expected is the result for its inputs, and not for another thread's
            try:
                compare(self._run_model(own, call, copies(values)), found.expected, CHECKED)
            except Apart as apart:
                if not self._selects(call, values, found.expected):
                    raise SmartpruneError(f"accelerate: {apart}; {STATE}") from apart
            found.expected = None
        return self._run_model(own, call, values)

    def _selects(self, call: tuple[Any, Any], values: Sequence[Any], expected: Any) -> bool:
        """Whether rounding alone moves the model's own result as far: it sorts or selects, as detectors do, and numbers that
        are all but equal change places. There the comparison of each replaced layer with its own has to do."""
        self._expect_no_state(call, list(values), expected)
        for size in NUDGES:
            try:
                compare(self._run_model(nudged(self._model[0], size), call, copies(values)), expected, CHECKED)
            except Apart:
                return True
        return False

    def _unknown(self, unknown: Unknown, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.options.dtype == "int8":
            raise SmartpruneError(f"accelerated model: an input is {unknown}, which int8 does not take; use float32")
        return self._made_own()(*args, **kwargs)


def copies(values: Sequence[Any]) -> list[Any]:
    """Inputs that may be changed."""
    return [x.clone() if isinstance(x, Tensor) else x for x in values]


def nudged(model: nn.Module, size: float) -> nn.Module:
    """A copy whose weights differ from the model's by about a share ``size`` of themselves."""
    out = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for weight in out.parameters():
        if weight.is_floating_point():
            weight.data *= 1 + size * torch.randn(weight.shape, generator=generator, device="cpu")
    return out


def state(model: nn.Module) -> list[Tensor]:
    """Everything that a model could write to."""
    return [*model.parameters(), *model.buffers()]


def parameters(model: nn.Module) -> list[inspect.Parameter]:
    """What the model's code takes; nothing where that is not told."""
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return []


def expect_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises if an input is missing, or one is too many."""
    known = parameters(model)
    try:
        inspect.Signature(known).bind(*args, **kwargs)
    except TypeError as error:
        for place, p in enumerate(known):
            single = p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            if single and p.default is p.empty and place >= len(args) and p.name not in kwargs:
                raise SmartpruneError(f"accelerated model: the input {p.name!r} is missing") from error
        given = len(args) + len(kwargs)
        raise SmartpruneError(f"accelerated model: takes {len(known)} inputs; {given} were given ({error})") from error


_POOLS: dict[tuple[str, int, int], tuple[int, threading.RLock]] = {}


def pool(library: build.Library, threads: int) -> tuple[int, threading.RLock]:
    """The threads of a library and the lock for using them. All models of this process share them, so that ten models do
    not start ten pools; a forked process starts its own. A single thread is nothing to share."""
    key = (library.code._name, threads, os.getpid())
    if key not in _POOLS:
        made = library.code.sp_pool_new(threads)
        if not made:
            raise SmartpruneError("accelerate: no memory for a pool of threads")
        _POOLS[key] = made, threading.RLock()
    return _POOLS[key] if threads > 1 else (_POOLS[key][0], threading.RLock())


def copied(model: nn.Module) -> nn.Module:
    """A copy in float32 and eval mode on the CPU, that shares nothing with the model, with the masks of torch.nn.utils.prune
    in its weights."""
    out = copy_of(model, "accelerate")
    for module in out.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, prune.BasePruningMethod):
                name = f"{hook._tensor_name}_orig"
                setattr(module, name, nn.Parameter(getattr(module, name), False))  # others may share it without this mask
                prune.remove(module, hook._tensor_name)
    return out.float().requires_grad_(False)
