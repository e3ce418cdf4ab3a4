"""Training with several processes: the result of one process, agreement of all ranks, errors and signals.

One pair of processes does most of the work (helpers/run_two_ranks.py), and the tests read its results.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from helpers.killed_ranks import Job, modified
from helpers.latency_tables import table_of
from helpers.run_two_ranks import ALL_OPTIONS, job_config, train_until_stopped
from helpers.task_folders import SETTINGS, folder
from helpers.training_jobs import EXACT_FILES, assert_same_run, environment, metric_rows, small_config
from smartprune import SmartpruneError
from smartprune.artifacts.receipt import Receipt
from smartprune.core.layers import Layer
from smartprune.runtime import latency
from smartprune.runtime.latency_table import LatencyTable
from smartprune.tasks import TASKS
from smartprune.training import ranks
from smartprune.training.config import configure, make_task
from smartprune.training.folder import write_checkpoint
from smartprune.training.result import Result
from smartprune.training.run import attach_pruner
from smartprune.training.train import resume, train

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
TESTS = Path(__file__).parents[1]
__all__ = ["folder"]  # a fixture


def finish(processes: list[subprocess.Popen[str]], seconds: float) -> list[str]:
    """The output of all processes, which are killed after the time limit."""
    until = time.monotonic() + seconds
    try:
        return [process.communicate(timeout=max(0.1, until - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def start_process(*words: str, **more: str) -> subprocess.Popen[str]:
    env = environment() | {"PYTHONPATH": os.pathsep.join([str(TESTS), environment()["PYTHONPATH"]])} | more
    return subprocess.Popen(
        [sys.executable, *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def start_two_ranks(*words: str, **more: str) -> list[subprocess.Popen[str]]:
    """Starts two ranks as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **more}
    return [start_process(*words, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in (0, 1)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two processes, and the same runs of one process."""
    out = tmp_path_factory.mktemp("two")
    for parallel in ("ddp", "fsdp"):
        train_until_stopped(job_config(out / f"one-to-{parallel}", parallel=parallel, **ALL_OPTIONS), 15)  # in the search
    processes = [start_process(str(TESTS / "helpers" / "run_two_ranks.py"), str(rank), str(out)) for rank in (0, 1)]
    train(job_config(out / "one"))
    train(job_config(out / "one-all", **ALL_OPTIONS))
    output = finish(processes, 200)
    assert [process.returncode for process in processes] == [0, 0], output
    return out


def assert_close(a: Path, b: Path) -> None:
    """Two runs are the same up to rounding, and removed the very same blocks."""
    for name in ("dense", "model"):
        one, two = (load_file(path / f"{name}.safetensors") for path in (a, b))
        for key, value in one.items():
            torch.testing.assert_close(two[key], value, rtol=2e-3, atol=1e-4)
    assert Receipt.load(a / "receipt.json").mask_hash == Receipt.load(b / "receipt.json").mask_hash
    for x, y in zip(metric_rows(a), metric_rows(b), strict=True):
        assert y["loss"] == pytest.approx(x["loss"], rel=1e-3)
        assert (y["stage"], y["step"]) == (x["stage"], x["step"])


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_match_one_process(parallel: str, done: Path) -> None:
    assert_close(done / "one", done / parallel)
    assert_close(done / "one-all", done / f"{parallel}-all")
    one, two = Result.load(done / "one"), Result.load(done / parallel)
    assert one.pruned > 0.3  # more than the 0.1 of guessing
    assert two.pruned == pytest.approx(one.pruned, abs=0.01)
    assert (one.versions["processes"], two.versions["processes"]) == ("1", "2")
    assert Receipt.load(done / parallel / "receipt.json").met


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_resume_after_a_stop_on_any_rank_is_bit_exact(parallel: str, done: Path) -> None:
    assert_same_run(done / f"{parallel}-all", done / f"{parallel}-resumed")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_run_resumes_with_another_number_of_processes(parallel: str, done: Path) -> None:
    assert_close(done / "one-all", done / f"one-to-{parallel}")
    assert resume(done / f"{parallel}-to-one").verified
    assert_close(done / "one-all", done / f"{parallel}-to-one")


def test_rank_0_shows_progress_and_all_ranks_report_errors(done: Path) -> None:
    first, second = (json.loads((done / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["ticks"] > 0
    assert second["ticks"] == 0
    held, odd, graph, large, sync = first["errors"]
    assert "already holds a run" in held
    assert "batch=127 cannot be split equally among 2 processes; choose a multiple of 2" in odd
    assert "graph='on'" in graph
    assert "batch=4096 is larger than the training data" in large
    assert "sync_bn='on' needs GPUs" in sync
    assert "rank 1" in second["errors"][0]
    assert not (done / "x").exists()


def test_methods_that_need_whole_weights_reject_fsdp(done: Path) -> None:
    outcomes = json.loads((done / "rank0.json").read_text())["methods"]
    assert outcomes["gradual"] == "no error"
    assert Receipt.load(done / "gradual" / "receipt.json").met
    for method in ("awg", "pdp"):
        assert f"parallel='fsdp': {method} needs whole weights in every step; use --parallel ddp" in outcomes[method]
        assert not (done / method).exists()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_batch_norm_statistics_of_rank_0_are_saved(parallel: str, done: Path) -> None:
    """Each rank has its own statistics; those of rank 0 are evaluated and saved."""
    task = make_task("digits", {"width": 4})
    model = task.model("resnet8")
    model.load_state_dict(load_file(done / f"{parallel}-batchnorm" / "model.safetensors"))
    model.eval()
    with torch.no_grad():
        assert task.metric(model, task.data("test", torch.device("cpu"))) == Result.load(done / f"{parallel}-batchnorm").pruned


ENDLESS = ["--dense-epochs", "100000", "--checkpoint-seconds", "1000"]
SHORT = {"dense_epochs": 1, "search_epochs": 1, "finetune_epochs": 1, "batch": 128, "sparsity": 0.5}
WORDS = ["train", "plain", "--search-epochs", "1", "--finetune-epochs", "1", "--batch", "128", "--sparsity", "0.5"]


def wait_for_rows(out: Path, processes: list[subprocess.Popen[str]]) -> None:
    until = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").stat().st_size:
        assert time.monotonic() < until, "no metrics"
        assert all(process.poll() is None for process in processes), finish(processes, 5)
        time.sleep(0.02)


def test_torchrun_stops_on_sigterm_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(TESTS / "helpers" / "plain_task.py")]
    launcher = start_process(*words, *WORDS, *ENDLESS, "--out", str(out))
    wait_for_rows(out, [launcher])
    launcher.send_signal(signal.SIGTERM)
    (output,) = finish([launcher], 60)
    assert launcher.returncode != 0
    assert f"continue with: smartprune train --resume --out {out}" in output
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    assert state["stage"] == "dense"
    config = json.loads((out / "config.json").read_text())
    shorter = {"dense_epochs": state["step"] // 7 + 1}  # as if the run had begun with it
    (out / "config.json").write_text(json.dumps(config | shorter))
    write_checkpoint(out, state | {"settings": json.dumps(json.loads(state["settings"]) | shorter)})
    assert resume(out).verified
    assert all((out / name).exists() for name in EXACT_FILES)


def test_error_on_one_rank_ends_the_other(done: Path) -> None:
    first, second = (json.loads((done / f"rank{rank}.json").read_text())["failure"] for rank in (0, 1))
    assert second.startswith("rank 1: the loss is nan in dense, step 10 of 21")
    assert first.startswith("rank 0: another process ended too early; read its error first")


def test_killed_rank_ends_the_other(tmp_path: Path) -> None:
    out = tmp_path / "run"
    processes = start_two_ranks(str(TESTS / "helpers" / "plain_task.py"), *WORDS, *ENDLESS, "--out", str(out))
    wait_for_rows(out, processes)
    processes[1].kill()
    output, _ = finish(processes, 60)
    assert processes[0].returncode == 1
    assert "smartprune: rank 0: another process ended too early" in output
    assert "Traceback" not in output


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")
def test_two_killed_ranks_restarted_by_torchrun_change_no_bit(done: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    epochs = ["--dense-epochs", "3", "--search-epochs", "2", "--finetune-epochs", "2"]
    words = [str(TESTS / "helpers" / "plain_task.py"), "train", "plain", *epochs, "--batch", "128", "--sparsity", "0.5"]
    words += ["--checkpoint-seconds", "0", "--out", str(out)]
    kills = Job(words, lambda: modified(out / "checkpoint.pt"), tmp_path / "log", longest=0.05).run(kills=2, seconds=300)
    assert len(kills) == 2
    assert_same_run(done / "ddp", out)
    assert Receipt.load(out / "receipt.json").met


def test_every_restart_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun keeps its store, in which the addresses of killed ranks remain."""
    kept: Any = torch.distributed
    server = kept.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("address", "gone")
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    for name, value in (variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    assert ranks.store_after_restart() == {}  # the first start
    for restart in ("1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        arguments = ranks.store_after_restart()
        assert (arguments["rank"], arguments["world_size"]) == (1, 2)
        assert not arguments["store"].check(["address"])
        arguments["store"].set("address", restart)
    assert server.get("address") == b"gone"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # several machines, which count restarts separately
    assert ranks.store_after_restart() == {}


def test_command_restarted_by_torchrun_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --max-restarts, torchrun repeats the same command, which then resumes the run."""
    from smartprune.cli import main

    out = tmp_path / "run"
    words = [*WORDS, "--dense-epochs", "1", "--out", str(out)]
    train_until_stopped(configure({"task": "plain", **SHORT, "out": str(out)}), 10)
    assert main(words) == 1  # the folder holds a run
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main(words) == 0
    assert Result.load(out).verified


@pytest.mark.parametrize("name", ["digits", "cifar10", "imagefolder", "scenes", "camvid", "segmentation"])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_split_every_batch(name: str, world: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of all ranks, concatenated, are the batches of one process, also from the middle of an epoch."""
    monkeypatch.setenv("SMARTPRUNE_DATA", str(folder))
    data = TASKS[name](**SETTINGS.get(name, {})).data("train", torch.device("cpu"))
    whole = list(data.batches(48, seed=3, epoch=5))
    parts = []
    for rank in range(world):
        with monkeypatch.context() as patch:
            patch.setenv("WORLD_SIZE", str(world))
            patch.setenv("RANK", str(rank))
            parts.append(list(ranks.batches(data, 48, 3, 5, 2)))
    assert [len(part) for part in parts] == [len(whole) - 2] * world
    for batch, pieces in zip(whole[2:], zip(*parts, strict=True), strict=True):
        for expected, *pieces_of_rank in zip(batch, *pieces, strict=True):
            assert torch.equal(torch.cat(pieces_of_rank), expected)


class DataWithoutEvery:
    """Data whose ``batches`` has no argument ``every``."""

    def steps(self, size: int) -> int:
        return 20 // size

    def batches(self, size: int, seed: int, epoch: int, first: int = 0) -> Any:
        for step in range(first, self.steps(size)):
            yield torch.arange(step * size, (step + 1) * size)


@pytest.mark.parametrize("rank", [0, 1])
def test_data_without_every_is_split_too(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    batches = [part.tolist() for part in ranks.batches(DataWithoutEvery(), 6, 0, 0, 1)]
    assert batches == [[6 + 3 * rank, 7 + 3 * rank, 8 + 3 * rank], [12 + 3 * rank, 13 + 3 * rank, 14 + 3 * rank]]


def test_fsdp_units_have_a_forward_pass_and_share_no_parameters() -> None:
    from torch import nn

    block = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList(block), nn.Sequential(nn.ReLU(), nn.Flatten()))
    assert ranks.fsdp_units(model, largest=80) == block
    assert ranks.fsdp_units(model, largest=10) == []
    resnet = make_task("digits", {}).model("resnet18")
    units = ranks.fsdp_units(resnet, sum(p.numel() for p in resnet.parameters()) // ranks.FSDP_UNITS)
    ids = [id(p) for unit in units for p in unit.parameters()]
    assert len(units) > 4
    assert len(ids) == len(set(ids))


def test_functions_work_for_a_single_process() -> None:
    assert (ranks.world_size(), ranks.rank()) == (1, 0)
    assert ranks.any_rank(True, False) == (True, False)
    assert ranks.gather(3) == [3]
    assert ranks.on_first(lambda: 4) == 4
    ranks.require_equal("it", "abc")


def test_only_rank_0_measures_a_budget_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks would measure different times, and write them to the same file."""
    running, measured, results = [0], [], []

    def measure(model: nn.Module, layers: Sequence[Layer], example: Any, threads: int) -> LatencyTable:
        measured.append(running[0])
        return table_of(layers, len(measured), example)

    def on_first(work: Callable[[], Any]) -> Any:  # rank 1 waits until rank 0 is done
        if not results:
            rank, running[0] = running[0], 0
            results.append(work())
            running[0] = rank
        return results[0]

    monkeypatch.setattr(latency, "measure_latency", measure)
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(ranks, "on_first", on_first)
    config = small_config(tmp_path / "run", sparsity=None, budget="latency=0.4")
    task = make_task(config.task, config.task_settings)
    (tmp_path / "run").mkdir()
    bounds = []
    for running[0] in (1, 0):
        bounds.append(attach_pruner(task.model(config.model), config, task, 4, tmp_path / "run").plan.bound)
    assert measured == [0]
    assert bounds[0] == bounds[1]


def test_different_digests_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "gather", lambda value: [value, "b" * 64])
    with pytest.raises(SmartpruneError, match=r"the ranks do not agree on the mask: 0: aaaaaaaaaaaa, 1: bbbbbbbbbbbb"):
        ranks.require_equal("the mask", "a" * 64)
