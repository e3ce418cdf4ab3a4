"""The contract: every trainer, real or small, ends where a hand-written loop ends, from whatever checkpoint it started."""

import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks

import smartprune as sp
from helpers import trainers
from smartprune.integrations import INTEGRATIONS
from smartprune.integrations.search import Search
from smartprune.pruning.pruner import find_pruner

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # the trainers' own: few workers, no accelerator
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SETTINGS: dict[str, Any] = {"block": (4, 4), "sparsity": 0.75, "include": "*"}


@pytest.fixture(params=list(trainers.TRAINERS))
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = trainers.TRAINERS[request.param](tmp_path)
    if not request.param.startswith("small"):
        pytest.importorskip(made.name, reason=f"{made.name} is not installed; the small trainer stands in for it")
    add, hooks = Optimizer.add_param_group, len(_global_optimizer_post_hooks)
    with trainers.importable(made.name) as module:
        made.callback = module.PruneCallback
        yield made
    del made
    gc.collect()
    assert Optimizer.add_param_group is add  # PyTorch is restored, also after a trainer that died
    assert len(_global_optimizer_post_hooks) <= max(hooks, 1)  # that of the optimizer registry


def replay(kind: str, seen: list[tuple[Tensor, Tensor]], steps: int, accumulate: int = 1, lr: float | None = None) -> Any:
    """The same batches in a loop as a user writes it."""
    model = trainers.Body()
    plain = list(model.parameters())
    pruner = sp.attach(model, sp.Smart(), steps=steps, **SETTINGS)
    own = pruner.param_group() if lr is None else pruner.param_group(lr=lr)
    decayed = [p for p in plain if p.ndim > 1 or kind == "lightning"]
    rest = [p for p in plain if p.ndim == 1 and kind != "lightning"]
    optimizer = trainers.make_optimizer([{"params": decayed}, *([{"params": rest, "weight_decay": 0.0}] if rest else []), own])
    scheduler = trainers.make_scheduler(optimizer, -(-trainers.BATCHES // accumulate) * trainers.EPOCHS)
    for number, (x, y) in enumerate(seen):
        (model(x, y)["loss"] / accumulate).backward()
        place = number % trainers.BATCHES + 1
        if place % accumulate == 0 or place == trainers.BATCHES:
            optimizer.step()
            pruner.step()
            optimizer.zero_grad()
            scheduler.step()
    return model, sp.bake(model)


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_ends_where_a_loop_ends(trainer: Any, accumulate: int) -> None:
    steps = 9 if accumulate == 1 else 4
    callback, module = trainer.callback(steps=steps, **SETTINGS), trainer.module()
    trainer.fit(module, callback, accumulate)
    model, receipt = replay(trainer.name, module.seen, steps, accumulate)
    assert callback.receipt.mask_hash == receipt.mask_hash
    assert callback.receipt.met
    assert find_pruner(module) is None
    assert same_bits(model, module)


def test_scores_have_a_group_of_their_own(trainer: Any) -> None:
    callback, module = trainer.callback(steps=9, score_lr=0.2, **SETTINGS), trainer.module()
    trainer.fit(module, callback)
    own = [group for group in trainer.groups() if group["initial_lr"] == 0.2]
    assert [group["weight_decay"] for group in own] == [0.0]
    assert [p.numel() for p in own[0]["params"]] == [callback.pruner.blocks.n]
    model, receipt = replay(trainer.name, module.seen, 9, lr=0.2)
    assert callback.receipt.mask_hash == receipt.mask_hash
    assert same_bits(model, module)


@pytest.mark.parametrize("phase", ["search", "frozen"])
@pytest.mark.parametrize("length", [{"steps": 10}, {}])
def test_interrupted_is_uninterrupted(trainer: Any, phase: str, length: dict[str, Any]) -> None:
    stop = trainer.stops[phase]
    whole, module = trainer.callback(**length, **SETTINGS), trainer.module()
    trainer.fit(module, whole)
    expected = module.state_dict()
    with pytest.raises(trainers.StopError):
        trainer.fit(trainer.module(), trainer.callback(**length, **SETTINGS), stop=stop)
    callback, resumed = trainer.callback(**length, **SETTINGS), trainer.module()
    trainer.fit(resumed, callback, resume=trainer.path(stop))
    assert len(resumed.seen) == len(module.seen) - stop
    assert callback.receipt == whole.receipt
    assert expected.keys() == resumed.state_dict().keys()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.state_dict().items())


@pytest.mark.parametrize(("length", "steps"), [({}, 7), ({"steps": 0.5}, 12), ({"epochs": 2}, 12), ({"epochs": 1.5}, 9)])
def test_the_length_of_the_search(trainer: Any, length: dict[str, Any], steps: int) -> None:
    callback = trainer.callback(**length, **SETTINGS)
    trainer.fit(trainer.module(), callback)
    assert callback.pruner.steps == callback.pruner.count == steps


@pytest.mark.parametrize("method", ["gradual", "acdc"])
def test_methods_without_scores(trainer: Any, method: str) -> None:
    made = {"gradual": sp.Gradual(), "acdc": sp.Acdc(cycles=2)}[method]
    callback, module = trainer.callback(made, **SETTINGS), trainer.module()
    trainer.fit(module, callback)
    assert callback.receipt.met
    assert callback.pruner.count == 7


def test_checkpoints_and_plain_models(trainer: Any) -> None:
    """One of the search is refused with the reason; one after it has plain keys or says what it is, and its zeros."""
    callback, module = trainer.callback(steps=10, **SETTINGS), trainer.module()
    trainer.fit(module, callback)
    plain = trainers.Body()
    with pytest.raises(RuntimeError, match="smartprune: saved at step 5 of the search, when no block was removed yet"):
        plain.load_state_dict(trainer.weights(5))
    plain.load_state_dict(trainer.weights(15), strict=trainer.name == "lightning")
    assert not any("scores" in name for name in trainer.weights(15))
    for name in (row.weight for row in callback.receipt.layers):
        assert torch.equal(plain.state_dict()[name] == 0, module.state_dict()[name] == 0), name


def test_evaluation_alone_does_not_prune(trainer: Any) -> None:
    callback, module = trainer.callback(steps=10, **SETTINGS), trainer.module()
    if trainer.name == "transformers":
        with pytest.raises(sp.SmartpruneError, match="soft masks from the moment the Trainer is made"):
            trainer.evaluate(module, callback)
        callback.search.stop()
    else:
        trainer.evaluate(module, callback)
        assert callback.pruner is None
        assert find_pruner(module) is None
        with pytest.raises(sp.SmartpruneError, match="there is no pruner yet"):
            _ = callback.receipt


def test_a_search_longer_than_the_training_is_told_before_it(trainer: Any) -> None:
    callback = trainer.callback(steps=25, **SETTINGS)
    with pytest.raises(sp.SmartpruneError, match="the search has 25 steps and the training 24"):
        trainer.fit(trainer.module(), callback)
    callback.search.stop()


def test_a_training_that_ends_in_the_search(trainer: Any) -> None:
    callback = trainer.callback(steps=10, **SETTINGS)
    with pytest.raises(sp.SmartpruneError, match=r"ended at step 6 of 10 of the search.*freeze\(force=True\)"):
        trainer.fit(trainer.module(), callback, stop=6, early=True)


def test_without_bake_it_stays_attached_and_goes_on_in_another_training(trainer: Any) -> None:
    callback, module = trainer.callback(steps=10, bake=False, **SETTINGS), trainer.module()
    trainer.fit(module, callback, stop=6, early=True)
    assert callback.pruner.count == 6
    trainer.fit(module, callback)
    assert callback.pruner.phase == "frozen"
    assert callback.receipt.met
    assert sp.bake(module).mask_hash == callback.receipt.mask_hash


def test_a_callback_has_one_life(trainer: Any) -> None:
    callback, module = trainer.callback(steps=10, **SETTINGS), trainer.module()
    trainer.fit(module, callback)
    with pytest.raises(sp.SmartpruneError, match="has pruned its model and baked it"):
        trainer.fit(module, callback)


def test_weights_of_elsewhere_are_no_resumption(trainer: Any) -> None:
    """A checkpoint after bake, or of a training without the callback."""
    trainer.fit(trainer.module(), trainer.callback(steps=10, **SETTINGS))
    if trainer.name == "lightning":
        saved = torch.load(trainer.path(15), weights_only=False)
        saved["callbacks" if "callbacks" in saved else "callback"] = {}
        torch.save(saved, trainer.path(15))
    elif trainer.path(15).is_dir():
        from safetensors.torch import save_file

        save_file(trainers.Body().state_dict(), trainer.path(15) / "model.safetensors")
    else:
        torch.save({**torch.load(trainer.path(15)), "state_dict": trainers.Body().state_dict()}, trainer.path(15))
    callback = trainer.callback(steps=10, **SETTINGS)
    with pytest.raises(sp.SmartpruneError, match="the checkpoint has no state of the pruner"):
        trainer.fit(trainer.module(), callback, resume=trainer.path(15))
    callback.search.stop()


def test_copies_of_an_attached_model(trainer: Any) -> None:
    """A copy has hooks of its own: it loads what the model saves, and is baked by itself."""
    callback, module = trainer.callback(steps=10, bake=False, **SETTINGS), trainer.module()
    trainer.fit(module, callback)
    module.trainer = module.seen = None
    twin = copy.deepcopy(module)
    twin.load_state_dict(module.state_dict())
    assert sp.bake(twin) == callback.receipt
    assert callback.pruner.phase == "frozen"
    assert "net.0.weight" in twin.state_dict()
    assert not any("smartprune" in name for name in twin.state_dict())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 3, "epochs": 1}, "give one of them"),
        ({"steps": 0}, "at least 1"),
        ({"steps": 1.5}, "share of the training"),
        ({"steps": True}, "share of the training"),
        ({"epochs": 0}, "number of epochs above 0"),
        ({"exclude": "head"}, "no argument 'exclude'; those of attach are block, sparsity, .* include, skip"),
    ],
)
def test_arguments_that_cannot_be(given: dict[str, Any], message: str) -> None:
    for name in INTEGRATIONS:
        with trainers.importable(name) as module, pytest.raises(sp.SmartpruneError, match=message):
            module.PruneCallback(**given)


