"""Watching: what torch's optimizers do to a model, seen and steered through their own hooks; and gradients of blocks for
methods that calibrate while nothing moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from .multiply import Masking

_still = WeakTensorKeyDictionary()  # parameters that do not move at present
_forgetful = WeakTensorKeyDictionary()  # parameters whose momentum is to be dropped before the next step
_stepped: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # the number of each optimizer's last step
_steps = 0
_hooked = False


class Watched:
    """The sum of ``|gradient * weight|`` over every block, [n], since :meth:`clear`, and whether a backward pass was seen."""

    def __init__(self, masking: Masking, device: torch.device) -> None:
        self.masking = masking
        with torch.inference_mode(False):  # a search may be resumed there: backward passes add to it later
            self.total = torch.zeros(masking.starts[-1], device=device)
        self.seen = False

    def clear(self) -> None:
        self.total.zero_()
        self.seen = False

    def apply(self, mask: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """``weight * mask`` for every weight; gradients are added up here, and the weights get zeros."""
        return list(_Watch.apply(mask, self, *weights))  # type: ignore[no-untyped-call]


class _Watch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mask: Tensor, watched: Watched, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.watched = watched
        ctx.products = [product.detach() for product in watched.masking.apply(mask, [w.detach() for w in weights])]
        return tuple(product.view_as(product) for product in ctx.products)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        watched: Watched = ctx.watched
        sizes = [None if grad is None else grad.abs() for grad in grads]
        sums = watched.masking.block_inner(sizes, [product.abs() for product in ctx.products])
        watched.total += sums
        watched.seen = True
        zero = 0 * sums.sum()  # or NaN, for a gradient scaler to see
        zeros = [
            torch.empty_like(p).fill_(zero) if needed else None
            for p, needed in zip(ctx.products, ctx.needs_input_grad[2:], strict=True)
        ]
        return (None, None, *zeros)


def hold_still(parameters: Iterable[Tensor]) -> None:
    """Torch optimizers leave these parameters, and their momentum, alone until :func:`let_go`."""
    hook()
    for parameter in parameters:
        _still[parameter] = True


def let_go(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        _still.pop(parameter, None)


def forget(parameters: Iterable[Tensor]) -> None:
    """Before their next step, torch optimizers drop the momentum of these parameters."""
    hook()
    for parameter in parameters:
        _forgetful[parameter] = True


def remember(parameters: Iterable[Tensor]) -> None:
    """Takes :func:`forget` back, where no step came after it."""
    for parameter in parameters:
        _forgetful.pop(parameter, None)


def forgetful(parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of those whose momentum is still to be dropped."""
    return [name for name, parameter in parameters if parameter in _forgetful]


def now() -> int:
    """The number of optimizer steps in this process so far. (Fused optimizers do not raise a tensor's version counter.)"""
    hook()
    return _steps


def since(number: int) -> list[Optimizer]:
    """The optimizers that stepped after ``now()`` was ``number``."""
    return [optimizer for optimizer, last in _stepped.items() if last > number]


def known(parameters: Iterable[Tensor]) -> bool:
    """Whether every one of these is in an optimizer that exists, and has stepped before."""
    held = {id(p) for optimizer in _stepped for group in optimizer.param_groups for p in group["params"]}
    return held.issuperset(map(id, parameters))


def hook() -> None:
    global _hooked
    if not _hooked:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _hooked = True


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _steps
    skipped = getattr(optimizer, "found_inf", None)  # by which a gradient scaler tells a fused optimizer to move nothing
    if isinstance(skipped, Tensor) and skipped.is_cpu and bool(skipped):
        return
    _steps += 1
    _stepped[optimizer] = _steps


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    _settle(optimizer)
    return _with_closure(optimizer, args, kwargs)


def _forget_one(state: dict[str, Any], parameter: Tensor) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor) and (value.shape == parameter.shape or name == "step"):
            value.zero_()  # Adam corrects its averages by the number of steps that they are made of


def _settle(optimizer: Optimizer) -> None:
    """What was asked for its parameters: momentum dropped, no gradients."""
    if not _still and not _forgetful:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if _forgetful.pop(parameter, None):
                _forget_one(optimizer.state.get(parameter, {}), parameter)
            if parameter in _still:
                parameter.grad = None


def _with_closure(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The arguments of ``optimizer.step`` with a closure after which the same holds: it is called inside the step, and makes
    gradients; and a copy of a model says what is to be done in its first forward pass."""
    place = 1 if len(args) > 1 and callable(args[1]) else None
    closure = kwargs.get("closure") if place is None else args[place]
    if closure is None:
        return None

    def settled() -> Any:
        loss = closure()
        _settle(optimizer)
        return loss

    return (args, {**kwargs, "closure": settled}) if place is None else ((args[0], settled, *args[2:]), kwargs)


def paused(module: nn.Module) -> tuple[nn.Module, str, Any]:
    """Lets a norm's running statistics stand still; the module, the name of what was set for it, and its value before.

    Batch norms go on with each batch's statistics, and keep no account of them. Instance norms would then use the statistics
    of their input in evaluation too: with a momentum of zero they do not.
    """
    instance = isinstance(module, nn.modules.instancenorm._InstanceNorm)
    name, still = ("momentum", 0.0) if instance else ("track_running_stats", False)
    before = getattr(module, name)
    setattr(module, name, still)
    return module, name, before
