"""One pass in lockstep, compared bit for bit with one pass per layer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smartprune as sp
from smartprune.core.block import Block
from smartprune.core.layers import find_layers
from smartprune.pruning.oneshot import job
from smartprune.pruning.oneshot.lockstep import Lockstep, Pass, held_bytes, twin


class Residual(nn.Module):
    """Layers that do not run in the order of their names, a bottleneck, attention, and state kept on the module between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 4)
        self.stem = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.branch = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.saved: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.saved = self.norm(self.stem(x)).relu_()
        x = self.branch(self.saved).relu_()
        x = (self.saved + x).flatten(2).mT
        return self.last((x + self.attention(x, x, x)[0]).mean(1))  # type: ignore[no-any-return]


DATA = [torch.randn(n, 4, 6, 6, generator=torch.Generator().manual_seed(n)) for n in (12, 7, 16, 9)]


def residual() -> nn.Module:
    torch.manual_seed(0)
    return Residual().eval()


def test_lockstep_gives_the_bits_of_one_pass_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    fits = job.Job._fits_in_lockstep

    def noted(self: job.Job) -> bool:
        used.append(fits(self))
        return used[-1]

    models = [residual(), residual()]
    monkeypatch.setattr(job.Job, "_fits_in_lockstep", noted)
    sp.prune(models[0], DATA, (4, 2), 0.5, include="*", floor=0.1)
    monkeypatch.setattr(job.Job, "_fits_in_lockstep", lambda self: False)
    sp.prune(models[1], DATA, (4, 2), 0.5, include="*", floor=0.1)
    assert used == [True]
    for name, value in models[0].state_dict().items():
        assert torch.equal(value, models[1].state_dict()[name]), name


def test_batches_wait_before_each_layer_and_go_on_with_its_new_weight() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).eval()
    layers, _ = find_layers(model, Block(1, 1), include="*")
    x = torch.randn(5, 3)
    with Lockstep((model,), layers, [0, 1], [x[:2], x[2:]], [0.4, 0.6]) as lockstep, torch.no_grad():
        assert torch.equal(torch.cat([rows[0][0][1][0] for rows in lockstep.rows(0)]), x)
        model[0].weight.mul_(2)  # type: ignore[operator, union-attr]
        second = torch.cat([rows[0][0][1][0] for rows in lockstep.rows(1)])
    assert torch.allclose(second, x @ model[0].weight.T)  # type: ignore[operator, union-attr, index]


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) if float(x.sum()) > 0 else self.b(self.a(x))  # type: ignore[no-any-return]


def test_layers_that_not_every_batch_reaches_are_read_where_they_run() -> None:
    model = Sometimes().eval()
    layers, _ = find_layers(model, Block(1, 1), include="*")
    x = torch.rand(4, 3) + 0.1
    with Lockstep((model,), layers, [0, 1], [x, -x], [0.5, 0.5]) as lockstep:
        assert [len(rows[0]) for rows in lockstep.rows(0)] == [0, 1]
        assert [len(rows[0]) for rows in lockstep.rows(1)] == [1, 1]


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if len(x) == 2:
            raise ValueError("two samples")
        return self.b(x)  # type: ignore[no-any-return]


def test_an_error_in_one_batch_is_raised_and_all_threads_end() -> None:
    model, before = Fails().eval(), threading.active_count()
    layers, _ = find_layers(model, Block(1, 1), include="*")
    batches = [torch.randn(n, 3) for n in (4, 2, 4)]
    with Lockstep((model,), layers, [0, 1], batches, [1.0] * 3) as lockstep:
        assert len(list(lockstep.rows(0))) == 3
        with pytest.raises(sp.SmartpruneError, match="does not run on it"):
            list(lockstep.rows(1))
    assert threading.active_count() == before
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_closed_pass_ends_without_an_error() -> None:
    layers, _ = find_layers(nn.Sequential(nn.Linear(3, 3)), Block(1, 1), include="*")
    unstarted = Pass(nn.Sequential(nn.Linear(3, 3)), layers, torch.randn(2, 3))
    unstarted.close()
    assert unstarted.thread is None


def test_a_twin_shares_parameters_and_can_share_buffers() -> None:
    model = residual()
    for buffers in (True, False):
        other: Any = twin(model, buffers)
        assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
        assert (other.norm.running_mean is model.norm.running_mean) == buffers
        assert not set(map(id, model.modules())) & set(map(id, other.modules()))


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.extra = model[0].weight * 2
    with pytest.raises(sp.SmartpruneError, match="the model cannot be copied"):
        sp.prune(model, [torch.randn(8, 8)], (4, 4), 0.5)


def test_held_bytes_are_the_activations_that_wait() -> None:
    """A chain holds one input at a time, and a residual connection one more."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(100, 100), nn.Linear(100, 100)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return y + self.b(y.relu())  # type: ignore[no-any-return]

    x = torch.randn(1, 100)
    for model, tensors in ((nn.Sequential(*[nn.Linear(100, 100) for _ in range(4)]), 2), (Skip(), 3)):
        layers, _ = find_layers(model, Block(1, 1), include="*")
        assert held_bytes(model.eval(), layers, x) == tensors * x.nbytes


def test_little_memory_needs_one_pass_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lockstep, "rows", None)  # would fail
    model = residual()
    receipt = sp.prune(model, DATA, (4, 2), 0.5, include="*", floor=0.1, memory=1e-5)
    assert sp.verify(model, receipt=receipt).ok
