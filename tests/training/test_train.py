"""The training job: what a run folder holds, that it repeats, and what goes wrong loudly."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.training_jobs import SMALL_SETTINGS, assert_same_run, metric_rows, small_config
from smartprune import METHODS, SmartpruneError
from smartprune.artifacts.receipt import Receipt
from smartprune.artifacts.verify import verify
from smartprune.cli.settings import requested_settings
from smartprune.cli.train import add_train
from smartprune.tasks.digits import Digits
from smartprune.training.check import check, resolve
from smartprune.training.config import configure, load_config
from smartprune.training.progress import Progress, Tick
from smartprune.training.result import Result
from smartprune.training.train import resume, train


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "done"
    train(small_config(out))
    return out


def test_run_folder(done: Path) -> None:
    names = {path.name for path in done.iterdir()}
    assert names == {
        "config.json", "metrics.jsonl", "checkpoint.pt", "receipt.json", "result.json",
        "dense.safetensors", "model.safetensors", "model.packed.safetensors", "scores.safetensors", "report.html",
    }  # fmt: skip
    result = Result.load(done)
    assert result.verified
    assert 0 < result.dense <= 1
    assert 0 < result.pruned <= 1
    assert result.seconds == pytest.approx(sum(result.stage_seconds.values()), abs=0.01)
    assert {"torch", "python", "device", "threads", "processes", "smartprune", "system"} == set(result.versions)
    receipt = Receipt.load(done / "receipt.json")
    assert receipt.met
    assert receipt.blocks.kept == math.ceil(receipt.blocks.total / 2)
    assert verify(done).ok


def test_metrics_have_a_row_for_every_epoch(done: Path) -> None:
    told = metric_rows(done)
    assert [(row["stage"], row["epoch"]) for row in told] == [
        ("dense", 1), ("dense", 2), ("search", 1), ("search", 2), ("finetune", 1)
    ]  # fmt: skip
    assert [row["accuracy"] is None for row in told] == [False, False, True, True, False]
    for row in told[2:4]:
        assert {"tau", "undecided", "changed", "gap", "kept", "collapsed"} <= set(row)


def test_baked_model_is_plain_and_as_accurate_as_stated(done: Path) -> None:
    task = Digits(width=4)
    model = task.model("resnet8")
    model.load_state_dict(load_file(done / "model.safetensors"))
    model.eval()
    with torch.no_grad():
        accuracy = task.metric(model, task.data("test", torch.device("cpu")))
    assert accuracy == Result.load(done).pruned


def test_config_round_trip_repeats_the_run(done: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    torch.rand(3)  # what happened in the process before does not matter
    train(replace(load_config(done / "config.json"), out=str(again)))
    assert_same_run(done, again)
    first, second = (json.loads((path / "config.json").read_text()) for path in (done, again))
    assert first | {"out": ""} == second | {"out": ""}


def test_config_is_resolved(done: Path) -> None:
    config = json.loads((done / "config.json").read_text())
    assert config["settings"] == asdict(METHODS["smart"]())
    assert config["task_settings"] == {"width": 4, "shift": 1}
    assert config["device"] == "cpu"


def test_another_seed_gives_another_model(done: Path, tmp_path: Path) -> None:
    train(small_config(tmp_path / "b", seed=1))
    assert (tmp_path / "b" / "model.safetensors").read_bytes() != (done / "model.safetensors").read_bytes()


def test_dense_checkpoint_leads_to_the_same_result(done: Path, tmp_path: Path) -> None:
    out = tmp_path / "from-dense"
    result = train(small_config(out, dense=str(done / "dense.safetensors")))
    for name in ("dense.safetensors", "model.safetensors", "receipt.json"):
        assert (out / name).read_bytes() == (done / name).read_bytes()
    assert result.dense == Result.load(done).dense
    assert [row["stage"] for row in metric_rows(out)] == ["search", "search", "finetune"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_meets_the_budget(method: str, done: Path, tmp_path: Path) -> None:
    out = tmp_path / method
    train(small_config(out, method=method, search_epochs=3, dense=str(done / "dense.safetensors")))
    receipt = Receipt.load(out / "receipt.json")
    assert receipt.method == method
    assert receipt.met


ABLATION = [
    {"mask_type": "stochastic"},
    {"mask_type": "binary"},
    {"mask_type": "binary_soft"},
    {"schedule": "fixed", "start": 0.01, "unit": "absolute"},
    {"schedule": "linear"},
    {"schedule": "inverse_exponential"},
    {"schedule": "paper_exponential", "start": 0.5, "end": 1e-5, "unit": "absolute"},
    {"start": 10.0, "end": 1e-7, "unit": "absolute"},
    {"init": "ones"},
    {"init": "l1"},
    {"train_weights": False},
    {"ramp": "cubic", "clip": 1.0},
]


@pytest.mark.parametrize("settings", ABLATION, ids=str)
def test_switches_of_the_ablation(settings: dict[str, object], done: Path, tmp_path: Path) -> None:
    """Every switch of the paper's Table 5, from the dense model to the verified file."""
    result = train(small_config(tmp_path / "run", settings=settings, dense=str(done / "dense.safetensors")))
    assert result.verified
    assert Receipt.load(tmp_path / "run" / "receipt.json").met


