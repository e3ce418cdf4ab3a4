"""Checks of the order of calls, of optimizers and schedulers, and of blocks that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import smartprune as sp
from smartprune import topk
from smartprune.methods.method import capabilities
from smartprune.pruning import checks, multiply, optimizers


def make() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(8, 16)


class Loop:
    """A user's training loop, one part of a step at a time."""

    def __init__(self, method: object = "smart", steps: int = 300) -> None:
        self.model, self.x = make()
        self.pruner = sp.attach(self.model, method, block=(4, 4), sparsity=0.5, steps=steps)  # type: ignore[arg-type]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()

    def run(self, steps: int, pruner_first: bool = False) -> None:
        """Training that calls the pruner too early, or never."""
        for _ in range(steps):
            self.backward()
            if pruner_first:
                self.pruner.step()
            self.optimizer.step()


@pytest.mark.parametrize("method", ["smart", "gradual"])
def test_two_steps_after_one_optimizer_step_raise(method: str) -> None:
    loop = Loop(method)
    loop.backward()
    loop.optimizer.step()
    loop.pruner.step()
    with pytest.raises(sp.SmartpruneError, match=r"called twice after one optimizer step.*once after each optimizer\.step\(\)"):
        loop.pruner.step()
    assert loop.pruner.count == 1


@pytest.mark.parametrize("method", ["smart", "gradual"])
def test_steps_before_the_optimizer_raise_after_a_few(method: str) -> None:
    loop = Loop(method)
    with pytest.raises(sp.SmartpruneError, match=r"between the forward pass and optimizer\.step\(\).*directly after"):
        loop.run(20, pruner_first=True)
    assert loop.pruner.count < 15


def test_a_pruner_that_never_steps_raises_during_training() -> None:
    loop = Loop()
    before = optimizers.step_count()
    with pytest.raises(sp.SmartpruneError, match=r"200 steps since the last pruner\.step\(\).*step 0 of 300"):
        loop.run(400)
    assert optimizers.step_count() - before == 200


def test_other_models_may_train_while_a_pruner_waits() -> None:
    """A teacher trains for long between attach and the first step."""
    loop, (other, x) = Loop(), make()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
    for _ in range(250):
        other(x).sum().backward()
        optimizer.step()
    loop.backward()
    loop.optimizer.step()
    loop.pruner.step()
    assert loop.pruner.count == 1


def test_a_scaler_may_skip_every_second_step() -> None:
    loop = Loop(steps=20)
    for i in range(20):
        loop.backward()
        if i % 2:
            loop.optimizer.step()
        loop.pruner.step()
    assert loop.pruner.phase == "frozen"


def test_an_evaluation_between_the_two_steps_is_allowed() -> None:
    loop = Loop(steps=20)
    for _ in range(20):
        loop.backward()
        loop.optimizer.step()
        with torch.no_grad():
            loop.model.eval()(loop.x)
        loop.model.train()
        loop.pruner.step()
    assert loop.pruner.phase == "frozen"


def test_blocks_much_larger_than_every_layer_raise() -> None:
    model, _ = make()
    with pytest.raises(sp.SmartpruneError, match=r"blocks of 512x512x1x1 are at least 16 times as large as every layer.*16x16"):
        sp.attach(model, "magnitude", block=(512, 512), sparsity=0.5, steps=1)
    assert sp.find_pruner(model) is None
    sp.attach(model, "magnitude", block=(32, 32), sparsity=0.5, steps=1)


def test_adding_scores_that_an_optimizer_has_already_raises() -> None:
    loop = Loop()
    with pytest.raises(sp.SmartpruneError, match=r"trains the scores already.*remove optimizer\.add_param_group"):
        loop.optimizer.add_param_group(loop.pruner.param_group())
    assert len(loop.optimizer.param_groups) == 1


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    "SWALR": lambda optimizer: SWALR(optimizer, 0.01),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_that_cannot_follow_the_scores_are_named(name: str) -> None:
    """Without the check they raise KeyError or ValueError at their next step."""
    model, _ = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    pruner = sp.attach(model, "smart", block=(4, 4), sparsity=0.5, steps=2)
    with pytest.raises(sp.SmartpruneError, match=rf"a {name} was created for this optimizer.*create the {name} afterwards"):
        optimizer.add_param_group(pruner.param_group())
    del scheduler


