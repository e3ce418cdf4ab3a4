"""What a run can do besides the plain loop: schedules, averages, distillation, clipping, accumulation, TensorBoard.

Each is compared with a slow loop or a closed form; and a run that uses all of them resumes to the same bits.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import math
import re
import shlex
import shutil
import signal
import sys
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import smartprune as sp
from helpers.plain_task import PlainTask
from helpers.training_jobs import SMALL_FLAGS, assert_same_run, command, environment, metric_rows, small_config
from smartprune import SmartpruneError
from smartprune.cli import main
from smartprune.tasks import TASKS
from smartprune.tasks.digits import Digits
from smartprune.tasks.distance import soft_distance
from smartprune.training import run as run_module
from smartprune.training import trackers
from smartprune.training import train as train_module
from smartprune.training.check import check, resolve
from smartprune.training.config import Config, configure
from smartprune.training.distill import Teacher
from smartprune.training.ema import Ema, decay_at
from smartprune.training.folder import create_folder
from smartprune.training.optimizer import lr_factor, make_optimizer
from smartprune.training.result import Result
from smartprune.training.run import Run, deterministic, start_run
from smartprune.training.step import steps_of_epoch, take_step, update_weights
from smartprune.training.train import resume, train

ALL: dict[str, Any] = {
    "schedule": "poly",
    "search_schedule": "linear",
    "warmup_epochs": 0.5,
    "ema": 0.9,
    "distill": 0.5,
    "augment": 1.0,
    "augment_over": "all",
    "clip_norm": 1.0,
    "batch": 64,
    "accumulate": 4,  # 14 batches: three steps of four, and one of two
    "deterministic": "on",
}
STEPS = {"dense": 20, "search": 8, "finetune": 12}


def plain(out: Path, **changes: Any) -> Config:
    given = {"dense_epochs": 1, "search_epochs": 2, "finetune_epochs": 1, "batch": 128, "sparsity": 0.5}
    return configure({"task": "plain", **given, "out": str(out), **changes})


# -- schedules --------------------------------------------------------------------------------------------------------------

SHAPES = {
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "poly": lambda x: (1 - x) ** 0.7,
    "linear": lambda x: 1 - x,
    "constant": lambda x: 1.0,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_schedule_with_warm_up(shape: str) -> None:
    """Half an epoch of eight steps is four: from 0.2 to 1 in a straight line, then the shape over what is left."""
    config = configure({"schedule": shape, "poly_power": 0.7, "warmup_epochs": 0.5, "warmup_start": 0.2})
    found = [lr_factor(config, "dense", step, STEPS.__getitem__, 8) for step in range(20)]
    wanted = [0.2, 0.4, 0.6, 0.8, *(SHAPES[shape](step / 16) for step in range(16))]
    assert found == pytest.approx(wanted, abs=1e-12)


def test_one_schedule_over_search_and_fine_tuning_warms_up_once() -> None:
    config = configure({"schedule": "linear", "warmup_epochs": 1, "warmup_start": 0.0, "schedule_over": "pruning"})
    found = [
        lr_factor(config, stage, step, STEPS.__getitem__, 4) for stage in ("search", "finetune") for step in range(STEPS[stage])
    ]
    assert found == pytest.approx([0, 0.25, 0.5, 0.75, *(1 - step / 16 for step in range(16))])


def test_the_rates_of_a_run_are_those_of_its_schedule(tmp_path: Path) -> None:
    train(
        small_config(tmp_path / "a", schedule="poly", poly_power=0.5, search_schedule="linear", warmup_epochs=1, finetune_epochs=2)
    )
    wanted = [0.1 * (0.1 + 0.9 * 6 / 7), 0.1 * (1 - 6 / 7) ** 0.5, 0.1 * (0.1 + 0.9 * 6 / 7), 0.1 * (1 - 6 / 7)]
    assert [row["lr"] for row in metric_rows(tmp_path / "a")[:4]] == pytest.approx(wanted)


# -- the average ------------------------------------------------------------------------------------------------------------


def slow_average(history: list[dict[str, Tensor]], decay: float) -> dict[str, Tensor]:
    """Of the states before the first step and after every step, in double precision."""
    out = {name: value.double() for name, value in history[0].items()}
    for step, state in enumerate(history[1:], start=1):
        keep = min(decay, (1 + step) / (10 + step))
        out = {name: keep * out[name] + (1 - keep) * state[name].double() for name in out}
    return out


def test_the_decay_rises_to_its_value() -> None:
    assert decay_at(0.99, 1) == pytest.approx(2 / 11)
    assert decay_at(0.99, 10**6) == 0.99


def test_average_against_a_plain_loop() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    ema = Ema(model, 0.6)
    history = [copy.deepcopy(dict(model.state_dict()))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 30):
        model(torch.randn(8, 3) + step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(step)
        history.append(copy.deepcopy(dict(model.state_dict())))
    wanted = slow_average(history, 0.6)
    with ema.swapped_in():
        for name, value in model.state_dict().items():
            if value.is_floating_point():  # running_mean and running_var among them
                torch.testing.assert_close(value.double(), wanted[name], rtol=1e-5, atol=1e-6)
            else:
                assert int(value) == 29
    for name, value in model.state_dict().items():
        assert torch.equal(value, history[-1][name])


def test_a_run_judges_and_keeps_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, make, histories = Ema.update, Ema.__init__, []

    def begin(self: Ema, model: nn.Module, decay: float) -> None:
        make(self, model, decay)
        self.model = model  # type: ignore[attr-defined]
        histories.append([copy.deepcopy(dict(model.state_dict()))])

    def update(self: Ema, step: int) -> None:
        real(self, step)
        histories[-1].append(copy.deepcopy(dict(self.model.state_dict())))  # type: ignore[attr-defined]

    monkeypatch.setattr(Ema, "__init__", begin)
    monkeypatch.setattr(Ema, "update", update)
    result = train(small_config(tmp_path / "a", ema=0.8))
    dense, pruned = histories  # none in the search
    assert [len(history) for history in histories] == [15, 8]
    for file, history in (("dense", dense), ("model", pruned)):
        saved, wanted = load_file(tmp_path / "a" / f"{file}.safetensors"), slow_average(history, 0.8)
        for name, value in saved.items():
            if value.is_floating_point():
                torch.testing.assert_close(value.double(), wanted[name], rtol=1e-4, atol=1e-6)
    start_of_search = histories[1][0]
    assert "conv1.weight" in start_of_search
    task = TASKS["digits"](width=4)
    model = task.model("resnet8")
    model.load_state_dict(load_file(tmp_path / "a" / "model.safetensors"))
    model.eval()
    with torch.no_grad():
        assert task.metric(model, task.data("test", torch.device("cpu"))) == result.pruned
        assert task.metric(model, task.data("validation", torch.device("cpu"))) == metric_rows(tmp_path / "a")[-1]["accuracy"]


def test_removed_blocks_are_zero_in_the_average() -> None:
    """Against the average of a copy that follows by ``apply_to``."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    ema: Ema | None = None
    other: nn.Module | None = None
    for step in range(1, 9):
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
        if pruner.phase != "frozen":
            continue
        if ema is None or other is None:
            ema, other = Ema(model, 0.5), copy.deepcopy(model)
        ema.update(step)
        theirs = dict(other.named_parameters())
        with torch.no_grad():
            for name, value in model.named_parameters():
                theirs[name].lerp_(value, 1 - decay_at(0.5, step))
        pruner.apply_to(other)
    assert ema is not None
    assert other is not None
    ema.copy_to_model()
    for layer, mine, copied in zip(pruner.plan.layers, pruner.blocks.weights, sp.find_pruner(other).blocks.weights, strict=True):  # type: ignore[union-attr]
        gone = layer.grid.expand(pruner.mask[layer.start : layer.stop].float()) == 0
        assert torch.count_nonzero(mine.detach()[gone]) == 0
        assert torch.equal(mine, copied)
    assert sp.bake(model).met


