"""The pruner: attaches masks to a model, follows the user's training loop, hardens the mask, bakes it in."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..artifacts.receipt import Receipt
from ..core.block import Block
from ..core.budget import Budget, scope
from ..core.kinds import LAYER_TYPES, is_masked, user_class
from ..core.layers import Patterns, plain_name
from ..core.sharding import full_tensor, is_sharded, reshard
from ..errors import SmartpruneError
from ..methods.method import Clock, Method, State, capabilities, settings
from ..topk import hard_topk
from . import guard, watch
from .autograd import again
from .checks import PREFIX, Careful, differing, require_values, sound
from .consensus import agree, average, distributed, grouped
from .masked import STILL_MASKED, put_on, take_off
from .multiply import Masking
from .plan import Plan, plan
from .receipt import make_receipt
from .telemetry import Telemetry, theorem_3_7

LINK = "_smartprune"  # the attribute of the model that holds its pruner
DECIDED = 0.1  # of a mask whose distance to its hard form is less, it can be said which layers have lost everything
TOO_WARM = 0.1  # a search whose mask is further than this from its hard form has not decided


@dataclass
class Live:
    """The masked weights of the last forward pass, and what they were made from."""

    weights: list[Tensor]
    mask: Tensor
    factors: Tensor  # [n], what weights were multiplied by: the mask, or more of it
    key: tuple[int, ...]
    versions: list[int]
    grad: bool
    inference: bool
    autocast: torch.dtype | None  # what autocast wants layers to compute in


class Pruner(Careful):
    """Made by :func:`attach`. Its life: search, frozen, baked."""

    def __init__(self, model: nn.Module, method: Method, planned: Plan, steps: int, seed: int) -> None:
        self.model = model
        self.method = method
        self.capabilities = capabilities(method)
        self.plan = planned
        self.steps = steps
        self.seed = seed
        self.count = 0
        self.phase = "search"
        reshard(model)  # an evaluation, or the example of a budget, may have gathered them
        self.blocks = planned.blocks(model)
        require_values(self.blocks)
        method.check(self.blocks, steps)
        self.masking = Masking([layer.grid for layer in planned.layers])
        self._sharded = is_sharded(self.blocks.weights[0])
        if self._sharded and self.capabilities.needs_whole_weights:
            raise SmartpruneError(f"attach: {method.name} needs whole weights, and FSDP has split them; use DDP, or another method")
        self._host_name, self._host = _last_module(model)
        self._state: State = {}
        self._trained: list[str] = []
        self._hard: Tensor | None = None
        self.ranked: Tensor | None = None  # what blocks were ranked by when the mask was made hard, [n]; in this process only
        self._live: Live | None = None
        self._inside = False
        self._castable: list[bool] | None = None  # by layer: whether autocast would cast for it
        self._scalars: dict[str, float] = {}
        self._last = watch.now()
        self._proven = False
        self._missed = 0
        self._agreed = False  # whether all ranks were seen to agree
        self._device = self.blocks.device
        self.telemetry_ = Telemetry(self.masking.starts, self._keep_equivalent())
        self._watched: watch.Watched | None = None
        self._paused: list[tuple[nn.Module, str, Any]] = []  # norms whose running statistics stand still, and how they were
        self._penalized = False
        self._forgets: list[str] | None = None  # of a copy that has not run yet: parameters whose momentum is to be dropped
        self._modules: dict[str, nn.Module] = {}
        self._edges: list[tuple[nn.Module, str, nn.Module]] = []
        try:
            self._register(method.state(self.blocks))
            self._move()
            self._put_on()
        except BaseException:  # an interrupt, or an error in a method: the model is as it was
            self._watch(False)
            self._take_off()
            raise
        guard.release(self.blocks.weights)  # of an earlier bake: this pruner decides now

    def _register(self, state: State) -> None:
        """What requires grad becomes a parameter of the model."""
        for name, value in state.items():
            if isinstance(value, Tensor) and value.requires_grad:
                if PREFIX + name in self._host._parameters:
                    raise SmartpruneError(
                        f"attach: {self._host_name or 'the model'}, where scores would go, has some of another pruner already, "
                        "that of a model that shares it; bake that one first, or attach to a model that does not share it"
                    )
                self._trained.append(name)
                self._host.register_parameter(PREFIX + name, nn.Parameter(value.detach()))
            else:
                self._state[name] = value
        self._average()

    def _average(self) -> None:
        """FSDP does not know the scores: they stay whole on every rank, and so do their gradients."""
        for parameter in self.parameters() if self._sharded else ():
            if average not in (parameter._post_accumulate_grad_hooks or {}).values():
                parameter.register_post_accumulate_grad_hook(average)

    # -- what the user sees -----------------------------------------------------------------------------------------------

    @property
    def progress(self) -> float:
        """Share of the search that is done, in [0, 1]."""
        return min(1.0, self.count / self.steps)

    @property
    def mask(self) -> Tensor:
        """The mask as it is now, [n]: soft in a search, hard (bool) once frozen."""
        if self._hard is not None:
            return self._hard.clone()
        self._follow()
        with torch.no_grad():
            return self._soft(None).clone()

    @property
    def tau(self) -> float:
        """The temperature now; 0 once frozen, or where the method has none."""
        return 0.0 if self._hard is not None else self._scalars.get("tau", 0.0)

    @property
    def scores(self) -> Tensor:
        """What blocks are ranked by now, [n]: the learned scores of a method that has them."""
        return self.method.rank(self.blocks, self._all_state()).detach()

    def param_group(self, **options: Any) -> dict[str, Any]:
        """A parameter group for the scores, for ``optimizer.add_param_group``: no weight decay unless given."""
        return {"params": self.parameters(), "weight_decay": 0.0, **options}

    def penalty(self) -> Tensor:
        """What the method wants added to the loss; zero for most."""
        penalty = getattr(self.method, "penalty", None)
        if penalty is None or self.phase != "search":
            return torch.zeros((), device=self.blocks.device)
        self._penalized = True
        out: Tensor = penalty(self.blocks, self._all_state())
        return out

    def step(self) -> None:
        """Call once after every ``optimizer.step()``, before ``optimizer.zero_grad()``. After ``steps`` calls the mask freezes."""
        if self.phase == "baked":
            raise SmartpruneError("pruner.step(): the model is baked, there is nothing left to step; take the call out of the loop")
        self._put_away()
        if self.phase == "frozen":
            self._require_agreement()
            self._clean()
            self._glance()
            return
        self._follow()
        self._require_attached("step")
        self._require_finite()
        self._require_trained()
        self._require_agreement()
        self.telemetry_.measure(self.mask if self._live is None else self._live.mask)  # an evaluation drops what was live
        self._require_penalty()
        self.count = min(self.count + 1, self.steps)
        self._update()
        self._move()
        self._last = watch.now()
        if self._live is not None:
            self._live.weights = []  # of the last step; its mask stays, since a replayed graph writes the next one there
        if self.count >= self.steps:
            self.freeze()

    def freeze(self, force: bool = False) -> None:
        """Hardens the mask now: keeps the best blocks that the budget allows, exactly, and zeroes the others.

        A search that ends too warm to be hard raises, unless ``force``; the weights and scores are not touched by that.
        """
        if self.phase != "search":
            raise SmartpruneError(f"pruner.freeze(): the mask is {self.phase} already")
        self._put_away()
        self._require_attached("freeze")
        self._require_finite_weights("freeze")
        hard = agree(self._choose())
        measure = getattr(self.method, "warmth", None)
        warmth = 0.0 if measure is None or force else measure(self.blocks, self._all_state())
        if warmth > TOO_WARM:
            raise SmartpruneError(
                f"pruner.freeze(): the search ends too warm: at temperature {self.tau:.3g} the soft mask is {warmth:.2f} away from "
                f"its hard form (at most {TOO_WARM} is allowed), so hardening would change the network; end at a lower "
                "temperature (end=), or call pruner.freeze(force=True) to harden anyway"
            )
        self.telemetry_.measure(hard.to(torch.float32))
        self._hard = hard
        self.phase = "frozen"
        self._watch(False)
        self._live = None
        self.masking.multiply_(hard.to(torch.float32), self.blocks.weights)
        guard.hold(self.blocks.weights, self.masking, hard)

    def _choose(self) -> Tensor:
        """The hard mask: the best blocks that the budget allows, or what a method without a budget wants."""
        final, floor = (getattr(self.method, name, None) for name in ("final", "floor"))
        chosen = None if final is None else final(self.blocks, self._all_state())
        if chosen is not None:
            return chosen  # type: ignore[no-any-return]
        rank = self.ranked = self.method.rank(self.blocks, self._all_state()).detach().clone()
        least = self.blocks.min_keep if floor is None else floor(self.blocks)
        layer = None if least is None else self.blocks.layer.to(rank.device)
        exact = self.plan.exact
        if exact is None:
            return hard_topk(rank, self.blocks.limit, self.blocks.cost, least, layer)
        kept = exact.best(rank, least, layer)
        if kept is None:
            raise SmartpruneError(
                "pruner.freeze(): the blocks that every layer must keep take more than the "
                f"{exact.limit:,} {self.plan.unit} of the budget; lower floor, or remove less"
            )
        return kept

    def telemetry(self) -> dict[str, Any]:
        """The search in numbers. Reading waits for a GPU; measuring, at every step, does not."""
        out: dict[str, Any] = {"step": self.count, "phase": self.phase, "progress": self.progress, "tau": self.tau}
        out |= self.telemetry_.read()
        decided = self.phase != "search" or out["gap"] < DECIDED  # a soft mask has hardly a block above one half
        empty = [layer.name for layer, kept in zip(self.plan.layers, out["kept"], strict=False) if kept == 0]
        out["collapsed"] = empty if decided else []
        theta = self._state.get("theta")
        out["theta"] = None if theta is None else float(theta[1].sum())
        if theta is not None and self._hard is None and math.isfinite(out["theta"]):
            out["theorem_3_7"] = theorem_3_7(self.scores, out["theta"], self.tau, self.count)
        return out

    def receipt(self) -> Receipt:
        """What was asked and what was achieved, integer by integer, from the weights as they are."""
        if self._hard is None:
            raise SmartpruneError(
                f"pruner.receipt(): the search is at step {self.count} of {self.steps} and no block is removed yet; finish it, or "
                "call pruner.freeze() to harden the mask now"
            )
        self._put_away()
        if self.phase == "frozen":  # a baked model is its owner's: what grew back there is told, not undone
            self._require_attached("receipt")
            self._require_finite_weights("receipt")
            self._clean()
        pairs = zip(self.plan.layers, self.blocks.weights, strict=True)
        weights = {layer.weight: full_tensor(weight.detach()) for layer, weight in pairs}
        return make_receipt(self.plan, weights, self._hard.cpu(), self.method.name, settings(self.method))

    def apply_to(self, other: nn.Module) -> None:
        """Gives a copy of the model (an EMA copy, say) the mask, temperature and phase of this one, where it stands now.

        A copy made by deepcopy after :func:`attach` follows; a plain copy, made before, becomes a masked one, and once this
        pruner is frozen its removed blocks are zeroed as well.
        """
        if not isinstance(other, nn.Module):
            raise SmartpruneError(f"pruner.apply_to(): {type(other).__name__} is no model; give a copy of the model")
        theirs = find_pruner(other)
        if theirs is self:
            raise SmartpruneError("pruner.apply_to(): that is the model this pruner is attached to; give a copy of it")
        if theirs is None:
            other = self._unwrapped(other)
        if self.phase == "baked" or (self._hard is not None and theirs is None):
            assert self._hard is not None
            reshard(other)
            weights = self.plan.blocks(other).weights if theirs is None else theirs.blocks.weights
            self.masking.multiply_(self._hard.to(torch.float32), weights)
            if theirs is not None:
                theirs.load_state_dict(self.state_dict())
            return
        if theirs is None:
            masked = {name for layer in self.plan.layers for name, _ in layer.sites}
            if taken := [name for name, module in other.named_modules() if name in masked and is_masked(module)]:
                raise SmartpruneError(
                    f"pruner.apply_to(): {taken[0]} belongs to a pruner already: the model is no copy, but shares the layer; give "
                    "a copy (copy.deepcopy)"
                )
            with torch.inference_mode(False):  # what follows the search is written to again
                theirs = Pruner(other, self.method, self.plan, self.steps, self.seed)
        theirs.load_state_dict(self.state_dict())

    def _unwrapped(self, other: nn.Module) -> nn.Module:
        """The copy inside of what holds it, such as AveragedModel."""
        inside: Any = other
        while inside is not None:
            names = {name for name, _ in inside.named_parameters(remove_duplicate=False)}
            if all(layer.weight in names for layer in self.plan.layers):
                return inside  # type: ignore[no-any-return]
            inside = inside._modules.get("module", inside._modules.get("_orig_mod"))
        raise SmartpruneError(
            f"pruner.apply_to(): this {type(other).__name__} is no copy of the model: it has no {self.plan.layers[0].weight!r}, or "
            "not all of the other pruned weights; give a copy of the model"
        )

    # -- checkpoints ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights, as tensors and plain values."""
        tensors = {
            name: value.detach().clone()
            for name, value in self._all_state().items()
            if isinstance(value, Tensor) and name != "watched"
        }
        floats = {name: value for name, value in self._state.items() if not isinstance(value, Tensor)}
        return {
            "format": 1,
            "method": self.method.name,
            "blocks": self.blocks.n,
            "limit": self.blocks.limit,
            "steps": self.steps,
            "seed": self.seed,
            "count": self.count,
            "phase": self.phase,
            "tensors": tensors,
            "floats": floats,
            "mask": None if self._hard is None else self._hard.clone(),
            "side": None if self.telemetry_.side is None else self.telemetry_.side.clone(),
            "measured": None if self.telemetry_.values is None else self.telemetry_.values.clone(),
            "forgets": self._forgetful(),
            **self._given(),
        }

    def _given(self) -> dict[str, Any]:
        """What the user attached with: a state that fits by its number of blocks alone may be of another search."""
        kind, of = ("", "") if self.plan.budget is None else (self.plan.budget.kind, scope(self.plan.budget))
        return {
            "block": str(self.plan.block),
            "settings": settings(self.method),
            "layers": [f"{plain_name(layer.weight)}: {layer.n} blocks" for layer in self.plan.layers],
            "floor": 0.0 if self.plan.floor is None else float(self.plan.floor),
            "budget": f"{kind} of {of}",
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where another pruner, attached with the same arguments, stood."""
        mine: dict[str, Any] = {"method": self.method.name, "blocks": self.blocks.n, "limit": self.blocks.limit}
        mine |= {"steps": self.steps}
        mine |= {name: value for name, value in self._given().items() if isinstance(state, dict) and name in state}
        if not isinstance(state, dict) or state.get("format") != 1:
            raise SmartpruneError(
                "pruner.load_state_dict(): this is not the state of a pruner; give what pruner.state_dict() returned"
            )
        if not sound(state, self.blocks.n):
            raise SmartpruneError("pruner.load_state_dict(): the state is damaged; give what pruner.state_dict() returned")
        for name, value in mine.items():
            if state.get(name) != value:
                theirs, ours = differing(state.get(name), value)
                raise SmartpruneError(
                    f"pruner.load_state_dict(): the saved pruner has {name}={theirs!r}, this one {ours!r}; attach with the "
                    "arguments of the saved run"
                )
        if self.phase == "baked":
            raise SmartpruneError("pruner.load_state_dict(): this model is baked; load into a freshly attached one")
        self._put_away()
        self._follow()
        now = self._all_state()
        lacking = [name for name in self._trained if name not in state["tensors"]]
        if lacking:
            raise SmartpruneError(
                f"pruner.load_state_dict(): the state has no {lacking[0]!r}; give what pruner.state_dict() returned"
            )
        with torch.no_grad():
            for name, value in state["tensors"].items():
                if name not in now or tuple(now[name].shape) != tuple(value.shape):
                    raise SmartpruneError(f"pruner.load_state_dict(): unexpected state {name!r} of shape {tuple(value.shape)}")
                now[name].copy_(value)
        self._state |= state["floats"]
        self.seed, self.count = int(state["seed"]), int(state["count"])
        mask = state["mask"]
        device = self.blocks.device
        self.phase = "search" if mask is None else "frozen"
        self._hard = None if mask is None else mask.to(device, torch.bool).clone()
        self.telemetry_.load(state["side"], state.get("measured"), device)
        self._live, self._proven, self._missed, self._agreed, self._last = None, False, 0, False, watch.now()
        self._move()
        if self._hard is not None:
            self.masking.multiply_(self._hard.to(torch.float32), self.blocks.weights)
            guard.hold(self.blocks.weights, self.masking, self._hard)
        else:
            guard.release(self.blocks.weights)  # where this one was frozen and goes back into its search
        watch.remember(self.model.parameters())
        self._forgets = list(state.get("forgets", []))
        self._arm()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": None, "_inside": False, "_proven": False, "_agreed": False, "_forgets": self._forgetful()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(
            {"_forgets": [], "_paused": [], "_modules": {}, "_edges": [], "_agreed": False, "_missed": 0}
        )  # which a pruner of before has not
        self.__dict__.update(state)
        self._paused = [entry if isinstance(entry, tuple) else (entry, "track_running_stats", True) for entry in self._paused]
        self._last = watch.now()

    def _forgetful(self) -> list[str]:
        """The parameters whose momentum an optimizer drops before its next step: a resumed search has to do so, too."""
        return watch.forgetful(self.model.named_parameters()) if self._forgets is None else self._forgets

    def _arm(self) -> None:
        """What optimizers are to do to these parameters is known to this process only: a copy says it again."""
        if self._forgets is None:
            return
        if self._forgets:
            chosen = set(self._forgets)
            watch.forget(parameter for name, parameter in self.model.named_parameters() if name in chosen)
        if self._watched is not None:
            watch.hold_still(self.model.parameters())
        self._forgets = None

    # -- how weights are masked -------------------------------------------------------------------------------------------

    def masked(self, index: int) -> Tensor:
        """The weight a layer computes with; called by the layer."""
        if self._sharded:
            return self._one(index)
        if not torch.compiler.is_compiling():
            return self._ensure(index)[index]
        if not self._inside:
            _ensure_uncompiled(self, index)
        assert self._live is not None
        return self._live.weights[index]

    def _fresh(self, live: Live, index: int) -> bool:
        """Whether the masked weights still belong to the weights and scores as they are."""
        same_weight = live.versions[index] == self.blocks.layer_weight(index)._version
        return bool(live.weights) and same_weight and live.autocast == _autocast() and self._solved(live)

    def _solved(self, live: Live) -> bool:
        """Whether its mask is still the one to use."""
        if live.inference and not torch.is_inference_mode_enabled():
            return False
        return (live.grad or not torch.is_grad_enabled()) and live.key == self._key()

    def _ensure(self, index: int) -> list[Tensor]:
        """The masked weights, whatever becomes of those that are kept: evaluations in other threads end and drop them."""
        live = self._live
        weights = [] if live is None else live.weights
        if live is not None and weights and self._fresh(live, index):
            return weights
        return _refresh_anyhow(self, live.mask if live is not None and self._solved(live) else None)

    def _one(self, index: int) -> Tensor:
        """The masked weight of one layer. FSDP gathers weights just before their layer needs them, and not all at once;
        at other times the layer has the part of its weight that is stored here."""
        weight: Tensor = self.blocks.layer_weight(index)
        if is_sharded(weight):
            return weight
        if self._live is None or not self._solved(self._live):
            self._refresh()
        assert self._live is not None
        with torch.autocast(weight.device.type, enabled=False):
            if not self.capabilities.trains_weights and self._hard is None:
                weight = weight.detach()
            return self.masking.one(
                self._live.factors, index, weight, self.capabilities.straight_through, held=self._hard is not None
            )

    def _refresh(self, mask: Tensor | None = None) -> list[Tensor]:
        """One solve, unless the mask is known, and one masked multiply for all layers."""
        self._require_unsplit()
        self._live = None  # first, so that old and new weights are not held at once
        self._follow()
        self._arm()
        if self._hard is not None:
            self._clean()
        weights: Sequence[Tensor] = self.blocks.weights
        self._require_shapes(weights)
        autocast = _autocast()
        dtypes = None if autocast is None else self._dtypes(weights, autocast)
        with torch.autocast(weights[0].device.type, enabled=False):
            if self._hard is not None:
                mask = self._hard
            elif mask is None:
                seed = self.seed * 1_000_003 + self.count if self.model.training else None
                sources = [*self.parameters(), *self.blocks.weights]
                mask = again(lambda: self._soft(seed), sources) if self.capabilities.plain_autograd else self._soft(seed)
            factors = mask if self._hard is not None else self._amplified(mask)
            if self._sharded:
                masked = []  # made one by one, when the layers ask
            elif self._hard is not None:
                extra = self.parameters() if grouped() else []  # DDP, of one process too, waits for a gradient of each
                masked = self.masking.hold(mask, weights, extra, dtypes)
            elif self._watched is not None:
                masked = self._watched.apply(factors, weights)
            else:
                trained = weights if self.capabilities.trains_weights else [weight.detach() for weight in weights]
                masked = self.masking.apply(factors, trained, self.capabilities.straight_through, dtypes)
        self._live = Live(
            masked,
            mask,
            factors,
            self._key(),
            [weight._version for weight in weights],
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast,
        )
        return masked

    def _follow(self) -> None:
        """Takes the state along when the user moves the model to another device."""
        device = self.blocks.device
        if device == self._device:
            return
        with torch.inference_mode(False):  # a model may be moved for an evaluation: nothing made there could be written to later
            self._state = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in self._state.items()}
            self._hard = None if self._hard is None else self._hard.to(device)
            self.blocks.to(device)
            self.telemetry_.to(device)
            if self._watched is not None:
                self._watched = watch.Watched(self.masking, device)
        self._device = device

    def _dtypes(self, weights: Sequence[Tensor], autocast: torch.dtype) -> list[torch.dtype | None]:
        """What autocast would cast each weight to, for torch's own layers: the multiply does it on the way."""
        if self._castable is None:
            own = LAYER_TYPES
            classes = [[user_class(self.model.get_submodule(s[0])) for s in layer.sites] for layer in self.plan.layers]
            self._castable = [all(cls in own for cls in same) for same in classes]
        fits = [w.is_cuda and w.dtype == torch.float32 for w in weights]
        return [autocast if fit and own else None for fit, own in zip(fits, self._castable, strict=True)]

    def _soft(self, seed: int | None) -> Tensor:
        """The mask. Only training moves on where the next solve starts: who looks in between does not change a run's bits."""
        state = self._all_state()
        if not torch.is_grad_enabled() and "theta" in state:
            state["theta"] = state["theta"].clone()
        return self.method.mask(self.blocks, state, seed)

    def _amplified(self, mask: Tensor) -> Tensor:
        """What weights are multiplied by: the mask, or more where the method makes up for its softness."""
        amplify = getattr(self.method, "amplify", None)
        if amplify is None:
            return mask
        return again(lambda: amplify(self.blocks, mask), [mask]) if self.capabilities.plain_autograd else amplify(self.blocks, mask)

    def _key(self) -> tuple[int, ...]:
        return (self.count, watch.now(), *(parameter._version for parameter in self.parameters()))

    def _all_state(self) -> State:
        out = {**self._state, **dict(zip(self._trained, self.parameters(), strict=True))}
        if self._watched is not None:
            out["watched"] = self._watched.total
        return out

    def _update(self) -> None:
        """What the method changes after a step."""
        update = getattr(self.method, "update", None)
        if update is None:
            return
        if self._watched is not None:
            if distributed():
                torch.distributed.all_reduce(self._watched.total)
            if not self._watched.total.is_cuda:
                self._require_finite_gradients(f"the gradients that {type(self.method).__name__} reads", [self._watched.total])
        with torch.no_grad():
            now = self._all_state()
            try:
                change = update(self.blocks, now, Clock(self.count, self.steps))
            except SmartpruneError:
                self._require_finite_weights("step")  # methods rank weights: an error about scores sends to the wrong place
                raise
            for name, value in change.state.items():
                now[name].copy_(value)  # in place: a captured graph reads these addresses
            if change.multiply is not None:
                self.masking.multiply_(change.multiply, self.blocks.weights)
        if change.forget:
            watch.forget(self.model.parameters())

    def _move(self) -> None:
        """Sets what depends on progress, on the device and without waiting for it."""
        self._scalars = self.method.scalars(self.blocks, self._all_state(), self.progress)
        for name, value in self._scalars.items():
            old = self._state.get(name)
            if old is None or old.device != self.blocks.device:
                self._state[name] = torch.full((), value, dtype=torch.float64, device=self.blocks.device)
            else:
                old.fill_(value)
        calibrates = getattr(self.method, "calibrates", None)
        self._watch(calibrates is not None and self._hard is None and calibrates(Clock(self.count, self.steps)))

    def _watch(self, on: bool) -> None:
        """While a method calibrates, gradients are added up per block and no parameter moves."""
        if on and self._watched is None:
            self._watched = watch.Watched(self.masking, self.blocks.device)
            watch.hold_still(self.model.parameters())
            norms = [module for module in self.model.modules() if getattr(module, "track_running_stats", False)]
            self._paused = [watch.paused(module) for module in norms]
        elif on and self._watched is not None:
            self._watched.clear()
        elif self._watched is not None:
            self._watched = None
            watch.let_go(self.model.parameters())
            for module, name, value in self._paused:
                setattr(module, name, value)

    def _put_away(self) -> None:
        if self._sharded:
            reshard(self.model)

    def _clean(self) -> None:
        """Removed blocks of a frozen model are zero again, whatever touched them."""
        assert self._hard is not None
        guard.clean(self.blocks.weights, self.masking, self._hard)

    # -- attaching --------------------------------------------------------------------------------------------------------

    def _put_on(self) -> None:
        index: dict[str, dict[str, int]] = {}
        for i, layer in enumerate(self.plan.layers):
            for module_name, attribute in layer.sites:
                index.setdefault(module_name, {})[attribute] = i
        self._modules = {name: self.model.get_submodule(name) for name in index}
        if self._trained:
            self._modules[self._host_name] = self._host
        self._edges = self._way()
        for module_name, attributes in index.items():
            put_on(self._modules[module_name], self, attributes)
        self.model.__dict__[LINK] = self
        self.model.register_forward_pre_hook(self._before, prepend=True)
        self.model.register_forward_hook(self._after, always_call=True)
        self.model.register_state_dict_pre_hook(self._before_save)
        self.model.register_load_state_dict_post_hook(self._after_load)

    def _take_off(self) -> None:
        for name in {module_name for layer in self.plan.layers for module_name, _ in layer.sites}:
            module = self._modules[name] if name in self._modules else self.model.get_submodule(name)
            if is_masked(module):  # not all of them are, where attaching was interrupted
                take_off(module)
        for name in self._trained:
            trained = self._host._parameters.pop(PREFIX + name, None)
            if trained is not None:
                self._state[name] = trained.detach()
        self._trained = []
        self.model.__dict__.pop(LINK, None)
        for table in ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
            hooks = getattr(self.model, table)
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                del hooks[key]
                self.model._forward_hooks_always_called.pop(key, None)

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined, no-untyped-call]
            raise SmartpruneError(STILL_MASKED)
        _refresh_anyhow(self)
        self._inside = True

    def _after(self, module: nn.Module, args: Any, out: Any) -> None:
        self._inside = False
        if self._live is not None and not self._live.grad:
            self._live.weights = []  # an evaluation needs them no more; a backward pass that recomputes would
            self._live = None

    def _before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._hard is not None:
            self._clean()

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        lost = [name for name in incompatible.missing_keys if name.rpartition(".")[2].startswith(PREFIX)]
        if lost:
            raise SmartpruneError(
                f"load_state_dict(): the checkpoint has no {lost[0]!r}, so it was saved before attach (or after bake); load it "
                "first and attach afterwards, or resume with a checkpoint of this search"
            )
        self._live = None
        self._average()  # with assign=True parameters are others now
        if self._watched is not None:
            watch.hold_still(self.model.parameters())

    def _keep_equivalent(self) -> float:
        """How many blocks the budget keeps, about."""
        return self.blocks.n * self.blocks.limit / max(self.blocks.total, 1)


