"""How many jobs run at once."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from helpers.sweeps import OPTIONS, small_grid
from smartprune.experiments.sweep import Sweep, slots
from smartprune.experiments.sweep.grid import expand_grids
from smartprune.experiments.sweep.progress import SweepProgress
from smartprune.experiments.sweep.slots import Memory, Pace, Slots, gpu_memory, read_pace

IDLE, TOTAL = 10.0, 100.0


class Gpu:
    """Jobs that share a GPU. ``speed`` is their speed together, by number; ``sizes`` is the memory of each kind of job."""

    def __init__(self, speed: Callable[[int], float], sizes: Mapping[str, float]) -> None:
        self.speed, self.sizes = speed, sizes
        self.jobs: dict[str, Pace] = {}
        self.most = 0

    def memory(self) -> Memory:
        """A job has allocated its memory once it has made an epoch."""
        return Memory(IDLE + sum(self.sizes[pace.kind] for pace in self.jobs.values() if pace.epochs), TOTAL)

    def run(self, slots: Slots, kinds: list[str], epochs: int) -> list[str]:
        """Starts the jobs as the slots allow, and lets all of them make so many epochs. Returns the messages."""
        messages = []
        for _ in range(epochs):
            while kinds and slots.may_start(kinds[0], self.jobs):
                kind = kinds.pop(0)
                slots.started(kind)
                self.jobs[f"{kind}-{len(kinds)}"] = Pace(kind)
            self.most = max(self.most, len(self.jobs))
            messages.append(slots.observe(self.jobs))
            seconds = len(self.jobs) / self.speed(len(self.jobs))
            self.jobs = {name: Pace(pace.kind, (*pace.epochs, ("search", seconds))) for name, pace in self.jobs.items()}
        return [message for message in messages if message]


def test_jobs_are_added_while_they_are_faster_together() -> None:
    gpu = Gpu({1: 1.0, 2: 1.8, 4: 2.3, 8: 2.1}.__getitem__, {"a": 1.0})
    found = Slots(16, fixed=False, read_memory=gpu.memory)
    messages = gpu.run(found, ["a"] * 8, 30)
    assert found.limit == 4
    assert messages[-1] == "8 jobs together are 0.91 times as fast as 4: 4 from now on"
    assert [found.speeds[n] for n in (1, 2, 4, 8)] == pytest.approx([1.0, 1.8, 2.3, 2.1])
    gpu.jobs = dict(list(gpu.jobs.items())[:4])  # half of them have ended
    assert not found.may_start("a", gpu.jobs)
    del gpu.jobs[next(iter(gpu.jobs))]
    assert found.may_start("a", gpu.jobs)


def test_one_job_stays_alone_where_jobs_only_take_turns() -> None:
    gpu = Gpu(lambda jobs: 1.0, {"a": 1.0})
    found = Slots(16, fixed=False, read_memory=gpu.memory)
    gpu.run(found, ["a"] * 8, 10)
    assert found.limit == 1


def test_jobs_start_as_long_as_their_measured_memory_fits() -> None:
    gpu = Gpu(float, {"a": 30.0})
    found = Slots(16, fixed=False, read_memory=gpu.memory)
    gpu.run(found, ["a"] * 8, 20)
    assert found.needs == {"a": 30.0}
    assert len(gpu.jobs) == gpu.most == 2  # the third would need 10 + 60 + 1.2 * 30


def test_a_large_kind_of_job_waits_and_a_smaller_one_starts() -> None:
    gpu = Gpu(float, {"large": 60.0, "small": 5.0})
    found = Slots(4, read_memory=gpu.memory)
    gpu.run(found, ["large"], 1)
    assert not found.may_start("small", gpu.jobs)  # the memory of the first job is not known yet
    gpu.run(found, ["small"], 3)
    assert found.needs["large"] == 60.0
    assert len(gpu.jobs) == 1  # a kind that is not known is taken for as large as the largest
    found.needs["small"] = 5.0
    assert found.may_start("small", gpu.jobs)
    assert not found.may_start("large", gpu.jobs)


def test_mixed_jobs_count_by_the_speed_of_their_own_kind() -> None:
    """An epoch of one network takes ten times as long as one of the other."""
    found = Slots(4, fixed=False)
    slow, fast = (lambda n, s: Pace("slow", (("search", 10 * s),) * n)), (lambda n, s: Pace("fast", (("search", s),) * n))
    found.observe({"x": slow(0, 1)})
    assert found.observe({"x": slow(2, 1)}) == "1 job at 1.00 times the speed of one: trying 2"
    found.observe({"y": fast(0, 1)})
    found.observe({"y": fast(2, 1)})
    found.observe({"x": slow(2, 1), "y": fast(2, 1)})
    assert found.observe({"x": slow(4, 1.25), "y": fast(4, 1.25)}) == "2 jobs at 1.60 times the speed of one: trying 4"


def test_the_metrics_of_a_run_give_its_pace(tmp_path: Path) -> None:
    rows = [{"stage": "dense", "seconds": 2.0}, {"stage": "dense", "seconds": 3.5}, {"stage": "search", "seconds": 7.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"stage": "se')
    assert read_pace("a", tmp_path) == Pace("a", (("dense", 2.0), ("dense", 1.5), ("search", 3.5)))
    assert read_pace("a", tmp_path / "none") == Pace("a")


def test_the_memory_of_a_gpu_is_read_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = --id=3 ] && echo "1234, 143771"\n')
    program.chmod(0o755)
    monkeypatch.setattr(slots.shutil, "which", lambda name: str(program))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert gpu_memory() == Memory(1234.0, 143771.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert gpu_memory() is None
    monkeypatch.setattr(slots.shutil, "which", lambda name: None)
    assert gpu_memory() is None


def test_memory_is_read_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, readings = 100.0, iter([Memory(1.0, 9.0), None])
    monkeypatch.setattr(slots.time, "monotonic", lambda: now)
    read = slots.once_a_second(lambda: next(readings))
    assert read() == read() == Memory(1.0, 9.0)
    now += 1.0
    assert read() is None
    assert read() is None


def test_a_sweep_runs_one_after_the_other_if_two_do_not_fit(tmp_path: Path) -> None:
    cells = expand_grids([small_grid(options={**OPTIONS, "search_epochs": 1})])
    most = 0

    def memory() -> Memory:
        nonlocal most
        most = max(most, len(sweep.running))
        return Memory(10.0 + 50.0 * len(sweep.running), 100.0)

    sweep = Sweep(tmp_path, cells, slots=Slots(2, read_memory=memory))
    outcome = sweep.run(SweepProgress(io.StringIO()), lambda: False)
    assert (outcome.done, outcome.missing, outcome.failed) == (cells, [], [])
    assert most == 1
