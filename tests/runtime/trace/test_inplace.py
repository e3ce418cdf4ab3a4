"""In-place changes: either their order is kept, or the model's own code runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smartprune as sp
from helpers.pruned_models import assert_equal_to_rounding, randomly_pruned
from smartprune.runtime.module import Accelerated


class Net(nn.Module):
    """Two convolutions with in-place operations between them."""

    def __init__(self, between: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.relu = nn.ReLU(inplace=True)
        self.register_buffer("kept", torch.randn(1, 8, 6, 6))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x)))


def on_view(m: Net, y: Tensor) -> Tensor:
    y[:, :4].clamp_(min=0)
    return y


def zeroed(m: Net, y: Tensor) -> Tensor:
    y[:, 1:3].zero_()
    return F.relu(y)


def narrowed(m: Net, y: Tensor) -> Tensor:
    y.narrow(1, 0, 2).mul_(-1)
    return y


def flattened(m: Net, y: Tensor) -> Tensor:
    y.flatten(2).relu_()
    return y


def seen_before(m: Net, y: Tensor) -> Tensor:
    v = y.view(2, 8, 36)
    torch.relu_(y)
    return y + v.view(2, 8, 6, 6)


def by_data(m: Net, y: Tensor) -> Tensor:
    y.data.mul_(2)
    return y


def in_a_list(m: Net, y: Tensor) -> Tensor:
    torch._foreach_mul_([y], 2.0)
    return y


def chunked(m: Net, y: Tensor) -> Tensor:
    a, b = y.chunk(2, 1)
    a.add_(b)
    return y


def given_out(m: Net, y: Tensor) -> Tensor:
    buffer = torch.empty_like(y)
    torch.mul(y, 2.0, out=buffer)
    return buffer + y


def dropped_out(m: Net, y: Tensor) -> Tensor:
    z = F.dropout(y, 0.5, m.training)  # the same memory
    z.sub_(1)
    return y + z


def viewed_before(m: Net, y: Tensor) -> Tensor:
    v = y[:, :4]
    y += 1
    return torch.cat([v, v], 1)


UNSAFE = [on_view, zeroed, narrowed, flattened, seen_before, by_data, in_a_list, chunked, given_out, dropped_out, viewed_before]


def function(m: Net, y: Tensor) -> Tensor:
    torch.relu_(y)
    return y


def positional(m: Net, y: Tensor) -> Tensor:
    F.relu(y, True)
    return y


def method(m: Net, y: Tensor) -> Tensor:
    z = F.relu(y)
    y.sub_(1)
    return z + y


def copied(m: Net, y: Tensor) -> Tensor:
    y = y.clone()
    z = y.relu()
    y.copy_(m.kept.expand(2, -1, -1, -1))
    return y + z


def operators(m: Net, y: Tensor) -> Tensor:
    z = F.relu(y)
    y *= 2
    y -= 1
    y /= 3
    return y + z


def renamed(m: Net, y: Tensor) -> Tensor:
    v = y
    y += 1
    y *= m.last(v)
    return v


def sizes(m: Net, y: Tensor) -> Tensor:
    n = y.shape[2]
    half = n
    half //= 2
    n += 2
    return F.interpolate(F.adaptive_avg_pool2d(y, (half, half)), size=(n, n))


def module(m: Net, y: Tensor) -> Tensor:
    return m.relu(y) + y


def chain(m: Net, y: Tensor) -> Tensor:
    before = y * 3
    y.mul_(2).add_(before).tanh_()
    z = torch.exp(y)
    y.clamp_(0, 0.5).neg_()
    return y * z + before


def of_a_view_alone(m: Net, y: Tensor) -> Tensor:
    z = y.tanh()
    return z[:, :8].sub_(1)


def memory_read_before(m: Net, y: Tensor) -> Tensor:
    z = y.tanh()
    w = F.relu(z)
    return m.last(w) + z.transpose(2, 3).sub_(1)


SAFE = [function, positional, method, copied, operators, renamed, sizes, module, chain, of_a_view_alone, memory_read_before]


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("example", [None, torch.zeros(2, 8, 6, 6), torch.randn(2, 8, 6, 6)], ids=["none", "zeros", "random"])
@pytest.mark.parametrize("between", [*UNSAFE, *SAFE])
@torch.no_grad()
def test_in_place_changes_agree_with_the_model(
    between: Callable[[Net, Tensor], Tensor], example: Tensor | None, backend: str
) -> None:
    model = randomly_pruned(Net(between), 0.3, (4, 4))
    fast = sp.accelerate(model, threads=1, example=example, backend=backend)
    for _ in range(2):
        x = torch.randn(2, 8, 6, 6)
        assert_equal_to_rounding(fast(x), model(x))
    is_fallback = not isinstance(fast, Accelerated) or fast.replaced_model() is not None
    if between in SAFE:
        assert not is_fallback
    elif between is not given_out:  # torch.fx may make the buffer a value, and then there is no in-place change
        assert is_fallback


def test_the_order_is_derived_from_memory_and_not_from_results() -> None:
    """Also where a wrong order gives the same numbers."""

    class Late(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x) * 0.0
            y[:, :4].clamp_(min=0)
            return self.last(y)

    fast = sp.accelerate(Late(on_view), example=torch.zeros(1, 8, 6, 6))
    assert not isinstance(fast, Accelerated)


@torch.no_grad()
def test_in_place_preprocessing_of_inputs() -> None:
    """Another dtype means new memory. Plans do not depend on the strides of inputs."""

    class Prepared(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = x.float()
            x -= 127
            return self.last(self.first(x.div_(64)))

    model, x = randomly_pruned(Prepared(on_view), 0.3, (4, 4)), (torch.rand(2, 8, 6, 6) * 255).to(torch.uint8)
    fast = sp.accelerate(model, threads=1, example=x)
    assert isinstance(fast, Accelerated)
    assert_equal_to_rounding(fast(x), model(x))

    class Contiguous(Net):
        def forward(self, x: Tensor) -> Tensor:
            x.contiguous().sub_(1)
            return self.last(self.first(x))

    model = randomly_pruned(Contiguous(on_view), 0.3, (4, 4))
    x = torch.randn(2, 8, 6, 6)
    fast = sp.accelerate(model, threads=1, example=x.contiguous(memory_format=torch.channels_last))
    assert_equal_to_rounding(fast(x.clone()), model(x.clone()))


@pytest.mark.parametrize("change", [lambda x: x.sub_(1), lambda x: x[:, 0].zero_(), lambda x: F.relu(x, inplace=True)])
@torch.no_grad()
def test_a_model_that_changes_its_inputs_still_does(change: Callable[[Tensor], Tensor]) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            change(x)
            return self.conv(x)

    model = randomly_pruned(Changing(), 0.3, (4, 4))
    example = torch.randn(1, 8, 4, 4)
    before = example.clone()
    fast = sp.accelerate(model, threads=1, example=[(example,)])
    x = torch.randn(1, 8, 4, 4)
    ours, theirs = x.clone(), x.clone()
    assert_equal_to_rounding(fast(ours), model(theirs))
    assert_equal_to_rounding(ours, theirs, 0.0)
    assert not torch.equal(ours, x)
    fast = sp.accelerate(model, threads=1)
    ours = before.clone()
    assert_equal_to_rounding(fast(ours), model(before.clone()))


def test_a_buffer_that_counts_calls() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return self.conv(x)

    fast = sp.accelerate(Counting(), threads=1, example=torch.randn(1, 8, 4, 4))
    before = float(fast.calls)
    fast(torch.randn(1, 8, 4, 4))
    assert float(fast.calls) == before + 1


@pytest.mark.parametrize("between", [on_view, zeroed, viewed_before])
def test_int8_raises_for_unsafe_changes(between: Callable[[Net, Tensor], Tensor]) -> None:
    with pytest.raises(sp.SmartpruneError, match="use float32"):
        sp.accelerate(Net(between), dtype="int8", example=torch.randn(2, 8, 6, 6))


@torch.no_grad()
@pytest.mark.parametrize("between", [method, operators, chain, memory_read_before])
def test_int8_keeps_the_order_of_safe_changes(between: Callable[[Net, Tensor], Tensor]) -> None:
    model, x = randomly_pruned(Net(between), 0.3, (4, 4)), torch.randn(2, 8, 6, 6)
    ours, theirs = sp.accelerate(model, dtype="int8", example=x, threads=1)(x), model(x)
    assert float((ours - theirs).norm() / theirs.norm()) < 0.05
