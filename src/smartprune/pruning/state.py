"""The state of a search: its position, the state of the method, and the masks that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.budget import scope
from ..core.layers import plain_name
from ..core.sharding import is_sharded, reshard
from ..errors import SmartpruneError
from ..methods.method import Clock, Method, State, capabilities, settings
from ..topk import hard_topk
from . import checks, optimizers, zeros
from .calibration import Calibration
from .consensus import average_gradient, is_distributed
from .multiply import BlockMultiplier
from .plan import Plan
from .telemetry import Telemetry

PREFIX = "smartprune_"  # of the names of trained tensors in the model while it is attached

Phase = Literal["search", "frozen", "baked"]


@dataclass
class Observations:
    """What the checks remember from step to step. A copy of the search starts with new ones."""

    scores_trained: bool = False  # an optimizer has stepped on the scores
    steps_missed: int = 0  # steps since then in which other parameters moved and the scores did not
    ranks_agree: bool = False
    last_step: int = field(default_factory=optimizers.step_count)  # optimizer steps that have been checked
    optimizer_stepped: bool = False  # between two steps of the pruner
    forward: int | None = None  # optimizer steps before the last forward pass with gradients since the last step of the pruner
    early: int = 0  # steps in a row before which a forward pass followed the step of the optimizer
    replays: bool = False  # a CUDA graph runs forward passes and optimizers unseen


class SearchState:
    """Everything that determines the mask."""

    def __init__(self, model: nn.Module, method: Method, plan: Plan, steps: int, seed: int) -> None:
        self.model, self.method, self.plan, self.steps, self.seed = model, method, plan, steps, seed
        self.capabilities = capabilities(method)
        self.count = 0
        self.baked = False
        self.blocks = plan.blocks(model)
        self.device = self.blocks.device
        self.is_sharded = is_sharded(self.blocks.weights[0])
        self.multiplier = BlockMultiplier([layer.grid for layer in plan.layers])
        self.hard: Tensor | None = None  # bool [n], once frozen
        self.ranking: Tensor | None = None  # [n], what blocks were ranked by when the mask was made hard; in this process only
        self.host_name, self.host = _last_module(model)
        self.trained: list[str] = []  # names of the method's tensors that are parameters of the model
        self.tensors: State = {}  # the rest of the method's state
        self.scalars: dict[str, float] = {}
        self.calibration: Calibration | None = None
        self.penalty_called = False  # since the last step
        self.pending_resets: list[str] | None = None  # of a copy that has not run yet: parameters whose momentum is to be reset
        self.telemetry = Telemetry(self.multiplier.starts, self.kept_blocks)
        self.seen = Observations()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "seen": None, "pending_resets": self.momentum_resets()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.seen = Observations()

    @property
    def phase(self) -> Phase:
        return "baked" if self.baked else "search" if self.hard is None else "frozen"

    @property
    def progress(self) -> float:
        return min(1.0, self.count / self.steps)

    @property
    def kept_blocks(self) -> float:
        """About how many blocks the budget keeps."""
        return self.blocks.n * self.blocks.limit / max(self.blocks.total, 1)

    @property
    def tau(self) -> float:
        """The temperature. 0 once the mask is hard, or if the method has none."""
        if self.hard is not None:
            return 0.0
        # a scalar if it depends on progress alone, a tensor if it depends on the scores
        return float(self.scalars["tau"] if "tau" in self.scalars else self.tensors.get("tau", 0.0))

    def scores(self) -> Tensor:
        """The numbers that rank the blocks now, [n]."""
        return self.method.rank(self.blocks, self.values()).detach()

    def identity(self) -> dict[str, Any]:
        """What must be equal to continue a search, and on all ranks. The number of blocks alone could belong to a different one."""
        kind, of = ("", "") if self.plan.budget is None else (self.plan.budget.kind, scope(self.plan.budget))
        return {
            "method": self.method.name,
            "blocks": self.blocks.n,
            "limit": self.blocks.limit,
            "steps": self.steps,
            "block": str(self.plan.block),
            "settings": settings(self.method),
            "layers": [f"{plain_name(layer.weight)}: {layer.n} blocks" for layer in self.plan.layers],
            "floor": 0.0 if self.plan.floor is None else float(self.plan.floor),
            "budget": f"{kind} of {of}",
        }

    # -- the state of the method ------------------------------------------------------------------------------------------

    def register(self, values: State) -> None:
        """Takes the method's initial state. Tensors that require grad become parameters of the model."""
        for name, value in values.items():
            if isinstance(value, Tensor) and value.requires_grad:
                if PREFIX + name in self.host._parameters:
                    raise SmartpruneError(
                        f"attach: {self.host_name or 'the model'}, the module that would hold the scores, already holds those of "
                        "another pruner, whose model shares it; bake that model first, or attach to a model that does not share it"
                    )
                self.trained.append(name)
                self.host.register_parameter(PREFIX + name, nn.Parameter(value.detach()))
                optimizers.watch_scores(self.parameters())
            else:
                self.tensors[name] = value
        self.average_gradients()

    def unregister(self) -> None:
        """Removes the scores from the model and keeps their values."""
        optimizers.stop_watching_scores(self.parameters() if self.has_scores() else ())
        for name in self.trained:
            parameter = self.host._parameters.pop(PREFIX + name, None)
            if parameter is not None:
                self.tensors[name] = parameter.detach()
        self.trained = []

    def average_gradients(self) -> None:
        """With FSDP, which does not manage the scores, every rank has all scores and their gradients are averaged here."""
        for parameter in self.parameters() if self.is_sharded else ():
            if average_gradient not in (parameter._post_accumulate_grad_hooks or {}).values():
                parameter.register_post_accumulate_grad_hook(average_gradient)

    def parameters(self) -> list[nn.Parameter]:
        return [self.host._parameters[PREFIX + name] for name in self.trained]  # type: ignore[misc]

    def has_scores(self) -> bool:
        """Whether the model still holds all trained tensors."""
        return all(PREFIX + name in self.host._parameters for name in self.trained)

    def values(self) -> State:
        """The whole state, as the method sees it."""
        out = {**self.tensors, **dict(zip(self.trained, self.parameters(), strict=True))}
        if self.calibration is not None:
            out["watched"] = self.calibration.gradients.total
        return out

    def to_device(self) -> None:
        """Moves the state to the device of the weights, in case the user moved the model."""
        device = self.blocks.device
        if device == self.device:
            return
        with torch.inference_mode(False):  # the model may be moved in inference mode, whose tensors cannot be written to later
            self.tensors = {n: value.to(device) if isinstance(value, Tensor) else value for n, value in self.tensors.items()}
            self.hard = None if self.hard is None else self.hard.to(device)
            self.blocks.to(device)
            self.telemetry.to(device)
            if self.calibration is not None:
                self.calibration.to(device)
        self.device = device

    # -- masks ------------------------------------------------------------------------------------------------------------

    def soft_mask(self, seed: int | None) -> Tensor:
        """The mask of a forward pass. Only training updates where the next solve starts, so reading the mask between steps does not
        change the result."""
        values = self.values()
        if not torch.is_grad_enabled() and "theta" in values:
            values["theta"] = values["theta"].clone()
        return self.method.mask(self.blocks, values, seed)

    def choose_hard_mask(self) -> Tensor:
        """The best blocks that the budget allows, or the hard mask of a method that does not follow the budget."""
        final, floor = (getattr(self.method, name, None) for name in ("final", "floor"))
        mask: Tensor | None = None if final is None else final(self.blocks, self.values())
        if mask is not None:
            return mask
        ranking = self.ranking = self.scores().clone()
        least = self.blocks.min_keep if floor is None else floor(self.blocks)
        layer = None if least is None else self.blocks.layer.to(ranking.device)
        exact = self.plan.exact
        if exact is None:
            return hard_topk(ranking, self.blocks.limit, self.blocks.cost, least, layer)
        mask = exact.best(ranking, least, layer)
        if mask is None:
            raise SmartpruneError(
                "pruner.freeze(): the blocks that every layer must keep take more than the "
                f"{exact.limit:,} {self.plan.unit} of the budget; lower floor, or remove less"
            )
        return mask

    def harden(self, mask: Tensor) -> None:
        """Zeroes the blocks that a hard mask removes, and keeps them at zero."""
        self.hard = mask
        self.multiplier.multiply_(mask.to(torch.float32), self.blocks.weights)
        zeros.hold_frozen(self.blocks.weights, self.multiplier, mask)

    def zero_removed_blocks(self) -> None:
        """Zeroes the removed blocks of a frozen model again, whatever wrote to them."""
        assert self.hard is not None
        zeros.zero_removed_blocks(self.blocks.weights, self.multiplier, self.hard)

    def reshard(self) -> None:
        """Frees weights that FSDP has gathered, since what is written to them is lost."""
        if self.is_sharded:
            reshard(self.model)

    # -- time -------------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Sets what depends on progress, on the device and without waiting for it."""
        self.scalars = self.method.scalars(self.blocks, self.values(), self.progress)
        for name, value in self.scalars.items():
            old = self.tensors.get(name)
            if old is None or old.device != self.blocks.device:
                self.tensors[name] = torch.full((), value, dtype=torch.float64, device=self.blocks.device)
            else:
                old.fill_(value)
        calibrates = getattr(self.method, "calibrates", None)
        self.calibrate(calibrates is not None and self.hard is None and calibrates(Clock(self.count, self.steps)))

    def update(self) -> None:
        """Applies what the method changes after a step."""
        update = getattr(self.method, "update", None)
        if update is None:
            return
        if self.calibration is not None:
            total = self.calibration.gradients.total
            if is_distributed():
                torch.distributed.all_reduce(total)
            if not total.is_cuda:
                checks.require_finite_gradients(self, f"the gradients that {type(self.method).__name__} reads", [total])
        with torch.no_grad():
            values = self.values()
            try:
                change = update(self.blocks, values, Clock(self.count, self.steps))
            except SmartpruneError:
                checks.require_finite_weights(self, "step")  # an error about ranks would hide that the weights diverged
                raise
            for name, value in change.state.items():
                values[name].copy_(value)  # in place: a CUDA graph reads these addresses
            if change.multiply is not None:
                self.multiplier.multiply_(change.multiply, self.blocks.weights)
        if change.forget:
            optimizers.reset_momentum(self.model.parameters())

    def calibrate(self, on: bool) -> None:
        """Starts, continues or ends a calibration."""
        if on and self.calibration is None:
            self.calibration = Calibration(self.model, self.multiplier, self.blocks.device)
        elif on and self.calibration is not None:
            self.calibration.gradients.clear()
        elif self.calibration is not None:
            self.calibration.stop()
            self.calibration = None

    def momentum_resets(self) -> list[str]:
        """The parameters whose momentum is reset before the next step. A resumed search must do so too."""
        if self.pending_resets is not None:
            return self.pending_resets
        return optimizers.pending_momentum_resets(self.model.named_parameters())

    def activate(self) -> None:
        """Makes a copied or loaded search known to the optimizer registry of this process."""
        if self.pending_resets is None:
            return
        if self.pending_resets:
            names = set(self.pending_resets)
            optimizers.reset_momentum(parameter for name, parameter in self.model.named_parameters() if name in names)
        if self.calibration is not None:
            self.calibration.pause_parameters()
        self.pending_resets = None


def _last_module(model: nn.Module) -> tuple[str, nn.Module]:
    """The module that holds the scores: the last one, so that ``zip`` with the parameters of a plain copy pairs all others."""
    modules = [(name, module) for name, module in model.named_modules() if not isinstance(module, torch.jit.ScriptModule)]
    return modules[-1]
