"""Networks with GPU layers, on the GPU, in the interpreter of Triton (in a child process), and with dense layers on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.pruned_weights import randomly_pruned_weight
from helpers.triton_interpreter import INTERPRETED, loaded_loop_bounds, needs_interpreter, needs_triton, run_interpreted  # noqa: F401 (a fixture)
from helpers.triton_interpreter import on_gpu as on_gpu_machine
from smartprune import SmartpruneError
from smartprune.runtime.gpu import network
from smartprune.runtime.gpu.layers import Dense
from smartprune.runtime.gpu.network import on_gpu
from smartprune.runtime.module import Options

FLOAT = Options("float32", 1, False)


@needs_triton
def test_networks_in_the_interpreter() -> None:
    run_interpreted(__file__)


class Net(nn.Module):
    """One layer of every kind that is handled differently."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(3, 20, 3, padding=1), nn.BatchNorm2d(20)
        self.c2, self.b2 = nn.Conv2d(20, 20, 3, padding=1, bias=False), nn.BatchNorm2d(20)
        self.depthwise, self.c3 = nn.Conv2d(20, 20, 3, 2, 1, groups=20), nn.Conv2d(20, 24, 1)
        self.c4, self.act = nn.Conv2d(24, 24, 5, 2, 4, dilation=2), nn.SiLU()
        self.grouped, self.same = nn.Conv2d(24, 24, 3, padding=1, groups=4), nn.Conv2d(24, 32, (3, 1), padding="same")
        self.fc, self.fc2 = nn.Linear(32, 24), nn.Linear(24, 7)
        self.register_buffer("shift", torch.randn(7))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.b1(self.c1(x)))
        x = torch.relu(self.b2(self.c2(x)) + x)
        x = self.c3(F.relu6(self.depthwise(x)))
        x = self.act(self.c4(x))
        features = self.same(self.grouped(x) + x)
        return self.fc2(F.gelu(self.fc(features.mean((2, 3))))) + self.shift, features


def make_network() -> Net:
    torch.manual_seed(2)
    net = Net().eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 2)
        elif isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1):
            module.weight.data = randomly_pruned_weight(module.weight.data, 0.5)
    return net


@needs_interpreter
def test_a_network_agrees_with_torch() -> None:
    net, x = make_network(), torch.randn(3, 3, 9, 11)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    fast = on_gpu(net, [(x,)], FLOAT, device="cpu")
    kinds = [type(module).__name__ for module in fast.children()]
    assert kinds.count("Sparse") == 7
    assert kinds.count("Dense") == 1
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fast.modules())
    for size in ((3, 3, 9, 11), (1, 3, 14, 8)):
        x = torch.randn(size)
        for ours, theirs in zip(fast(x), net(x), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_missing_requirements_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_network()
    with pytest.raises(SmartpruneError, match="needs example="):
        on_gpu(net, [], FLOAT)
    with pytest.raises(SmartpruneError, match="dtype='int8' on a GPU; it is one of float32, bfloat16, float16"):
        on_gpu(net, [(torch.zeros(1, 3, 8, 8),)], Options("int8", 1, False))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SmartpruneError, match="finds no CUDA device"):
        on_gpu(net, [(torch.zeros(1, 3, 8, 8),)], FLOAT)


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float64])
@torch.no_grad()
def test_examples_of_all_floating_dtypes(given: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses dense layers on the CPU, which need neither a GPU nor Triton."""
    monkeypatch.setattr(network, "choose_layer", lambda step, shapes, dtype, device: Dense(step, shapes[step.node], dtype))
    net, x = make_network(), torch.randn(2, 3, 9, 11).to(given)
    fast = on_gpu(net.to(given), [(x,)], Options("bfloat16", 1, False), "cpu")
    for ours, theirs in zip(fast(x), net.float()(x.float()), strict=True):
        assert ours.dtype is torch.bfloat16
        assert float((ours.float() - theirs).abs().max()) < 0.1 * float(theirs.abs().max())


@pytest.mark.gpu
@on_gpu_machine
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gpu_network_agrees_with_torch(dtype: str) -> None:
    net, x = make_network().cuda(), torch.randn(8, 3, 40, 44, device="cuda")
    fast = on_gpu(net, [(x,)], Options(dtype, 1, False))
    for ours, theirs in zip(fast(x), net(x), strict=True):
        assert float((ours.float() - theirs).detach().abs().max()) < network.TOLERANCE[network.DTYPES[dtype]] * float(
            theirs.detach().abs().max()
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_place_changes_keep_their_order(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses dense layers on the CPU, which need neither a GPU nor Triton."""

    class Net(nn.Module):
        def __init__(self, hidden: bool) -> None:
            super().__init__()
            self.a, self.b, self.hidden = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1), hidden

        def forward(self, x: Tensor) -> Tensor:
            z = torch.tanh(self.a(x))
            w = self.b(z)
            if self.hidden:
                z[:, :4].sub_(1)
            else:
                z.sub_(1)
            return F.relu(w) + z

    monkeypatch.setattr(network, "choose_layer", lambda step, shapes, dtype, device: Dense(step, shapes[step.node], dtype))
    model, x = Net(False).eval(), torch.randn(2, 8, 6, 6)
    options = Options(dtype, 1, False)
    with torch.no_grad():
        ours, theirs = on_gpu(model, [(x,)], options, "cpu")(x).float(), model(x)
    assert float((ours - theirs).abs().max()) < (1e-4 if dtype == "float32" else 5e-2)
    with pytest.raises(SmartpruneError, match="under another name"):
        on_gpu(Net(True).eval(), [(x,)], options, "cpu")


