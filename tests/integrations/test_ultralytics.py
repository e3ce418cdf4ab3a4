"""The trainer that prunes, driven by a small trainer with the hooks of Ultralytics. The real one is in tests/hosts."""

from __future__ import annotations

import copy
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import smartprune as sp
from helpers import trainers
from smartprune.integrations.ultralytics import STATE, count_steps, prune_trainer

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")  # the real trainer steps in this order, too
EPOCHS, BATCHES = 4, 6


class SmallTrainer:
    """Calls in the order of the real trainer: freezing, optimizer, scheduler, average, checkpoint, then the epochs."""

    def __init__(self, folder: Path, **options: Any) -> None:
        given = {"imgsz": 16, "warmup_epochs": 1.0, "time": None, "save_dir": str(folder), **options}
        self.args, self.folder = types.SimpleNamespace(**given), folder
        self.epochs, self.start_epoch, self.accumulate = EPOCHS, 0, 1
        self.fitness = self.best_fitness = None
        self.validated: list[torch.Tensor] = []
        self.events: list[str] = []
        self.optimizer: Any = None

    def run_callbacks(self, event: str) -> None:
        self.events.append(event)

    def train(self, ckpt: Any = None, stop: int | None = None) -> None:
        self.resume = ckpt is not None
        self.model: nn.Module = trainers.Body()
        if ckpt:
            self.model.load_state_dict(ckpt["ema"])
        self.train_loader = trainers.batches()
        weights = [p for p in self.model.parameters() if p.ndim == 2]
        rest = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [
            {"params": weights, "weight_decay": 0.1, "param_group": "weight", "use_muon": True},
            {"params": rest, "param_group": "bias"},
        ]
        self.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        self.lf = lambda epoch: 1 - epoch / self.epochs
        self.scheduler = LambdaLR(self.optimizer, lr_lambda=self.lf)
        self.ema = types.SimpleNamespace(ema=copy.deepcopy(self.model))
        self.stopper = types.SimpleNamespace(best_fitness=0.0, best_epoch=0)
        self.resume_training(ckpt)
        self.scheduler.last_epoch = self.start_epoch - 1
        self.run_callbacks("on_pretrain_routine_end")
        try:
            self.loop(stop)
        finally:
            self.run_callbacks("teardown")

    def loop(self, stop: int | None) -> None:
        for epoch in range(self.start_epoch, self.epochs):
            self.epoch = epoch
            if self.epoch == stop:
                raise trainers.StopError
            self.scheduler.step()
            for batch in self.train_loader:
                self.model(**batch)["loss"].backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                with torch.no_grad():
                    for name, value in self.ema.ema.named_parameters():
                        value.lerp_(dict(self.model.named_parameters())[name], 0.5)
            self.run_callbacks("on_train_epoch_end")
            self.fitness = self.validate()
            self.best_fitness = self.fitness if self.best_fitness is None else max(self.fitness, self.best_fitness)
            self.save_model()
        self.final_eval()

    def resume_training(self, ckpt: Any) -> None:
        if ckpt:
            self.optimizer.load_state_dict(ckpt["optimizer"])
            self.ema.ema.load_state_dict(ckpt["ema"])
            self.start_epoch = ckpt["epoch"] + 1

    def validate(self) -> float:
        self.validated.append(self.ema.ema.net[0].weight.detach().clone())
        return -float(self.epoch)

    def save_model(self) -> None:
        saved = {"epoch": self.epoch, "ema": self.ema.ema.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(saved, self.folder / "last.pt")
        if self.best_fitness == self.fitness:
            torch.save(saved, self.folder / "best.pt")

    def final_eval(self) -> None:
        self.run_callbacks("final_eval")


def make(folder: Path, method: Any = None, options: dict[str, Any] | None = None, **given: Any) -> Any:
    settings = {"block": (4, 4), "sparsity": 0.75, "include": "*", "epochs": 2, "example": None, **given}
    return prune_trainer(SmallTrainer, method, **settings)(folder, **(options or {}))


def kept(state: dict[str, torch.Tensor]) -> int:
    """Blocks of 4 by 4 weights that are not zero."""
    weights = [nn.functional.pad(value, (0, 0, 0, -len(value) % 4)) for name, value in state.items() if value.ndim == 2]
    return sum(int((w.reshape(len(w) // 4, 4, w.shape[1] // 4, 4) != 0).any(3).any(1).sum()) for w in weights)


@pytest.mark.parametrize("method", [None, sp.Gradual()])
def test_the_budget_is_exact_in_all_files(method: Any, tmp_path: Path) -> None:
    trainer = make(tmp_path, method)
    trainer.train()
    total = 32 // 4 * 16 // 4 + 8 * 8 + 3 * 8
    for name in ("best.pt", "last.pt"):
        assert kept(torch.load(tmp_path / name)["ema"]) == total // 4
    assert trainer.receipt.blocks.kept == total // 4
    assert trainer.pruner.phase == "baked"
    assert trainer.pruner.count == trainer.pruner.steps == 2 * BATCHES
    assert trainer.events[0] == "on_pretrain_routine_end"
    assert trainer.events[-2:] == ["final_eval", "teardown"]
    assert sp.Receipt.load(tmp_path / "receipt.json") == trainer.receipt
    best = torch.load(tmp_path / "best.pt")["epoch"]
    assert best == 1, "the fitness falls, so the best epoch is the first one whose blocks are removed"


def test_scores_have_a_group_that_the_trainer_does_not_mistake(tmp_path: Path) -> None:
    trainer = make(tmp_path, score_lr=0.3)
    trainer.train()
    groups = [(g["param_group"], g["weight_decay"], g["initial_lr"]) for g in trainer.optimizer.param_groups]
    assert groups == [("weight", 0.1, 0.1), ("bias", 0, 0.1), (STATE, 0.0, 0.3)]
    assert [g.get("use_muon") for g in trainer.optimizer.param_groups] == [True, None, False], "scores are no matrices"
    assert [g["lr"] / g["initial_lr"] for g in trainer.optimizer.param_groups] == pytest.approx([0.25] * 3)


def test_validation_sees_masked_weights_during_the_search(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    with pytest.raises(trainers.StopError):
        trainer.train(stop=1)
    saved = torch.load(tmp_path / "last.pt")["ema"]["net.0.weight"]
    mask = trainer.pruner.mask[: 8 * 4].reshape(8, 4).repeat_interleave(4, 0).repeat_interleave(4, 1)
    assert torch.equal(trainer.validated[0], saved * mask)
    assert not torch.equal(trainer.validated[0], saved)


@pytest.mark.parametrize("stop", [1, 3])
def test_resuming_restores_the_pruner(stop: int, tmp_path: Path) -> None:
    trainer = make(tmp_path)
    with pytest.raises(trainers.StopError):
        trainer.train(stop=stop)
    resumed = make(tmp_path)
    (scores,) = trainer.pruner.parameters()
    expected = scores.detach().clone(), trainer.optimizer.state[scores]["momentum_buffer"].clone()
    seen: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def loop(stop: Any) -> None:
        (own,) = resumed.pruner.parameters()
        seen.append((own.detach().clone(), resumed.optimizer.state[own]["momentum_buffer"].clone(), resumed.pruner.count))
        type(resumed).loop(resumed, stop)

    resumed.loop = loop
    resumed.train(torch.load(tmp_path / "last.pt"))
    ((own, momentum, count),) = seen
    assert torch.equal(own, expected[0])
    assert torch.equal(momentum, expected[1])
    assert count == BATCHES * min(stop, 2)
    assert resumed.receipt.met
    assert kept(torch.load(tmp_path / "last.pt")["ema"]) == resumed.receipt.blocks.kept


def test_a_checkpoint_without_the_pruner_raises(tmp_path: Path) -> None:
    with pytest.raises(trainers.StopError):
        SmallTrainer(tmp_path).train(stop=1)
    with pytest.raises(sp.SmartpruneError, match="has no state of the pruner, because it was saved by another trainer"):
        make(tmp_path).train(torch.load(tmp_path / "last.pt"))


@pytest.mark.parametrize(
    ("option", "value"), [("compile", True), ("compile", "max-autotune"), ("quantize", 8), ("distill_model", "big.pt")]
)
def test_trainings_that_cannot_prune_raise(option: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(sp.SmartpruneError, match=f"{option}={value!r}; a training that prunes and"):
        make(tmp_path, options={option: value})


def test_a_search_longer_than_the_training_raises(tmp_path: Path) -> None:
    with pytest.raises(sp.SmartpruneError, match="the search has 30 steps and the training 24"):
        make(tmp_path, epochs=5).train()
    with pytest.raises(sp.SmartpruneError, match="the length of the training is not known"):
        make(tmp_path, options={"time": 1.0}, epochs=None).train()


@pytest.mark.parametrize("given", [None, nn.Linear(2, 2), dict, types.SimpleNamespace(task_map={}, task="detect")])
def test_neither_a_model_nor_a_trainer_raises(given: Any) -> None:
    with pytest.raises(sp.SmartpruneError, match="neither a YOLO model nor a trainer class"):
        prune_trainer(given, sparsity=0.5)


def test_the_trainer_of_a_model_is_found() -> None:
    model = types.SimpleNamespace(task_map={"segment": {"trainer": SmallTrainer}}, task="segment")
    assert issubclass(prune_trainer(model, sparsity=0.5), SmallTrainer)
    with pytest.raises(sp.SmartpruneError, match="give one of them"):
        prune_trainer(model, sparsity=0.5, steps=3, epochs=1)


@pytest.mark.parametrize(
    ("batches", "warmup", "accumulate"), [(40, 0, 1), (41, 0, 4), (100, 30, 16), (7, 9, 3), (1, 0, 8), (64, 5, 4)]
)
def test_count_steps_follows_the_loop_of_the_trainer(batches: int, warmup: int, accumulate: int) -> None:
    count, last, due = 0, -1, accumulate
    for batch in range(batches):
        if warmup and batch <= warmup:
            due = max(1, int(np.interp(batch, [0, warmup], [1, accumulate]).round()))
        if batch - last >= due:
            count, last = count + 1, batch
    assert count_steps(batches, warmup, accumulate) == count
