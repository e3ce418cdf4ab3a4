"""The registry of optimizer hooks: steps, paused parameters, momentum, and listeners for parameter groups."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from smartprune.pruning import optimizers


def parameter(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((3,), value))


def step(optimizer: Optimizer, *parameters: nn.Parameter) -> None:
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_steps_are_counted_per_optimizer() -> None:
    first, second = parameter(), parameter()
    one, two = torch.optim.SGD([first], lr=0.1), torch.optim.SGD([second], lr=0.1)
    count = optimizers.step_count()
    step(one, first)
    assert optimizers.step_count() == count + 1
    assert optimizers.stepped_since(count) == [one]
    assert optimizers.have_stepped([first])
    assert not optimizers.have_stepped([first, second])
    step(two, second)
    assert optimizers.stepped_since(count + 1) == [two]


def test_paused_parameters_and_their_momentum_do_not_change() -> None:
    paused, free = parameter(), parameter()
    optimizer = torch.optim.SGD([paused, free], lr=0.1, momentum=0.9, weight_decay=0.1)
    step(optimizer, paused, free)
    value, momentum = paused.detach().clone(), optimizer.state[paused]["momentum_buffer"].clone()
    optimizers.pause([paused])
    before = free.detach().clone()
    step(optimizer, paused, free)
    assert torch.equal(paused, value)
    assert torch.equal(optimizer.state[paused]["momentum_buffer"], momentum)
    assert not torch.equal(free, before)
    optimizers.resume([paused])
    step(optimizer, paused, free)
    assert not torch.equal(paused, value)


def test_momentum_is_reset_before_the_next_step_only() -> None:
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    step(optimizer, weight)
    optimizers.reset_momentum([weight])
    assert optimizers.pending_momentum_resets([("weight", weight)]) == ["weight"]
    step(optimizer, weight)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.ones(3))
    assert optimizers.pending_momentum_resets([("weight", weight)]) == []
    step(optimizer, weight)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.full((3,), 1.9))


def test_cancelled_momentum_resets_do_nothing() -> None:
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    step(optimizer, weight)
    optimizers.reset_momentum([weight])
    optimizers.cancel_momentum_resets([weight])
    step(optimizer, weight)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.full((3,), 1.9))


class Listener:
    """Gives its parameter a group of its own."""

    def __init__(self, wanted: nn.Parameter) -> None:
        self.own = wanted
        self.added: list[Optimizer] = []

    def takes_group(self, parameter_ids: set[int]) -> bool:
        return id(self.own) in parameter_ids

    def place_group(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        rest = [p for p in group["params"] if p is not self.own]
        for parameters in (rest, [self.own]):
            optimizers.add_param_group(optimizer, {**group, "params": parameters})

    def group_added(self, optimizer: Optimizer) -> None:
        self.added.append(optimizer)


def test_a_listener_places_its_groups_until_it_stops() -> None:
    original, wanted, other = Optimizer.add_param_group, parameter(), parameter()
    listener = Listener(wanted)
    optimizers.listen_to_groups(listener)
    optimizer = torch.optim.SGD([wanted, other], lr=0.1)
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [[id(other)], [id(wanted)]]
    unrelated = torch.optim.SGD([parameter(), parameter()], lr=0.1)
    assert len(unrelated.param_groups) == 1
    assert listener.added == [optimizer, unrelated]
    optimizers.stop_listening_to_groups(listener)
    assert Optimizer.add_param_group is original
    assert len(torch.optim.SGD([wanted, other], lr=0.1).param_groups) == 1


def test_pytorch_is_restored_when_the_last_listener_is_freed() -> None:
    optimizers.stop_watching_scores(list(optimizers._scores))  # of other tests
    original = Optimizer.add_param_group
    listener = Listener(parameter())
    optimizers.listen_to_groups(listener)
    assert Optimizer.add_param_group is not original
    del listener
    gc.collect()
    assert Optimizer.add_param_group is original
