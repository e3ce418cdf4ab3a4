"""What the integrations share: one search inside a trainer, from the attached model to the baked one."""

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
from ..pruning.optimizers import add_param_group, listen_to_groups, parameter_of, step_count, stop_listening_to_groups
from ..pruning.pruner import Pruner, attach, bake, find_pruner
from .state import Carrier

SHARE = 0.3  # of the training is search: between the 0.2 and the 0.4 of the records, which differ by no more than their spread
OPEN = 2**31  # the length of a search until the trainer knows its own


class Search:
    """One search. The trainer's hooks call, in this order: attach, claim, settle, begin, (steps of the optimizer), end or stop."""

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
        share = isinstance(steps, float) and 0 < steps <= 1
        count = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1
        if steps is not None and not share and not count:
            raise SmartpruneError(
                f"{where}: steps={steps!r}; give the length of the search as a number of optimizer steps (an integer, at least 1) "
                "or as a share of the training (a float above 0, at most 1.0)"
            )
        if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, int | float) or not 0 < epochs < math.inf):
            raise SmartpruneError(f"{where}: epochs={epochs!r}; give the length of the search as a number of epochs above 0")
        known = [name for name in inspect.signature(attach).parameters if name not in ("model", "method", "steps")]
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise SmartpruneError(f"{where}: there is no argument {unknown[0]!r}; those of attach are {', '.join(known)}")
        self.where, self.method, self.settings = where, Smart() if method is None else method, settings
        self.steps = SHARE if steps is None and epochs is None else steps
        self.epochs, self.score_lr, self.bake = epochs, score_lr, bake
        self.pruner: Pruner | None = None
        self.receipt: Receipt | None = None
        self._carrier: Carrier | None = None
        self._home: weakref.ref[Optimizer] | None = None  # the optimizer that trains the scores, whose steps count
        self._last = False  # whether their group is one that was made here, which stays behind those of the user
        self._seen = 0
        self._handle: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """For processes that are started by a trainer, which has its own optimizer in each."""
        return {**self.__dict__, "_home": None, "_handle": None}

    @property
    def fixed(self) -> int | None:
        """The length of the search where it does not depend on the trainer."""
        return self.steps if isinstance(self.steps, int) else None

    def length(self, total: float, per_epoch: float) -> int:
        """The length of the search in a training of so many optimizer steps, infinite where that is not known."""
        whole, share = (per_epoch, self.epochs) if self.epochs is not None else (total, self.steps)
        if not 0 < whole < math.inf:
            raise SmartpruneError(
                f"{self.where}: the length of the {'epochs' if self.epochs is not None else 'training'} is not known before it "
                "starts, so the search cannot have a share of it; give its length in optimizer steps: steps=1000"
            )
        assert share is not None
        return max(1, round(share * whole))

    # -- before the training ----------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module, carry: bool) -> None:
        """Puts masks on the model, unless they are there. ``carry``: its state dict holds the state of the pruner."""
        self.require_unbaked()
        if self.pruner is None:
            self.pruner = attach(model, self.method, steps=self.fixed or OPEN, **self.settings)
            self._carrier = Carrier(self.pruner, carry, flexible=self.fixed is None)
        elif find_pruner(model) is not self.pruner:
            raise SmartpruneError(f"{self.where}: this callback prunes another model already; make a new one for this model")

    def require_unbaked(self) -> None:
        if self.receipt is not None:
            raise SmartpruneError(
                f"{self.where}: this callback has pruned its model and baked it; to go on training, take it out of the callbacks "
                "(removed blocks stay zero in this process); to prune again, make a new one"
            )

    def claim(self) -> None:
        """From now on the first optimizer that is given a pruned weight gets the scores, in a group without weight decay.

        Schedulers and saved states count the groups of an optimizer, so the group has to be there when the optimizer is made. It is
        the last: those of the user keep their numbers.
        """
        self._home = None
        listen_to_groups(self)

    def settle(self, optimizers: Sequence[Optimizer], scheduled: Sequence[Optimizer] = ()) -> None:
        """The trainer has its optimizers. One that is older than the scores gets them now, if no scheduler counts its groups."""
        stop_listening_to_groups(self)
        found = None if self._home is None else self._home()
        if any(optimizer is found for optimizer in optimizers):
            return
        ours, scores = self._ids(), {id(parameter) for parameter in self._pruner.parameters()}
        for optimizer in optimizers:
            if scores and scores <= {id(p) for group in optimizer.param_groups for p in group["params"]}:
                self._home = weakref.ref(optimizer)  # of an earlier training
                return
        for optimizer in optimizers:
            group = next((group for group in optimizer.param_groups if ours & {id(p) for p in group["params"]}), None)
            if group is None:
                continue
            if any(optimizer is other for other in scheduled):
                raise SmartpruneError(
                    f"{self.where}: the optimizer and its scheduler were made before the scores were there, and a scheduler counts "
                    "the parameter groups it was made with; let the trainer make both, after attach"
                )
            options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            names = [f"smartprune.{i}" for i in range(len(scores))] if "param_names" in group else None
            self._give(optimizer, options, names)
            return
        raise SmartpruneError(
            f"{self.where}: none of the {len(optimizers)} optimizers trains a pruned weight, so the search could never move; give "
            "the optimizer the parameters of the model (layer.weight reads as the masked weight, which is no parameter), "
            "or choose other layers (include=, skip=)"
        )

    def begin(self, total: float, per_epoch: float) -> None:
        """The training starts: from now on every step of the optimizer is one of the search."""
        self.require_unbaked()
        pruner, carrier = self._pruner, self._carrier
        assert carrier is not None
        if carrier.owed:
            raise SmartpruneError(
                f"{self.where}: the checkpoint has no state of the pruner: it was saved before the search, or after bake, or with "
                "the weights alone; load its weights into the model before the trainer starts, or resume from one of this search"
            )
        if self.fixed is None and pruner.count == 0 and pruner.phase == "search":  # also where an earlier training took no step
            pruner.reschedule(self.length(total, per_epoch))
        if self.bake and pruner.phase == "search" and total < pruner.steps:
            raise SmartpruneError(
                f"{self.where}: the search has {pruner.steps} steps and the training {total}, so it would end before the mask is "
                "hard; search shorter (steps=, epochs=), train longer, or give bake=False to go on in a later training"
            )
        self.stop()
        self._seen = step_count()
        after_step = weakref.WeakMethod(self._after_step)

        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (call := after_step()) is not None:
                call(optimizer)

        self._handle = register_optimizer_step_post_hook(hook)
        weakref.finalize(self, self._handle.remove)  # of a training that died, where the trainer has no hook for that

    # -- in it, and after it ----------------------------------------------------------------------------------------------

    def _after_step(self, optimizer: Optimizer) -> None:
        """Torch calls this after real steps only: not for batches that are gathered, nor for what a gradient scaler skips."""
        if self._home is None or self._home() is not optimizer or step_count() == self._seen:
            return
        self._seen = step_count()
        if self._pruner.phase != "baked":  # by the user, before the trainer was done
            self._pruner.step()

    def metrics(self, whole: bool = False) -> dict[str, float]:
        """``whole``: with what has to be waited for on a GPU."""
        out = {"smartprune/tau": self._pruner.tau, "smartprune/progress": self._pruner.progress}
        if whole:
            out["smartprune/undecided"] = float(self._pruner.telemetry()["undecided"])
        return out

    def stop(self) -> None:
        """Nothing of the search is left at torch. The model stays as it is."""
        stop_listening_to_groups(self)
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._carrier is not None:
            self._carrier.owed = False

    def end(self) -> None:
        """The training is over: the model becomes plain, or the user is told why it cannot."""
        self.stop()
        pruner = self._pruner
        if not self.bake or self.receipt is not None:
            return
        if pruner.phase == "search":
            raise SmartpruneError(
                f"{self.where}: the training ended at step {pruner.count} of {pruner.steps} of the search, and no block is removed "
                "yet; resume from its last checkpoint, search shorter (steps=, epochs=), or take the mask as it stands: "
                "callback.pruner.freeze(force=True), then smartprune.bake(model)"
            )
        self.receipt = pruner.receipt() if pruner.phase == "baked" else bake(pruner.model)
        assert self._carrier is not None
        self._carrier.remove()

    def proof(self) -> Receipt:
        return self._pruner.receipt() if self.receipt is None else self.receipt

    def state_dict(self) -> dict[str, Any]:
        return {} if self.pruner is None or self.pruner.phase == "baked" else self.pruner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of a model that is baked, only weights are loaded: the best of those after the search, say."""
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

    def _give(self, optimizer: Optimizer, options: dict[str, Any], names: Sequence[str] | None) -> None:
        self._home = weakref.ref(optimizer)
        group = self._pruner.param_group() if self.score_lr is None else self._pruner.param_group(lr=self.score_lr)
        if not group["params"]:
            return
        if names is not None:
            group["params"] = list(zip(names, group["params"], strict=True))
        add_param_group(optimizer, {**options, **group})

    def takes_group(self, parameter_ids: set[int]) -> bool:
        return not self._ids().isdisjoint(parameter_ids)

    def place_group(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """A group with pruned weights or scores, which an optimizer is given: without the scores, which get their own."""
        scores = {id(parameter) for parameter in self._pruner.parameters()}
        mine = [entry for entry in group["params"] if id(parameter_of(entry)) in scores]
        rest = [entry for entry in group["params"] if id(parameter_of(entry)) not in scores]
        options = {name: value for name, value in group.items() if name != "params"}
        home = None if self._home is None else self._home()
        if rest:
            add_param_group(optimizer, {**options, "params": rest})
        elif home is not None:  # a group of the scores alone was meant for them
            home.param_groups = [other for other in home.param_groups if not scores & {id(p) for p in other["params"]}]
            home = None
        if home is None:
            self._last = bool(rest)
            names = [entry[0] for entry in mine] or [f"smartprune.{i}" for i in range(len(scores))]
            self._give(optimizer, options, names if isinstance(group["params"][0], tuple) else None)

    def group_added(self, optimizer: Optimizer) -> None:
        if self._last and self._home is not None and self._home() is optimizer:
            scores = {id(parameter) for parameter in self._pruner.parameters()}
            optimizer.param_groups.sort(key=lambda group: bool(scores & {id(p) for p in group["params"]}))


class Pruning:
    """What both callbacks have: the arguments, the pruner and, after the training, the receipt.

    ``steps`` is the length of the search in optimizer steps, or as a share (a float) of the training; ``epochs`` is its length in
    epochs. Without either it is 0.3 of the training, and the rest is fine-tuning. ``score_lr`` is the learning rate of the scores,
    that of the weights unless given. ``settings`` are the other arguments of :func:`smartprune.attach`.
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
        return self.search.proof()
