"""What a run changes outside itself, and what it closes at its end."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from helpers.training_jobs import (
    StopAfter,
    small_config,
)
from smartprune import SmartpruneError
from smartprune.training import run as run_module
from smartprune.training import trackers
from smartprune.training import train as train_module
from smartprune.training.step import update_weights
from smartprune.training.train import train


def test_global_state_is_restored(tmp_path: Path) -> None:
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    train(small_config(tmp_path / "a", dense_epochs=0, search_epochs=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


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
def test_finished_run_frees_its_model_and_closes_its_writer(tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
            train(small_config(tmp_path / "a", tensorboard="on"), stop=StopAfter(steps))
        assert [writer.closed for writer in writers] == [True]
        assert models
        assert [model() for model in models] == [None] * len(models)
        assert set(Recorder.alive) == set(writers)
    finally:
        gc.enable()


def test_errors_on_close_do_not_hide_the_error_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard's writer raises if the disk is full, which would hide the error that says how to continue."""

    class Full(Recorder):
        def close(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(trackers, "import_writer", lambda: Full)
    with pytest.raises(SmartpruneError, match="stopped in dense, after step 5"):
        train(small_config(tmp_path / "a", tensorboard="on"), stop=StopAfter(5))
