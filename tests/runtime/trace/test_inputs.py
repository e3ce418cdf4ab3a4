"""Which calls share a plan: dtypes, structures, and shapes that depend on numbers."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smartprune as sp
from helpers.pruned_models import assert_equal_to_rounding, randomly_pruned
from smartprune.runtime.cpu.program import InputMismatch
from smartprune.runtime.module import MOST_GRAPHS, MOST_PLANS, Accelerated

Pair = collections.namedtuple("Pair", "first second")


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.conv(x) * mask


class Nested(nn.Module):
    """Accepts any container of two tensors."""

    def __init__(self, read: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.read, self.linear = read, nn.Linear(16, 16)

    def forward(self, both: Any) -> Tensor:
        a, b = self.read(both)
        return self.linear(a) + b


@torch.no_grad()
def same(fast: nn.Module, model: nn.Module, *inputs: Any, **named: Any) -> None:
    assert_equal_to_rounding(fast(*inputs, **named), model(*inputs, **named))


def planned(fast: nn.Module) -> Accelerated:
    assert isinstance(fast, Accelerated)
    assert fast.replaced_model() is None
    return fast


def test_inputs_of_other_dtypes() -> None:
    model = randomly_pruned(Masked(), 0.4, (4, 4))
    x, mask = torch.randn(2, 8, 6, 6), torch.rand(2, 8, 6, 6) > 0.5
    fast = sp.accelerate(model, threads=1)
    for other in (mask.float(), mask, mask.long() * 3, mask.to(torch.uint8), mask.float(), mask):
        same(fast, model, x, other)
    assert len(planned(fast)._plans) == 4


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.complex64])
def test_a_dtype_that_the_model_rejects_gives_its_error(dtype: torch.dtype) -> None:
    """The error is that of the model, before and after a successful call."""
    model = randomly_pruned(nn.Sequential(nn.Conv2d(3, 8, 3)), 0.4, (4, 4))
    x = (torch.rand(1, 3, 16, 16) * 9).to(dtype)
    with pytest.raises(RuntimeError) as theirs, torch.no_grad():
        model(x)
    for fast in (sp.accelerate(model, threads=1), sp.accelerate(model, threads=1, example=x.real.float())):
        with pytest.raises(RuntimeError) as ours:
            fast(x)
        assert str(ours.value) == str(theirs.value)


def test_wrong_shapes_give_the_error_of_the_model() -> None:
    model = randomly_pruned(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), 0.4, (4, 4))
    fast = sp.accelerate(model, example=torch.randn(1, 3, 9, 9))
    for x in (torch.randn(1, 4, 9, 9), torch.randn(1, 3, 9, 9, 1), None, "x"):
        with pytest.raises((RuntimeError, TypeError)) as theirs:
            model(x)
        with pytest.raises(theirs.type) as ours:
            fast(x)
        assert str(ours.value) == str(theirs.value)
    same(fast, model, torch.randn(1, 3, 9, 9))


READS: list[tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = [
    (lambda a, b: [a, b], lambda v: (v[0], v[1])),
    (lambda a, b: (a, [b]), lambda v: (v[0], v[1][0])),
    (lambda a, b: {"a": a, "b": (b, None)}, lambda v: (v["a"], v["b"][0])),
    (lambda a, b: collections.OrderedDict(a=a, b=b), lambda v: (v["a"], v["b"])),
    (lambda a, b: Pair(a, b), lambda v: (v.first, v.second)),
]


@pytest.mark.parametrize(("make", "read"), READS)
def test_nested_inputs(make: Callable[[Tensor, Tensor], Any], read: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
    model = randomly_pruned(Nested(read), 0.4, (4, 4))
    fast = sp.accelerate(model, threads=1)
    for rows in (3, 3, 300, 3000, 3):  # the text of large tensors is not a key
        for _ in range(2):
            same(fast, model, make(torch.randn(rows, 16), torch.randn(rows, 16)))
    same(fast, model, make(torch.randn(3, 16), torch.arange(48).reshape(3, 16)))
    assert len(planned(fast)._plans) == 4
    assert len(fast._graphs) == 1
    a, b = torch.randn(3, 16).double(), torch.randn(3, 16).bfloat16()
    assert_equal_to_rounding(fast(make(a, b)), model(make(a.float(), b.float())))


def test_numbers_and_other_constants() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor, times: int = 1, factor: float = 1.0, *, mode: str = "plain", flag: bool = False) -> Tensor:
            for _ in range(times):  # tracing needs the number
                x = self.conv(x) * factor
            return x.relu() if mode == "relu" else -x if flag else x

    model, x = randomly_pruned(Scaled(), 0.4, (4, 4)), torch.randn(1, 8, 4, 4)
    fast = sp.accelerate(model, threads=1, example=x)
    for _ in range(2):
        for args, kwargs in (
            ((), {}),
            ((2,), {}),
            ((3, 0.5), {}),
            ((), {"times": 3, "factor": -0.5}),
            ((), {"factor": 2.0, "times": 2}),
            ((2,), {"mode": "relu"}),
            ((2,), {"flag": True}),
        ):
            same(fast, model, x, *args, **kwargs)
    assert len(planned(fast)._plans) == 7


def test_the_number_of_plans_is_bounded() -> None:
    model = randomly_pruned(nn.Sequential(nn.Linear(8, 8)), 0.4, (4, 4))
    fast = planned(sp.accelerate(model, threads=1))
    for rows in range(1, MOST_PLANS + 9):
        same(fast, model, torch.randn(rows, 8))
        same(fast, model, torch.randn(1, 8))  # recently used plans stay
    assert len(fast._plans) == MOST_PLANS
    assert next(reversed(fast._plans)) == ((tuple, (torch.float32, (1, 8))))

    model = randomly_pruned(Nested(lambda v: (v[0], v[-1])), 0.4, (4, 4))
    fast = planned(sp.accelerate(model, threads=1))
    for count in range(2, MOST_GRAPHS + 6):
        same(fast, model, [torch.randn(2, 16)] * count)
    assert len(fast._graphs) == MOST_GRAPHS


class Chosen(nn.Module):
    """Selects rows by their numbers, as detectors select proposals."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return F.relu(self.b(h[h[:, 0] > 0]))


