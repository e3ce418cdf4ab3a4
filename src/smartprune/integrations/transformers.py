"""Pruning inside the Trainer of transformers: ``Trainer(..., callbacks=[PruneCallback(block=(16, 8), sparsity=0.9)])``."""

from __future__ import annotations

import math
from typing import Any

from ..errors import SmartpruneError
from ..pruning.lookup import find_pruner
from .search import Pruning

try:
    from transformers import TrainerCallback  # type: ignore[import-not-found,unused-ignore]
except ImportError as error:
    raise SmartpruneError(
        f"smartprune.integrations.transformers: transformers cannot be imported ({error}); install transformers and accelerate"
    ) from None


class PruneCallback(Pruning, TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Searches for removable blocks while the trainer trains, fine-tunes without them, and bakes the model after ``train``.

    Arguments: :class:`smartprune.integrations.search.Pruning`.

    The model is masked when the Trainer is created: no later callback comes before it loads a checkpoint, creates the optimizer and
    wraps the model. The state of the pruner is part of the model's state dict, and so of the trainer's checkpoints.
    """

    where = "transformers.PruneCallback"
    _began = False

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **others: Any) -> None:
        self.search.attach(model, carry=True)
        self.search.claim()
        if optimizer is not None:
            self.search.settle([optimizer], [] if others.get("lr_scheduler") is None else [optimizer])

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **others: Any) -> None:
        if self.pruner is None or (find_pruner(model) is not self.pruner and self.pruner.phase != "baked"):
            raise SmartpruneError(
                f"{self.search.where}: the trained model is not the one that the Trainer was created with; give the Trainer a "
                "model (not model_init), and pass the callback to its constructor (not by add_callback)"
            )
        optimizer = getattr(optimizer, "optimizer", optimizer)  # the one of accelerate is a wrapper
        self.search.require_unbaked()
        self.search.settle([optimizer], [optimizer])
        batches = _length(others.get("train_dataloader"))
        self.search.begin(state.max_steps, math.ceil(batches / args.gradient_accumulation_steps) if batches < math.inf else batches)
        self._began = True

    def on_prediction_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if not self._began:
            raise SmartpruneError(
                f"{self.search.where}: the model has soft masks from the moment the Trainer is made, so its predictions before "
                "training are not the dense model's; evaluate the dense model with a Trainer without this callback"
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any) -> None:
        """Adds metrics to the logs. Callbacks of ``report_to`` run earlier and do not see them."""
        if self._began and logs is not None and "loss" in logs:
            metrics = self.search.metrics(wait=True)
            logs |= metrics
            state.log_history[-1] |= metrics

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.pruner is not None and self.pruner.phase == "search" and args.load_best_model_at_end and self.search.bake:
            self.search.stop()
            raise SmartpruneError(
                f"{self.search.where}: load_best_model_at_end loaded {state.best_model_checkpoint}, saved at step "
                f"{self.pruner.count} of the {self.pruner.steps} of the search, when no block was removed yet; select "
                "the best of the checkpoints after the search, or give load_best_model_at_end=False"
            )
        self.search.end()


def _length(loader: Any) -> float:
    try:
        return len(loader)
    except TypeError:
        return math.inf
