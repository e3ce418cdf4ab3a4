"""The pruner: masks the weights of a model, follows the user's training loop, makes the mask hard and bakes it into the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..artifacts.receipt import Receipt
from ..core.sharding import full_tensor, reshard
from ..core.vector import Blocks
from ..errors import SmartpruneError
from ..methods.method import Capabilities, Method, settings
from ..text import stdout_is_ascii
from . import checkpoint, checks, copies, optimizers
from .consensus import mask_of_first_rank
from .hold import release_layers
from .hooks import ModelHooks
from .lookup import LINK
from .masked import MaskedModules
from .plan import Plan
from .receipt import make_receipt
from .start import initial_state
from .state import Phase, SearchState
from .summary import layer_table, one_line
from .telemetry import describe
from .weights import LiveWeights, MaskedWeights


class Pruner:
    """Masks the weights of a model, follows your training loop, and makes the mask hard. Made by :func:`smartprune.attach`.

    Its phases are ``"search"``, ``"frozen"`` (the mask is hard and the weights train on) and ``"baked"``.

    Args:
        model: The model that is pruned.
        method: The method with its settings.
        planned: The plan of the model.
        steps: The length of the search in optimizer steps.
        seed: The seed of methods that draw random numbers.
        start: Scores to start from, in the order of the blocks.

    Raises:
        SmartpruneError: The method cannot work with these settings, or the weights are not finite.

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        >>> pruner = sp.attach(model, "gradual", block=(4, 4), sparsity=0.5, steps=100)
        >>> pruner.phase, pruner.progress, pruner.mask
        ('search', 0.0, tensor([1., 1., 1., 1.]))
        >>> pruner.freeze(), pruner.phase, int(pruner.mask.sum())
        (None, 'frozen', 2)
    """

    def __init__(self, model: nn.Module, method: Method, planned: Plan, steps: int, seed: int, start: Any = None) -> None:
        reshard(model)  # an evaluation, or the example of a budget, may have gathered the weights
        search = self.search = SearchState(model, method, planned, steps, seed)
        checks.require_values(search.blocks)
        method.check(search.blocks, steps)
        checks.require_capable_device(search)
        self.live = LiveWeights(search)
        self.hooks = ModelHooks(search, self.live)
        self.modules = MaskedModules(model, planned.layers)
        try:
            search.register(initial_state(method, search.blocks, start))
            search.advance()
            self.modules.mask(self.live, (search.host_name, search.host) if search.trained else None)
            model.__dict__[LINK] = self
            self.hooks.add()
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
        return self.search.tau

    @property
    def scores(self) -> Tensor:
        """The numbers that rank the blocks now, [n]: the scores, if they are learned."""
        return self.search.scores()

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
        checks.require_unbaked(search)
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
        search.seen.last_step, search.seen.forward = optimizers.step_count(), None
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
            raise SmartpruneError(f"pruner.reschedule(): the search is at step {self.count}; change its length before it begins")
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
        if not force:
            checks.require_nearly_hard(search)
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
        return describe(self.search)

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

        A deepcopy that was made after :func:`smartprune.attach` is updated. A plain copy that was made before becomes a masked one.
        If this pruner is frozen, the removed blocks of a plain copy are zeroed and held at zero instead.

        Args:
            other: A copy of the model.

        Raises:
            SmartpruneError: ``other`` is not a copy of the model, or shares layers with it.
        """
        copies.apply_to(self, other)

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
        forward passes must not use them.

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
        self.search.seen.replays = True

    # -- attaching --------------------------------------------------------------------------------------------------------

    def require_attached(self, call: str) -> None:
        """Raises if layers of the model were replaced after :func:`smartprune.attach`.

        Args:
            call: The name of the calling function, for the message.

        Raises:
            SmartpruneError: A layer or the scores are no longer in the model.
        """
        self.modules.require_attached(call)
        checks.require_scores(self.search, call)

    def detach(self) -> None:
        """Restores the model without a mask: modules, parameters and hooks."""
        self.modules.unmask()
        self.search.unregister()
        self.model.__dict__.pop(LINK, None)
        self.hooks.remove()
