"""The contract of integrations: every trainer, real or small, gives the result of a plain loop, from any checkpoint."""

import copy
import gc
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
from smartprune.pruning.lookup import find_pruner

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # the trainers' own: few workers, no accelerator
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
CALLBACKS = [name for name, place in INTEGRATIONS.items() if place.endswith(":PruneCallback")]
SETTINGS: dict[str, Any] = {"block": (4, 4), "sparsity": 0.75, "include": "*"}


@pytest.fixture(params=list(trainers.TRAINERS))
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = trainers.TRAINERS[request.param](tmp_path)
    if not request.param.startswith("small"):
        pytest.importorskip(made.name, reason=f"{made.name} is not installed; the small trainer stands in for it")
    gc.collect()  # models of earlier tests may still be watched
    add, hooks = Optimizer.add_param_group, len(_global_optimizer_post_hooks)
    with trainers.importable(made.name) as module:
        made.callback = module.PruneCallback
        yield made
    vars(made).clear()  # pytest keeps the trainer itself
    gc.collect()
    assert Optimizer.add_param_group is add  # PyTorch is restored, also after a trainer that died
    assert len(_global_optimizer_post_hooks) <= max(hooks, 1)  # that of the optimizer registry


def replay(kind: str, seen: list[tuple[Tensor, Tensor]], steps: int, accumulate: int = 1, lr: float | None = None) -> Any:
    """Trains on the same batches in a plain loop."""
    model = trainers.Body()
    plain = list(model.parameters())
    pruner = sp.attach(model, sp.Smart(), steps=steps, **SETTINGS)
    group = pruner.param_group() if lr is None else pruner.param_group(lr=lr)
    decayed = [p for p in plain if p.ndim > 1 or kind == "lightning"]
    rest = [p for p in plain if p.ndim == 1 and kind != "lightning"]
    optimizer = trainers.make_optimizer([{"params": decayed}, *([{"params": rest, "weight_decay": 0.0}] if rest else []), group])
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
def test_result_equals_that_of_a_plain_loop(trainer: Any, accumulate: int) -> None:
    steps = 9 if accumulate == 1 else 4
    callback, module = trainer.callback(steps=steps, **SETTINGS), trainer.module()
    trainer.fit(module, callback, accumulate)
    model, receipt = replay(trainer.name, module.seen, steps, accumulate)
    assert callback.receipt.mask_hash == receipt.mask_hash
    assert callback.receipt.met
    assert find_pruner(module) is None
    assert same_bits(model, module)


def test_scores_have_their_own_parameter_group(trainer: Any) -> None:
    callback, module = trainer.callback(steps=9, score_lr=0.2, **SETTINGS), trainer.module()
    trainer.fit(module, callback)
    groups = [group for group in trainer.groups() if group["initial_lr"] == 0.2]
    assert [group["weight_decay"] for group in groups] == [0.0]
    assert [p.numel() for p in groups[0]["params"]] == [callback.pruner.blocks.n]
    model, receipt = replay(trainer.name, module.seen, 9, lr=0.2)
    assert callback.receipt.mask_hash == receipt.mask_hash
    assert same_bits(model, module)


@pytest.mark.parametrize("phase", ["search", "frozen"])
@pytest.mark.parametrize("length", [{"steps": 10}, {}])
def test_resuming_is_bit_exact(trainer: Any, phase: str, length: dict[str, Any]) -> None:
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


def test_a_plain_model_refuses_checkpoints_of_the_search(trainer: Any) -> None:
    """A checkpoint saved during the search is refused with the reason. A later one has plain keys, or one that explains itself."""
    callback, module = trainer.callback(steps=10, **SETTINGS), trainer.module()
    trainer.fit(module, callback)
    plain = trainers.Body()
    with pytest.raises(RuntimeError, match="smartprune: saved at step 5 of the search, when no block was removed yet"):
        plain.load_state_dict(trainer.weights(5))
    plain.load_state_dict(trainer.weights(15), strict=trainer.name == "lightning")
    assert not any("scores" in name for name in trainer.weights(15))
    for name in (row.weight for row in callback.receipt.layers):
        assert torch.equal(plain.state_dict()[name] == 0, module.state_dict()[name] == 0), name


def test_evaluation_does_not_prune(trainer: Any) -> None:
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


def test_a_search_longer_than_the_training_raises_before_it(trainer: Any) -> None:
    callback = trainer.callback(steps=25, **SETTINGS)
    with pytest.raises(sp.SmartpruneError, match="the search has 25 steps and the training 24"):
        trainer.fit(trainer.module(), callback)
    callback.search.stop()


def test_a_training_that_ends_during_the_search_raises(trainer: Any) -> None:
    callback = trainer.callback(steps=10, **SETTINGS)
    with pytest.raises(sp.SmartpruneError, match=r"ended at step 6 of 10 of the search.*freeze\(force=True\)"):
        trainer.fit(trainer.module(), callback, stop=6, early=True)


def test_without_bake_the_next_training_continues(trainer: Any) -> None:
    callback, module = trainer.callback(steps=10, bake=False, **SETTINGS), trainer.module()
    trainer.fit(module, callback, stop=6, early=True)
    assert callback.pruner.count == 6
    trainer.fit(module, callback)
    assert callback.pruner.phase == "frozen"
    assert callback.receipt.met
    assert sp.bake(module).mask_hash == callback.receipt.mask_hash


def test_a_callback_prunes_only_once(trainer: Any) -> None:
    callback, module = trainer.callback(steps=10, **SETTINGS), trainer.module()
    trainer.fit(module, callback)
    with pytest.raises(sp.SmartpruneError, match="has pruned its model and baked it"):
        trainer.fit(module, callback)


def test_resuming_without_the_state_of_the_pruner_raises(trainer: Any) -> None:
    """Saved after bake, or by a training without the callback."""
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


def test_copies_have_their_own_hooks(trainer: Any) -> None:
    """A copy loads what the model saves, and is baked separately."""
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
        ({"exclude": "head"}, "no argument 'exclude'; the arguments of attach are block, sparsity, .* include, skip"),
    ],
)
def test_invalid_arguments_raise(given: dict[str, Any], message: str) -> None:
    for name in CALLBACKS:
        with trainers.importable(name) as module, pytest.raises(sp.SmartpruneError, match=message):
            module.PruneCallback(**given)


def test_import_does_not_import_trainers() -> None:
    code = (
        "import sys, smartprune.integrations, smartprune.integrations.ultralytics\n"
        "print(sorted({'lightning', 'pytorch_lightning', 'transformers', 'ultralytics'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_missing_library_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (name, "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"smartprune.integrations.{name}", raising=False)
    with pytest.raises(sp.SmartpruneError, match=f"integrations.{name}: {name} cannot be imported"):
        __import__(f"smartprune.integrations.{name}")


def test_metrics_are_logged(trainer: Any) -> None:
    if not hasattr(trainer, "log"):
        pytest.skip("the real trainers have tests of their own")
    callback, module = trainer.callback(steps=10, **SETTINGS), trainer.module()
    trainer.fit(module, callback)
    log = trainer.log(module)
    assert log["smartprune/progress"][:3] == [0.1, 0.2, 0.3]
    assert log["smartprune/progress"][-1] == 1
    assert log["smartprune/tau"][0] > log["smartprune/tau"][5] > log["smartprune/tau"][-1] == 0
    assert log["smartprune/undecided"][-1] == 0
