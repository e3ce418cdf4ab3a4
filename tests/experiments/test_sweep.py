"""A grid of runs: in order, nothing lost and nothing twice after a kill, failures told at the end."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from helpers.training_jobs import SMALL_FLAGS, SMALL_SETTINGS, assert_same_run, command, environment, small_config
from smartprune import SmartpruneError
from smartprune.cli import main
from smartprune.experiments.compare.identity import run_key
from smartprune.experiments.sweep import Sweep, noted
from smartprune.experiments.sweep.board import Board, Line, State
from smartprune.experiments.sweep.grid import Cell, Grid, dense_config, dense_name, lay_out, read_grids
from smartprune.experiments.sweep.job import OWNER, Job, jobs_at_once
from smartprune.experiments.sweep.job import environment as job_environment
from smartprune.experiments.sweep.recorded import recorded
from smartprune.training.config import make_task
from smartprune.training.run import prune
from smartprune.training.train import train

RECORDS = Path(__file__).parents[2] / "records"
OPTIONS = {name: value for name, value in SMALL_SETTINGS.items() if name != "sparsity"}
CELL = "digits-resnet8-{}-4x2-{}-s{}"


def grid(**changes: Any) -> Grid:
    told: dict[str, Any] = {"methods": ("smart", "magnitude"), "sparsities": (0.5,), "options": OPTIONS, "settings": {}}
    return Grid(**{**told, **changes})


def arguments(out: Path, *more: str) -> list[str]:
    without = SMALL_FLAGS[: SMALL_FLAGS.index("--sparsity")]
    return ["sweep", *without, "--methods", "smart,magnitude", "--sparsities", "0.5", "--out", str(out), *more]


def starts(out: Path, name: str) -> list[str]:
    """The commands that were started for a run."""
    log = (out / "logs" / f"{name}.log").read_text()
    return [line for line in log.splitlines() if line.startswith("$ ")]


def finish(out: Path, cell: Cell, pruned: float = 1.0, **config: Any) -> None:
    """A run folder as a finished run leaves it; a machine may have decided some of its configuration."""
    folder = cell.folder(out)
    folder.mkdir(parents=True)
    result = {"measure": "accuracy", "dense": 1.0, "pruned": pruned, "verified": True, "seconds": 100.0, "stage_seconds": {}}
    result |= {"folder": "", "task": "digits", "model": "resnet8", "method": cell.config.method, "versions": {"torch": "2"}}
    (folder / "config.json").write_text(json.dumps(asdict(cell.config) | config))
    (folder / "result.json").write_text(json.dumps(result))


def record(folder: Path, runs: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["compare", str(runs), "--record", str(folder), "--note", "made up"]) == 0
    capsys.readouterr()
    return folder


def wait_for(there: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def test_cells_come_in_order() -> None:
    cells = lay_out([grid(methods=("magnitude", "smart"), sparsities=(0.75, 0.5), seeds=(1, 0))])
    assert [cell.name for cell in cells] == [
        CELL.format(m, s, seed) for m in ("magnitude", "smart") for s in (0.75, 0.5) for seed in (1, 0)
    ]
    assert len({cell.dense for cell in cells}) == 2


def test_settings_belong_to_a_method_and_to_the_name() -> None:
    (cell, other) = lay_out([grid(settings={"smart": {"ramp": "cubic", "end": 1e-4}})])
    assert cell.name == "digits-resnet8-smart-ramp=cubic-end=0.0001-4x2-0.5-s0"
    assert cell.config.settings["ramp"] == "cubic"
    assert other.name == CELL.format("magnitude", 0.5, 0)
    with pytest.raises(SmartpruneError, match="settings for pdp, which is not among the methods"):
        lay_out([grid(settings={"pdp": {}})])
    with pytest.raises(SmartpruneError, match="comes twice with different options; give each of the two grids a label"):
        lay_out([grid(), grid(options={**OPTIONS, "search_epochs": 3})])
    assert len(lay_out([grid(), grid()])) == 2


def test_labels_keep_grids_with_other_options_apart() -> None:
    longer = {**OPTIONS, "search_epochs": 3, "block": "8x4"}
    cells = lay_out([grid(), grid(label="long-3_a", options=longer), grid(label="b", settings={"smart": {"end": 0.01}})])
    assert [cell.name for cell in cells[:3]] == [
        "digits-resnet8-smart-4x2-0.5-s0", "digits-resnet8-magnitude-4x2-0.5-s0", "digits-resnet8-long-3_a-smart-8x4-0.5-s0"
    ]  # fmt: skip
    assert len({cell.name for cell in cells}) == 6
    assert len({cell.dense for cell in cells}) == 1
    wrong: list[Any] = ["", "a b", "a/b", "..", "ü", 3, ["a"]]
    for label in wrong:
        with pytest.raises(SmartpruneError, match="should be a word of letters, digits, - and _"):
            grid(label=label)


def test_one_dense_model_for_all_seeds(tmp_path: Path) -> None:
    own, shared = lay_out([grid(seeds=(0, 1, 7))]), lay_out([grid(seeds=(0, 1, 7), dense_seed=7)])
    assert len({cell.dense for cell in own}) == 3
    assert {cell.dense for cell in shared} == {own[2].dense}
    assert [cell.config for cell in shared] == [cell.config for cell in own]
    assert {cell.dense_config(tmp_path).seed for cell in shared} == {7}
    assert dense_name(shared[0].dense_config(tmp_path)) == own[2].dense
    with pytest.raises(SmartpruneError, match="comes twice"):
        lay_out([grid(dense_seed=0), grid(dense_seed=1)])
    wrong: list[Any] = [-1, 2**32, 1.0, True, "0"]
    for seed in wrong:
        with pytest.raises(SmartpruneError, match=r"dense_seed .* should be an integer from 0"):
            grid(dense_seed=seed)
    with pytest.raises(SmartpruneError, match=r"dense_seed 0 and dense 'd\.safetensors': give one of the two"):
        grid(dense_seed=0, options={**OPTIONS, "dense": "d.safetensors"})
    finish(tmp_path, own[1], dense=f"/elsewhere/{own[1].dense}.safetensors")
    Sweep(tmp_path, own)
    with pytest.raises(SmartpruneError, match="began with the dense model digits-resnet8-s1, and digits-resnet8-s7 is asked for"):
        Sweep(tmp_path, shared)


def test_dense_models_are_shared_by_what_they_depend_on(tmp_path: Path) -> None:
    base = small_config(tmp_path)
    after: list[dict[str, Any]] = [{"method": "magnitude"}, {"sparsity": 0.9}, {"search_epochs": 9}, {"block": "8x4"}]
    after += [{"augment": 1.0}, {"augment": 1.0, "augment_over": "pruning"}, {"augment_over": "all"}]
    before: list[dict[str, Any]] = [{"seed": 1}, {"dense_epochs": 3}, {"lr": 0.2}, {"task_settings": {"width": 5}}]
    before += [{"augment": 1.0, "augment_over": "all"}]
    assert {dense_name(small_config(tmp_path, **change)) for change in after} == {dense_name(base)}
    assert len({dense_name(small_config(tmp_path, **change)) for change in [{}, *before]}) == 6
    assert dense_name(dense_config(base, tmp_path / "d")) == dense_name(base)


@pytest.mark.parametrize("over", ["stage", "pruning"])
@pytest.mark.parametrize("epochs", [0.5, 1.0, 2.5])
def test_a_dense_model_that_is_warmed_up(tmp_path: Path, over: str, epochs: float) -> None:
    base = small_config(tmp_path, warmup_epochs=epochs, schedule_over=over, dense_epochs=3, search_epochs=3, finetune_epochs=3)
    made = dense_config(base, tmp_path / "d")  # what comes after the dense stage is shorter there, but not than its warm-up
    assert (made.warmup_epochs, made.dense_epochs, dense_name(made)) == (epochs, 3, dense_name(base))


def test_a_dense_model_that_is_given(tmp_path: Path) -> None:
    cells = lay_out([grid(options={**OPTIONS, "dense": "/models/s{seed}.safetensors"}, seeds=(0, 3))])
    assert [cell.config.dense for cell in cells[:2]] == ["/models/s0.safetensors", "/models/s3.safetensors"]
    assert all(cell.dense is None for cell in cells)


def test_grid_files(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    entry = {"methods": ["smart"], "seeds": [0, 1], "options": OPTIONS, "settings": {"smart": {"start": 2.0}}}
    path.write_text(json.dumps([entry, {"methods": ["magnitude"], "sparsities": [0.5], "options": {**OPTIONS, "sparsity": 0}}]))
    with pytest.raises(SmartpruneError, match=r"grid.json: \[1\]: options has sparsity"):
        read_grids(path)
    path.write_text(json.dumps([entry, {"methods": ["magnitude"], "sparsities": [0.5], "options": OPTIONS}]))
    names = [cell.name for cell in lay_out([g.under({"batch": 64}, {"smart": {"end": 0.01}}) for g in read_grids(path)])]
    assert len(names) == 3
    assert "start=2-end=0.01" in names[0]
    (found,) = [g for g in read_grids(path) if g.methods == ("magnitude",)]
    assert found.under({"task_settings": {"folder": "/data"}}, {}).options["task_settings"] == {"width": 4, "folder": "/data"}
    for text, message in (
        ("[3]", "is a int"),
        ("[]", "holds no grid"),
        ('{"method": []}', "unknown key 'method'"),
        ('{"methods": [["smart"]]}', r"methods has \['smart'\]"),
        ('{"seeds": 3}', "must be a list"),
        ('[{"label": "a b"}]', r"grid.json: \[0\]: label 'a b' should be a word"),
        ('{"dense_seed": "0"}', "grid.json: dense_seed '0' should be an integer"),
    ):
        path.write_text(text)
        with pytest.raises(SmartpruneError, match=message):
            read_grids(path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--jobs", "0"], "--jobs 0 should be at least 1"),
        (["--minutes", "0"], "--minutes 0 should be above 0"),
        (["--seeds", "a"], "--seeds a: write a list with commas"),
        (["--methods", "snip"], "unknown method 'snip'"),
        (["--set", "start=2"], "write METHOD.NAME=VALUE, such as smart.start=2"),
        (["--set", "smart.strat=2"], "unknown setting 'strat' for smart"),
        (["--set", "pdp.end=2"], "settings for pdp"),
        (["--sparsities", "93"], "sparsity=93"),
        (["--grid", "grid.json"], "--grid and --methods"),
        (["--macs", "0.5"], "--sparsities and --macs"),
        (["--sparsity", "0.5"], "unrecognized arguments: --sparsity"),
        (["--label", "a b"], "label 'a b' should be a word"),
        (["--dense-seed", "-1"], "dense_seed -1 should be an integer"),
        (["--dense-seed", "0", "--dense", "d.safetensors"], "give one of the two"),
        (["--recorded", "no/such/folder"], "no/such/folder is not a folder"),
        (["--recorded", str(Path(__file__).parent)], "holds no record"),
    ],
)
def test_bad_arguments(more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments(tmp_path / "out", *more))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    (cell, _) = lay_out([grid()])
    folder = cell.folder(tmp_path)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(asdict(small_config(folder, lr=0.3))))
    with pytest.raises(SmartpruneError, match=r"was made with lr=0\.3, and 0\.1 is asked for now"):
        Sweep(tmp_path, [cell])


def test_grid_files_have_their_own_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in (["--label", "a"], ["--dense-seed", "0"]):
        with pytest.raises(SystemExit):
            main(["sweep", "--grid", "grid.json", "--out", str(tmp_path / "out"), *flag])
        assert f"--grid and {flag[0]}: the file has its own" in capsys.readouterr().err


def test_what_is_recorded_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record knows a run by what it is, not by its folder, its label, or where and how fast it was made."""
    options = {**OPTIONS, "amp": "auto"}
    (cell,) = lay_out([grid(methods=("smart",), options=options)])
    finish(tmp_path / "runs", cell, amp="bf16", device="cuda", threads=7, dense="/elsewhere/d.safetensors")
    held = [record(tmp_path / "records" / "one", tmp_path / "runs", capsys)]

    def known(cells: list[Cell]) -> bool:
        (name,) = [other.name for other in cells]
        return recorded(held, cells) == {name}

    def one(seed: int = 0, sparsity: float | None = 0.5, **changes: Any) -> list[Cell]:
        told: dict[str, Any] = {"methods": ("smart",), "options": options, **changes}
        return lay_out([grid(seeds=(seed,), sparsities=(sparsity,), **told)])

    same: list[dict[str, Any]] = [{"amp": "bf16"}, {"device": "cpu"}, {"checkpoint_seconds": 1}, {"graph": "off"}]
    for change in same:
        assert known(one(label="other", options={**options, **change})), change
    other: list[dict[str, Any]] = [{"amp": "off"}, {"lr": 0.2}, {"search_epochs": 3}, {"dense_epochs": 3}, {"block": "8x4"}]
    other += [{"floor": 0.01}, {"skip": ["head"]}, {"ema": 0.9}, {"task_settings": {"width": 5}}]
    for change in other:
        assert not known(one(options={**options, **change})), change
    assert not known(one(seed=1))
    assert not known(one(sparsity=0.6))
    assert not known(one(sparsity=None, options={**options, "macs": 0.5}))
    assert not known(one(methods=("gradual",)))
    assert not known(one(settings={"smart": {"ramp": "cubic"}}))
    assert known(one(settings={"smart": {"ramp": "none"}}))
    path = held[0] / "result.json"
    told = json.loads(path.read_text())
    assert told["rows"][0]["method"] == "smart"
    told["rows"][0]["settings"]["ramp"] = "cubic"  # as if that was the default when the record was made
    path.write_text(json.dumps(told))
    assert not known(one())
    assert known(one(settings={"smart": {"ramp": "cubic"}}))


