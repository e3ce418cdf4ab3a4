"""Learning-rate schedules, and the parameter groups of the optimizer."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers.small_steps import plain_config
from helpers.training_jobs import metric_rows, small_config
from smartprune.training.config import Config, configure
from smartprune.training.cuda_graph import place_rates
from smartprune.training.optimizer import lr_factor, make_optimizer, set_learning_rates
from smartprune.training.train import train

STEPS = {"dense": 20, "search": 8, "finetune": 12}


SHAPES = {
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "poly": lambda x: (1 - x) ** 0.7,
    "linear": lambda x: 1 - x,
    "constant": lambda x: 1.0,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_schedule_starts_with_warm_up(shape: str) -> None:
    """Half an epoch of eight steps is four: from 0.2 to 1 in a straight line, then the shape over what is left."""
    config = configure({"schedule": shape, "poly_power": 0.7, "warmup_epochs": 0.5, "warmup_start": 0.2})
    factors_of_run = [lr_factor(config, "dense", step, STEPS.__getitem__, 8) for step in range(20)]
    expected = [0.2, 0.4, 0.6, 0.8, *(SHAPES[shape](step / 16) for step in range(16))]
    assert factors_of_run == pytest.approx(expected, abs=1e-12)


def test_one_schedule_over_search_and_fine_tuning_warms_up_once() -> None:
    config = configure({"schedule": "linear", "warmup_epochs": 1, "warmup_start": 0.0, "schedule_over": "pruning"})
    factors_of_run = [
        lr_factor(config, stage, step, STEPS.__getitem__, 4) for stage in ("search", "finetune") for step in range(STEPS[stage])
    ]
    assert factors_of_run == pytest.approx([0, 0.25, 0.5, 0.75, *(1 - step / 16 for step in range(16))])


SHORT_STEPS = {"dense": 10, "search": 4, "finetune": 12}


def factors(config: Config, stage: str) -> list[float]:
    return [lr_factor(config, stage, step, SHORT_STEPS.__getitem__, 2) for step in range(SHORT_STEPS[stage])]


def test_one_cosine_over_search_and_fine_tuning() -> None:
    config = replace(configure({}), schedule_over="pruning")
    whole = [0.5 * (1 + math.cos(math.pi * step / 16)) for step in range(16)]
    assert factors(config, "search") + factors(config, "finetune") == pytest.approx(whole)
    assert factors(config, "dense")[5] == pytest.approx(0.5)


def test_every_stage_has_its_own_schedule_by_default() -> None:
    config = configure({})
    assert config.schedule_over == "stage"
    assert factors(config, "search") == [1.0] * 4
    assert factors(config, "finetune")[::6] == pytest.approx([1.0, 0.5])


def test_metrics_hold_the_scheduled_learning_rates(tmp_path: Path) -> None:
    train(
        small_config(tmp_path / "a", schedule="poly", poly_power=0.5, search_schedule="linear", warmup_epochs=1, finetune_epochs=2)
    )
    expected = [0.1 * (0.1 + 0.9 * 6 / 7), 0.1 * (1 - 6 / 7) ** 0.5, 0.1 * (0.1 + 0.9 * 6 / 7), 0.1 * (1 - 6 / 7)]
    assert [row["lr"] for row in metric_rows(tmp_path / "a")[:4]] == pytest.approx(expected)


def test_learning_rate_tensors_are_changed_in_place() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": parameters[:1], "lr": 0.2}, {"params": parameters[1:], "lr": 0.4}]
    optimizer = torch.optim.SGD(groups, fused=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    set_learning_rates(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    place_rates(optimizer, torch.device("cpu"))
    placed = [group["lr"] for group in optimizer.param_groups]
    set_learning_rates(optimizer, 0.25)
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, placed, strict=True))
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer.step()
    assert [float(p.detach()[0]) for p in parameters] == pytest.approx([0.95, 0.9])


def test_momentum_is_nesterov_and_scores_have_no_weight_decay(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1))
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=2)
    config = plain_config(tmp_path / "a", momentum=0.9, weight_decay=0.01)
    optimizer = make_optimizer(model, config, "search", pruner)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert all(group["nesterov"] for group in optimizer.param_groups)
    scores = {id(p) for p in pruner.parameters()}
    assert {decay[id(p)] for p in model.parameters() if id(p) not in scores} == {0.01}
    assert {decay[i] for i in scores} == {0.0}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_scores_have_their_own_weight_decay(optimizer: str) -> None:
    """A step without gradients of the loss moves scores and weights by their decay alone."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    config = replace(
        configure({"optimizer": optimizer, "momentum": 0.0, "weight_decay": 0.2, "score_decay": 0.1}), search_lr=0.5, score_lr=0.25
    )
    pruner = sp.attach(model, sp.Smart.paper(), (2, 2), 0.5, steps=4, include="*")
    made = make_optimizer(model, config, "search", pruner)
    (scores,), weight = pruner.parameters(), model[0].bias
    before, weight_before = scores.detach().clone(), weight.detach().clone()
    for parameter in (scores, weight):
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    assert torch.allclose(scores, before * (1 - 0.25 * 0.1))
    assert torch.allclose(weight, weight_before * (1 - 0.5 * 0.2))
    assert configure({}).score_decay == 0
