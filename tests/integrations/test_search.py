"""The search inside a trainer: its steps, its parameter group and its length, driven without a trainer."""

import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

import smartprune as sp
from helpers import trainers
from smartprune.integrations.search import Search
from smartprune.pruning.lookup import find_pruner

SETTINGS: dict[str, Any] = {"block": (4, 4), "sparsity": 0.75, "include": "*"}


@pytest.fixture
def search() -> Iterator[Search]:
    made = Search("here", None, 3, None, None, True, dict(SETTINGS))
    yield made
    made.stop()


def attached(search: Search) -> trainers.Body:
    model = trainers.Body()
    search.attach(model, carry=False)
    search.claim()
    return model


def test_steps_that_a_gradient_scaler_skips_do_not_count(search: Search) -> None:
    model = attached(search)
    optimizer = trainers.make_optimizer(model.parameters())
    search.settle([optimizer])
    search.begin(10, 10)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    counts = []
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(model(**trainers.batches()[0])["loss"] * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert search.pruner is not None
        counts.append(search.pruner.count)
    assert counts == [1, 1, 2]


def test_the_first_optimizer_with_pruned_weights_counts(search: Search) -> None:
    model = attached(search)
    biases = torch.optim.SGD([model.net[4].bias], lr=0.1)
    first = trainers.make_optimizer(model.net[:2].parameters())
    second = trainers.make_optimizer([dict(model.named_parameters())[name] for name in ("net.2.weight", "net.4.weight")])
    assert [len(optimizer.param_groups) for optimizer in (biases, first, second)] == [1, 2, 1]
    search.settle([biases, first, second])
    search.begin(10, 10)
    for _ in range(3):
        model(**trainers.batches()[0])["loss"].backward()
        for optimizer in (biases, second, first):
            optimizer.step()
            optimizer.zero_grad()
    search.end()
    assert search.receipt is not None
    assert search.receipt.met


@pytest.mark.parametrize("kind", ["all", "names", "single", "generator", "own"])
def test_scores_have_one_group_however_parameters_are_given(search: Search, kind: str) -> None:
    model = attached(search)
    assert search.pruner is not None
    scores = search.pruner.parameters()
    group = {"params": [*scores], "lr": 0.3}
    weights = [parameter for parameter in model.parameters() if parameter is not scores[0]]
    given: Any = {
        "all": list(model.parameters()),
        "names": list(model.named_parameters()),
        "single": [{"params": parameter} for parameter in model.parameters()],
        "generator": (parameter for parameter in model.parameters()),
        "own": [{"params": weights}, group],
    }[kind]
    optimizer = trainers.make_optimizer(given)
    search.settle([optimizer])
    mine = [group for group in optimizer.param_groups if any(p is scores[0] for p in group["params"])]
    assert [(len(group["params"]), group["weight_decay"]) for group in mine] == [(1, 0.0)]
    assert mine[0]["lr"] == (0.3 if kind == "own" else trainers.LR)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_groups_of_the_user_keep_their_numbers(search: Search) -> None:
    """Also if they are added one by one. A group of the scores alone belongs to the user, too."""
    model = attached(search)
    assert search.pruner is not None
    (scores,) = search.pruner.parameters()
    parts = [[p for p in layer.parameters() if p is not scores] for layer in (model.net[0], model.net[2], model.net[4])]
    optimizer = torch.optim.SGD([{"params": parts[0]}, {"params": parts[1], "lr": 0.2}], lr=0.1, weight_decay=0.1)
    optimizer.add_param_group({"params": parts[2], "lr": 0.3})
    groups = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert groups == [(0.1, 0.1), (0.2, 0.1), (0.3, 0.1), (0.1, 0.0)]
    assert optimizer.param_groups[3]["params"] == [scores]
    given = [{"params": parts[0]}, {"params": [scores], "lr": 0.4}, {"params": parts[1]}]
    assert [group["lr"] for group in torch.optim.SGD(given, lr=0.1).param_groups] == [0.1, 0.4, 0.1]


def test_pytorch_is_restored_when_a_waiting_search_is_freed() -> None:
    gc.collect()  # scores of the tests above are watched until they are freed
    plain = Optimizer.add_param_group
    searches = [Search("here", None, 3, None, None, True, dict(SETTINGS)) for _ in range(2)]
    for search in searches:
        attached(search)
    del search
    while searches:
        assert Optimizer.add_param_group is not plain
        del searches[0]
        gc.collect()
    assert Optimizer.add_param_group is plain


def test_a_running_search_can_be_pickled(search: Search) -> None:
    """Trainers that start processes pickle it with the model. It continues there with another optimizer."""
    model = attached(search)
    optimizer = trainers.make_optimizer(model.parameters())
    for _ in range(2):
        search.settle([optimizer])
        search.begin(10, 10)
        model(**trainers.batches()[0])["loss"].backward()
        optimizer.step()
        model, search = pickle.loads(pickle.dumps((model, search)))
        assert search.pruner is find_pruner(model)
        search.claim()
        optimizer = trainers.make_optimizer(model.parameters())
    assert search.pruner is not None
    assert search.pruner.count == 2
    search.stop()


def test_an_optimizer_older_than_the_scores(search: Search) -> None:
    model = trainers.Body()
    optimizer = trainers.make_optimizer(model.parameters())
    search.attach(model, carry=False)
    with pytest.raises(sp.SmartpruneError, match="a scheduler counts the parameter groups it was made with"):
        search.settle([optimizer], [optimizer])
    for _ in range(2):  # in a second training it has them
        search.settle([optimizer])
        assert [group["weight_decay"] for group in optimizer.param_groups] == [trainers.DECAY, 0.0]
        search.claim()
    with pytest.raises(sp.SmartpruneError, match=r"none of the 1 optimizers trains a pruned weight.*layer\.weight reads as"):
        search.settle([trainers.make_optimizer([nn.Parameter(torch.ones(2))])])


def test_the_user_bakes_before_the_training_ends(search: Search) -> None:
    model = attached(search)
    optimizer = trainers.make_optimizer(model.parameters())
    search.settle([optimizer])
    search.begin(10, 10)
    for step in range(5):
        model(**trainers.batches()[0])["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            receipt = sp.bake(model)
    search.end()
    assert search.receipt is not None
    assert search.receipt.mask_hash == receipt.mask_hash
    assert not any("smartprune" in name for name in model.state_dict())


def test_the_length_is_set_by_the_first_training_that_takes_a_step() -> None:
    """A training that failed before its first step, or that tried batch sizes, does not set it."""
    search = Search("here", None, 0.5, None, None, True, dict(SETTINGS))
    model = attached(search)
    optimizer = trainers.make_optimizer(model.parameters())
    assert search.pruner is not None
    for total, stepped in ((100, False), (10, True), (40, True)):
        search.settle([optimizer])
        search.begin(total, total)
        if stepped:
            model(**trainers.batches()[0])["loss"].backward()
            optimizer.step()
        search.stop()
        assert search.pruner.steps == (5 if stepped else 50)


def test_an_unknown_length_raises() -> None:
    search = Search("here", None, 0.5, None, None, True, dict(SETTINGS))
    with pytest.raises(sp.SmartpruneError, match="the length of the training is not known before it starts"):
        search.length(float("inf"), 10)