def test_importing_imports_no_trainer() -> None:
    code = (
        "import sys, smartprune.integrations; print(sorted({'lightning', 'pytorch_lightning', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("name", list(INTEGRATIONS))
def test_a_library_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (name, "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"smartprune.integrations.{name}", raising=False)
    with pytest.raises(sp.SmartpruneError, match=f"integrations.{name}: {name} cannot be imported"):
        __import__(f"smartprune.integrations.{name}")


# -- optimizers -----------------------------------------------------------------------------------------------------------


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


def test_of_several_optimizers_the_first_with_pruned_weights_counts(search: Search) -> None:
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
def test_however_an_optimizer_gets_its_parameters_the_scores_have_one_group(search: Search, kind: str) -> None:
    model = attached(search)
    assert search.pruner is not None
    scores = search.pruner.parameters()
    own = {"params": [*scores], "lr": 0.3}
    weights = [parameter for parameter in model.parameters() if parameter is not scores[0]]
    given: Any = {
        "all": list(model.parameters()),
        "names": list(model.named_parameters()),
        "single": [{"params": parameter} for parameter in model.parameters()],
        "generator": (parameter for parameter in model.parameters()),
        "own": [{"params": weights}, own],
    }[kind]
    optimizer = trainers.make_optimizer(given)
    search.settle([optimizer])
    mine = [group for group in optimizer.param_groups if any(p is scores[0] for p in group["params"])]
    assert [(len(group["params"]), group["weight_decay"]) for group in mine] == [(1, 0.0)]
    assert mine[0]["lr"] == (0.3 if kind == "own" else trainers.LR)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_groups_of_the_user_keep_their_numbers(search: Search) -> None:
    """Also where they are added one by one; a group of the scores alone is the user's, too."""
    model = attached(search)
    assert search.pruner is not None
    (scores,) = search.pruner.parameters()
    parts = [[p for p in layer.parameters() if p is not scores] for layer in (model.net[0], model.net[2], model.net[4])]
    optimizer = torch.optim.SGD([{"params": parts[0]}, {"params": parts[1], "lr": 0.2}], lr=0.1, weight_decay=0.1)
    optimizer.add_param_group({"params": parts[2], "lr": 0.3})
    found = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [(0.1, 0.1), (0.2, 0.1), (0.3, 0.1), (0.1, 0.0)]
    assert optimizer.param_groups[3]["params"] == [scores]
    given = [{"params": parts[0]}, {"params": [scores], "lr": 0.4}, {"params": parts[1]}]
    assert [group["lr"] for group in torch.optim.SGD(given, lr=0.1).param_groups] == [0.1, 0.4, 0.1]


def test_torch_is_as_it_was_when_a_search_that_waits_is_gone() -> None:
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


def test_a_search_that_has_its_optimizer_can_be_pickled(search: Search) -> None:
    """By trainers that start processes, with the model: there it goes on with another optimizer."""
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


def test_an_optimizer_that_is_older_than_the_scores(search: Search) -> None:
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


def test_a_model_that_the_user_bakes_first(search: Search) -> None:
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


def test_the_length_is_that_of_the_first_training_with_a_step() -> None:
    """One that failed before, or tried sizes of batches, had another."""
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


def test_a_length_that_nobody_knows() -> None:
    search = Search("here", None, 0.5, None, None, True, dict(SETTINGS))
    with pytest.raises(sp.SmartpruneError, match="the length of the training is not known before it starts"):
        search.length(float("inf"), 10)


def test_numbers_reach_the_log(trainer: Any) -> None:
    if not hasattr(trainer, "log"):
        pytest.skip("the real trainers have tests of their own")
    callback, module = trainer.callback(steps=10, **SETTINGS), trainer.module()
    trainer.fit(module, callback)
    log = trainer.log(module)
    assert log["smartprune/progress"][:3] == [0.1, 0.2, 0.3]
    assert log["smartprune/progress"][-1] == 1
    assert log["smartprune/tau"][0] > log["smartprune/tau"][5] > log["smartprune/tau"][-1] == 0
    assert log["smartprune/undecided"][-1] == 0
