"""The trainer of Ultralytics prunes: average, resuming, early stopping, checkpoints and export. Counts are made here, by hand."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smartprune as sp
from smartprune.integrations.ultralytics import STATE, prune_trainer

os.environ |= {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false"}
os.environ.setdefault("YOLO_CONFIG_DIR", str(Path(tempfile.gettempdir()) / "smartprune-hosts"))
for package in ("ultralytics", "torchvision", "polars", "matplotlib"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; run make hosts", allow_module_level=True)
from helpers.hosts import yolo_data  # noqa: E402

pytestmark = pytest.mark.timeout(300)
BLOCK, SPARSITY, BATCHES = (8, 8), 0.7, 2
HEADS = {"yolov8n": 22, "yolo11n": 23, "yolov8n-seg": 22, "yolo11n-seg": 23}  # the index of the module with the output layers
PLAIN = (
    "import sys; sys.modules['smartprune'] = None; import torch; print(type(torch.load(sys.argv[1], weights_only=False)['model']))"
)


class InterruptError(Exception):
    """Simulates a training that dies."""


@pytest.fixture(scope="module", autouse=True)
def suppression() -> None:
    yolo_data.provide_suppression()


def train(folder: Path, name: str, trainer: Callable[[Any], type[Any]], weights: Path | None = None, **options: Any) -> Any:
    """Trains a new model, or one of a checkpoint, in ``folder/run``, and returns the YOLO object."""
    from ultralytics import YOLO

    data = yolo_data.write(folder / "data", outlines=name.endswith("seg"))
    model = YOLO(weights or f"{name}.yaml")
    quiet = {"plots": False, "verbose": False, "amp": False, "device": "cpu", "workers": 0, "exist_ok": True}
    short = {"epochs": 3, "imgsz": yolo_data.SIZE, "batch": 8 // BATCHES, "nbs": 8 // BATCHES, "mosaic": 0.0, "warmup_epochs": 1.0}
    model.train(
        trainer=trainer(model), data=str(data), project=str(folder), name="run", optimizer="SGD", **{**quiet, **short, **options}
    )
    return model


def pruning(**options: Any) -> Callable[[Any], type[Any]]:
    return lambda model: prune_trainer(model, **{"block": BLOCK, "sparsity": SPARSITY, "epochs": 1, **options})


def kept_blocks(weight: Tensor) -> tuple[int, int]:
    """Blocks of 8 output by 8 input channels by one place of the kernel that are not zero, and all blocks."""
    rows, columns, *kernel = weight.shape
    padded = torch.zeros(-(-rows // 8) * 8, -(-columns // 8) * 8, *kernel)
    padded[:rows, :columns] = weight.float()
    tiles = padded.reshape(padded.shape[0] // 8, 8, padded.shape[1] // 8, 8, -1)
    alive = (tiles != 0).any(3).any(1)
    return int(alive.sum()), alive.numel()


def kept_in(path: Path, receipt: sp.Receipt) -> tuple[int, int]:
    """The same for the layers of a receipt together, in a file."""
    plain = load(path)
    counts = [kept_blocks(plain.get_parameter(row.weight)) for row in receipt.layers]
    return sum(kept for kept, _ in counts), sum(total for _, total in counts)


def load(path: Path) -> nn.Module:
    model: nn.Module = torch.load(path, weights_only=False)["model"]
    return model


def expected_layers(model: nn.Module, head: int) -> list[str]:
    """All convolutions except the first, the output layers, and those that compute a constant."""
    names = [
        name for name, module in model.named_modules() if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)) and module.groups == 1
    ]
    outputs = [f"model.{head}.cv{branch}.{scale}.2" for branch in (2, 3, 4) for scale in range(3)]
    return [name for name in names if name not in ("model.0.conv", f"model.{head}.dfl.conv", *outputs)]


@pytest.mark.parametrize("name", HEADS)
def test_best_and_last_are_plain_and_have_the_exact_budget(name: str, tmp_path: Path) -> None:
    model = train(tmp_path, name, pruning())
    receipt = model.trainer.receipt
    for file in ("best.pt", "last.pt"):
        path = tmp_path / "run" / "weights" / file
        with zipfile.ZipFile(path) as archive:
            (pickle,) = [archive.read(entry) for entry in archive.namelist() if entry.endswith("data.pkl")]
        assert b"smartprune" not in pickle
        kept, total = kept_in(path, receipt)
        assert kept == -(-total * 3 // 10)  # 30 % of the blocks, rounded up
        assert kept == receipt.blocks.kept
        assert total == receipt.blocks.total
    plain = load(tmp_path / "run" / "weights" / "best.pt")
    assert {row.name for row in receipt.layers} <= set(expected_layers(plain, HEADS[name]))
    for branch in (2, 3):
        for scale in range(3):
            weight = plain.get_parameter(f"model.{HEADS[name]}.cv{branch}.{scale}.2.weight")
            assert bool((weight != 0).any(1).all()), "an output layer was pruned"
    assert sp.Receipt.load(tmp_path / "run" / "receipt.json") == receipt
    best = plain.float().state_dict()
    assert all(torch.equal(value, best[key]) for key, value in model.model.state_dict().items())


def test_a_checkpoint_loads_without_smartprune_and_exports_to_onnx(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = train(tmp_path, "yolo11n", pruning())
    path = tmp_path / "run" / "weights" / "best.pt"
    loaded = subprocess.run([sys.executable, "-c", PLAIN, str(path)], capture_output=True, text=True, timeout=120)
    assert "DetectionModel" in loaded.stdout, loaded.stderr
    file = model.export(format="onnx", simplify=False, imgsz=yolo_data.SIZE)
    picture = torch.rand(1, 3, yolo_data.SIZE, yolo_data.SIZE)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {session.get_inputs()[0].name: picture.numpy()})
    plain = load(path).float().eval()
    with torch.no_grad():
        expected = plain(picture)[0]
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-3, atol=1e-3)


def interrupt_in(trainer: type[Any], epoch: int) -> type[Any]:
    """The trainer, which dies at the beginning of an epoch."""

    class Interrupted(trainer):  # type: ignore[misc]
        def run_callbacks(self, event: str) -> None:
            super().run_callbacks(event)
            if event == "on_train_epoch_start" and self.epoch == epoch:
                raise InterruptError

    return Interrupted


@pytest.mark.parametrize(("name", "epoch", "phase"), [("yolov8n", 1, "search"), ("yolo11n-seg", 3, "frozen")])
def test_resuming_continues_the_search_with_its_scores(name: str, epoch: int, phase: str, tmp_path: Path) -> None:
    trainer = pruning(epochs=2)
    with pytest.raises(InterruptError):
        train(tmp_path, name, lambda model: interrupt_in(trainer(model), epoch), epochs=4)
    last = tmp_path / "run" / "weights" / "last.pt"
    saved = torch.load(last, weights_only=False)
    (state,) = [group[STATE] for group in saved["optimizer"]["param_groups"] if STATE in group]
    assert (state["count"], state["phase"]) == (BATCHES * min(epoch, 2), phase)
    begun: list[Any] = []

    def watched(model: Any) -> type[Any]:
        class Watched(trainer(model)):  # type: ignore[misc]
            def run_callbacks(self, event: str) -> None:
                super().run_callbacks(event)
                if event == "on_pretrain_routine_end":
                    pruner = self.pruner
                    momentum = [self.optimizer.state[p]["momentum_buffer"].clone() for p in pruner.parameters()]
                    begun.append((pruner.count, pruner.phase, pruner.parameters()[0].detach().clone(), momentum, self.start_epoch))

        return Watched

    model = train(tmp_path, name, watched, weights=last, resume=True)
    ((count, resumed_phase, scores, momentum, start_epoch),) = begun
    assert (count, resumed_phase, start_epoch) == (state["count"], phase, epoch)
    assert torch.equal(scores, state["tensors"]["scores"])
    assert all(bool(buffer.any()) for buffer in momentum) or phase == "frozen"
    receipt = model.trainer.receipt
    assert receipt.met
    if phase == "frozen":
        assert torch.equal(receipt.mask(), state["mask"])
    assert kept_in(tmp_path / "run" / "weights" / "best.pt", receipt)[0] == receipt.blocks.kept


def test_early_stopping_waits_for_the_search(tmp_path: Path) -> None:
    """With patience=1 and no detections, the fitness never improves, so the training ends soon after the search."""
    epochs: list[tuple[int, str]] = []

    def watched(model: Any) -> type[Any]:
        class Watched(pruning(epochs=4)(model)):  # type: ignore[misc]
            def validate(self) -> Any:
                metrics, _ = super().validate()
                epochs.append((self.epoch, self.pruner.phase))
                self.best_fitness = self.best_fitness or 1.0 - self.epoch / 100  # worse in every epoch
                return metrics, 1.0 - self.epoch / 100

        return Watched

    model = train(tmp_path, "yolov8n", watched, epochs=9, patience=1)
    assert [phase for _, phase in epochs[:5]] == ["search", "search", "search", "frozen", "frozen"]
    assert len(epochs) == 5
    receipt = model.trainer.receipt
    assert kept_in(tmp_path / "run" / "weights" / "best.pt", receipt)[0] == receipt.blocks.kept


def test_the_search_ends_with_an_epoch_when_batches_are_accumulated(tmp_path: Path) -> None:
    counts: list[tuple[int, str]] = []

    def watched(model: Any) -> type[Any]:
        class Watched(pruning(epochs=2)(model)):  # type: ignore[misc]
            def run_callbacks(self, event: str) -> None:
                if event == "on_train_epoch_end":
                    counts.append((self.pruner.count, self.pruner.phase))
                super().run_callbacks(event)

        return Watched

    model = train(tmp_path, "yolov8n", watched, epochs=3, batch=2, nbs=4, val=False)  # 4 batches, 2 for every step
    assert [phase for _, phase in counts] == ["search", "frozen", "frozen"]
    assert counts[1][0] == model.trainer.pruner.steps


def test_validation_uses_the_mask_and_leaves_the_average_as_it_was(tmp_path: Path) -> None:
    """During the search the average is multiplied by the soft mask while it is validated."""
    seen: list[bool] = []

    def watched(model: Any) -> type[Any]:
        class Watched(pruning(epochs=2)(model)):  # type: ignore[misc]
            def validate(self) -> Any:
                row, weights = self.pruner.plan.layers[5], self.ema.ema
                before = weights.get_parameter(row.weight).clone()
                inside: list[Tensor] = []
                handle = weights.get_submodule(row.name).register_forward_pre_hook(
                    lambda module, _: inside.append(module.weight.detach().clone())
                )
                out = super().validate()
                handle.remove()
                searching = self.pruner.phase == "search"
                assert torch.equal(weights.get_parameter(row.weight), before)
                assert torch.equal(inside[0], before) != searching
                seen.append(searching)
                return out

        return Watched

    train(tmp_path, "yolov8n", watched, epochs=3)
    assert seen == [True, False, False]


def test_a_checkpoint_of_the_stock_trainer_is_refused(tmp_path: Path) -> None:
    def stock(model: Any) -> type[Any]:
        trainer: type[Any] = model.task_map[model.task]["trainer"]
        return trainer

    with pytest.raises(InterruptError):
        train(tmp_path, "yolov8n", lambda model: interrupt_in(stock(model), 1))
    with pytest.raises(sp.SmartpruneError, match="the checkpoint has no state of the pruner"):
        train(tmp_path, "yolov8n", pruning(), weights=tmp_path / "run" / "weights" / "last.pt", resume=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": True}, "compile=True; a training that prunes and compiles is not supported"),
        ({"epochs": 1}, "the search has 4 steps and the training 2"),
    ],
)
def test_trainings_that_cannot_prune_raise(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(sp.SmartpruneError, match=message):
        train(tmp_path, "yolov8n", pruning(epochs=2), **options)