def test_the_list_and_a_sweep_with_nothing_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, runs = tmp_path / "out", tmp_path / "runs"
    cells = lay_out([grid(methods=("smart", "magnitude", "gradual"), seeds=(0, 1), dense_seed=0)])
    names = [cell.name for cell in cells]
    finish(out, cells[0])
    for cell in cells[:2]:
        finish(runs, cell)
    record(tmp_path / "records" / "one", runs, capsys)
    for cell in cells[2:5]:
        finish(runs, cell)
    extra = tmp_path / "records" / "two"
    extra.mkdir()
    row: dict[str, Any] = {
        "model": "m",
        "data": "d",
        "method": "topk",
        "block": "-",
        "sparsity": "-",
        "protocol": "-",
        "metric": "ms",
    }
    row |= {"values": [1.0], "mean": 1.0, "std": None, "n": 1}
    (extra / "result.json").write_text(json.dumps({"rows": [row]}))  # a benchmark, which has no seeds
    words = ["--methods", "smart,magnitude,gradual", "--seeds", "0,1", "--dense-seed", "0"]
    words = [*arguments(out, *words), "--recorded", str(tmp_path / "records")]
    before = sorted(out.rglob("*"))
    assert main([*words, "--list"]) == 0
    states = ["done", "recorded", *["missing"] * 4]
    lines = [f"{state:<8}  {name}" for state, name in zip(states, names, strict=True)]
    lines += ["", "dense models of the missing cells", f"missing   {cells[0].dense}  for 4 cells", ""]
    assert capsys.readouterr().out.splitlines() == [*lines, "6 cells: 1 done, 1 recorded, 4 missing"]
    assert sorted(out.rglob("*")) == before
    (out / "dense").mkdir()
    (out / "dense" / f"{cells[0].dense}.safetensors").touch()
    assert main([*words, "--recorded", str(record(tmp_path / "more", runs, capsys)), "--list"]) == 0
    told = capsys.readouterr().out
    assert f"done      {cells[0].dense}  for 1 cell\n" in told
    assert told.endswith("6 cells: 1 done, 4 recorded, 1 missing\n")
    finish(runs, cells[5])
    assert main([*words, "--recorded", str(record(tmp_path / "more", runs, capsys))]) == 0
    assert capsys.readouterr().err == "6 of 6 cells are recorded already\n"
    assert not (out / "logs").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": [0]}, "rows[0]: seeds is a list of 1; it must be a list of 2 integers, one for each of the values"),
        ({"seeds": ["0", "1"]}, "rows[0]: seeds is a list of 2; it must be a list of at most"),
        ({"settings": None}, "rows[0]: settings is None; it must be a dictionary"),
        ({"protocol": 3}, "rows[0]: protocol is 3; it must be a string"),
        ({"sparsity": "0.5"}, "rows[0]: sparsity is '0.5'; it must be a number"),
        ({"sparsity": None, "macs": None}, "rows[0]: sparsity is None; it must be a number"),
        ({"mean": 0.3}, "rows[0]: mean is 0.3"),
        (None, "not readable as JSON"),
    ],
)
def test_a_damaged_record(change: dict[str, Any] | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for cell in lay_out([grid(methods=("smart",), seeds=(0, 1))]):
        finish(tmp_path / "runs", cell)
    path = record(tmp_path / "one", tmp_path / "runs", capsys) / "result.json"
    told = json.loads(path.read_text())
    told["rows"][0] |= change or {}
    path.write_text(json.dumps(told)[: None if change else -9])
    with pytest.raises(SystemExit) as stop:
        main(arguments(tmp_path / "out", "--recorded", str(path.parent)))
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert f"{path}: " in said
    assert message in said


@pytest.fixture(scope="module")
def paper() -> list[Cell]:
    return lay_out(read_grids(RECORDS / "paper.json"))


def test_the_grid_of_the_paper(paper: list[Cell]) -> None:
    count = Counter(
        (c.config.task, c.config.model, c.config.block, c.config.search_epochs, c.config.finetune_epochs) for c in paper
    )
    assert count == {
        ("cifar10", "resnet18", "16x8", 12, 48): 7 * 3 * 3 + 3 + 19 * 2,
        ("cifar10", "resnet18", "16x8", 40, 160): 4,
        ("cifar10", "resnet18", "8x8", 12, 48): 4,
        ("cifar10", "resnet18", "16x16", 12, 48): 4,
        ("cifar10", "resnet18", "16x8", 6, 54): 2 + 3 * 2,
        ("cifar10", "resnet18", "16x8", 24, 36): 2,
        ("cifar10", "densenet", "16x8", 12, 48): 4 * 2 * 2 + 2,
        ("cifar10", "mobilenetv2", "16x8", 12, 48): 4 * 2 * 2,
        ("cifar10", "googlenet", "16x8", 12, 48): 4,
        ("voc07sub", "yolov5m", "16x8", 30, 100): 6,
        ("bccd", "yolov5m", "16x8", 100, 200): 6,
        ("camvid", "bisenetv2", "16x8", 15, 35): 6,
        ("imagefolder", "resnet50", "16x8", 6, 18): 6,
    }
    methods = ("smart", "gradual", "acdc", "pdp", "awg", "pas", "magnitude")
    assert [(c.config.method, c.config.sparsity, c.config.seed) for c in paper[:63]] == list(
        product(methods, (0.97, 0.95, 0.93), (0, 1, 2))
    )
    assert len({cell.name for cell in paper}) == len({run_key(asdict(cell.config)) for cell in paper}) == len(paper)
    assert len({cell.dense for cell in paper}) == 8  # one for each network on each task
    dense = {(cell.config.model, cell.config.dense_epochs) for cell in paper if cell.config.task == "cifar10"}
    assert dense == {("resnet18", 200), ("densenet", 60), ("googlenet", 60), ("mobilenetv2", 60)}


def test_every_cell_of_the_paper_can_be_attached(paper: list[Cell]) -> None:
    """Settings that a method refuses, and budgets that cannot be met, would come up after the dense stage only."""
    tried: set[str] = set()
    for config in (cell.config for cell in paper if cell.config.task == "cifar10" and cell.config.seed == 0):
        same = json.dumps([config.model, config.block, config.sparsity, config.method, config.settings])
        if same not in tried:
            task = make_task(config.task, config.task_settings)
            assert prune(task.model(config.model), config, task, 390 * config.search_epochs).phase == "search"
            tried.add(same)
    assert len(tried) == 67


def test_the_record_of_cifar10_counts_for_the_paper(paper: list[Cell]) -> None:
    name = "cifar10-resnet18-short-gradual-16x8-0.97-s{}"
    known = recorded([RECORDS], paper)
    assert {name.format(0), name.format(1)} <= known
    assert known < {cell.name for cell in paper}
    first = replace(read_grids(RECORDS / "paper.json")[0], methods=("gradual",), sparsities=(0.97,), seeds=(0, 1))
    elsewhere = lay_out([first.under({"task_settings": {"folder": "/data"}}, {})])
    assert len(recorded([RECORDS / "cifar10-resnet18-short"], elsewhere)) == 2


def test_a_dense_model_that_fails_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = lay_out([grid()])
    work = tmp_path / "out" / "dense" / f".{cells[0].dense}"
    work.mkdir(parents=True)
    (work / "config.json").write_text(json.dumps(asdict(cells[0].dense_config(work))))
    (work / "checkpoint.pt").write_bytes(b"nonsense")
    assert main(arguments(tmp_path / "out", "--jobs", "1")) == 1
    said = capsys.readouterr().err
    assert f"{cells[0].dense} failed with exit code 1" in said
    assert all(f"{cell.name} failed with exit code 1" in said for cell in cells)
    assert "0 runs done, 2 failed; the same command goes on from here" in said


@pytest.mark.parametrize("going", [False, True])
def test_what_made_a_dense_model_goes_with_the_killed_sweep(going: bool, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    cells = lay_out([grid()])
    for cell in cells:
        finish(tmp_path, cell)
    name = str(cells[0].dense)
    work, log = tmp_path / "dense" / f".{name}", tmp_path / "logs" / f"{name}.log"
    work.mkdir(parents=True)
    (work / "dense.safetensors").write_bytes(b"whole")
    log.parent.mkdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    with log.open("wb") as file:  # whose lock goes with the process
        fcntl.flock(file, fcntl.LOCK_EX)
        left = subprocess.Popen(["sleep", "100" if going else "0"], stdout=file)
        file.write(f"{OWNER} {left.pid} {gone.pid}\n".encode())
    if not going:
        left.wait()
    threading.Thread(target=left.wait, daemon=True).start()  # as the system does for a process that has no parent any more
    sweep = Sweep(tmp_path, cells)
    assert not sweep.run(Board(io.StringIO()), lambda: False).missing
    assert left.wait(10) == (-signal.SIGTERM if going else 0)
    assert (sweep.dense_path(name).read_bytes(), work.exists(), sweep.took["dense"]) == (b"whole", False, [])


def test_no_time_for_another_run(tmp_path: Path) -> None:
    """One run is done and took longer than there is time: the next one is not started."""
    first, second = lay_out([grid()])
    finish(tmp_path, first)
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / f"{first.dense}.safetensors").touch()
    sweep = Sweep(tmp_path, [first, second], minutes=1)
    outcome = sweep.run(Board(io.StringIO()), lambda: False)
    assert (outcome.done, outcome.missing, outcome.why) == ([first], [second], "time")
    assert not (tmp_path / "logs" / f"{second.name}.log").exists()
    second.folder(tmp_path).mkdir()
    (second.folder(tmp_path) / "metrics.jsonl").write_text('{"seconds": 90}\n')
    assert sweep._spent("run", second) == 90


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "smart.ramp=zzz"], "zzz"),
        (["--floor", "0.9"], "floor=0.9 needs"),
        (["--model", "nosuch:x"], "nosuch"),
        (["--dense", "none.safetensors"], "none.safetensors cannot be read as a .safetensors file (No such file or directory)"),
    ],
)
def test_what_a_run_would_fail_of_is_told_before_the_dense_stage(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments(tmp_path / "out", *more))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_cells_that_differ_in_their_seeds_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells, seen = lay_out([grid(methods=("smart", "magnitude", "gradual"), seeds=(0, 1, 2))]), []
    for cell in cells[:3]:
        finish(tmp_path, cell)
    monkeypatch.setattr("smartprune.experiments.sweep.check", lambda config: seen.append(config.method))
    Sweep(tmp_path, cells).check()
    assert seen == ["magnitude", "gradual"]


