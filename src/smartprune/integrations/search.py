"""A search inside a trainer, from the attached model to the baked one. All integrations use it."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..artifacts.receipt import Receipt
from ..errors import SmartpruneError
from ..methods import Smart
from ..methods.method import Method
from ..pruning.attach import attach
from ..pruning.bake import bake
from ..pruning.lookup import find_pruner
from ..pruning.optimizers import add_param_group, listen_to_groups, parameter_of, step_count, stop_listening_to_groups
from ..pruning.pruner import Pruner
from .state import Carrier

DEFAULT_SHARE = 0.3  # of the training: records with 0.2 and 0.4 differ by no more than their standard deviation
UNKNOWN_STEPS = 2**31  # the length of a search until the length of the training is known


class Search:
    """One search. The hooks of a trainer call, in this order: attach, claim, settle, begin, (optimizer steps), end or stop."""

    def __init__(
        self,
        where: str,
        method: Method | None,
        steps: float | None,
        epochs: float | None,
        score_lr: float | None,
        bake: bool,
        settings: dict[str, Any],
    ) -> None:
        if steps is not None and epochs is not None:
            raise SmartpruneError(f"{where}: steps={steps!r} and epochs={epochs!r}; give one of them as the length of the search")
        is_share = isinstance(steps, float) and 0 < steps <= 1
        is_count = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1
        if steps is not None and not is_share and not is_count:
            raise SmartpruneError(
                f"{where}: steps={steps!r}; give the length of the search as a number of optimizer steps (an integer, at least 1) "
                "or as a share of the training (a float above 0, at most 1.0)"
            )
        if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, int | float) or not 0 < epochs < math.inf):
            raise SmartpruneError(f"{where}: epochs={epochs!r}; give the length of the search as a number of epochs above 0")
        known = [name for name in inspect.signature(attach).parameters if name not in ("model", "method", "steps")]
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise SmartpruneError(f"{where}: there is no argument {unknown[0]!r}; the arguments of attach are {', '.join(known)}")
        self.where, self.method, self.settings = where, Smart() if method is None else method, settings
        self.steps = DEFAULT_SHARE if steps is None and epochs is None else steps
        self.epochs, self.score_lr, self.bake = epochs, score_lr, bake
        self.pruner: Pruner | None = None
        self.receipt: Receipt | None = None
        self._carrier: Carrier | None = None
        self._optimizer: weakref.ref[Optimizer] | None = None  # trains the scores; its steps advance the search
        self._keep_last = False  # whether the group of the scores was made here, and stays behind the groups of the user
        self._last_step = 0
        self._handle: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """For processes that a trainer starts: each has its own optimizer."""
        return {**self.__dict__, "_optimizer": None, "_handle": None}

    @property
    def fixed(self) -> int | None:
        """The length of the search if it does not depend on the trainer."""
        return self.steps if isinstance(self.steps, int) else None

    def length(self, total: float, per_epoch: float) -> int:
        """The length of the search in a training of ``total`` optimizer steps, infinite if that is unknown."""
        base, share = (per_epoch, self.epochs) if self.epochs is not None else (total, self.steps)
        if not 0 < base < math.inf:
            raise SmartpruneError(
                f"{self.where}: the length of the {'epochs' if self.epochs is not None else 'training'} is not known before it "
                "starts, so the search cannot be a share of it; give its length in optimizer steps: steps=1000"
            )
        assert share is not None
        return max(1, round(share * base))

    # -- before the training ----------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module, carry: bool) -> None:
        """Masks the model, if it is not masked yet. With ``carry`` its state dict holds the state of the pruner."""
        self.require_unbaked()
        if self.pruner is None:
            self.pruner = attach(model, self.method, steps=self.fixed or UNKNOWN_STEPS, **self.settings)
            self._carrier = Carrier(self.pruner, carry, flexible=self.fixed is None)
        elif find_pruner(model) is not self.pruner:
            raise SmartpruneError(f"{self.where}: this callback already prunes another model; create a new one for this model")

    def require_unbaked(self) -> None:
        if self.receipt is not None:
            raise SmartpruneError(
                f"{self.where}: this callback has pruned its model and baked it; to continue training, remove the callback "
                "(removed blocks stay zero in this process); to prune again, create a new one"
            )

    def claim(self) -> None:
        """From now on the first optimizer that gets a pruned weight also gets the scores, in a group without weight decay.

        Schedulers and saved states count the groups of an optimizer, so the group must exist when the optimizer is created. It is
        the last group, so the groups of the user keep their numbers.
        """
        self._optimizer = None
        listen_to_groups(self)

    def settle(self, optimizers: Sequence[Optimizer], scheduled: Sequence[Optimizer] = ()) -> None:
        """The trainer has its optimizers. An optimizer older than the scores gets them now, if no scheduler counts its groups."""
        stop_listening_to_groups(self)
        current = self._current_optimizer()
        if any(optimizer is current for optimizer in optimizers):
            return
        pruned, scores = self._ids(), self._score_ids()
        for optimizer in optimizers:
            if scores and scores <= {id(p) for group in optimizer.param_groups for p in group["params"]}:
                self._optimizer = weakref.ref(optimizer)  # from an earlier training
                return
        for optimizer in optimizers:
            group = next((group for group in optimizer.param_groups if pruned & {id(p) for p in group["params"]}), None)
            if group is None:
                continue
            if any(optimizer is other for other in scheduled):
                raise SmartpruneError(
                    f"{self.where}: the optimizer and its scheduler were created before the scores, but a scheduler counts "
                    "the parameter groups it was made with; let the trainer create both, after attach"
                )
            options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            names = [f"smartprune.{i}" for i in range(len(scores))] if "param_names" in group else None
            self._add_scores(optimizer, options, names)
            return
        raise SmartpruneError(
            f"{self.where}: none of the {len(optimizers)} optimizers trains a pruned weight, so the search could not learn; give "
            "the optimizer the parameters of the model (layer.weight reads as the masked weight, which is not a parameter), "
            "or choose other layers (include=, skip=)"
        )

    def begin(self, total: float, per_epoch: float) -> None:
        """The training starts. From now on every step of the optimizer is a step of the search."""
        self.require_unbaked()
        pruner, carrier = self._pruner, self._carrier
        assert carrier is not None
        if carrier.state_missing:
            raise SmartpruneError(
                f"{self.where}: the checkpoint has no state of the pruner: it was saved before the search, after bake, or with "
                "weights only; load its weights into the model before the trainer starts, or resume from one of this search"
            )
        if self.fixed is None and pruner.count == 0 and pruner.phase == "search":  # also if an earlier training took no step
            pruner.reschedule(self.length(total, per_epoch))
        if self.bake and pruner.phase == "search" and total < pruner.steps:
            raise SmartpruneError(
                f"{self.where}: the search has {pruner.steps} steps and the training {total}, so it would end before the mask is "
                "hard; make the search shorter (steps=, epochs=), train longer, or give bake=False to continue in a later training"
            )
        self.stop()
        self._last_step = step_count()
        after_step = weakref.WeakMethod(self._after_step)

        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (call := after_step()) is not None:
                call(optimizer)

        self._handle = register_optimizer_step_post_hook(hook)
        weakref.finalize(self, self._handle.remove)  # if the training dies and the trainer has no hook for that

    # -- during and after the training ------------------------------------------------------------------------------------

    def _after_step(self, optimizer: Optimizer) -> None:
        """Called after real steps only: not for accumulated batches, nor for steps that a gradient scaler skips."""
        if self._current_optimizer() is not optimizer or step_count() == self._last_step:
            return
        self._last_step = step_count()
        if self._pruner.phase != "baked":  # baked by the user, before the training ended
            self._pruner.step()

    def metrics(self, wait: bool = False) -> dict[str, float]:
        """With ``wait`` it includes numbers that must be copied from a GPU."""
        out = {"smartprune/tau": self._pruner.tau, "smartprune/progress": self._pruner.progress}
        if wait:
            out["smartprune/undecided"] = float(self._pruner.telemetry()["undecided"])
        return out

    def stop(self) -> None:
        """Removes everything that the search registered with PyTorch. The model does not change."""
        stop_listening_to_groups(self)
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._carrier is not None:
            self._carrier.state_missing = False

    def end(self) -> None:
        """The training is over: bakes the model, or raises if the search has not finished."""
        self.stop()
        pruner = self._pruner
        if not self.bake or self.receipt is not None:
            return
        if pruner.phase == "search":
            raise SmartpruneError(
                f"{self.where}: the training ended at step {pruner.count} of {pruner.steps} of the search, and no block is removed "
                "yet; resume from its last checkpoint, make the search shorter (steps=, epochs=), or harden the mask now: "
                "callback.pruner.freeze(force=True), then smartprune.bake(model)"
            )
        self.receipt = pruner.receipt() if pruner.phase == "baked" else bake(pruner.model)
        assert self._carrier is not None
        self._carrier.remove()

    def make_receipt(self) -> Receipt:
        return self._pruner.receipt() if self.receipt is None else self.receipt

    def state_dict(self) -> dict[str, Any]:
        return {} if self.pruner is None or self.pruner.phase == "baked" else self.pruner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing for a baked model, whose trainer may load the best weights after the search."""
        if self._carrier is not None and state and self._pruner.phase != "baked":
            self._carrier.restore(state)

    # -- the scores and their optimizer -----------------------------------------------------------------------------------

    @property
    def _pruner(self) -> Pruner:
        if self.pruner is None:
            raise SmartpruneError(f"{self.where}: there is no pruner yet; it is attached when the trainer starts to train")
        return self.pruner

    def _ids(self) -> set[int]:
        return {id(parameter) for parameter in (*self._pruner.parameters(), *self._pruner.blocks.weights)}

    def _score_ids(self) -> set[int]:
        return {id(parameter) for parameter in self._pruner.parameters()}

    def _current_optimizer(self) -> Optimizer | None:
        return None if self._optimizer is None else self._optimizer()

    def _add_scores(self, optimizer: Optimizer, options: dict[str, Any], names: Sequence[str] | None) -> None:
        self._optimizer = weakref.ref(optimizer)
        group = self._pruner.param_group() if self.score_lr is None else self._pruner.param_group(lr=self.score_lr)
        if not group["params"]:
            return
        if names is not None:
            group["params"] = list(zip(names, group["params"], strict=True))
        add_param_group(optimizer, {**options, **group})

    def takes_group(self, parameter_ids: set[int]) -> bool:
        return not self._ids().isdisjoint(parameter_ids)

    def place_group(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Adds a group with pruned weights or scores without the scores, which get a group of their own."""
        scores, current = self._score_ids(), self._current_optimizer()
        moved = [entry for entry in group["params"] if id(parameter_of(entry)) in scores]
        rest = [entry for entry in group["params"] if id(parameter_of(entry)) not in scores]
        options = {name: value for name, value in group.items() if name != "params"}
        if rest:
            add_param_group(optimizer, {**options, "params": rest})
        elif current is not None:  # the user gives the scores a group of their own
            current.param_groups = [other for other in current.param_groups if not scores & {id(p) for p in other["params"]}]
            current = None
        if current is None:
            self._keep_last = bool(rest)
            names = [entry[0] for entry in moved] or [f"smartprune.{i}" for i in range(len(scores))]
            self._add_scores(optimizer, options, names if isinstance(group["params"][0], tuple) else None)

    def group_added(self, optimizer: Optimizer) -> None:
        if self._keep_last and self._current_optimizer() is optimizer:
            scores = self._score_ids()
            optimizer.param_groups.sort(key=lambda group: bool(scores & {id(p) for p in group["params"]}))


class Pruning:
    """The common part of all callbacks: their arguments, the pruner, and the receipt after the training.

    ``steps`` is the length of the search in optimizer steps, or a share (a float) of the training. ``epochs`` is its length in
    epochs. Without either it is 0.3 of the training, and the rest is fine-tuning. ``score_lr`` is the learning rate of the scores,
    which defaults to the rate of the weights. ``settings`` are the other arguments of :func:`smartprune.attach`.
    """

    where: ClassVar[str]  # the name of the callback in messages

    def __init__(
        self,
        method: Method | None = None,
        *,
        steps: float | None = None,
        epochs: float | None = None,
        score_lr: float | None = None,
        bake: bool = True,
        **settings: Any,
    ) -> None:
        self.search = Search(self.where, method, steps, epochs, score_lr, bake, settings)

    @property
    def pruner(self) -> Pruner | None:
        return self.search.pruner

    @property
    def receipt(self) -> Receipt:
        return self.search.make_receipt()
