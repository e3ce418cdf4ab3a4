"""Distillation: the distance of outputs, the teacher, and both in a run."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.slow_distance import slow_distance
from helpers.small_steps import new_run, plain_config
from helpers.training_jobs import small_config
from smartprune.tasks.distance import soft_distance
from smartprune.training.check import resolve
from smartprune.training.distill import Teacher
from smartprune.training.run import deterministic
from smartprune.training.step import steps_of_epoch, take_step
from smartprune.training.train import train


def test_teacher_gets_the_inputs_of_the_student() -> None:
    student, dense = nn.Linear(3, 4), nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    teacher = Teacher(dense, soft_distance, weight=0.3, temperature=2.0)
    teacher.attach(nn.Linear(3, 4))
    teacher.attach(student)
    x = torch.randn(6, 3)
    out = student(x)
    loss = teacher.loss()
    target = slow_distance(out.detach().numpy(), dense[0](x).detach().numpy(), 2.0)
    assert float(loss.detach()) == pytest.approx(0.3 * target, rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert student.weight.grad is not None
    assert all(p.grad is None for p in dense.parameters())


def test_distance_is_added_to_the_loss_of_the_search(tmp_path: Path) -> None:
    """The loss of the first step of a search, by hand."""
    from smartprune.run_files import DENSE
    from smartprune.training.folder import save_weights
    from smartprune.training.run import enter_stage

    config = plain_config(tmp_path / "a", distill=0.7, distill_temperature=2.0)
    with deterministic(resolve(config)):
        run = new_run(config)
        dense = copy.deepcopy(run.model)
        save_weights(run.model, run.folder / DENSE)
        enter_stage(run, "search")
        assert run.pruner is not None
        batch = next(iter(steps_of_epoch(run)))[0]
        masked = copy.deepcopy(run.model)
        take_step(run, batch)
    images, labels = batch
    out, target = masked(images).detach(), dense(images).detach()
    hard = float(nn.functional.cross_entropy(out, labels))
    assert float(run.losses) == pytest.approx(hard + 0.7 * slow_distance(out.numpy(), target.numpy(), 2.0), rel=1e-5)


def test_distillation_from_a_given_dense_model(tmp_path: Path) -> None:
    train(small_config(tmp_path / "a", distill=0.5))
    train(small_config(tmp_path / "b", distill=0.5, dense=str(tmp_path / "a" / "dense.safetensors")))
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