class Deaf(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("live", [False, True])
def test_nobody_looks_at_the_board(live: bool) -> None:
    board = Board(Deaf(), live=live)
    board.show(State(1, 2, 0, None, []))
    board.say("a")
    board.ended("b")
    board.close()


def test_a_result_that_cannot_be_read_stops_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither one that was there before, nor one that a run of the sweep leaves; each is told with its cure."""
    cells = lay_out([grid()])
    for cell in cells:
        finish(tmp_path, cell)
    path = cells[0].folder(tmp_path) / "result.json"
    path.write_text('{"folder": 3}')
    assert main(arguments(tmp_path)) == 1
    said = capsys.readouterr()
    assert f"{path}: " in said.err
    assert "delete it, and the run is finished once more" in said.err
    assert "1 runs done, 1 failed" in said.err

    class Ended:
        kind, folder, adopted, seconds, name = "run", cells[0].folder(tmp_path), False, 1.0, cells[0].name

        def poll(self) -> int:
            return 0

    sweep, shown = Sweep(tmp_path, cells), io.StringIO()
    sweep.running[cells[0].name] = Ended()  # type: ignore[assignment]
    sweep._reap(Board(shown))
    assert list(sweep.failed) == [cells[0].name]
    assert "FAILED: its result.json cannot be read" in shown.getvalue()


def test_the_live_block() -> None:
    stream = io.StringIO()
    board = Board(stream, live=True)
    board.show(State(1, 4, 1, 75.0, [Line("smart-0.9-s0", "search 3/9", 5.0)]))
    board.say("done")
    board.close()
    text = stream.getvalue()
    assert "sweep  1/4 done, 1 running, 1 failed, about 1:15 left\n  smart-0.9-s0   0:05  search 3/9\n" in text
    assert text.endswith("\x1b[2A\x1b[Jdone\n")


def test_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jobs_at_once(["cuda"]) == 1
    assert jobs_at_once(["cpu"]) >= 1
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert job_environment(1000)["OMP_NUM_THREADS"] == "1"


def test_processes_find_the_package_and_not_its_modules() -> None:
    """With the package's own folder in the path, its onnx.py stood before the library of that name."""
    first = Path(job_environment(1)["PYTHONPATH"].split(os.pathsep)[0])
    assert (first / "smartprune" / "__init__.py").is_file()
    assert not (first / "onnx.py").exists()


def test_killed_and_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sweep is killed, and one of its two runs with it: the other is waited for, the dead one resumed."""
    out, alone = tmp_path / "out", tmp_path / "alone"
    train(small_config(alone, search_epochs=60))
    words = arguments(out, "--jobs", "2", "--search-epochs", "60", "--checkpoint-seconds", "0.2")
    words += ["--dense", str(alone / "dense.safetensors")]
    smart, magnitude = (CELL.format(method, 0.5, 0) for method in ("smart", "magnitude"))
    pipe = subprocess.PIPE
    sweep = subprocess.Popen(command(*words), env=environment(), text=True, stdout=pipe, stderr=pipe)
    wait_for(lambda: all((out / name / "checkpoint.pt").exists() for name in (smart, magnitude)), sweep)
    sweep.kill()
    sweep.communicate()
    log = (out / "logs" / f"{smart}.log").read_text()
    owner = next(line for line in log.splitlines() if line.startswith("# process"))
    os.kill(int(owner.split()[-2]), signal.SIGKILL)
    assert not (out / smart / "result.json").exists()
    assert main(words) == 0
    assert len(starts(out, smart)) == 2
    assert "--resume" in starts(out, smart)[1]
    assert len(starts(out, magnitude)) == 1
    assert capsys.readouterr().out.startswith("digits(width=4), resnet8, blocks of 4x2")
    assert noted(out)["commands"] == [shlex.join(["smartprune", *words])]
    kept = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    (alone / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in kept if row["stage"] != "dense"))
    assert_same_run(out / smart, alone)
    assert main(words) == 0
    assert len(starts(out, smart)) == 2
    assert "2 of 2 runs are done already" in capsys.readouterr().err


def test_a_failed_run_stops_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The dense model is that of a run of its own, here of another seed; a damaged run is told at the end, with its log.
    What is recorded is not run."""
    out = tmp_path / "out"
    train(small_config(tmp_path / "plain", search_epochs=1))
    methods = ("smart", "magnitude", "gradual")
    smart, magnitude, gradual = lay_out([grid(methods=methods, seeds=(1,), options={**OPTIONS, "search_epochs": 1}, dense_seed=0)])
    finish(tmp_path / "runs", gradual)
    held = record(tmp_path / "held", tmp_path / "runs", capsys)
    folder = smart.folder(out)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(asdict(smart.config) | {"out": str(folder)}))
    (folder / "checkpoint.pt").write_bytes(b"nonsense")
    more = ["--methods", ",".join(methods), "--seeds", "1", "--dense-seed", "0", "--recorded", str(held)]
    assert main(arguments(out, "--search-epochs", "1", "--jobs", "1", *more)) == 1
    captured = capsys.readouterr()
    assert "1 of 3 cells are recorded already" in captured.err
    assert f"{smart.name} failed with exit code 1; the end of {out / 'logs' / smart.name}.log:" in captured.err
    assert "checkpoint.pt is damaged" in captured.err
    assert "1 runs done, 1 failed; the same command goes on from here" in captured.err
    assert "magnitude" in captured.out
    dense = out / "dense" / f"{magnitude.dense}.safetensors"
    assert dense.read_bytes() == (tmp_path / "plain" / "dense.safetensors").read_bytes()
    assert list((out / "dense").iterdir()) == [dense]
    told = json.loads((magnitude.folder(out) / "config.json").read_text())
    assert (told["seed"], told["dense"]) == (1, str(dense))
    assert not gradual.folder(out).exists()


