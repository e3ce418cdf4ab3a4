"""Pruning inside the trainer of Ultralytics: ``model.train(trainer=prune_trainer(model, block=(16, 8), sparsity=0.7), ...)``.

Ultralytics is licensed under the AGPL-3.0. This module does not import it: the trainer that is extended comes from your model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ..artifacts.receipt import Receipt
from ..core.sharding import is_sharded
from ..errors import SmartpruneError
from ..methods.method import Method
from ..pruning.consensus import average_gradient, is_distributed
from ..pruning.pruner import Pruner
from .search import Search

WHERE = "ultralytics.prune_trainer"
STATE = "smartprune"  # the entry of a parameter group with the state of the pruner, in last.pt
RECEIPT = "receipt.json"  # in the folder of the training
UNSUPPORTED = {"compile": "compiles", "quantize": "quantizes", "distill_model": "distills"}


def prune_trainer(
    model_or_trainer: Any,
    method: Method | None = None,
    *,
    steps: float | None = None,
    epochs: float | None = None,
    score_lr: float | None = None,
    **settings: Any,
) -> type[Any]:
    """Returns a trainer class that prunes, for the argument ``trainer`` of the ``train`` method of a YOLO model.

    The trainer searches for removable blocks, fine-tunes without them, and saves plain models with zero blocks. Its attribute
    ``receipt`` has the receipt afterwards, which is also written into the folder of the training.

    Args:
        model_or_trainer: A ``YOLO`` object, or the trainer class to extend, such as ``DetectionTrainer``.
        method: The method, by default ``Smart()``.
        steps: The length of the search in optimizer steps, or as a share (a float) of the training. The default is 0.3.
        epochs: The length of the search in epochs.
        score_lr: The learning rate of the scores, by default that of the weights.
        settings: Other arguments of :func:`smartprune.attach`. ``example`` is a picture of the size that is trained by default.

    Returns:
        A subclass of the trainer. Every training with it is a search of its own.

    Raises:
        SmartpruneError: An argument is out of range, or the first one is neither a model nor a trainer.
    """
    arguments = (method, steps, epochs, score_lr, True, settings)
    Search(WHERE, *arguments)  # checks the arguments
    base = model_or_trainer
    if not isinstance(base, type):
        task_map, task = getattr(base, "task_map", {}), getattr(base, "task", None)
        base = task_map.get(task, {}).get("trainer") if isinstance(task_map, dict) else None
    if not isinstance(base, type) or not hasattr(base, "resume_training"):
        raise SmartpruneError(
            f"{WHERE}: {type(model_or_trainer).__name__} is neither a YOLO model nor a trainer class; give what "
            'ultralytics.YOLO("yolo11n.pt") returns, or a class such as DetectionTrainer'
        )
    return type(f"Prune{base.__name__}", (PruneTrainer, base), {"search_arguments": arguments})


class PruneTrainer:
    """What :func:`prune_trainer` adds to a trainer.

    The model is masked after the trainer has frozen layers, created the optimizer and copied the average (EMA), so the average is
    always a plain model. It is multiplied by the mask while it is validated. After the search its removed blocks are zero.
    """

    search_arguments: tuple[Any, ...]
    args: Any
    model: Any
    ema: Any
    optimizer: Any
    scheduler: Any
    stopper: Any
    resume: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.search = Search(WHERE, *self.search_arguments)
        self._resumed: tuple[dict[str, Any], list[dict[str, Any]]] | None = None
        self._search_over = False  # before the epoch that trains now
        super().__init__(*args, **kwargs)
        for option, verb in UNSUPPORTED.items():
            value = getattr(self.args, option, None)
            if value is True or (value not in (None, False, 16, 32) and value != ""):
                raise SmartpruneError(
                    f"{WHERE}: {option}={value!r}; a training that prunes and {verb} is not supported; train without {option}= "
                    "first, and use it on the pruned model"
                )

    @property
    def pruner(self) -> Pruner | None:
        """The pruner, once the training has started."""
        return self.search.pruner

    @property
    def receipt(self) -> Receipt:
        """The receipt, after the search."""
        if self.search.pruner is None and (path := Path(self.args.save_dir) / RECEIPT).exists():
            return Receipt.load(path)  # several GPUs: the training ran in other processes
        return self.search.make_receipt()

    # -- the search -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Masks the model. The trainer has prepared everything else, and loaded its checkpoint."""
        trainer: Any = self
        search, model = self.search, _plain(self.model)
        if "example" not in search.settings:
            size, weight = trainer.args.imgsz, next(model.parameters())
            channels = trainer.data.get("channels", 3)
            search.settings = {**search.settings, "example": torch.zeros(1, channels, size, size, device=weight.device)}
        search.attach(model, carry=False)
        search.settle([self.optimizer])
        self._adapt_group()
        if self._resumed is not None:
            self._restore(*self._resumed)
        self.scheduler = LambdaLR(self.optimizer, lr_lambda=trainer.lf)  # it has one value per group
        self.scheduler.last_epoch = trainer.start_epoch - 1
        for parameter in search.pruner.parameters() if search.pruner is not None and is_distributed() else ():
            if not is_sharded(parameter):  # DDP wrapped the model before the scores existed
                parameter.register_post_accumulate_grad_hook(average_gradient)
        search.begin(*self._lengths())

    def _adapt_group(self) -> None:
        """The trainer sets the decay of groups by their name, and MuSGD orthogonalizes the matrices of some groups."""
        group = self._score_group()
        if group is not None:
            group |= {"param_group": STATE, "initial_lr": group["lr"]}
            if "use_muon" in group:
                group["use_muon"] = False

    def _score_group(self) -> dict[str, Any] | None:
        assert self.search.pruner is not None
        scores = {id(parameter) for parameter in self.search.pruner.parameters()}
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return next((group for group in groups if scores & {id(p) for p in group["params"]}), None)

    def _lengths(self) -> tuple[float, float]:
        """Optimizer steps of the training, and of an epoch of the search."""
        trainer: Any = self
        batches, epochs = len(trainer.train_loader), trainer.epochs
        warmup = round(min(trainer.args.warmup_epochs, max(epochs - 1, 0)) * batches)
        searched = self.search.epochs or 1
        per_epoch = count_steps(round(searched * batches), warmup, trainer.accumulate) / searched
        return math.inf if trainer.args.time else count_steps(epochs * batches, warmup, trainer.accumulate), per_epoch

    def _end_epoch(self) -> None:
        """Called before the average is validated. The best model, and the end of the training, are chosen after the search."""
        pruner = self.search.pruner
        assert pruner is not None
        trainer: Any = self
        if not self._search_over:
            trainer.best_fitness = None
            self.stopper.best_fitness, self.stopper.best_epoch = 0.0, trainer.epoch + 1
        self._search_over = pruner.phase != "search"
        self._zero_average()

    def _average(self) -> list[Tensor]:
        """The pruned weights of the average."""
        assert self.search.pruner is not None
        return [self.ema.ema.get_parameter(layer.weight).data for layer in self.search.pruner.plan.layers]

    def _zero_average(self) -> None:
        pruner = self.search.pruner
        if pruner is not None and pruner.phase == "frozen":
            pruner.search.multiplier.multiply_(pruner.mask.to(torch.float32), self._average())

    # -- what the trainer calls -------------------------------------------------------------------------------------------

    def run_callbacks(self, event: str) -> None:
        """Called by the trainer at certain points."""
        trainer: Any = super()
        if event == "on_pretrain_routine_end":
            self._start()
        elif event == "on_train_epoch_end":
            self._end_epoch()
        elif event == "teardown":
            self.search.stop()
        trainer.run_callbacks(event)

    def validate(self) -> Any:
        """Validates the average with the current mask."""
        trainer: Any = super()
        with self._masked_average():
            return trainer.validate()

    @contextlib.contextmanager
    def _masked_average(self) -> Iterator[None]:
        pruner = self.search.pruner
        if pruner is None or pruner.phase != "search":
            yield
            return
        average = self._average()
        saved = [weight.clone() for weight in average]
        pruner.search.multiplier.multiply_(pruner.mask.to(torch.float32), average)
        try:
            yield
        finally:
            for weight, value in zip(average, saved, strict=True):
                weight.copy_(value)

    def save_model(self) -> Any:
        """Saves the average, a plain model, and the state of the pruner together with the optimizer's."""
        trainer: Any = super()
        group = self._carrying_group()
        group[STATE] = self.search.state_dict()
        try:
            self._zero_average()
            return trainer.save_model()
        finally:
            del group[STATE]

    def _carrying_group(self) -> dict[str, Any]:
        group = self._score_group()
        first: dict[str, Any] = self.optimizer.param_groups[0]
        return first if group is None else group  # methods without scores have no group

    def resume_training(self, ckpt: Any) -> None:
        """Takes the pruner and the scores out of the checkpoint, since the optimizer has no scores yet."""
        trainer: Any = super()
        saved = ckpt.get("optimizer") if ckpt and self.resume else None
        if saved is not None:
            groups = saved["param_groups"]
            carrying = next((group for group in groups if STATE in group), None)
            if carrying is None:
                raise SmartpruneError(
                    f"{WHERE}: the checkpoint has no state of the pruner, because it was saved by another trainer; resume from the "
                    "last.pt of this search, or start a new training from its weights"
                )
            states = []
            if carrying.get("param_group") == STATE:
                groups.remove(carrying)
                states = [saved["state"].pop(index, {}) for index in carrying["params"]]
            self._resumed = carrying, states
        trainer.resume_training(ckpt)
        for group in self.optimizer.param_groups:
            group.pop(STATE, None)

    def _restore(self, saved: dict[str, Any], states: list[dict[str, Any]]) -> None:
        pruner, group = self.search.pruner, self._score_group()
        assert pruner is not None
        if group is not None:
            group |= {name: value for name, value in saved.items() if name not in ("params", STATE)}
            for parameter, state in zip(pruner.parameters(), states, strict=True):
                self.optimizer.state[parameter] = {name: _like(value, parameter, name) for name, value in state.items()}
        self.search.load_state_dict(saved[STATE])
        self._search_over = pruner.phase != "search"

    def final_eval(self) -> None:
        """Ends the search, and lets the trainer reduce its checkpoints to plain models and validate the best one."""
        trainer: Any = super()
        self._zero_average()
        self.search.end()
        if not is_distributed() or torch.distributed.get_rank() == 0:
            self.receipt.save(Path(self.args.save_dir) / RECEIPT)
        trainer.final_eval()


def count_steps(batches: int, warmup: int, accumulate: int) -> int:
    """How often the trainer steps its optimizer in the first ``batches`` batches.

    It steps once ``accumulate`` batches have passed since the last step. During the warm-up this number grows from 1.
    """
    count, last = 0, -1
    for batch in range(min(batches, warmup + 1)):
        due = max(1, round(1 + (accumulate - 1) * batch / warmup)) if warmup else accumulate
        if batch - last >= due:
            count, last = count + 1, batch
    return count + max(0, batches - 1 - last) // accumulate


def _like(value: Any, parameter: Tensor, name: str) -> Any:
    """A saved value of the optimizer's state, on the device and in the type that the optimizer had. The trainer saves half
    precision."""
    if not isinstance(value, Tensor) or name == "step":
        return value
    return value.to(parameter.device, parameter.dtype if value.is_floating_point() else value.dtype)


def _plain(model: nn.Module) -> nn.Module:
    """The model inside DDP."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
