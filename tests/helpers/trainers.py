"""Trainers for the tests of the integrations: the real ones, and small ones that call the hooks in the documented order."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from .torchvision_operators import declare_operators

declare_operators()  # lightning and transformers import torchvision where it is installed

EPOCHS, BATCHES, LR, DECAY = 4, 6, 0.05, 0.01
STOPS = {"search": 5, "frozen": 15}  # optimizer steps at which training is interrupted
INSTALLED = {name: importlib.util.find_spec(name) is not None for name in ("lightning", "transformers")}


class StopError(Exception):
    """Simulates an interrupted training run."""


class Body(nn.Module):
    """A network that records its training batches. Its last module has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
        self.loss = nn.CrossEntropyLoss()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.seen.append((x.clone(), labels.clone()))
        out = self.net(x)
        return {"loss": self.loss(out, labels), "logits": out}


def data() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(BATCHES * 4, 16, generator=generator), torch.randint(0, 10, (BATCHES * 4,), generator=generator)
    return [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]


def batches() -> list[dict[str, Tensor]]:
    samples = data()
    return [{k: torch.stack([s[k] for s in samples[i : i + 4]]) for k in samples[0]} for i in range(0, len(samples), 4)]


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY)


def make_scheduler(optimizer: torch.optim.Optimizer, total: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 - step / total)


# -- small trainers -------------------------------------------------------------------------------------------------------