# Inside torch.compile these run as they are. (torch.compiler.disable would load the compiler for everybody.)
_refresh_uncompiled = torch._disable_dynamo(Pruner._refresh)  # type: ignore[attr-defined]
_ensure_uncompiled = torch._disable_dynamo(Pruner._ensure)  # type: ignore[attr-defined]


def _refresh_anyhow(pruner: Pruner, mask: Tensor | None = None) -> list[Tensor]:
    """A hook that the compiler gave up on runs plainly, but what it calls would be compiled; hence the look at whether
    the compiler is loaded at all."""
    if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
        made: list[Tensor] = _refresh_uncompiled(pruner, mask)
        return made
    return pruner._refresh(mask)


def attach(
    model: nn.Module,
    method: Method,
    block: Block | str | Sequence[int | None] = (16, 8),
    sparsity: float | None = None,
    budget: Budget | None = None,
    *,
    steps: int,
    floor: float | None = None,
    include: Patterns = (),
    skip: Patterns = (),
    example: Any = None,
    seed: int = 0,
) -> Pruner:
    """Puts masks on a model, in place, and returns the pruner that steers them.

    ``steps`` is the length of the search in optimizer steps. The model keeps its parameters, their names and their order; the
    scores are one more parameter, the last. ``seed`` is for methods that draw at random. The other arguments are those of
    :func:`plan`.
    """
    if isinstance(method, str) or not hasattr(method, "rank"):
        raise SmartpruneError(
            f"attach: method={method!r} is no method; give its settings, such as smartprune.Smart() (all by name: "
            "smartprune.METHODS)"
        )
    if isinstance(method, type):
        raise SmartpruneError(f"attach: method is the class {method.__name__}; give its settings, at least {method.__name__}()")
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"attach: model is a {type(model).__name__}; give a torch.nn.Module")
    if isinstance(steps, bool) or not isinstance(steps, numbers.Integral) or steps < 1:
        raise SmartpruneError(f"attach: steps={steps!r}; give the length of the search as a number of optimizer steps, at least 1")
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise SmartpruneError(f"attach: seed={seed!r}; give an integer")
    if find_pruner(model) is not None:
        raise SmartpruneError("attach: the model has a pruner already; bake it first, or start from a fresh model")
    if sparsity is None and budget is None:
        raise SmartpruneError("attach: no budget given; give sparsity=0.95, or budget=smartprune.macs(0.5, example=x)")
    with torch.inference_mode(False):  # what is made here is trained, or read by backward passes
        planned = plan(model, block, sparsity, budget, floor=floor, include=include, skip=skip, example=example).require()
    taken = [layer.name for layer in planned.layers if any(is_masked(model.get_submodule(name)) for name, _ in layer.sites)]
    if taken:
        raise SmartpruneError(
            f"attach: {taken[0]} belongs to another pruner already, that of a larger model or of one that shares the layer; bake "
            f"that one first, or leave the layer out: skip={taken[0]!r}"
        )
    with torch.inference_mode(False):
        return Pruner(model, method, planned, int(steps), int(seed))