def test_macs_budget(done: Path, tmp_path: Path) -> None:
    train(small_config(tmp_path / "macs", sparsity=None, macs=0.5, dense=str(done / "dense.safetensors")))
    receipt = Receipt.load(tmp_path / "macs" / "receipt.json")
    assert receipt.macs is not None
    assert receipt.macs.removed >= receipt.macs.total / 2
    assert receipt.requested is not None
    assert receipt.requested.kind == "macs"


def test_adamw_floor_and_skip(done: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-3, "search_lr": 1e-3, "finetune_lr": 1e-3, "floor": 0.25}
    train(small_config(tmp_path / "a", skip=["stages.0.*"], dense=str(done / "dense.safetensors"), **changes))
    receipt = Receipt.load(tmp_path / "a" / "receipt.json")
    assert all(row.blocks.kept >= row.blocks.total / 4 for row in receipt.layers)
    assert not any(row.name.startswith("stages.0") for row in receipt.layers)


def test_global_state_is_put_back(tmp_path: Path) -> None:
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    train(small_config(tmp_path / "a", dense_epochs=0, search_epochs=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


def test_nan_loss_names_stage_and_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Digits.loss, []

    def loss(self: Digits, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        return real(self, model, batch) * (math.nan if len(calls) == 20 else 1)

    monkeypatch.setattr(Digits, "loss", loss)
    with pytest.raises(SmartpruneError, match=r"the loss is nan in search, step 6 of 14; lower the learning rate"):
        train(small_config(tmp_path / "a"))


def test_existing_folder_is_refused(done: Path, tmp_path: Path) -> None:
    before = (done / "model.safetensors").read_bytes()
    with pytest.raises(SmartpruneError, match="already holds a run; continue it with: smartprune train --resume"):
        train(small_config(done))
    assert (done / "model.safetensors").read_bytes() == before
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(SmartpruneError, match="is not empty and holds no run; choose another folder"):
        train(small_config(tmp_path))
    with pytest.raises(SmartpruneError, match="is a file; give a folder"):
        train(small_config(tmp_path / "note.txt"))


def test_empty_folder_is_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert train(small_config(tmp_path / "empty", dense_epochs=0, search_epochs=1)).verified


def test_what_cannot_work_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(SmartpruneError, match=r"floor=0\.9 needs"):
        train(small_config(tmp_path / "a", floor=0.9))
    with pytest.raises(SmartpruneError, match="matches no layer"):
        train(small_config(tmp_path / "a", skip=["nothing.*"]))
    assert not (tmp_path / "a").exists()


def test_dense_file_that_does_not_fit(done: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    with pytest.raises(SmartpruneError, match=r"cannot be read as a \.safetensors file"):
        check(small_config(tmp_path / "a", dense=str(file)))
    file.write_bytes(b"\xff" * 100)
    with pytest.raises(SmartpruneError, match=r"cannot be read as a \.safetensors file"):
        check(small_config(tmp_path / "a", dense=str(file)))
    tensors = load_file(done / "dense.safetensors")
    with pytest.raises(SmartpruneError, match=r"conv1.weight has shape \(4, 1, 3, 3\) in the file and \(8, 1, 3, 3\) in the model"):
        check(small_config(tmp_path / "a", dense=str(done / "dense.safetensors"), task_settings={"width": 8}))
    save_file({name: value for name, value in tensors.items() if not name.startswith("fc")}, file)
    with pytest.raises(SmartpruneError, match=r"lacks fc.bias, fc.weight; give the model it was saved from"):
        check(small_config(tmp_path / "a", dense=str(file)))
    save_file({**tensors, "fc.bias": tensors["fc.bias"] * math.nan}, file)
    with pytest.raises(SmartpruneError, match=r"fc\.bias holds NaN or infinity"):
        check(small_config(tmp_path / "a", dense=str(file)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparsity": 93}, r"sparsity=93\.0 is outside"),
        ({"sparsity": "0.9"}, "sparsity='0.9' must be"),
        ({"sparsity": math.nan}, "sparsity=nan must be"),
        ({"macs": 0.5, "sparsity": 0.5}, "set exactly one of them"),
        ({"block": "8y4"}, "block='8y4' cannot be read"),
        ({"lr": 0.0}, "lr=0.0 must be above 0"),
        ({"finetune_epochs": 0}, "finetune_epochs=0 must be above 0"),
        ({"dense_epochs": -1}, "dense_epochs=-1 must not be negative"),
        ({"batch": 1.5}, "batch=1.5 must be int"),
        ({"batch": True}, "batch=True must be int"),
        ({"seed": 2**32}, r"must be below 2\*\*32"),
        ({"device": "tpu"}, "device='tpu' must be one of auto, cpu, cuda"),
        ({"schedule": "step"}, "schedule='step' must be one of cosine, poly, linear, constant"),
        ({"method": "snip"}, "unknown method 'snip'; choose one of: smart"),
        ({"task": "mnist"}, "unknown task 'mnist'; choose one of: digits"),
        ({"model": "vgg"}, "model='vgg' is unknown to the task digits; its networks are: resnet8, resnet18"),
        ({"settings": {"strat": 1}}, "unknown setting 'strat' for smart; its settings are: start, end"),
        ({"settings": {"start": "hot"}}, "smart: start='hot' must be float"),
        ({"skip": "conv1"}, "skip='conv1' must be"),
        ({"epochs": 3}, "unknown setting 'epochs'; the settings of a run are: task,"),
    ],
)
def test_wrong_configurations(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SmartpruneError, match=message):
        configure({**SMALL_SETTINGS, **change})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as a configuration"),
        ("[1]", "holds a list"),
        ('{"sparsty": 1}', "unknown setting 'sparsty'"),
    ],
)
def test_wrong_configuration_files(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SmartpruneError, match=message):
        load_config(tmp_path / "config.json")


def test_resuming_a_finished_run_changes_nothing(done: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in done.iterdir()}
    assert resume(done) == Result.load(done)
    assert {path.name: path.stat().st_mtime_ns for path in done.iterdir()} == before


def test_a_page_that_a_kill_left_out_is_made_up_for(done: Path) -> None:
    before = (done / "report.html").read_bytes()
    (done / "report.html").unlink()
    resume(done)
    assert len((done / "report.html").read_bytes()) == len(before)


def test_the_folder_we_are_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(small_config(Path()))
    assert (tmp_path / "result.json").exists()
    assert not list(tmp_path.glob("*.part"))


def test_threads_are_decided_once(tmp_path: Path) -> None:
    """A resumed run must not depend on how many cores are free by then."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        config = resolve(small_config(tmp_path / "run", threads=0))
    finally:
        torch.set_num_threads(before)
    assert config.threads == 2
    assert resolve(config).threads == 2


def test_a_dense_file_that_went_away(done: Path, tmp_path: Path) -> None:
    """The run has a copy; what it is interrupted by may also move its folders."""
    file = tmp_path / "dense.safetensors"
    file.write_bytes((done / "dense.safetensors").read_bytes())
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(small_config(whole, dense=str(file)))
    count = 0

    def stop() -> bool:
        nonlocal count
        count += 1
        return count == 3

    with pytest.raises(SmartpruneError, match="stopped in search"):
        train(small_config(parted, dense=str(file)), stop=stop)
    file.unlink()
    resume(parted)
    assert_same_run(whole, parted)


def test_a_network_given_as_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "objects.py").write_text(
        "from smartprune.models import build\nNET = build('resnet8', num_classes=10, in_channels=1)\n"
        "from torch import nn\nNONE = nn.Flatten()\n"
    )
    monkeypatch.chdir(tmp_path)
    train(small_config(tmp_path / "run", model="objects:NET"))
    with pytest.raises(SmartpruneError, match="has no parameters"):
        check(small_config(tmp_path / "other", model="objects:NONE"))


def test_a_network_that_does_not_fit_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unfit.py").write_text(
        "from smartprune.models import build\ndef net():\n    return build('resnet8', num_classes=3, in_channels=1)\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SmartpruneError, match=r"model='unfit:net': its first step on digits failed \(IndexError: Target \d"):
        train(small_config(tmp_path / "run", model="unfit:net"))


def test_a_file_for_another_task(tmp_path: Path) -> None:
    """What the file does not say comes from the task that the command names."""
    (tmp_path / "f.json").write_text('{"sparsity": 0.8}')
    parser = argparse.ArgumentParser()
    add_train(parser.add_subparsers())
    args = parser.parse_args(["train", "scenes", "--config", str(tmp_path / "f.json")])
    given = requested_settings(args)
    assert configure(given).model == "segnet"
    assert given["sparsity"] == 0.8
    (tmp_path / "f.json").write_text('{"sparsity": 0.8, "sparsity": 0.9}')
    with pytest.raises(SmartpruneError, match="duplicate key"):
        requested_settings(args)
    (tmp_path / "f.json").write_text('{"lr": ' + "9" * 400 + "}")
    with pytest.raises(SmartpruneError, match="lr="):
        configure(requested_settings(args))
    (tmp_path / "f.json").write_text(json.dumps(asdict(small_config(tmp_path / "x"))))
    more = parser.parse_args(["train", "scenes", "--config", str(tmp_path / "f.json"), "--model", "segnet", "--block", "8x4"])
    assert configure(requested_settings(more)).model == "segnet"  # flags are in place of what the file says


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--set", "ramp=none"], {"ramp": "none"}),
        (["--set", "reach=none"], {"reach": None}),
        (["--set", "end=1e-4", "--set", "follow=false"], {"end": 1e-4, "follow": False}),
        (["--task", "imagefolder", "--task-set", "folder=2012", "--task-set", "size=64"], {"folder": "2012", "size": 64}),
    ],
)
def test_a_setting_is_read_as_its_type(words: list[str], settings: dict[str, object]) -> None:
    """``none`` is a word in one setting and nothing in another, and a folder may be called by a number."""
    parser = argparse.ArgumentParser()
    add_train(parser.add_subparsers())
    task, words = (words[1:2], words[2:]) if words[0] == "--task" else ([], words)
    found = configure(requested_settings(parser.parse_args(["train", *task, *words])))
    kept = {**found.task_settings, **found.settings}
    assert {name: kept[name] for name in settings} == settings


@pytest.mark.parametrize("words", [["--set", "end=1e-4"], ["--task-set", "width=8"], ["--data", "here"]])
def test_settings_of_a_file_that_are_none(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text('{"settings": 5, "task_settings": [1]}')
    parser = argparse.ArgumentParser()
    add_train(parser.add_subparsers())
    with pytest.raises(SmartpruneError, match=r"settings=(5|\[1\]) must be dict"):
        configure(requested_settings(parser.parse_args(["train", "--config", str(tmp_path / "f.json"), *words])))


class Screen:
    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


def tick(step: int, **changes: Any) -> Tick:
    values = Tick("search", step, 100, step, 200, 0.5, "accuracy", 0.985, 1e-3, 42, 3.0)
    return replace(values, **changes)


def test_progress_on_a_terminal_is_one_line_per_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setenv("COLUMNS", "120")
    progress = Progress(screen, live=True)  # type: ignore[arg-type]
    for step in range(1, 101):
        progress(tick(step))
    assert screen.text.count("\n") == 1
    assert "undecided 42" in screen.text
    assert "tau 1.0e-03" in screen.text
    assert "█" * 12 + "░" * 12 in screen.text
    assert "left" in screen.text


def test_progress_names_layers_that_lost_everything() -> None:
    screen = Screen()
    progress = Progress(screen)  # type: ignore[arg-type]
    progress(tick(99))
    assert "empty" not in screen.text
    progress(tick(100, empty_layers=3))
    assert "empty layers 3" in screen.text


def test_progress_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setenv("COLUMNS", "50")
    Progress(screen, live=True)(tick(50))  # type: ignore[arg-type]
    assert len(screen.text.removeprefix("\r\x1b[K")) < 50


def test_progress_elsewhere_is_a_few_plain_lines() -> None:
    screen = Screen()
    progress = Progress(screen)  # type: ignore[arg-type]
    for step in range(1, 101):
        progress(tick(step))
    assert screen.text.splitlines()[0].startswith("search      1/100  loss 0.5000  accuracy 98.5 %")
    assert screen.text.count("\n") == 2
    assert "\r" not in screen.text
    assert "\x1b" not in screen.text


def test_progress_without_unicode() -> None:
    screen = Screen()
    screen.encoding = "ascii"
    Progress(screen, live=True)(tick(50))  # type: ignore[arg-type]
    screen.text.encode("ascii")
