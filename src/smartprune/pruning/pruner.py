"""The pruner: masks the weights of a model, follows the user's training loop, makes the mask hard and bakes it into the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..artifacts.receipt import Receipt
from ..core.block import Block
from ..core.budget import Budget
from ..core.kinds import is_masked
from ..core.layers import Patterns
from ..core.sharding import full_tensor, reshard
from ..core.vector import Blocks
from ..errors import SmartpruneError
from ..methods import METHODS
from ..methods.method import Capabilities, Method, settings
from ..text import stdout_is_ascii
from . import checkpoint, checks, optimizers
from .consensus import mask_of_first_rank
from .hold import hold_plain_copy, release_layers
from .masked import MaskedModules
from .plan import Plan, plan
from .receipt import make_receipt
from .state import PREFIX, Phase, SearchState
from .summary import layer_table, one_line
from .telemetry import theorem_3_7
from .weights import LiveWeights, MaskedWeights

LINK = "_smartprune"  # the attribute of the model that holds its pruner
DECIDED = 0.1  # if a soft mask is closer than this to its hard form, it is known which layers have lost all blocks
TOO_WARM = 0.1  # if a soft mask is further than this from its hard form, the search has not decided
HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks")


class Pruner:
    """Masks the weights of a model, follows your training loop, and makes the mask hard. Made by :func:`attach`.

    Its phases are ``"search"``, ``"frozen"`` (the mask is hard and the weights train on) and ``"baked"``.

    Args:
        model: The model that is pruned.
        method: The method with its settings.
        planned: The plan of the model.
        steps: The length of the search in optimizer steps.
        seed: The seed of methods that draw random numbers.

    Raises:
        SmartpruneError: The method cannot work with these settings, or the weights are not finite.

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        >>> pruner = sp.attach(model, "gradual", block=(4, 4), sparsity=0.5, steps=100)
        >>> pruner.phase, pruner.progress, pruner.mask
        ('search', 0.0, tensor([1., 1., 1., 1.]))
        >>> pruner.freeze()
        >>> pruner.phase, int(pruner.mask.sum())
        ('frozen', 2)
    """

    def __init__(self, model: nn.Module, method: Method, planned: Plan, steps: int, seed: int) -> None:
        reshard(model)  # an evaluation, or the example of a budget, may have gathered the weights
        search = self.search = SearchState(model, method, planned, steps, seed)
        checks.require_values(search.blocks)
        method.check(search.blocks, steps)
        if search.is_sharded and search.capabilities.needs_whole_weights:
            raise SmartpruneError(f"attach: {method.name} needs whole weights, and FSDP has split them; use DDP, or another method")
        self.live = LiveWeights(search)
        self.modules = MaskedModules(model, planned.layers)
        try:
            search.register(method.state(search.blocks))
            search.advance()
            self.modules.mask(self.live, (search.host_name, search.host) if search.trained else None)
            self._add_hooks()
        except BaseException:  # an interrupt, or an error in a method: restore the model
            search.calibrate(False)
            self.detach()
            raise
        release_layers(model, search.blocks.weights, planned.layers)  # an earlier bake may hold them

    # -- the user's view --------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model that is pruned."""
        return self.search.model

    @property
    def method(self) -> Method:
        """The method with its settings."""
        return self.search.method

    @property
    def capabilities(self) -> Capabilities:
        """What the method declares about itself."""
        return self.search.capabilities

    @property
    def plan(self) -> Plan:
        """The plan that the pruner was attached with."""
        return self.search.plan

    @property
    def blocks(self) -> Blocks:
        """The block vector: the blocks of all layers in a fixed order."""
        return self.search.blocks

    @property
    def phase(self) -> Phase:
        """``"search"``, ``"frozen"`` or ``"baked"``."""
        return self.search.phase

    @property
    def count(self) -> int:
        """Steps of the search that are done."""
        return self.search.count

    @property
    def steps(self) -> int:
        """The length of the search in optimizer steps."""
        return self.search.steps

    @property
    def progress(self) -> float:
        """The share of the search that is done, in [0, 1]."""
        return self.search.progress

    @property
    def mask(self) -> Tensor:
        """The current mask, [n]: soft during the search, hard (bool) once frozen."""
        if self.search.hard is not None:
            return self.search.hard.clone()
        self.search.to_device()
        with torch.no_grad():
            return self.search.soft_mask(None).clone()

    @property
    def tau(self) -> float:
        """The current temperature. 0 once the mask is hard, or if the method has no temperature."""
        search = self.search
        if search.hard is not None:
            return 0.0
        # a scalar if it depends on progress alone, a tensor if it depends on the scores
        return float(search.scalars["tau"] if "tau" in search.scalars else search.tensors.get("tau", 0.0))

    @property
    def scores(self) -> Tensor:
        """The numbers that rank the blocks now, [n]. For a method with learned scores, these are the scores."""
        return self.method.rank(self.blocks, self.search.values()).detach()

    @property
    def ranked(self) -> Tensor | None:
        """The numbers that ranked the blocks when the mask became hard, [n]. None in a process that resumed later."""
        return self.search.ranking

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that your optimizer must train in addition to the weights.

        Returns:
            The scores, or an empty list if the method has none.
        """
        return self.search.parameters()

    def param_group(self, **options: Any) -> dict[str, Any]:
        """A parameter group with the scores, for ``optimizer.add_param_group``.

        Args:
            options: Options of the group, such as ``lr=0.01``. The weight decay is 0 by default.

        Returns:
            A dictionary with the key ``params``.
        """
        return {"params": self.parameters(), "weight_decay": 0.0, **options}

    def penalty(self) -> Tensor:
        """The term that the method adds to the loss. Only ``Pas`` has one.

        Returns:
            A scalar to add to your loss; zero for the other methods and after the search.
        """
        penalty = getattr(self.method, "penalty", None)
        if penalty is None or self.phase != "search":
            return torch.zeros((), device=self.blocks.device)
        self.search.penalty_called = True
        out: Tensor = penalty(self.blocks, self.search.values())
        return out

    def __repr__(self) -> str:
        return f"<Pruner {one_line(self)}>"

    def summary(self) -> str:
        """What the mask keeps now: one line, and a table of the layers.

        Returns:
            Text to print. During the search the mask is soft, and a layer's share of the kept blocks is the sum of its mask.

        Examples:
            >>> import smartprune as sp
            >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
            >>> pruner = sp.attach(model, "magnitude", block=(4, 4), sparsity=0.5, steps=1)
            >>> pruner
            <Pruner magnitude: 4 blocks of 4x4x1x1 in 1 layer, remove 50% of the blocks; search, step 0 of 1>
            >>> print(pruner.summary())
            magnitude: 4 blocks of 4x4x1x1 in 1 layer, remove 50% of the blocks; search, step 0 of 1
            <BLANKLINE>
            layer       weight  blocks  kept by the soft mask  sparsity
            0           8x8          4                    2.0     50.0%  #######.......
            all layers               4                    2.0     50.0%  #######.......
        """
        return layer_table(self, ascii_only=stdout_is_ascii())

    # -- the search -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Advances the search by one step. Call it after every ``optimizer.step()`` and before ``optimizer.zero_grad()``.

        After ``steps`` calls the mask becomes hard. Later calls only check that removed weights are still zero.

        Raises:
            SmartpruneError: The optimizer does not train the scores, a value is not finite, layers were replaced, or the model is
                baked.
        """
        search = self.search
        if self.phase == "baked":
            raise SmartpruneError("pruner.step(): the model is baked, so no step is left; remove the call from the loop")
        search.reshard()
        if self.phase == "frozen":
            checks.require_agreement(search)
            search.zero_removed_blocks()
            checks.check_smallest_weight(search)
            return
        search.to_device()
        self.require_attached("step")
        checks.require_finite(search)
        checks.require_trained(search)
        checks.require_agreement(search)
        search.telemetry.measure(self.mask if self.live.last is None else self.live.last.mask)  # an evaluation drops the last one
        checks.require_method_inputs(search)
        search.count = min(search.count + 1, search.steps)
        search.update()
        search.advance()
        search.seen.last_step = optimizers.step_count()
        if self.live.last is not None:
            self.live.last.weights = []  # free them; a replayed CUDA graph writes the next mask into the mask
        if search.count >= search.steps:
            self.freeze()

    def reschedule(self, steps: int) -> None:
        """Changes the length of a search before its first step.

        Args:
            steps: The new length in optimizer steps.

        Raises:
            SmartpruneError: The search has begun, or the method needs more steps.
        """
        if self.phase != "search" or self.count:
            raise SmartpruneError(
                f"pruner.reschedule(): the search is at step {self.count}; change its length before the first step"
            )
        self.method.check(self.blocks, steps)
        self.search.steps = steps
        self.search.advance()
        self.live.last = None

    def freeze(self, force: bool = False) -> None:
        """Makes the mask hard now: keeps the best blocks that the budget allows, exactly, and zeroes the others.

        Args:
            force: Harden even if the soft mask is far from hard, which changes the network.

        Raises:
            SmartpruneError: The mask is hard already, or it is too soft and ``force`` is not set. Then nothing changes.
        """
        search = self.search
        if self.phase != "search":
            raise SmartpruneError(f"pruner.freeze(): the mask is {self.phase} already")
        search.reshard()
        self.require_attached("freeze")
        checks.require_finite_weights(search, "freeze")
        hard = mask_of_first_rank(search.choose_hard_mask())
        measure = getattr(self.method, "warmth", None)
        warmth = 0.0 if measure is None or force else measure(self.blocks, search.values())
        if warmth > TOO_WARM:
            raise SmartpruneError(
                f"pruner.freeze(): the search ends too warm: at temperature {self.tau:.3g} the soft mask is {warmth:.2f} away from "
                f"its hard form (at most {TOO_WARM} is allowed), so hardening would change the network; end at a lower "
                "temperature (end=), or call pruner.freeze(force=True) to harden anyway"
            )
        search.telemetry.measure(hard.to(torch.float32))
        search.calibrate(False)
        self.live.last = None
        search.harden(hard)

    def telemetry(self) -> dict[str, Any]:
        """The state of the search in numbers: undecided blocks, blocks kept by layer, layers that lost every block, temperature.

        Returns:
            A dictionary of plain values, measured in the last step. ``"kept"`` has the number of blocks by the name of the layer
            whose mask is above one half. Reading it waits for a GPU; ``step()`` does not.

        Examples:
            >>> import smartprune as sp
            >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
            >>> pruner = sp.attach(model, "magnitude", block=(4, 4), sparsity=0.5, steps=1, seed=0)
            >>> pruner.freeze()
            >>> sum(pruner.telemetry()["kept"].values())
            2
        """
        search = self.search
        out: dict[str, Any] = {"step": self.count, "phase": self.phase, "progress": self.progress, "tau": self.tau}
        out |= search.telemetry.read()
        names = [layer.name for layer in self.plan.layers]
        out["kept"] = dict(zip(names, out["kept"], strict=False))  # empty before the first step
        is_decided = self.phase != "search" or out["gap"] < DECIDED  # a soft mask has hardly a block above one half
        out["collapsed"] = [name for name, kept in out["kept"].items() if kept == 0] if is_decided else []
        theta = search.tensors.get("theta")
        out["theta"] = None if theta is None else float(theta[1].sum())
        if theta is not None and search.hard is None and math.isfinite(out["theta"]):
            out["theorem_3_7"] = theorem_3_7(self.scores, out["theta"], self.tau, self.count)
        return out

    def receipt(self) -> Receipt:
        """What was requested and what was achieved, in integers, counted from the current weights.

        Returns:
            The receipt.

        Raises:
            SmartpruneError: The search is not finished.
        """
        search = self.search
        if search.hard is None:
            raise SmartpruneError(
                f"pruner.receipt(): the search is at step {self.count} of {self.steps} and no block is removed yet; finish it, or "
                "call pruner.freeze() to harden the mask now"
            )
        search.reshard()
        if self.phase == "frozen":  # blocks of a baked model that trained again are reported, not zeroed
            self.require_attached("receipt")
            checks.require_finite_weights(search, "receipt")
            search.zero_removed_blocks()
        pairs = zip(self.plan.layers, self.blocks.weights, strict=True)
        weights = {layer.weight: full_tensor(weight.detach()) for layer, weight in pairs}
        return make_receipt(self.plan, weights, search.hard.cpu(), self.method.name, settings(self.method))

    # -- copies and checkpoints -------------------------------------------------------------------------------------------

    def apply_to(self, other: nn.Module) -> None:
        """Gives a copy of the model, such as an EMA copy, the mask, the temperature and the phase of this pruner.

        A copy that was made by deepcopy after :func:`attach` follows. A plain copy, made before, becomes a masked one. If this
        pruner
        is frozen, the removed blocks of a plain copy are zeroed and held at zero instead.

        Args:
            other: A copy of the model.

        Raises:
            SmartpruneError: ``other`` is not a copy of the model, or shares layers with it.
        """
        if not isinstance(other, nn.Module):
            raise SmartpruneError(f"pruner.apply_to(): {type(other).__name__} is not a model; give a copy of the model")
        pruner = find_pruner(other)
        if pruner is self:
            raise SmartpruneError("pruner.apply_to(): this is the model that the pruner is attached to; give a copy of it")
        if pruner is None:
            other = checkpoint.unwrap_copy(self.search, other)
        hard = self.search.hard
        if hard is not None and (self.phase == "baked" or pruner is None):
            reshard(other)
            weights = self.plan.blocks(other).weights if pruner is None else pruner.blocks.weights
            self.search.multiplier.multiply_(hard.to(torch.float32), weights)
            if pruner is None:
                hold_plain_copy(weights, self.search.multiplier, hard)
                return
        if pruner is None:
            masked = {name for layer in self.plan.layers for name, _ in layer.sites}
            if shared := [name for name, module in other.named_modules() if name in masked and is_masked(module)]:
                raise SmartpruneError(
                    f"pruner.apply_to(): {shared[0]} belongs to a pruner already: the model is not a copy, but shares this layer; "
                    "give a copy (copy.deepcopy)"
                )
            with torch.inference_mode(False):  # the state of the copy is written to later
                pruner = Pruner(other, self.method, self.plan, self.steps, self.search.seed)
        pruner.load_state_dict(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Everything except the weights, as tensors and plain values.

        Returns:
            A dictionary that ``torch.load(..., weights_only=True)`` can read after ``torch.save``.
        """
        return checkpoint.state_dict(self.search)

    def load_state_dict(self, state: dict[str, Any], *, adopt_steps: bool = False) -> None:
        """Continues where another pruner stopped that was attached with the same arguments.

        Args:
            state: What :meth:`state_dict` returned.
            adopt_steps: Take over the length of the search from the state, if it differs.

        Raises:
            SmartpruneError: The state belongs to another model, method, budget or length.
        """
        checkpoint.load_state_dict(self.search, state, adopt_steps)
        self.live.last = None

    # -- CUDA graphs ------------------------------------------------------------------------------------------------------

    def take_forward(self) -> MaskedWeights | None:
        """Returns the masked weights of the last forward pass and forgets them. For training loops that record CUDA graphs.

        The masked weights of a recorded forward pass lie in the memory of the graph, where only replays write to them. Other
        forward
        passes must not use them.

        Returns:
            The masked weights, or None outside the search.
        """
        last, self.live.last = self.live.last, None
        return last if self.phase == "search" else None

    def restore_forward(self, masked: MaskedWeights) -> None:
        """Gives back what :meth:`take_forward` returned after the recording. Call it after each replay, before :meth:`step`.

        Args:
            masked: The masked weights of the recorded forward pass.
        """
        self.live.last = masked

    # -- attaching --------------------------------------------------------------------------------------------------------

    def require_attached(self, call: str) -> None:
        """Raises if layers of the model were replaced after :func:`attach`.

        Args:
            call: The name of the calling function, for the message.

        Raises:
            SmartpruneError: A layer or the scores are no longer in the model.
        """
        self.modules.require_attached(call)
        checks.require_scores(self.search, call)

    def _add_hooks(self) -> None:
        model = self.model
        model.__dict__[LINK] = self
        model.register_forward_pre_hook(self.live.before_forward, prepend=True)
        model.register_forward_hook(self.live.after_forward, always_call=True)
        model.register_state_dict_pre_hook(self._before_save)
        model.register_load_state_dict_post_hook(self._after_load)

    def detach(self) -> None:
        """Restores the model without a mask: modules, parameters and hooks."""
        self.modules.unmask()
        self.search.unregister()
        self.model.__dict__.pop(LINK, None)
        for table in HOOK_TABLES:
            hooks = getattr(self.model, table)
            for key in [key for key, hook in hooks.items() if _owner(hook) in (id(self), id(self.live))]:
                del hooks[key]
                self.model._forward_hooks_always_called.pop(key, None)

    def _before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self.search.hard is not None:
            self.search.zero_removed_blocks()

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        missing = [name for name in incompatible.missing_keys if name.rpartition(".")[2].startswith(PREFIX)]
        if missing:
            raise SmartpruneError(
                f"load_state_dict(): the checkpoint has no {missing[0]!r}, so it was saved before attach (or after bake); load it "
                "first and attach afterwards, or resume with a checkpoint of this search"
            )
        self.live.last = None
        self.search.average_gradients()  # assign=True replaces parameters
        if self.search.calibration is not None:
            self.search.calibration.pause_parameters()


def _owner(hook: Any) -> int:
    """The id of the object that a bound method belongs to."""
    return id(getattr(hook, "__self__", None))


def attach(
    model: nn.Module,
    method: Method | str,
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
    """Masks the weights of a model in place and returns the pruner that controls the masks.

    The model keeps its parameters, their names and their order. The scores of a method that learns them are one more parameter,
    the
    last one: add ``pruner.param_group()`` to an optimizer that exists already.

    Args:
        model: The model to prune.
        method: A method with its settings, such as ``Smart()``, or its name, such as ``"smart"``.
        block: The size of a block, such as ``(16, 8)`` or ``"16x8"``: output channels, input channels, then the kernel.
        sparsity: The share of the blocks to remove, in [0, 1).
        budget: Any other budget, such as ``macs(0.5, example=x)``. Give ``sparsity`` or ``budget``, not both.
        steps: The length of the search in optimizer steps. Afterwards the mask is hard, and the same loop fine-tunes the model.
        floor: The smallest share of its blocks that every layer keeps.
        include: Layers to prune although they are skipped by default: a glob of names such as ``"head.*"``, a layer type, or a
            list.
        skip: Layers to leave out, in the same form. It takes precedence over ``include``.
        example: One input of the model, see :func:`plan`.
        seed: The seed of methods that draw random numbers.

    Returns:
        The pruner. Call its ``step()`` after each ``optimizer.step()``.

    Raises:
        SmartpruneError: The budget cannot be met, the model has a pruner already, or an argument is out of range.

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.75, steps=8)
        >>> optimizer.add_param_group(pruner.param_group())
        >>> for _ in range(10):  # 8 steps of search, 2 of fine-tuning
        ...     model(torch.randn(16, 8)).square().mean().backward()
        ...     optimizer.step()
        ...     pruner.step()
        ...     optimizer.zero_grad()
        >>> sp.bake(model).blocks.kept, pruner.plan.n
        (6, 24)
    """
    if isinstance(method, str) and method in METHODS:
        method = METHODS[method]()
    checks.require_arguments(model, method, steps, seed)
    assert not isinstance(method, str)
    if find_pruner(model) is not None:
        raise SmartpruneError("attach: the model already has a pruner; bake it first, or start from a fresh model")
    if sparsity is None and budget is None:
        raise SmartpruneError("attach: no budget given; give sparsity=0.95, or budget=smartprune.macs(0.5, example=x)")
    with torch.inference_mode(False):  # what is made here is trained, or read by backward passes
        planned = plan(model, block, sparsity, budget, floor=floor, include=include, skip=skip, example=example).require()
    masked = [layer.name for layer in planned.layers if any(is_masked(model.get_submodule(name)) for name, _ in layer.sites)]
    if masked:
        raise SmartpruneError(
            f"attach: {masked[0]} belongs to another pruner already, that of a larger model or of one that shares the layer; bake "
            f"that one first, or leave the layer out: skip={masked[0]!r}"
        )
    with torch.inference_mode(False):
        return Pruner(model, method, planned, int(steps), int(seed))


def find_pruner(model: nn.Module) -> Pruner | None:
    """Finds the pruner of a model, also through wrappers such as DDP and ``torch.compile``.

    Args:
        model: A model, or a wrapper around one.

    Returns:
        The pruner, or None if the model has none.

    Raises:
        SmartpruneError: Several parts of the model have a pruner.

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        >>> sp.find_pruner(model) is None
        True
        >>> pruner = sp.attach(model, "magnitude", block=(4, 4), sparsity=0.5, steps=1)
        >>> sp.find_pruner(nn.Sequential(model)) is pruner
        True
    """
    pruners = {name: module.__dict__[LINK] for name, module in model.named_modules() if LINK in module.__dict__}
    if len(pruners) > 1:
        raise SmartpruneError(
            f"the model has {len(pruners)} pruners, on {' and '.join(pruners)}; give one part, such as model.{next(iter(pruners))}"
        )
    return next(iter(pruners.values()), None)
