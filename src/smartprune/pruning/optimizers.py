"""Everything that the pruner needs from PyTorch's optimizers: one registry, one step pre-hook and one step post-hook.

For all optimizers of this process the registry

- counts the steps that were really taken,
- keeps paused parameters, and their momentum, unchanged,
- resets the momentum of parameters before their next step,
- keeps removed blocks of frozen, baked and held models at zero, whatever momentum and weight decay do (``zeros.py``),
- lets a listener place parameters into groups when an optimizer is built. PyTorch has no hook for this, so
  ``Optimizer.add_param_group`` is replaced while there are listeners or scores. (The other patches of PyTorch are in
  ``zeros.py`` and ``hooks.py``.)
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import SmartpruneError
from . import zeros

_steps = 0
_last_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # the number of each optimizer's last step
_paused = WeakTensorKeyDictionary()
_resets = WeakTensorKeyDictionary()  # parameters whose momentum is reset before their next step
_installed = False


def install() -> None:
    """Registers the two hooks. PyTorch allows no new hooks while it calls them, so this happens before the first step."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _installed = True


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    _prepare_parameters(optimizer)
    zeros.prepare(optimizer)
    return _wrap_closure(optimizer, args, kwargs)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _count_step(optimizer)
    zeros.restore(optimizer)


# -- steps ----------------------------------------------------------------------------------------------------------------


def step_count() -> int:
    """The number of optimizer steps in this process so far. (Fused optimizers do not raise a tensor's version counter.)"""
    install()
    return _steps


def stepped_since(count: int) -> list[Optimizer]:
    """The optimizers that stepped after :func:`step_count` was ``count``."""
    return [optimizer for optimizer, last in _last_steps.items() if last > count]


def have_stepped(parameters: Iterable[Tensor]) -> bool:
    """Whether all parameters belong to optimizers that exist and have stepped before."""
    ids = {id(p) for optimizer in _last_steps for group in optimizer.param_groups for p in group["params"]}
    return ids.issuperset(map(id, parameters))


def have_owners(scores: Iterable[Tensor]) -> bool:
    """Whether all watched scores were added to optimizers that exist, whether or not these have stepped."""
    return all((owner := _scores.get(score)) is not None and owner() is not None for score in scores)


def _count_step(optimizer: Optimizer) -> None:
    global _steps
    skipped = getattr(optimizer, "found_inf", None)  # set by a gradient scaler to make a fused optimizer skip the step
    if isinstance(skipped, Tensor) and skipped.is_cpu and bool(skipped):
        return
    _steps += 1
    _last_steps[optimizer] = _steps


# -- paused parameters and momentum ---------------------------------------------------------------------------------------


def pause(parameters: Iterable[Tensor]) -> None:
    """Optimizers leave these parameters and their momentum unchanged until :func:`resume`."""
    install()
    for parameter in parameters:
        _paused[parameter] = True