# -- distillation -----------------------------------------------------------------------------------------------------------


def slow_distance(out: np.ndarray, wanted: np.ndarray, temperature: float) -> float:
    """Sample by sample and class by class, classes last."""
    total = 0.0
    for a, b in zip(out.reshape(-1, out.shape[-1]), wanted.reshape(-1, wanted.shape[-1]), strict=True):
        p, q = (np.exp(row / temperature) / np.exp(row / temperature).sum() for row in (b, a))
        total += sum(pi * (math.log(pi) - math.log(qi)) for pi, qi in zip(p, q, strict=True))
    return temperature**2 * total / (out.size // out.shape[-1])


@pytest.mark.parametrize("shape", [(5, 7), (2, 4, 3, 5)])
def test_distance_against_a_plain_loop(shape: tuple[int, ...]) -> None:
    out, wanted = torch.randn(shape).double(), torch.randn(shape).double()
    last = [np.moveaxis(tensor.numpy(), 1, -1) for tensor in (out, wanted)]
    assert float(soft_distance(out, wanted, 3.0)) == pytest.approx(slow_distance(*last, 3.0), rel=1e-5)
    assert float(soft_distance((out, wanted), [wanted], 3.0)) == pytest.approx(slow_distance(*last, 3.0), rel=1e-5)  # first heads
    assert float(soft_distance(out, out, 3.0)) == pytest.approx(0, abs=1e-6)


def test_teacher_sees_what_the_student_sees() -> None:
    student, dense = nn.Linear(3, 4), nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    teacher = Teacher(dense, soft_distance, weight=0.3, temperature=2.0)
    teacher.attach(nn.Linear(3, 4))
    teacher.attach(student)
    x = torch.randn(6, 3)
    out = student(x)
    loss = teacher.loss()
    wanted = slow_distance(out.detach().numpy(), dense[0](x).detach().numpy(), 2.0)
    assert float(loss.detach()) == pytest.approx(0.3 * wanted, rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert student.weight.grad is not None
    assert all(p.grad is None for p in dense.parameters())


def begun(config: Config) -> Run:
    """A run at its beginning, to be taken step by step."""
    create_folder(config)
    return start_run(Path(config.out), resolve(config))


def test_distance_joins_the_loss_of_search_and_fine_tuning(tmp_path: Path) -> None:
    """The loss of the first step of a search, by hand."""
    from smartprune.run_files import DENSE
    from smartprune.training.folder import save_weights
    from smartprune.training.run import enter_stage

    config = plain(tmp_path / "a", distill=0.7, distill_temperature=2.0)
    with deterministic(resolve(config)):
        run = begun(config)
        dense = copy.deepcopy(run.model)
        save_weights(run.model, run.folder / DENSE)
        enter_stage(run, "search")
        assert run.pruner is not None
        batch = next(iter(steps_of_epoch(run)))[0]
        masked = copy.deepcopy(run.model)
        take_step(run, batch)
    images, labels = batch
    out, wanted = masked(images).detach(), dense(images).detach()
    hard = float(nn.functional.cross_entropy(out, labels))
    assert float(run.losses) == pytest.approx(hard + 0.7 * slow_distance(out.numpy(), wanted.numpy(), 2.0), rel=1e-5)


def test_distillation_needs_a_dense_model_and_a_task_that_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SmartpruneError, match=r"distill=0\.5 needs a trained dense model; give --dense FILE"):
        check(small_config(tmp_path / "a", distill=0.5, dense_epochs=0))
    monkeypatch.delattr("smartprune.tasks.digits.Digits.distance")
    with pytest.raises(SmartpruneError, match=r"distill=0\.5: the task digits has no distance\(\) .*; use --distill 0"):
        check(small_config(tmp_path / "a", distill=0.5))


def test_distillation_from_a_given_dense_model(tmp_path: Path) -> None:
    train(small_config(tmp_path / "a", distill=0.5))
    train(small_config(tmp_path / "b", distill=0.5, dense=str(tmp_path / "a" / "dense.safetensors")))
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


# -- clipping and accumulation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0.01, 1e6])
def test_clipping_against_the_norm_by_hand(most: float, tmp_path: Path) -> None:
    config = plain(tmp_path / "a", clip_norm=most, momentum=0.0, weight_decay=0.0)
    with deterministic(resolve(config)):
        run = begun(config)
        batch = next(iter(steps_of_epoch(run)))[0]
        before = copy.deepcopy(run.model)
        nn.functional.cross_entropy(before(batch[0]), batch[1]).backward()
        take_step(run, batch)
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in before.parameters() if p.grad is not None))
    scale = min(1.0, most / norm)
    for old, new in zip(before.parameters(), run.model.parameters(), strict=True):
        assert old.grad is not None
        torch.testing.assert_close(new, old - config.lr * scale * old.grad, rtol=1e-4, atol=1e-7)


