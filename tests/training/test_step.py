"""Single steps: clipping, accumulation, mixed precision and NaN."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from helpers.plain_task import PlainTask
from helpers.small_steps import new_run, plain_config
from helpers.training_jobs import metric_rows, small_config
from smartprune import SmartpruneError
from smartprune.tasks.digits import Digits
from smartprune.training.check import resolve
from smartprune.training.run import deterministic
from smartprune.training.step import steps_of_epoch, take_step
from smartprune.training.train import train


@pytest.mark.parametrize("most", [0.01, 1e6])
def test_clipping_matches_the_norm_by_hand(most: float, tmp_path: Path) -> None:
    config = plain_config(tmp_path / "a", clip_norm=most, momentum=0.0, weight_decay=0.0)
    with deterministic(resolve(config)):
        run = new_run(config)
        batch = next(iter(steps_of_epoch(run)))[0]
        before = copy.deepcopy(run.model)
        nn.functional.cross_entropy(before(batch[0]), batch[1]).backward()
        take_step(run, batch)
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in before.parameters() if p.grad is not None))
    scale = min(1.0, most / norm)
    for old, new in zip(before.parameters(), run.model.parameters(), strict=True):
        assert old.grad is not None
        torch.testing.assert_close(new, old - config.lr * scale * old.grad, rtol=1e-4, atol=1e-7)


def test_clipping_does_not_affect_the_scores(tmp_path: Path) -> None:
    """They have a setting of their own, ``--set clip=1.0``."""
    from smartprune.training.run import enter_stage

    moved = []
    for most in (0.0, 1e-9):
        config = plain_config(tmp_path / f"{most}", clip_norm=most, momentum=0.0, settings={"follow": False})
        with deterministic(resolve(config)):
            run = new_run(config)
            enter_stage(run, "search")
            assert run.pruner is not None
            before = run.pruner.scores.clone()
            take_step(run, *next(iter(steps_of_epoch(run))))
            moved.append(run.pruner.scores - before)
    assert torch.equal(*moved)
    assert moved[0].abs().max() > 0


def test_four_accumulated_batches_match_one_large_batch(tmp_path: Path) -> None:
    train(plain_config(tmp_path / "one", block="8x4", batch=128, clip_norm=1.0, ema=0.5))
    train(plain_config(tmp_path / "four", block="8x4", batch=32, accumulate=4, clip_norm=1.0, ema=0.5))
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
    config = plain_config(tmp_path / "a", batch=64, accumulate=4, momentum=0.0, weight_decay=0.0)
    with deterministic(resolve(config)):
        run = new_run(config)
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


def test_search_counts_optimizer_steps(tmp_path: Path) -> None:
    train(small_config(tmp_path / "a", batch=64, accumulate=4))
    search_rows = [row for row in metric_rows(tmp_path / "a") if row["stage"] == "search"]
    assert [row["step"] for row in search_rows] == [4, 8]
    assert search_rows[-1]["undecided"] == 0  # the search came to its end


def test_bfloat16_run_on_a_cpu(tmp_path: Path) -> None:
    result = train(small_config(tmp_path / "a", amp="bf16", dense_epochs=1, search_epochs=1))
    assert result.verified
    assert all(math.isfinite(row["loss"]) for row in metric_rows(tmp_path / "a"))


def test_nan_loss_names_stage_and_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Digits.loss, []

    def loss(self: Digits, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        return real(self, model, batch) * (math.nan if len(calls) == 20 else 1)

    monkeypatch.setattr(Digits, "loss", loss)
    with pytest.raises(SmartpruneError, match=r"the loss is nan in search, step 6 of 14; lower the learning rate"):
        train(small_config(tmp_path / "a"))


def test_plain_task_has_no_batch_norm() -> None:
    model = PlainTask().model("plain")
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