def resume(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        _paused.pop(parameter, None)


def reset_momentum(parameters: Iterable[Tensor]) -> None:
    """Optimizers reset the momentum of these parameters before their next step."""
    install()
    for parameter in parameters:
        _resets[parameter] = True


def cancel_momentum_resets(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        _resets.pop(parameter, None)


def pending_momentum_resets(parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of the parameters whose momentum has not been reset yet."""
    return [name for name, parameter in parameters if parameter in _resets]


def _prepare_parameters(optimizer: Optimizer) -> None:
    """Resets momentum, and removes the gradients of paused parameters."""
    if not _paused and not _resets:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if _resets.pop(parameter, None):
                _reset_state(optimizer.state.get(parameter, {}), parameter)
            if parameter in _paused:
                parameter.grad = None


def _reset_state(state: dict[str, Any], parameter: Tensor) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor) and (value.shape == parameter.shape or name == "step"):
            value.zero_()  # with "step", since Adam corrects its averages by the number of steps that they contain


def _wrap_closure(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The arguments of ``optimizer.step``, with a closure that prepares the parameters again. The closure runs inside the step and
    makes gradients, and the first forward pass of a copied model may pause parameters."""
    is_positional = len(args) > 1 and callable(args[1])
    closure = args[1] if is_positional else kwargs.get("closure")
    if closure is None:
        return None

    def prepared() -> Any:
        loss = closure()
        _prepare_parameters(optimizer)
        return loss

    return ((args[0], prepared, *args[2:]), kwargs) if is_positional else (args, {**kwargs, "closure": prepared})


# -- parameter groups -----------------------------------------------------------------------------------------------------


class GroupListener(Protocol):
    """Places some parameters into the groups of an optimizer while it is built."""

    def takes_group(self, parameter_ids: set[int]) -> bool:
        """Whether a new group with these parameters is for this listener."""

    def place_group(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Adds the group, or parts of it, with :func:`add_param_group`."""

    def group_added(self, optimizer: Optimizer) -> None:
        """Called after every group that any optimizer gets."""


_listeners: WeakSet[Any] = WeakSet()
_scores = WeakTensorKeyDictionary()  # score parameters, whose groups are checked -> a weak reference to their optimizer
# schedulers that break if a group is added after them: they hold one value for every group, or store values in the groups
_RIGID = (
    lr_scheduler.OneCycleLR,
    lr_scheduler.CyclicLR,
    lr_scheduler.LambdaLR,
    lr_scheduler.MultiplicativeLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
    lr_scheduler.SequentialLR,
    SWALR,
)
_torch_add_param_group = Optimizer.add_param_group


def watch_scores(parameters: Iterable[Tensor]) -> None:
    """Adding these parameters to an optimizer that has them, or that a scheduler cannot follow, raises what to do."""
    for parameter in parameters:
        _scores[parameter] = None
        finalize(parameter, _restore_add_param_group)
    Optimizer.add_param_group = _add_param_group  # type: ignore[method-assign,assignment]


def stop_watching_scores(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        _scores.pop(parameter, None)
    _restore_add_param_group()


def _check_scores(optimizer: Optimizer, entries: Iterable[Any]) -> None:
    """Checks a group of scores before PyTorch adds it."""
    scores = {id(p) for p in map(parameter_of, entries) if isinstance(p, Tensor) and p in _scores}
    if not scores:
        return
    if any(id(p) in scores for group in optimizer.param_groups for p in group["params"]):
        raise SmartpruneError(
            "add_param_group: the optimizer trains the scores already, because it was created after attach; remove "
            "optimizer.add_param_group(pruner.param_group())"
        )
    if not any("initial_lr" in group for group in optimizer.param_groups):
        return
    rigid = [s for s in gc.get_objects() if issubclass(type(s), _RIGID) and getattr(s, "optimizer", None) is optimizer]
    if rigid:
        name = type(rigid[0]).__name__
        raise SmartpruneError(
            f"add_param_group: a {name} was created for this optimizer before it got the scores, and would fail at its next step; "
            f"call optimizer.add_param_group(pruner.param_group()) first, and create the {name} afterwards"
        )


def listen_to_groups(listener: GroupListener) -> None:
    """Until :func:`stop_listening_to_groups`, every group that an optimizer gets is offered to the listener first."""
    _listeners.add(listener)
    finalize(listener, _restore_add_param_group)
    Optimizer.add_param_group = _add_param_group  # type: ignore[method-assign,assignment]


def stop_listening_to_groups(listener: GroupListener) -> None:
    _listeners.discard(listener)
    _restore_add_param_group()


def add_param_group(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """PyTorch's own ``optimizer.add_param_group``, which no listener sees."""
    _torch_add_param_group(optimizer, group)


def _add_param_group(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Replaces ``Optimizer.add_param_group`` while there are listeners or scores."""
    parameters = group.get("params") if isinstance(group, dict) else None
    ids = set()
    if parameters is not None and not isinstance(parameters, set):
        group["params"] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ids = {id(parameter_of(entry)) for entry in group["params"]}
    listener = next((listener for listener in list(_listeners) if listener.takes_group(ids)), None)
    if listener is None:
        _check_scores(optimizer, group["params"] if ids else ())
        _torch_add_param_group(optimizer, group)
    else:
        listener.place_group(optimizer, group)
    for score in [p for added in optimizer.param_groups for p in added["params"] if p in _scores]:
        _scores[score] = ref(optimizer)
    for other in list(_listeners):
        other.group_added(optimizer)


def _restore_add_param_group() -> None:
    if (
        not list(_listeners) and not list(_scores) and Optimizer.add_param_group is _add_param_group
    ):  # list() drops listeners that just died
        Optimizer.add_param_group = _torch_add_param_group  # type: ignore[method-assign]


def parameter_of(entry: Any) -> Any:
    """The tensor of an entry of a parameter group, which is a tensor, or a name and a tensor."""
    return entry[1] if isinstance(entry, tuple) else entry