def test_clipping_leaves_the_scores_alone(tmp_path: Path) -> None:
    """They have a setting of their own, ``--set clip=1.0``."""
    from smartprune.training.run import enter_stage

    moved = []
    for most in (0.0, 1e-9):
        config = plain(tmp_path / f"{most}", clip_norm=most, momentum=0.0, settings={"follow": False})
        with deterministic(resolve(config)):
            run = begun(config)
            enter_stage(run, "search")
            assert run.pruner is not None
            before = run.pruner.scores.clone()
            take_step(run, *next(iter(steps_of_epoch(run))))
            moved.append(run.pruner.scores - before)
    assert torch.equal(*moved)
    assert moved[0].abs().max() > 0


def test_four_batches_are_as_one_of_four_times_the_size(tmp_path: Path) -> None:
    train(plain(tmp_path / "one", batch=128, clip_norm=1.0, ema=0.5))
    train(plain(tmp_path / "four", batch=32, accumulate=4, clip_norm=1.0, ema=0.5))
    assert [row["step"] for row in metric_rows(tmp_path / "four")] == [7, 7, 14, 7]
    for file in ("dense", "model"):
        one, four = (load_file(tmp_path / name / f"{file}.safetensors") for name in ("one", "four"))
        for name, value in one.items():
            torch.testing.assert_close(four[name], value, rtol=1e-3, atol=2e-5)
    for a, b in zip(metric_rows(tmp_path / "one"), metric_rows(tmp_path / "four"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)
        assert b["lr"] == pytest.approx(a["lr"])


def test_an_epoch_may_end_with_a_shorter_step(tmp_path: Path) -> None:
    """14 batches, four at a time: the last step has two, and averages over these."""
    config = plain(tmp_path / "a", batch=64, accumulate=4, momentum=0.0, weight_decay=0.0)
    with deterministic(resolve(config)):
        run = begun(config)
        groups = list(steps_of_epoch(run))
        assert [len(group) for group in groups] == [4, 4, 4, 2]
        assert run.steps_per_epoch == 4
        run.step = 3
        assert [len(group) for group in steps_of_epoch(run)] == [2]
        run.step = 0
        before = copy.deepcopy(run.model)
        images, labels = (torch.cat(part) for part in zip(*groups[3], strict=True))
        nn.functional.cross_entropy(before(images), labels).backward()
        take_step(run, *groups[3])
    for old, new in zip(before.parameters(), run.model.parameters(), strict=True):
        assert old.grad is not None
        torch.testing.assert_close(new, old - config.lr * old.grad, rtol=1e-4, atol=1e-6)


def test_the_search_counts_optimizer_steps(tmp_path: Path) -> None:
    train(small_config(tmp_path / "a", batch=64, accumulate=4))
    told = [row for row in metric_rows(tmp_path / "a") if row["stage"] == "search"]
    assert [row["step"] for row in told] == [4, 8]
    assert told[-1]["undecided"] == 0  # the search came to its end


# -- all of it --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(small_config(out, **ALL))
    return out


class After:
    """Asks a run to stop after so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


@pytest.mark.parametrize("every", [1, 3, 5])
def test_resumed_with_everything_switched_on(every: int, whole: Path, tmp_path: Path) -> None:
    """20 steps of four batches or two: the stops fall into, onto and between epochs and stages."""
    out, stops = tmp_path / "run", 1
    with pytest.raises(SmartpruneError, match="stopped in dense"):
        train(small_config(out, **ALL), stop=After(every))
    while not (out / "result.json").exists():
        torch.rand(1)
        with suppress(SmartpruneError):
            resume(out, stop=After(every))
        stops += 1
    assert stops == 20 // every + 1
    assert_same_run(whole, out)


def test_killed_with_everything_switched_on(whole: Path, tmp_path: Path) -> None:
    import subprocess

    flags = [word for name, value in ALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    out, arguments, kills = tmp_path / "run", [*SMALL_FLAGS, *flags, "--checkpoint-seconds", "0", "--out", str(tmp_path / "run")], 0
    for moment in (0.0, 0.25):
        process = subprocess.Popen(command("train", *arguments), env=environment(), stderr=subprocess.PIPE)
        before = (out / "checkpoint.pt").stat().st_mtime_ns if (out / "checkpoint.pt").exists() else None
        while process.poll() is None:  # until it works on from the checkpoint
            if (out / "checkpoint.pt").exists() and (out / "checkpoint.pt").stat().st_mtime_ns != before:
                break
            time.sleep(0.002)
        time.sleep(moment)
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        arguments = ["--resume", "--out", str(out)]
    assert kills >= 1
    resume(out)
    assert_same_run(whole, out)


def test_everything_is_recorded(whole: Path) -> None:
    import json

    config = json.loads((whole / "config.json").read_text())
    assert {name: config[name] for name in ALL} == ALL
    assert Result.load(whole).verified


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ema": 1.0}, r"ema=1\.0 must be at least 0 and below 1, such as 0\.999"),
        ({"ema": -0.1}, r"ema=-0\.1 must be at least 0"),
        ({"warmup_start": 1.5}, r"warmup_start=1\.5 must be from 0 to 1"),
        ({"warmup_epochs": 2.0}, r"warmup_epochs=2 must be shorter than the dense stage \(2 epochs\)"),
        ({"warmup_epochs": 1.5}, r"warmup_epochs=1\.5 must be shorter than the fine-tuning \(1 epochs\)"),
        ({"accumulate": 0}, "accumulate=0 must be above 0"),
        ({"accumulate": 1.5}, r"accumulate=1\.5 must be int"),
        ({"clip_norm": -1.0}, r"clip_norm=-1\.0 must not be negative"),
        ({"distill": -1.0}, r"distill=-1\.0 must not be negative"),
        ({"distill_temperature": 0.0}, r"distill_temperature=0\.0 must be above 0"),
        ({"poly_power": 0.0}, r"poly_power=0\.0 must be above 0"),
        ({"parallel": "tp"}, "parallel='tp' must be one of ddp, fsdp"),
        ({"tensorboard": "yes"}, "tensorboard='yes' must be one of on, off"),
        ({"deterministic": "maybe"}, "deterministic='maybe' must be one of on, off"),
    ],
)
def test_wrong_settings(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SmartpruneError, match=message):
        small_config(tmp_path / "a", **change)


# -- TensorBoard ------------------------------------------------------------------------------------------------------------


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told = EventAccumulator(str(folder / "tensorboard"))
    told.Reload()
    return {tag: [(event.step, event.value) for event in told.Scalars(tag)] for tag in told.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_every_row_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    out = tmp_path / "a"
    with pytest.raises(SmartpruneError, match="stopped in search"):
        train(small_config(out, tensorboard="on", checkpoint_seconds=1000.0), stop=After(17))
    resume(out, stop=After(1000))
    told, found = metric_rows(out), read_events(out)
    at = [7, 14, 21, 28, 35]  # steps of the whole run
    assert found["loss"] == [(step, pytest.approx(row["loss"])) for step, row in zip(at, told, strict=True)]
    assert [step for step, _ in found["accuracy"]] == [7, 14, 35]  # none in the search
    assert [step for step, _ in found["tau"]] == [21, 28]
    assert {"lr", "seconds", "undecided"} <= set(found)
    if importlib.util.find_spec("PIL") is not None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        pictures = EventAccumulator(str(out / "tensorboard"), size_guidance={"images": 0}).Reload()
        assert {"layers", "scores"} <= set(pictures.Tags()["images"])
        (event,) = pictures.Images("layers")
        assert (event.step, event.encoded_image_string[:4]) == (35, b"\x89PNG")


def test_missing_tensorboard_is_said_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(SmartpruneError, match=r"pip install 'smartprune\[track\]', or use --tensorboard off"):
        train(small_config(tmp_path / "a", tensorboard="on"))
    assert not (tmp_path / "a").exists()


class Recorder:
    """Stands in for TensorBoard's writer, which has a file and a thread, and for a recorded step, which has memory of a GPU."""

    alive: ClassVar[weakref.WeakSet[Recorder]] = weakref.WeakSet()

    def __init__(self, run: Any) -> None:
        self.run, self.failed, self.closed = run, None, False
        self.alive.add(self)

    def __call__(self, batches: tuple[Any, ...]) -> None:
        self.run.optimizer.zero_grad()
        update_weights(self.run, batches)

    def close(self) -> None:
        self.closed = True

    def add_scalar(self, *_: object, **__: object) -> None: ...

    add_image = flush = add_scalar


@pytest.mark.parametrize("steps", [5, 1000])
def test_nothing_of_a_run_outlives_it(tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its end nor a stop leaves a file open, or a model in memory that waits for the garbage collector."""
    writers: list[Recorder] = []
    monkeypatch.setattr(trackers, "import_writer", lambda: lambda folder: writers.append(Recorder(folder)) or writers[-1])
    monkeypatch.setattr(run_module, "make_graph", Recorder)
    models: list[weakref.ref[nn.Module]] = []

    monkeypatch.setattr(train_module, "save_checkpoint", lambda run: models.append(weakref.ref(run.model)))
    gc.collect()
    gc.disable()
    try:
        with suppress(SmartpruneError):
            train(small_config(tmp_path / "a", tensorboard="on"), stop=After(steps))
        assert [writer.closed for writer in writers] == [True]
        assert models
        assert [model() for model in models] == [None] * len(models)
        assert set(Recorder.alive) == set(writers)
    finally:
        gc.enable()


def test_what_ended_a_run_is_told_whatever_closing_it_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard's writer raises where the disk is full, and how to go on would be lost."""

    class Full(Recorder):
        def close(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(trackers, "import_writer", lambda: Full)
    with pytest.raises(SmartpruneError, match="stopped in dense, after step 5"):
        train(small_config(tmp_path / "a", tensorboard="on"), stop=After(5))


# -- on a GPU ---------------------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("graph", ["off", "on"])
def test_the_same_bits_twice_on_a_gpu(graph: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(small_config(tmp_path / name, **{**ALL, "accumulate": 2}, device="cuda", graph=graph))
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


@gpu
@pytest.mark.gpu
def test_everything_in_a_graph(tmp_path: Path) -> None:
    """A graph takes the steps that Python takes, the shorter last one of an epoch among them."""
    for graph in ("off", "on"):
        train(small_config(tmp_path / graph, **ALL, dense_epochs=3, device="cuda", graph=graph))
    for a, b in zip(metric_rows(tmp_path / "off"), metric_rows(tmp_path / "on"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=0.1)
        assert b["lr"] == pytest.approx(a["lr"])
        assert "graph" not in b


def test_the_plain_task_has_no_batch_norm() -> None:
    model = PlainTask().model("plain")
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


# -- the page -----------------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
LINES = [
    shlex.split(line, comments=True)
    for text in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.S)
    for line in text.splitlines()
    if line.strip()
]


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_commands_of_the_page(words: list[str], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run as they stand, but shorter, and where the page's runs are there already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "smartprune.tasks.digits.Digits.recipe", replace(Digits.recipe, dense_epochs=1, search_epochs=1, finetune_epochs=1)
    )
    if words[0] == "torchrun":
        words = words[words.index("smartprune") :]
        monkeypatch.setenv("WORLD_SIZE", "1")
        monkeypatch.setenv("RANK", "0")
    assert words[0] == "smartprune"
    if words[1] in ("sweep", "compare"):
        shutil.copytree(PAGE.parent.parent / "records", tmp_path / "records")
        shutil.copytree(whole, tmp_path / "runs" / "paper" / "a")
        words = words + ["--list"] * (words[1] == "sweep" and "--list" not in words)  # the paper's table takes days
    if "--resume" in words or "--config" in words:
        shutil.copytree(whole, tmp_path / "runs" / "a")
        shutil.copytree(whole, tmp_path / "runs" / "c")
    assert main(words[1:]) == 0


def test_momentum_is_nesterovs_and_weight_decay_spares_the_scores(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1))
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=2)
    config = plain(tmp_path / "a", momentum=0.9, weight_decay=0.01)
    optimizer = make_optimizer(model, config, "search", pruner)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert all(group["nesterov"] for group in optimizer.param_groups)
    scores = {id(p) for p in pruner.parameters()}
    assert {decay[id(p)] for p in model.parameters() if id(p) not in scores} == {0.01}
    assert {decay[i] for i in scores} == {0.0}
