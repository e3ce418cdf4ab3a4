"""Pruning inside Lightning: ``Trainer(callbacks=[PruneCallback(block=(16, 8), sparsity=0.9)])``."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import torch

from ..errors import SmartpruneError
from .search import Pruning

try:  # the package that the user has imported: both contain the same code
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        raise ImportError
    from lightning.pytorch import Callback  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    try:
        from pytorch_lightning import Callback  # type: ignore[import-not-found,no-redef,unused-ignore]
    except ImportError as error:
        raise SmartpruneError(
            f"smartprune.integrations.lightning: lightning cannot be imported ({error}); install lightning, or pytorch-lightning"
        ) from None


class PruneCallback(Pruning, Callback):  # type: ignore[misc,unused-ignore]
    """Searches for removable blocks while the trainer trains, fine-tunes without them, and bakes the model after ``fit``.

    Arguments: :class:`smartprune.integrations.search.Pruning`.
    """

    where = "lightning.PruneCallback"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Masks the module in ``configure_model``, since the trainer loads checkpoints and wraps the module right after it."""
        if stage != "fit":
            return
        self.search.require_unbaked()
        for other in itertools.takewhile(lambda callback: callback is not self, trainer.callbacks):
            if any(
                kind.__name__ == "WeightAveraging" for kind in type(other).__mro__
            ):  # by name, since old versions lack the class
                raise SmartpruneError(
                    f"{self.search.where}: {type(other).__name__} has copied the module before the scores exist, so it could not "
                    "average them; put it after this callback: callbacks=[prune, average]"
                )
        configure = pl_module.configure_model

        def configure_and_attach() -> None:
            del pl_module.configure_model
            configure()
            self._attach(pl_module)

        pl_module.configure_model = configure_and_attach

    def _attach(self, pl_module: Any) -> None:
        dtype, device = torch.get_default_dtype(), next((p.device for p in pl_module.parameters()), torch.device("cpu"))
        torch.set_default_dtype(torch.float32)  # the trainer changes it for layers that configure_model creates
        try:
            with device:
                self.search.attach(pl_module, carry=False)
        finally:
            torch.set_default_dtype(dtype)
        self.search.claim()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.search.settle(trainer.optimizers, [config.scheduler.optimizer for config in trainer.lr_scheduler_configs])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.search.begin(*_lengths(trainer, pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if not trainer.barebones:
            pl_module.log_dict(self.search.metrics())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.barebones:
            pl_module.log("smartprune/undecided", self.search.metrics(wait=True)["smartprune/undecided"])

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Runs after ``on_train_end`` of every callback, so that averages written there are pruned as well."""
        self.search.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self.search.stop()
            pl_module.__dict__.pop("configure_model", None)

    def state_dict(self) -> dict[str, Any]:
        return self.search.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.search.load_state_dict(state_dict)


def _lengths(trainer: Any, pl_module: Any) -> tuple[float, float]:
    """Optimizer steps of the training and of an epoch; infinite if unknown."""
    if not pl_module.automatic_optimization:  # the module decides when the optimizer steps
        return math.inf, math.inf
    total = trainer.estimated_stepping_batches
    per_epoch = (
        math.inf
        if math.isinf(trainer.num_training_batches)
        else math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    )
    return (math.inf if total < 0 else total), per_epoch
