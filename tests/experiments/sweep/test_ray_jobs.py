"""Jobs of a sweep on Ray, without Ray: tests/hosts/test_ray.py runs the same code on a cluster."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from helpers.sweeps import small_grid, sweep_arguments
from smartprune import SmartpruneError
from smartprune.cli import main
from smartprune.experiments.sweep import Sweep
from smartprune.experiments.sweep.grid import expand_grids
from smartprune.experiments.sweep.job import try_lock
from smartprune.experiments.sweep.ray_jobs import RayJob, on_ray, run_job, to_resume


class TaskCancelledError(Exception):
    pass


class RayTaskError(Exception):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class RayError(Exception):
    pass


class SmallRay(types.SimpleNamespace):
    """The functions of Ray that a sweep calls. A task ends at once with ``result``."""

    exceptions = types.SimpleNamespace(TaskCancelledError=TaskCancelledError, RayTaskError=RayTaskError, RayError=RayError)

    def __init__(self, machines: tuple[dict[str, float], ...] = (), result: int | Exception = 0) -> None:
        super().__init__(machines=machines, result=result, cancelled=[])

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": machine} for machine in self.machines] + [{"Alive": False, "Resources": {"CPU": 99.0}}]

    def cluster_resources(self) -> dict[str, float]:
        return {name: sum(machine.get(name, 0) for machine in self.machines) for name in ("CPU", "GPU")}

    def remote(self, **options: Any) -> Any:
        self.options = options
        return lambda function: types.SimpleNamespace(remote=lambda *arguments: arguments)

    def wait(self, tasks: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return tasks, []

    def get(self, task: Any) -> int:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def cancel(self, task: Any, force: bool = False) -> None:
        self.cancelled.append(force)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a stand-in for Ray."""
    return lambda ray: monkeypatch.setitem(sys.modules, "ray", ray)


def job_of(ray: SmallRay, folder: Path) -> RayJob:
    log = folder / "a.log"
    log.write_text("$ smartprune train\nthe end of the log\n")
    return RayJob("a", "run", folder, log, ["train"], 1, ray=ray, options={}, shared=(folder, ""))


def test_without_ray_the_error_says_how_to_install_it(tmp_path: Path, use: Any, capsys: pytest.CaptureFixture[str]) -> None:
    use(None)
    with pytest.raises(SystemExit) as stop:
        main(sweep_arguments(tmp_path / "out", "--on", "ray"))
    assert stop.value.code == 2
    assert "--on ray: Ray cannot be imported" in (text := capsys.readouterr().err)
    assert "pip install ray, or leave --on out to run here" in text


def test_as_many_jobs_as_fit_on_the_machines_are_submitted(tmp_path: Path, use: Any) -> None:
    """A job needs all its CPUs and its GPU on one machine, and machines that are gone do not count."""
    ray = SmallRay(({"CPU": 4.0, "GPU": 1.0}, {"CPU": 7.0}))
    use(ray)
    sweep = Sweep(tmp_path, expand_grids([small_grid(options={**small_grid().options, "device": "cpu"})]))
    for cpus, gpus, jobs in ((2, 0, 5), (3, None, 3), (1, 0.25, 4), (4, 1, 1)):
        with on_ray(sweep, cpus=cpus, gpus=gpus):
            assert sweep.slots.most == jobs
            (file,) = (tmp_path / "logs").iterdir()
        assert not file.exists()
    with on_ray(sweep, jobs=3, cpus=8):
        assert sweep.slots.most == 3
    with (
        pytest.raises(SmartpruneError, match=r"no machine of the cluster has 8 CPUs and 0 GPUs .* 4 CPUs and 1 GPUs; .* 7 CPUs"),
        on_ray(sweep, cpus=8),
    ):
        pass


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("cuda", 1), ("auto", 1)])
def test_jobs_request_what_they_need(device: str, gpus: int, tmp_path: Path, use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SmallRay(({"CPU": 4.0, "GPU": 1.0},))
    use(ray)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("SMARTPRUNE_DATA", "/data")
    sweep = Sweep(tmp_path, expand_grids([small_grid(options={**small_grid().options, "device": device})]))
    with on_ray(sweep, cpus=4):
        sweep.launch("a", "run", tmp_path / "a", tmp_path / "a.log", ["train"], 1)
    assert (ray.options["num_cpus"], ray.options["num_gpus"]) == (4, gpus)
    variables = ray.options["runtime_env"]["env_vars"]
    assert (variables["OMP_NUM_THREADS"], variables["SMARTPRUNE_DATA"]) == ("4", "/data")
    assert "HOME" not in variables


def test_a_lost_worker_and_an_error_of_the_task_are_named(tmp_path: Path) -> None:
    lost = job_of(SmallRay(result=RayError("The worker died.\nMore.")), tmp_path)
    assert lost.poll() == 1
    assert lost.last_lines()[-2:] == ["the end of the log", "Ray gave up after 5 retries: RayError: The worker died."]
    wrong = job_of(SmallRay(result=RayTaskError(SmartpruneError("not the folder"))), tmp_path)
    assert wrong.poll() == 1
    assert wrong.last_lines()[-1] == "not the folder"
    ray = SmallRay(result=TaskCancelledError())
    stopped = job_of(ray, tmp_path)
    stopped.stop()
    stopped.stop()
    stopped.end()
    assert (ray.cancelled, stopped.stopped, stopped.poll()) == ([False], True, 1)


def test_a_finished_job_waits_until_its_result_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine may have written it to a shared disk."""
    job = job_of(SmallRay(), tmp_path)
    assert job.poll() is None
    (tmp_path / "result.json").touch()
    assert job.poll() == 0
    late = job_of(SmallRay(), tmp_path / "..")
    monkeypatch.setattr("smartprune.experiments.sweep.ray_jobs.SHARED_DISK_SECONDS", 0.0)
    assert late.poll() == 0, "reported as a failure by the sweep"


def test_a_worker_with_another_folder_names_it(tmp_path: Path) -> None:
    for content in (None, "other"):
        if content:
            (tmp_path / "token").write_text(content)
        with pytest.raises(SmartpruneError, match="must share the folder of --out, under the same path"):
            run_job(["train"], tmp_path, tmp_path / "a.log", (tmp_path / "token", "token"), tmp_path)
    assert not (tmp_path / "a.log").exists()


def test_a_job_writes_its_log_and_returns_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.chdir(tmp_path)
    token, log = tmp_path / "token", tmp_path / "a.log"
    token.write_text("token")

    def run(*arguments: str) -> int:
        return run_job(list(arguments), tmp_path / "a", log, (token, "token"), tmp_path)

    assert run("train", "digits", "--settings") == 0
    assert run("train", "digits", "--sparsity", "7") == 2
    assert run("train", "--config", "no.json", "--out", "a") != 0
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("damaged")
    assert run("train", "--config", "no.json", "--out", "a") != 0
    text = log.read_text()
    assert '"task": "digits"' in text
    assert "sparsity=7" in text
    assert f"process {os.getpid()}\n" in text
    assert text.count("$ smartprune train --resume --out a\n") == 1
    assert capfd.readouterr() == ("", "")
    with log.open("ab") as file:
        assert try_lock(file)


def test_arguments_to_resume() -> None:
    assert to_resume(["train", "--config", "a.json", "--out", "a", "--dense-only"]) == [
        "train",
        "--resume",
        "--out",
        "a",
        "--dense-only",
    ]
    assert to_resume(["train", "--resume", "--out", "a"]) == ["train", "--resume", "--out", "a"]