def dense_unless_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs layers on the CPU: sparse ones in the interpreter, otherwise dense ones, which need neither a GPU nor Triton."""
    if not INTERPRETED:
        monkeypatch.setattr(network, "choose_layer", lambda step, shapes, dtype, device: Dense(step, shapes[step.node], dtype))


class Pixel(nn.Module):
    """The result of a linear layer becomes a map of one pixel, which a convolution reads or is added to."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.fc, self.conv, self.adds = nn.Linear(8, 16), nn.Conv2d(8 if adds else 16, 16, 1), adds

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).reshape(-1, 16, 1, 1)
        return self.conv(x.reshape(-1, 8, 1, 1)) + y if self.adds else torch.relu(self.conv(y))


@pytest.mark.parametrize("adds", [False, True])
@torch.no_grad()
def test_rows_can_become_maps_of_one_pixel(adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dense_unless_interpreted(monkeypatch)
    torch.manual_seed(0)
    net = Pixel(adds)
    fast = on_gpu(net, [(torch.randn(2, 8),)], FLOAT, "cpu")
    for batch in (2, 3, 0):
        x = torch.randn(batch, 8)
        assert fast(x).shape == net(x).shape
        assert torch.allclose(fast(x), net(x), atol=1e-5)


class Spread(nn.Module):
    """Sums that torch broadcasts over images, pixels or tokens, unless there is only one."""

    def __init__(self, kind: str, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.kind, self.after = kind, after
        self.a, self.b = (nn.Linear(8, 16), nn.Linear(8, 16)) if kind == "tokens" else (nn.Conv2d(8, 16, 1), nn.Conv2d(8, 16, 1))
        self.place = nn.Parameter(torch.randn(1, 8) if kind == "tokens" else torch.randn(1, 16, 3, 5))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "images":
            return self.after(self.a(x) + self.place)
        if self.kind == "activated":
            return self.after(self.a(x)) + self.place
        if self.kind == "tokens":
            return self.after(self.a(x) + self.b(x[:, :1]))
        whole, mean = self.a(x), x.mean((2, 3), keepdim=True)
        return self.after(whole + self.b(mean) if self.kind == "pixels" else self.b(mean) + self.a(x))


@pytest.mark.parametrize("after", [torch.relu, F.silu, F.gelu])
@pytest.mark.parametrize("kind", ["images", "activated", "tokens", "pixels", "pixels first"])
@torch.no_grad()
def test_sums_are_broadcast_where_the_example_has_size_one(
    kind: str, after: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    dense_unless_interpreted(monkeypatch)
    torch.manual_seed(0)
    net = Spread(kind, after)
    example, sizes = {
        "images": ((1, 8, 3, 5), [(3, 8, 3, 5)]),
        "activated": ((1, 8, 3, 5), [(3, 8, 3, 5)]),
        "tokens": ((2, 1, 8), [(2, 4, 8), (3, 1, 8)]),
        "pixels": ((2, 8, 1, 1), [(2, 8, 3, 5), (3, 8, 1, 1)]),
        "pixels first": ((2, 8, 1, 1), [(2, 8, 3, 5), (3, 8, 1, 1)]),
    }[kind]
    fast = on_gpu(net, [(torch.randn(example),)], FLOAT, "cpu")
    for size in (example, *sizes):
        x = torch.randn(size)
        assert fast(x).shape == net(x).shape
        assert torch.allclose(fast(x), net(x), atol=1e-5)


@pytest.mark.parametrize(
    ("net", "example", "wrong"),
    [
        (nn.Conv2d(3, 16, 3), (1, 3, 8, 8), [(1, 4, 8, 8), (1, 1, 8, 8), (1, 3, 2, 2)]),
        (nn.Linear(8, 16), (2, 8), [(2, 4), (2, 9), (2, 2, 2, 2), (2, 1, 1, 8)]),  # with four axes, only a single pixel fits
        (nn.Linear(8, 16), (2, 3, 8), [(2, 3, 4)]),
        (nn.Sequential(nn.Conv2d(8, 16, 1), nn.Flatten(), nn.Linear(16, 5)), (2, 8, 1, 1), [(2, 8, 2, 2)]),
    ],
)
def test_inputs_that_do_not_fit_are_an_error(
    net: nn.Module, example: tuple[int, ...], wrong: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dense_unless_interpreted(monkeypatch)
    fast = on_gpu(net, [(torch.randn(example),)], FLOAT, "cpu")
    for size in wrong:
        with pytest.raises(SmartpruneError, match=r"channels and a \dx\d kernel got an input of"):
            fast(torch.randn(size))


class Flattened(nn.Module):
    """Convolutions with a result of one pixel, which is flattened before the next operation."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.a, self.b, self.adds = nn.Conv2d(3, 16, 3), nn.Conv2d(3, 16, 5, padding=1), adds

    def forward(self, x: Tensor) -> Tensor:
        out = self.a(x).flatten(1)
        return torch.relu(out + self.b(x).flatten(1)) if self.adds else torch.relu(out)


@pytest.mark.parametrize("adds", [False, True])
@torch.no_grad()
def test_convolutions_can_return_rows(adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dense_unless_interpreted(monkeypatch)
    torch.manual_seed(0)
    net = Flattened(adds)
    fast = on_gpu(net, [(torch.randn(2, 3, 3, 3),)], FLOAT, "cpu")
    for batch in (2, 1, 0):
        x = torch.randn(batch, 3, 3, 3)
        assert fast(x).shape == net(x).shape
        assert torch.allclose(fast(x), net(x), atol=1e-5)


class Squeezed(nn.Module):
    """With one image, the result has no batch axis, as in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.gate = nn.Conv2d(3, 16, 3), nn.Linear(16, 5), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.conv(x), 1).squeeze()
        return torch.relu(self.fc(x) + self.gate(x))


@torch.no_grad()
def test_linear_layers_accept_other_numbers_of_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    dense_unless_interpreted(monkeypatch)
    torch.manual_seed(0)
    for net, example, sizes in (
        (Squeezed(), (2, 3, 8, 8), [(1, 3, 8, 8), (3, 3, 6, 6)]),
        (nn.Linear(8, 16), (2, 8), [(8,), (2, 1, 8), (2, 3, 8), (0, 8)]),
        (nn.Linear(8, 16), (2, 3, 8), [(8,), (4, 8), (2, 0, 8), (1, 2, 3, 8)]),
    ):
        fast = on_gpu(net, [(torch.randn(example),)], FLOAT, "cpu")
        for size in (example, *sizes):
            x = torch.randn(size)
            assert fast(x).shape == net(x).shape
            assert torch.allclose(fast(x), net(x), atol=1e-5)