def bake(model: nn.Module, hold: bool = True) -> Receipt:
    """Makes the model plain again, with zeros where blocks were removed, and says what was achieved.

    Parameters stay the same objects. With ``hold``, torch optimizers of this process that go on training the model leave the
    zeros at zero; ``hold=False`` lets them grow back, and so does training a copy of the baked model, which is a plain one.
    """
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"bake: model is a {type(model).__name__}; give a torch.nn.Module")
    pruner = find_pruner(model)
    if pruner is None:
        raise SmartpruneError("bake: the model has no pruner; attach one first (a baked model is plain and needs no second bake)")
    if pruner.phase == "search":
        raise SmartpruneError(
            f"bake: the search is at step {pruner.count} of {pruner.steps}; let it finish, or call pruner.freeze() to harden the "
            "mask now; if this is a copy of a model whose search is over (EMA), call pruner.apply_to(copy) first"
        )
    receipt = pruner.receipt()
    with torch.no_grad():
        torch._foreach_add_(list(pruner.blocks.weights), 0.0)  # a negative weight times zero is -0.0; in files a zero is a zero
    pruner._take_off()
    pruner.phase = "baked"
    pruner._live = None
    if not hold:
        guard.release(pruner.blocks.weights)
    return receipt


def find_pruner(model: nn.Module) -> Pruner | None:
    """The pruner of a model, also through wrappers such as DDP and torch.compile."""
    found = {name: module.__dict__[LINK] for name, module in model.named_modules() if LINK in module.__dict__}
    if len(found) > 1:
        raise SmartpruneError(
            f"the model has {len(found)} pruners, on {' and '.join(found)}; give the part that is meant, model.{next(iter(found))}"
        )
    return next(iter(found.values()), None)


def _last_module(model: nn.Module) -> tuple[str, nn.Module]:
    """Where the scores live: the last module, so that they come last in ``parameters()`` and zip with a plain copy's."""
    named = [(name, module) for name, module in model.named_modules() if not isinstance(module, torch.jit.ScriptModule)]
    return named[-1]


def _autocast() -> torch.dtype | None:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