def test_schedulers_that_can_follow_the_scores_are_allowed() -> None:
    model, x = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    pruner = sp.attach(model, "smart", block=(4, 4), sparsity=0.5, steps=2)
    optimizer.add_param_group(pruner.param_group())
    model(x).sum().backward()
    optimizer.step()
    scheduler.step()
    pruner.step()


def test_a_plain_model_says_why_it_cannot_load_a_search() -> None:
    loop, (plain, _) = Loop(), make()
    with pytest.raises(sp.SmartpruneError, match=r"4\.smartprune_scores .*saved during a search.*attach with the same arguments"):
        plain.load_state_dict(loop.model.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        plain.load_state_dict({})


class Float64Counter(TorchDispatchMode):
    """Counts operations with float64 results, as a device without such numbers would refuse them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += sum(isinstance(x, torch.Tensor) and x.dtype is torch.float64 for x in tree_leaves(out))
        return out


@pytest.mark.parametrize("name", sp.METHODS)
def test_methods_run_in_plain_torch_and_say_if_they_need_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other devices than CPUs and CUDA GPUs run these paths."""
    kept = {}
    for backend in ("auto", "torch"):
        monkeypatch.setattr(topk, "BACKEND", backend)
        monkeypatch.setattr(multiply, "BACKEND", backend)
        loop = Loop(name, steps=20)
        with Float64Counter() as counter:
            for _ in range(20):
                loop.backward()
                if hasattr(loop.pruner.method, "penalty"):
                    loop.pruner.penalty().backward()
                loop.optimizer.step()
                loop.pruner.step()
            kept[backend] = loop.pruner.mask.clone()
    assert torch.equal(kept["auto"], kept["torch"])
    assert counter.count == 0 or capabilities(loop.pruner.method).needs_float64


@pytest.mark.parametrize("method", [sp.Smart(), sp.Magnitude(norm="l2"), sp.Gradual(norm="balanced"), sp.Magnitude()], ids=repr)
def test_devices_without_float64_are_refused_if_the_method_needs_it(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device, where: str, remedy: str) -> None:
        raise sp.SmartpruneError(f"{where}: refused; {remedy}")

    monkeypatch.setattr(checks, "require_float64", refuse)
    model, x = make()
    if method == sp.Magnitude():
        sp.attach(model, method, block=(4, 4), sparsity=0.5, steps=2)
        model, x = make()
        with pytest.raises(sp.SmartpruneError, match="refused"):
            sp.attach(model, method, block=(4, 4), budget=sp.macs(0.5, example=x), steps=2)
    else:
        with pytest.raises(sp.SmartpruneError, match=r"^attach: refused; .*with one of these methods: magnitude, gradual"):
            sp.attach(model, method, block=(4, 4), sparsity=0.5, steps=2)


def test_the_state_of_a_search_has_the_bytes_per_block_that_the_message_names() -> None:
    """In an error about too many blocks under FSDP2, where every rank holds this state."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    pruner = sp.attach(model, sp.Smart(), block=(1, 1), sparsity=0.5, include="*", steps=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        pruner.step()
        tensors = [*pruner.search.values().values(), *(p.grad for p in pruner.parameters()), pruner.search.telemetry.side]
        tensors += [value for value in vars(pruner.blocks).values() if isinstance(value, torch.Tensor)]
        assert pruner.live.last is not None
        tensors += [pruner.live.last.mask, pruner.live.last.factors]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, torch.Tensor)}
        assert sum(sizes.values()) // pruner.blocks.n == checks.REPLICATED_BYTES
        optimizer.zero_grad()