class Resized(nn.Module):
    """A size depends on numbers, and the inputs of the program keep their shape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        size = x[0, 0, 0].nonzero().shape[0]
        return self.conv(F.adaptive_avg_pool2d(F.interpolate(self.conv(x), size=(size, 8), mode="bilinear"), (size // 2, 4)))


def test_shapes_that_depend_on_numbers() -> None:
    model = randomly_pruned(Chosen(), 0.4, (4, 4))
    fast = sp.accelerate(model, threads=1)
    seen = set()
    for seed in range(12):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
        seen.add(fast(x).shape)
        same(fast, model, x)
    assert len(seen) > 3
    assert len(planned(fast)._plans) == 1
    model.a.bias.data.fill_(-100)
    assert sp.accelerate(model, example=x)(x).shape == (0, 4)  # no rows


def test_sizes_that_depend_on_numbers() -> None:
    model = randomly_pruned(Resized(), 0.4, (4, 4))
    fast = sp.accelerate(model, threads=1)
    for size in (8, 4, 8, 2, 6):
        x = torch.randn(1, 4, 8, 8)
        x[0, 0, 0, size:] = 0
        same(fast, model, x)
    assert planned(fast).plan(x).programs


def test_a_program_rejects_other_tensors() -> None:
    x = torch.randn(2, 8)
    fast = planned(sp.accelerate(randomly_pruned(nn.Sequential(nn.Linear(8, 8)), 0.4, (4, 4)), threads=1))
    plan = fast.plan(x)
    program = plan.programs[0]
    for other in (x.double(), x.to(torch.uint8), x > 0, x[:1], x.T, x[None], x.to("meta"), x.to_sparse(), None, 3):
        with pytest.raises(InputMismatch):
            program.run(fast._pool.address, [other])
    assert_equal_to_rounding(program.run(fast._pool.address, [x])[0], fast(x))


def test_negative_views_and_other_default_dtypes_are_read() -> None:
    """The imaginary part of a conjugate is negated lazily, and outputs do not have the default dtype."""
    model = randomly_pruned(nn.Sequential(nn.Linear(8, 8)), 0.4, (4, 4))
    fast = sp.accelerate(model, threads=1)
    x = torch.randn(3, 8, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    same(fast, model, x)
    torch.set_default_dtype(torch.float64)
    try:
        same(fast, model, torch.randn(3, 8, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)


def test_inference_mode() -> None:
    model = randomly_pruned(nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(inplace=True)), 0.4, (4, 4))
    with torch.inference_mode():
        fast = planned(sp.accelerate(model, threads=1))
        x = torch.randn(1, 8, 4, 4)
        same(fast, model, x)
    same(fast, model, x.clone())


def test_under_autocast() -> None:
    model, x = randomly_pruned(nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU()), 0.4, (4, 4)), torch.randn(1, 8, 4, 4)
    fast = sp.accelerate(model, threads=1)
    with torch.no_grad():
        theirs = model(x)
        with torch.autocast("cpu"):
            ours = planned(fast)(x)
    assert_equal_to_rounding(ours, theirs)
    planned(fast)
