"""Models without a graph, or with a different graph for some calls: they run their own code."""

from __future__ import annotations

import collections
import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smartprune as sp
from helpers.pruned_models import assert_equal_to_rounding, randomly_pruned
from smartprune.runtime.fallback import ReplacedLayer
from smartprune.runtime.module import Accelerated

NT = collections.namedtuple("NT", "a b")


@dataclass
class Box:
    inside: Tensor


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.conv(x)
        if mask is not None:
            x = x * mask
        return x


class Named(Optional):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return F.relu(self.conv(input=x))


class Kinds(Optional):
    def forward(self, x: Tensor | list[Tensor]) -> Tensor:  # type: ignore[override]
        if not isinstance(x, torch.Tensor):
            x = torch.cat(x, 1)
        return self.conv(x)


class Many(Optional):
    def forward(self, *xs: Tensor) -> Tensor:  # type: ignore[override]
        return self.conv(xs[0]) + sum(xs[1:])


class Rest(Optional):
    def forward(self, x: Tensor, **rest: Tensor) -> Tensor:  # type: ignore[override]
        return self.conv(x) + sum(rest.values())


class Encoder(nn.Module):
    """Cannot be traced, and contains modules of torch that read the weights of their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 100:
            x = x[:, :100]
        x = self.layer(x)
        return self.head(self.attention(x, x, x)[0])


class Reads(nn.Module):
    """Cannot be traced, and reads attributes of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        x = F.linear(self.b(x.to(self.b.weight.dtype)), self.a.weight, self.a.bias)
        return x.view(-1, self.b.out_features)


@torch.no_grad()
def same(fast: nn.Module, model: nn.Module, *inputs: Any, **named: Any) -> None:
    assert_equal_to_rounding(fast(*inputs, **named), model(*inputs, **named))


X, Y = torch.randn(2, 2, 8, 6, 6, generator=torch.Generator().manual_seed(1))
CALLS: list[tuple[type[nn.Module], list[tuple[tuple[Any, ...], dict[str, Any]]]]] = [
    (Optional, [((X,), {}), ((X, Y), {}), ((X,), {"mask": Y > 0}), ((X, None), {}), ((X,), {})]),
    (Named, [((X,), {}), ((), {"x": X})]),
    (Kinds, [((X,), {}), (([X[:, :3], X[:, 3:]],), {}), ((X,), {})]),
    (Many, [((X,), {}), ((X, Y), {}), ((X, Y, Y), {})]),
    (Rest, [((X,), {}), ((X,), {"y": Y, "z": X}), ((X,), {"y": Y})]),
    (Encoder, [((torch.randn(2, 5, 16),), {}), ((torch.randn(1, 104, 16),), {})]),
    (Reads, [((torch.randn(2, 16),), {}), ((torch.full((2, 16), 1e9),), {})]),
]


@pytest.mark.parametrize("with_example", [True, False])
@pytest.mark.parametrize(("make", "calls"), CALLS)
def test_all_kinds_of_calls_agree_with_the_model(
    make: type[nn.Module], calls: list[tuple[tuple[Any, ...], dict[str, Any]]], with_example: bool
) -> None:
    model = randomly_pruned(make(), 0.3, (4, 4))
    fast = sp.accelerate(model, threads=1, example=calls[0][0] if with_example and calls[0][0] else None)
    for _ in range(2):
        for args, kwargs in calls:
            same(fast, model, *args, **kwargs)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        same(other, model, *calls[0][0], **calls[0][1])
    if make in (Optional, Named, Many, Rest):  # these have one graph for every kind of call
        assert isinstance(fast, Accelerated)
        assert fast.replaced_model() is None
        assert len(fast.plan(X).programs) == 1


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_wrong_graphs_are_found_with_an_example_of_zeros(dtype: str) -> None:
    """A symbol is not a Tensor, so the traced graph lacks a factor. Zeros hide this, random inputs do not."""

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            if isinstance(x, Tensor):
                x = x * 2
            return self.conv(x)

    model = randomly_pruned(Doubled(), 0.3, (4, 4))
    if dtype == "int8":
        with pytest.raises(sp.SmartpruneError, match="use float32"):
            sp.accelerate(model, dtype=dtype, example=torch.zeros(2, 8, 6, 6))
    else:
        state = torch.get_rng_state()
        fast = sp.accelerate(model, threads=1, example=torch.zeros(2, 8, 6, 6))
        assert torch.equal(torch.get_rng_state(), state)
        same(fast, model, X)