class Module(Body):
    """The LightningModule of the small trainer. It creates its layers in configure_model."""

    automatic_optimization = True

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.logged: dict[str, list[float]] = {}
        self.configured = False

    def configure_model(self) -> None:
        if not self.configured:
            with torch.device("cpu"):
                Body.__init__(self)
            self.configured = True

    def configure_optimizers(self, total: int) -> tuple[torch.optim.Optimizer, LambdaLR]:
        optimizer = make_optimizer(self.net.parameters())
        return optimizer, make_scheduler(optimizer, total)

    def log(self, name: str, value: float) -> None:
        self.logged.setdefault(name, []).append(value)

    def log_dict(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.log(name, value)


class SmallLightning:
    """The hook order of Lightning: setup, configure_model, checkpoint, optimizers, on_fit_start, on_train_start."""

    name, barebones, stops = "lightning", False, STOPS

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_training_batches, self.callbacks = folder, BATCHES, ()

    def module(self) -> Module:
        return Module()

    @property
    def estimated_stepping_batches(self) -> int:
        return -(-BATCHES // self.accumulate_grad_batches) * EPOCHS

    def fit(self, module: Any, callback: Any, accumulate: int = 1, stop: int = -1, resume: Any = None, early: bool = False) -> None:
        self.accumulate_grad_batches = accumulate
        try:
            self._fit(module, callback, stop, resume, early)
        except BaseException as error:
            callback.on_exception(self, module, error)
            raise

    def _fit(self, module: Any, callback: Any, stop: int, resume: Any, early: bool) -> None:
        saved = None if resume is None else torch.load(resume, weights_only=True)
        callback.setup(self, module, "fit")
        with torch.device("meta"):  # layers created outside of the module would be lost
            module.configure_model()
        if saved:
            module.load_state_dict(saved["state_dict"], strict=True)
            if saved["callback"]:
                callback.load_state_dict(saved["callback"])
        optimizer, scheduler = module.configure_optimizers(self.estimated_stepping_batches)
        self.optimizers, self.lr_scheduler_configs = [optimizer], [types.SimpleNamespace(scheduler=scheduler)]
        callback.on_fit_start(self, module)
        done = 0
        if saved:
            optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
            done = saved["done"]
        callback.on_train_start(self, module)
        module.train()
        for number in range(done, EPOCHS * BATCHES):
            if number == stop:
                if early:
                    break
                raise StopError
            last = number % BATCHES == BATCHES - 1
            (module(**batches()[number % BATCHES])["loss"] / self.accumulate_grad_batches).backward()
            if (number % BATCHES + 1) % self.accumulate_grad_batches == 0 or last:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            callback.on_train_batch_end(self, module, None, None, number)
            if last:
                callback.on_train_epoch_end(self, module)
            state = {"state_dict": module.state_dict(), "callback": callback.state_dict(), "done": number + 1}
            torch.save({**state, "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, self.path(number + 1))
        callback.on_fit_end(self, module)
        callback.teardown(self, module, "fit")

    def path(self, step: int) -> Path:
        return self.folder / f"{step}.ckpt"

    def weights(self, step: int) -> dict[str, Tensor]:
        return torch.load(self.path(step), weights_only=True)["state_dict"]

    def evaluate(self, module: Any, callback: Any) -> None:
        callback.setup(self, module, "validate")
        module.configure_model()
        with torch.no_grad():
            module.eval()(**batches()[0])
        callback.teardown(self, module, "validate")

    def groups(self) -> list[dict[str, Any]]:
        return self.optimizers[0].param_groups

    def log(self, module: Module) -> dict[str, list[float]]:
        return module.logged


class TransformersTrainer:
    name, stops = "transformers", STOPS

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def module(self) -> Body:
        return Body()


class SmallTransformers(TransformersTrainer):
    """The hook order of the transformers Trainer: on_init_end, checkpoint, optimizer and scheduler, on_train_begin."""

    def fit(self, module: Any, callback: Any, accumulate: int = 1, stop: int = -1, resume: Any = None, early: bool = False) -> None:
        args = types.SimpleNamespace(gradient_accumulation_steps=accumulate, load_best_model_at_end=False, output_dir=self.folder)
        total = -(-BATCHES // accumulate) * EPOCHS
        state = types.SimpleNamespace(max_steps=total, log_history=[], best_model_checkpoint=None)
        callback.on_init_end(args, state, None, model=module, optimizer=None, lr_scheduler=None)
        saved = None if resume is None else torch.load(resume, weights_only=True)
        if saved:
            module.load_state_dict(saved["state_dict"], strict=False)
        decayed = [p for p in module.parameters() if p.ndim > 1 or p.numel() > 32]
        others = [p for p in module.parameters() if p.ndim == 1 and p.numel() <= 32]
        self.optimizer = make_optimizer([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
        scheduler, done = make_scheduler(self.optimizer, total), 0
        if saved:
            self.optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
            done = saved["done"]
        arguments = {"model": module, "optimizer": self.optimizer, "lr_scheduler": scheduler, "train_dataloader": batches()}
        callback.on_train_begin(args, state, None, **arguments)
        self.history = state.log_history
        module.train()
        for number in range(done, EPOCHS * BATCHES):
            if number == stop:
                if early:
                    break
                raise StopError
            (module(**batches()[number % BATCHES])["loss"] / accumulate).backward()
            if (number % BATCHES + 1) % accumulate == 0 or number % BATCHES == BATCHES - 1:
                self.optimizer.step()
                scheduler.step()
                module.zero_grad()
                logs = {"loss": 0.0}
                state.log_history.append({**logs})
                callback.on_log(args, state, None, logs=logs, **arguments)
            checkpoint = {"state_dict": module.state_dict(), "done": number + 1}
            torch.save(
                {**checkpoint, "optimizer": self.optimizer.state_dict(), "scheduler": scheduler.state_dict()}, self.path(number + 1)
            )
        callback.on_train_end(args, state, None, **arguments)

    def path(self, step: int) -> Path:
        return self.folder / f"{step}.ckpt"

    def weights(self, step: int) -> dict[str, Tensor]:
        return torch.load(self.path(step), weights_only=True)["state_dict"]

    def evaluate(self, module: Any, callback: Any) -> None:
        callback.on_init_end(None, None, None, model=module)
        callback.on_prediction_step(None, None, None)

    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def log(self, module: Body) -> dict[str, list[float]]:
        return {name: [row[name] for row in self.history] for name in self.history[0]}


# -- the real ones --------------------------------------------------------------------------------------------------------


class RealLightning:
    name = "lightning"
    stops: ClassVar[dict[str, int]] = {
        "search": 6,
        "frozen": 18,
    }  # at epoch ends, because Lightning restarts the data of an interrupted epoch

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def module(self) -> Any:
        from lightning.pytorch import LightningModule

        class Late(LightningModule):  # type: ignore[misc]
            def configure_model(self) -> None:
                if not hasattr(self, "net"):
                    body = Body()
                    self.net, self.loss, self.seen = body.net, body.loss, body.seen

            def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
                return Body.forward(self, **batch)["loss"]  # type: ignore[arg-type]

            def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
                self.log("val", Body.forward(self, **batch)["loss"])  # type: ignore[arg-type]

            def configure_optimizers(self) -> Any:
                optimizer = make_optimizer(self.net.parameters())
                scheduler = make_scheduler(optimizer, int(self.trainer.estimated_stepping_batches))
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        return Late()

    def trainer(self, callback: Any, **options: Any) -> Any:
        from lightning.pytorch import Trainer

        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu", "devices": 1}
        defaults = {"max_epochs": EPOCHS, "default_root_dir": self.folder, "callbacks": [callback], **quiet}
        return Trainer(**{"enable_checkpointing": False, **defaults, **options})

    def fit(self, module: Any, callback: Any, accumulate: int = 1, stop: int = -1, resume: Any = None, early: bool = False) -> None:
        from lightning.pytorch import Callback
        from lightning.pytorch.callbacks import ModelCheckpoint
        from torch.utils.data import DataLoader

        class Stopper(Callback):  # type: ignore[misc]
            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
                if trainer.current_epoch * BATCHES + index == stop and not early:
                    raise StopError

            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                trainer.should_stop = trainer.should_stop or (early and trainer.global_step == stop)

        keep = ModelCheckpoint(self.folder, "{step}", save_top_k=-1, every_n_train_steps=1, enable_version_counter=False)
        self.last = self.trainer(
            [], callbacks=[callback, Stopper(), keep], enable_checkpointing=True, accumulate_grad_batches=accumulate
        )
        self.last.fit(module, DataLoader(data(), batch_size=4), DataLoader(data(), batch_size=4), ckpt_path=resume)

    def path(self, step: int) -> Path:
        return self.folder / f"step={step}.ckpt"

    def weights(self, step: int) -> dict[str, Tensor]:
        return torch.load(self.path(step), weights_only=False)["state_dict"]

    def evaluate(self, module: Any, callback: Any) -> None:
        from torch.utils.data import DataLoader

        self.trainer(callback).validate(module, DataLoader(data(), batch_size=4), verbose=False)

    def groups(self) -> list[dict[str, Any]]:
        return self.last.optimizers[0].param_groups


class RealTransformers(TransformersTrainer):
    def trainer(self, module: Any, callbacks: list[Any], **options: Any) -> Any:
        from transformers import Trainer, TrainingArguments

        defaults = {"num_train_epochs": EPOCHS, "learning_rate": LR, "weight_decay": DECAY, "max_grad_norm": 0.0, "save_steps": 1}
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "per_device_train_batch_size": 4}
        args = TrainingArguments(str(self.folder), **{**defaults, **quiet, "optim": "adamw_torch", **options})
        return Trainer(module, args, train_dataset=data(), eval_dataset=data(), callbacks=callbacks)

    def fit(self, module: Any, callback: Any, accumulate: int = 1, stop: int = -1, resume: Any = None, early: bool = False) -> None:
        from transformers import TrainerCallback

        class Stopper(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                if state.global_step == stop and not early:
                    raise StopError

            def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                control.should_training_stop = control.should_training_stop or (early and state.global_step == stop)

        self.last = self.trainer(module, [callback, Stopper()], gradient_accumulation_steps=accumulate)
        self.last.train(resume_from_checkpoint=None if resume is None else str(resume))

    def path(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step}"

    def weights(self, step: int) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        return load_file(self.path(step) / "model.safetensors")

    def evaluate(self, module: Any, callback: Any) -> None:
        self.trainer(module, [callback]).evaluate()

    def groups(self) -> list[dict[str, Any]]:
        return self.last.optimizer.param_groups


TRAINERS = {
    "small lightning": SmallLightning,
    "small transformers": SmallTransformers,
    "lightning": RealLightning,
    "transformers": RealTransformers,
}


@contextlib.contextmanager
def importable(name: str) -> Iterator[Any]:
    """The integration module, with a stub of the library if it is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        if not INSTALLED[name]:
            library, submodule = types.ModuleType(name), types.ModuleType("lightning.pytorch")
            library.TrainerCallback = submodule.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
            library.pytorch = submodule  # type: ignore[attr-defined]
            patch.setitem(sys.modules, name, library)
            if name == "lightning":
                patch.setitem(sys.modules, "lightning.pytorch", submodule)
            patch.delitem(sys.modules, f"smartprune.integrations.{name}", raising=False)
        yield importlib.import_module(f"smartprune.integrations.{name}")
        if not INSTALLED[name]:
            sys.modules.pop(f"smartprune.integrations.{name}", None)