def test_stopped_at_the_limit_with_a_checkpoint(tmp_path: Path) -> None:
    """An orphan of a sweep that is gone is stopped too."""
    (cell,) = lay_out([grid(methods=("magnitude",), options={**OPTIONS, "search_epochs": 5000, "checkpoint_seconds": 0.2})])
    out, name = tmp_path, cell.name
    (out / "logs").mkdir()
    (out / "dense").mkdir()
    (out / "logs" / "c.json").write_text(json.dumps(asdict(cell.config) | {"out": ""}))
    words = ["train", "--config", str(out / "logs" / "c.json"), "--out", str(out / name)]
    job = Job(name, "run", out / name, out / "logs" / f"{name}.log", words, 1)
    log = out / "logs" / f"{name}.log"
    text = log.read_text()
    log.write_text(text.replace(f" {os.getpid()}\n", " 999999999\n"))  # as if the sweep that started it was gone
    assert job.process is not None
    while not (out / name / "checkpoint.pt").exists():
        assert job.poll() is None, job.last_lines()
        time.sleep(0.05)
    sweep = Sweep(out, [cell], jobs=1, minutes=0.01)
    (out / "dense" / f"{cell.dense}.safetensors").touch()
    outcome = sweep.run(Board(io.StringIO()), lambda: False)
    assert (outcome.why, outcome.missing, outcome.failed) == ("time", [cell], [])
    assert job.process.wait(30) == 1
    assert "stopped in" in job.last_lines()[-1]
    assert (out / name / "checkpoint.pt").exists()
    assert not job.adopted