def test_modules_of_torch_are_not_replaced() -> None:
    fast = sp.accelerate(randomly_pruned(Encoder(), 0.3, (4, 4)), example=torch.randn(2, 5, 16))
    assert type(fast.layer.linear1) is nn.Linear
    assert isinstance(fast.head, ReplacedLayer)
    assert fast.head.out_features == 4
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = fast.head.colour


@pytest.mark.parametrize("with_example", [True, False])
def test_the_models_code_can_append_to_a_list_and_its_attributes_can_be_set(with_example: bool) -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.twice = nn.Conv2d(8, 8, 3, padding=1), False

        def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
            out = self.conv(x) if x.sum() < 1e9 else x
            kept.append(out)
            return 2 * out if self.twice else out

    fast, kept = sp.accelerate(Keeping(), threads=1, example=(X, []) if with_example else None), []
    first = fast(X, kept)
    assert len(kept) == 1
    assert kept[0] is first
    fast.twice = True
    assert_equal_to_rounding(fast(X, kept), 2 * first)
    fast.other = 1
    assert fast.other == 1
    copied = copy.deepcopy(fast)
    assert (copied.twice, copied.other) == (True, 1)


@pytest.mark.parametrize("with_example", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_models_code_runs_in_float32_and_eval_mode(dtype: torch.dtype, with_example: bool) -> None:
    """Also without gradients, whatever mode and dtype a surrounding model is set to."""

    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) + self.conv(x) if x.sum() < 1e9 else x

    model, x = randomly_pruned(Choosing(), 0.3, (4, 4)).to(dtype), X.to(dtype)
    with torch.no_grad():
        theirs = model.float()(x.float())
    fast = sp.accelerate(model.to(dtype), threads=1, example=x if with_example else None)
    assert not isinstance(fast, Accelerated)
    outer = nn.Sequential(fast).train().half()
    for run in (fast, outer, copy.deepcopy(outer)):
        assert_equal_to_rounding(run(x.clone().requires_grad_()), theirs)
    assert not fast.training
    assert not fast.norm.training


def test_inputs_of_an_unknown_class() -> None:
    class Boxed(Optional):
        def forward(self, box: Box) -> Tensor:  # type: ignore[override]
            return self.conv(box.inside)

    model = randomly_pruned(Boxed(), 0.3, (4, 4))
    for fast in (sp.accelerate(model, threads=1), sp.accelerate(model, threads=1, example=[(Box(X),)])):
        same(fast, model, Box(X))
        same(fast, model, Box(Y[:1]))
    with pytest.raises(sp.SmartpruneError, match="Box"):
        sp.accelerate(model, dtype="int8", example=[(Box(X),)])


RESULTS = {
    "named tuple": lambda y: NT(y, y + 1),
    "ordered": lambda y: collections.OrderedDict(out=y, a=y + 1),
    "list": lambda y: [y],
    "one": lambda y: (y,),
    "nested": lambda y: {"b": [y, {"a": y.relu()}], "a": (y, None)},
    "nothing": lambda y: None,
    "size": lambda y: y.shape,
    "number": lambda y: (y, y.shape[0], "text", 2.5),
    "default": lambda y: collections.defaultdict(list, a=[y]),
}


