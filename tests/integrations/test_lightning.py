"""What only the real Lightning can show: its own checkpoints, averages, manual optimization, several processes."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import smartprune as sp
from helpers import trainers

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed; a small trainer stands in for it")
from smartprune.integrations.lightning import PruneCallback  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
SETTINGS: dict[str, Any] = {"block": (4, 4), "sparsity": 0.75, "include": "*", "steps": 10}


class Net(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.body = trainers.Body()

    def training_step(self, batch: Any, index: int) -> Any:
        return self.body(**batch)["loss"]

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.body(**batch)["loss"])

    def configure_optimizers(self) -> Any:
        return trainers.make_optimizer(self.parameters())


class Manual(Net):
    """Has two optimizers. The one with the first pruned weight takes two steps per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        one, two = self.optimizers()
        for optimizers in ((one, two), (one,)):
            self.manual_backward(self.body(**batch)["loss"])
            for optimizer in optimizers:
                optimizer.step()
            self.zero_grad()

    def configure_optimizers(self) -> Any:
        return [trainers.make_optimizer(self.body.net[:3].parameters()), trainers.make_optimizer(self.body.net[3:].parameters())]


def loader() -> Any:
    return torch.utils.data.DataLoader(trainers.data(), batch_size=4)


def zeros(model: torch.nn.Module, plan: sp.Receipt | sp.Plan) -> int:
    return sum(int((dict(model.named_parameters())[row.weight] == 0).sum()) for row in plan.layers)


def fit(folder: Path, module: Any, *callbacks: Any, **options: Any) -> Any:
    trainer = trainers.RealLightning(folder).trainer([], callbacks=list(callbacks), enable_checkpointing=True, **options)
    trainer.fit(module, loader(), loader())
    return trainer


def test_best_checkpoint(tmp_path: Path) -> None:
    """The best checkpoint of the search is refused with the reason. The best one after it is the pruned model."""
    keep = lightning.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    callback = PruneCallback(**SETTINGS)
    trainer = fit(tmp_path, Net(), callback, keep)
    assert trainer.logged_metrics["smartprune/tau"] == trainer.logged_metrics["smartprune/undecided"] == 0
    assert trainer.logged_metrics["smartprune/progress"] == 1
    with pytest.raises(RuntimeError, match="saved at step 6 of the search, when no block was removed yet"):
        Net.load_from_checkpoint(tmp_path / "epoch=0.ckpt")
    best = Net.load_from_checkpoint(tmp_path / "epoch=2.ckpt")
    assert zeros(best, callback.receipt) == zeros(trainer.lightning_module, callback.receipt) > 0
    trainer.validate(ckpt_path=str(tmp_path / "epoch=2.ckpt"), dataloaders=loader(), verbose=False)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert set(torch.load(tmp_path / "after.ckpt", weights_only=False)["state_dict"]) == set(Net().state_dict())


def test_resuming_from_weights_only_raises(tmp_path: Path) -> None:
    keep = lightning.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_weights_only=True)
    fit(tmp_path, Net(), PruneCallback(**SETTINGS), keep)
    trainer = trainers.RealLightning(tmp_path).trainer(PruneCallback(**SETTINGS))
    with pytest.raises((sp.SmartpruneError, KeyError), match=r"no state of the pruner|not contain|save_weights_only"):
        trainer.fit(Net(), loader(), ckpt_path=str(tmp_path / "epoch=0.ckpt"))


def test_manual_optimization(tmp_path: Path) -> None:
    callback = PruneCallback(**SETTINGS)
    fit(tmp_path, Manual(), callback, max_epochs=1)
    assert callback.pruner is not None
    assert callback.pruner.count == 10
    assert callback.receipt.met
    with pytest.raises(sp.SmartpruneError, match="is not known before it starts"):
        fit(tmp_path, Manual(), PruneCallback(**{**SETTINGS, "steps": 0.5}))


@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_averaged_weights_are_pruned(tmp_path: Path, kind: str) -> None:
    """Averages are copied into the module when the training ends."""
    callback, net = PruneCallback(**SETTINGS), Net()
    swa, ema = lightning.callbacks.StochasticWeightAveraging, lightning.callbacks.EMAWeightAveraging
    fit(tmp_path, net, callback, swa(0.01, swa_epoch_start=1) if kind == "swa" else ema(decay=0.9))
    assert callback.receipt.met
    assert sp.verify(net, (4, 4), receipt=callback.receipt).ok


def test_an_average_before_the_callback_raises(tmp_path: Path) -> None:
    with pytest.raises(sp.SmartpruneError, match=r"EMAWeightAveraging has copied the module.*callbacks=\[prune, average\]"):
        fit(tmp_path, Net(), lightning.callbacks.EMAWeightAveraging(), PruneCallback(**SETTINGS))


@pytest.mark.slow
def test_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare = "from helpers.torchvision_operators import declare_operators\ndeclare_operators()\n"
    (tmp_path / "sitecustomize.py").write_text(declare)  # new processes import lightning, and with it torchvision, first
    source, tests = Path(sp.__file__).parents[1], Path(trainers.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(tests), str(source)]))
    callback, net = PruneCallback(**{**SETTINGS, "steps": 6}), Net()
    keep = lightning.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(tmp_path, net, callback, keep, strategy="ddp_spawn", devices=2)
    best = Net.load_from_checkpoint(tmp_path / "epoch=3.ckpt")
    plan = sp.plan(Net(), SETTINGS["block"], SETTINGS["sparsity"], include="*")
    assert zeros(best, plan) == zeros(net, plan) >= (plan.n - plan.keep) * 4 * 2
    resumed = Net()
    trainer = trainers.RealLightning(tmp_path).trainer(PruneCallback(**{**SETTINGS, "steps": 6}), strategy="ddp_spawn", devices=2)
    trainer.fit(resumed, loader(), loader(), ckpt_path=str(tmp_path / "epoch=1.ckpt"))
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in resumed.state_dict().items())


def test_the_learning_rate_finder_leaves_no_trace(tmp_path: Path) -> None:
    plain, finding = PruneCallback(**SETTINGS), PruneCallback(**SETTINGS)
    one, two = Net(), Net()
    two.lr = 0.05
    finder = lightning.callbacks.LearningRateFinder(num_training_steps=8, update_attr=False)
    fit(tmp_path, one, plain)
    fit(tmp_path, two, finding, finder)
    assert finding.receipt == plain.receipt
    assert all(torch.equal(value, one.state_dict()[name]) for name, value in two.state_dict().items())


def test_the_batch_size_finder_runs_before_the_length_is_known(tmp_path: Path) -> None:
    class Sized(Net):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(trainers.data(), batch_size=self.batch_size)

        val_dataloader = staticmethod(loader)

    callback, net = PruneCallback(**{**SETTINGS, "steps": 0.5}), Sized()
    trainer = trainers.RealLightning(tmp_path).trainer(callback)
    lightning.tuner.Tuner(trainer).scale_batch_size(net, max_trials=3, steps_per_trial=1)
    trainer.fit(net)
    assert callback.pruner is not None
    assert callback.pruner.steps == callback.pruner.count == 24 // net.batch_size * trainers.EPOCHS // 2
    assert sp.verify(net, (4, 4), receipt=callback.receipt).ok