def test_models_with_a_slash_in_their_name() -> None:
    given = {**OPTIONS, "model": "some/where:net"}
    for cell in lay_out([grid(options=given)]):
        assert "/" not in cell.name
        assert cell.dense is not None
        assert "/" not in cell.dense


@pytest.mark.parametrize("kind", ["macs", "cycles"])
def test_two_budgets(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """None of the two is dropped without a word."""
    with pytest.raises(SystemExit) as stop:
        main(arguments(tmp_path / "a", f"--{kind}", "0.5"))
    assert stop.value.code == 2
    assert f"--sparsities and --{kind}" in capsys.readouterr().err
    file = tmp_path / "grid.json"
    file.write_text(json.dumps({"sparsities": [0.9], "options": {kind: 0.5}}))
    with pytest.raises(SystemExit) as stop:
        main(["sweep", "--grid", str(file), "--out", str(tmp_path / "b")])
    assert stop.value.code == 2
    assert f"sparsities and {kind}" in capsys.readouterr().err
    file.write_text(json.dumps({"sparsities": [0.9]}))
    with pytest.raises(SystemExit) as stop:
        main(["sweep", "--grid", str(file), f"--{kind}", "0.5", "--out", str(tmp_path / "b")])
    assert stop.value.code == 2


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The cells of a sweep by name."""
    assert main(["sweep", *words, "--list"]) == 0
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    return [line.split()[1] for line in lines]


def test_lists_win_over_a_configuration_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As flags do in smartprune train; what no list says is the file's: its method, settings, budget and seed."""
    file, out = tmp_path / "c.json", ["--out", str(tmp_path / "out")]
    file.write_text(json.dumps(asdict(small_config(tmp_path / "run", seed=3, settings={"ramp": "cubic"}))))
    given = ["--config", str(file), *out]
    assert listed(capsys, *given) == ["digits-resnet8-smart-ramp=cubic-4x2-0.5-s3"]
    assert listed(capsys, *given, "--seeds", "1") == ["digits-resnet8-smart-ramp=cubic-4x2-0.5-s1"]
    assert listed(capsys, *given, "--set", "smart.ramp=none") == ["digits-resnet8-smart-ramp=none-4x2-0.5-s3"]
    assert listed(capsys, *given, "--methods", "gradual") == ["digits-resnet8-gradual-4x2-0.5-s3"]
    assert listed(capsys, *given, "--macs", "0.4") == ["digits-resnet8-smart-ramp=cubic-4x2-macs0.4-s3"]
    file.write_text(json.dumps({"macs": 0.5, "block": "4x2"}))
    assert listed(capsys, *given) == ["digits-resnet8-smart-4x2-macs0.5-s0"]
    assert listed(capsys, *given, "--sparsities", "0.7") == ["digits-resnet8-smart-4x2-0.7-s0"]


@pytest.mark.parametrize("flag", ["--methods", "--sparsities", "--seeds"])
def test_an_empty_list_is_not_one_that_was_left_out(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["sweep", flag, "", "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert f"{flag} '': write a list" in capsys.readouterr().err