def assert_same_containers(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, Tensor):
        assert_equal_to_rounding(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        assert_same_containers(list(ours.values()), list(theirs.values()))
    elif isinstance(theirs, (tuple, list)):
        for a, b in zip(ours, theirs, strict=True):
            assert_same_containers(a, b)
    else:
        assert ours == theirs


@pytest.mark.parametrize("name", RESULTS)
def test_results_have_the_containers_of_the_model(name: str) -> None:
    class Giving(Optional):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return RESULTS[name](self.conv(x))

    model = randomly_pruned(Giving(), 0.3, (4, 4))
    fast = sp.accelerate(model, threads=1)
    with torch.no_grad():
        for _ in range(2):
            assert_same_containers(fast(X), model(X))


def test_results_of_a_custom_class() -> None:
    class Boxing(Optional):
        def forward(self, x: Tensor) -> Box:  # type: ignore[override]
            return Box(self.conv(x))

    model = randomly_pruned(Boxing(), 0.3, (4, 4))
    with torch.no_grad():
        assert_equal_to_rounding(sp.accelerate(model, threads=1, example=X)(Y).inside, model(Y).inside)


def test_forward_hooks_run() -> None:
    model = randomly_pruned(Named(), 0.3, (4, 4))
    model.register_forward_hook(lambda m, args, out: out + 1)
    model.conv.register_forward_hook(lambda m, args, out: out * 2)
    same(sp.accelerate(model, threads=1), model, X)


def test_a_model_that_contains_an_accelerated_one() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.last = inner, nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.relu(self.inner(x)))

    model = Outer(sp.accelerate(randomly_pruned(Named(), 0.3, (4, 4)), threads=2)).eval()
    same(sp.accelerate(model, threads=2), model, X)


def test_int8_with_and_without_a_mask() -> None:
    torch.manual_seed(0)
    model = randomly_pruned(Optional(), 0.3, (4, 4))
    fast = sp.accelerate(model, dtype="int8", example=[X, (Y, X > 0)], threads=1)
    with torch.no_grad():
        for args in ((X,), (Y, X > 0), (X, Y > 0)):
            theirs = model(*args)
            assert float((fast(*args) - theirs).norm() / theirs.norm()) < 0.03
    with pytest.raises(sp.SmartpruneError, match="no example had inputs like these"):
        sp.accelerate(model, dtype="int8", example=X)(X, Y)


def test_tracing_does_not_disturb_other_threads() -> None:
    """torch.fx patches torch.nn.Module while it traces, and other threads run models meanwhile."""
    model, other = randomly_pruned(Optional(), 0.3, (4, 4)), nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    errors: list[BaseException] = []
    stop = threading.Event()

    def run() -> None:
        try:
            while not stop.is_set():
                assert isinstance(other(torch.zeros(1, 4)), Tensor)
        except BaseException as error:  # reported by the main thread
            errors.append(error)

    def plan() -> None:
        try:
            for _ in range(15):
                same(sp.accelerate(model, threads=1), model, X)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=target) for target in (run, plan, plan)]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    stop.set()
    threads[0].join()
    assert not errors
    assert nn.Module.__call__.__module__ == "torch.nn.modules.module"


def test_threads_with_the_same_new_shape_get_their_own_results() -> None:
    """The expected result of the first thread is compared only with its own result."""

    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.conv(x)
            z = y[:, :2]
            z += 1
            return y

    torch.manual_seed(0)
    model = View().eval()
    fast = sp.accelerate(model, threads=1)
    with ThreadPoolExecutor(4) as pool:
        for side in range(6, 12):
            inputs = [torch.randn(1, 8, side, side) for _ in range(4)]
            for x, y in zip(inputs, pool.map(fast, inputs), strict=True):
                assert torch.allclose(y, model(x), atol=1e-5)


class Selects(nn.Module):
    """Sorts many almost equal numbers, as detectors sort boxes: rounding changes the order."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.scores, self.noise = nn.Linear(256, 4096), noise

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().isnan():  # torch.fx cannot trace this
            return x
        scores = self.scores(x)
        order = scores.argsort(-1, descending=True)
        return order.float() + self.noise * torch.rand(order.shape)


def test_a_model_that_sorts_almost_equal_numbers_is_accepted() -> None:
    torch.manual_seed(0)
    model, x = randomly_pruned(Selects(), 0.5), torch.randn(16, 256)
    fast = sp.accelerate(model, example=x)
    same = (fast(x) == model(x)).float().mean()
    assert 0.9 < same < 1  # otherwise nothing is tested
    with pytest.raises(sp.SmartpruneError, match="draw random numbers"):
        sp.accelerate(randomly_pruned(Selects(noise=100), 0.5), example=x)
