"""GPU layers: in the interpreter of Triton where there is no GPU (in a child process), else on the GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.triton_interpreter import INTERPRETED, loaded_loop_bounds, needs_interpreter, needs_triton, run_interpreted  # noqa: F401 (a fixture)
from helpers.triton_interpreter import on_gpu as on_gpu_machine
from smartprune import SmartpruneError
from smartprune.runtime.gpu import network
from smartprune.runtime.gpu.layers import TILES, Dense, KeptBlocks, Sparse, Tile
from smartprune.runtime.gpu.network import on_gpu
from smartprune.runtime.lower.steps import IDENTITY, Activation, Step
from smartprune.runtime.module import Options

FLOAT = Options("float32", 1, False)


@needs_triton
def test_layers_in_the_interpreter() -> None:
    run_interpreted(__file__)


def pruned(weight: Tensor, keep: float, block: tuple[int, int] = (16, 8)) -> Tensor:
    """The weight with blocks removed at random."""
    out, channels = weight.shape[:2]
    mask = (torch.rand(-(-out // block[0]), -(-channels // block[1]), *weight.shape[2:]) < keep).to(weight.dtype)
    return weight * mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:out, :channels]


def step(weight: Tensor, bias: Tensor, adding: str, activation: Activation, **window: int) -> Step:
    kh, kw = weight.shape[2:]
    window = {"kh": kh, "kw": kw, "sh": 1, "sw": 1, "ph": 0, "pw": 0, "dh": 1, "dw": 1} | window
    return Step("conv", None, [], weight=weight.numpy(), bias=bias.numpy(), activation=activation, addition=adding, window=window)  # type: ignore[arg-type]


def test_table_holds_every_kept_block_once() -> None:
    torch.manual_seed(0)
    weight = pruned(torch.randn(40, 20, 3, 2), 0.3)
    weight[16:32] = 0  # a row without blocks still has a step
    kept = KeptBlocks(weight)
    for size in (1, 2, 4):
        for group in (1, 2, 3):
            begins, finished, place, column, values = kept.table(size, group)
            again = torch.zeros(48, 24, 3, 2)
            row = 0
            for s in range(len(finished)):
                for k in range(s * size, s * size + size):
                    if place[k] >= 0:
                        y, z = int(place[k]) // 2, int(place[k]) % 2
                        again[row * 16 : row * 16 + 16, column[k] * 8 : column[k] * 8 + 8, y, z] += values[k].T
                    else:
                        assert not values[k].any()
                if finished[s] >= 0:
                    assert finished[s] == row
                    assert row % group != group - 1 or s + 1 in begins.tolist()
                    row += 1
            assert row == kept.rows
            assert torch.equal(again[:40, :20], weight)
            assert len(place) == (int(begins[-1]) + 2) * size == len(values)


def test_weights_are_held_once_for_inputs_of_all_widths() -> None:
    torch.manual_seed(0)
    weight, bias = pruned(torch.randn(40, 20, 3, 2), 0.3), torch.zeros(40)
    layer, fresh = (Sparse(step(weight, bias, "none", IDENTITY, ph=1), (1, 20, 8, 8), torch.float32) for _ in range(2))
    tables = [layer._table(width, torch.device("cpu")) for width in (8, 9, 10)]
    assert len({table[0].data_ptr() for table in tables}) == 1
    assert len({table[3].data_ptr() for table in tables}) == 3
    for ours, theirs in zip(tables[-1], fresh._table(10, torch.device("cpu")), strict=True):
        assert torch.equal(ours, theirs)


def test_two_threads_may_bring_new_widths_at_once() -> None:
    layer = Sparse(step(torch.ones(16, 8, 1, 1), torch.zeros(16), "none", IDENTITY), (1, 8, 8, 8), torch.float32)

    class Meanwhile:
        """A tile at whose comparison another thread adds a table."""

        __hash__ = object.__hash__

        def __eq__(self, other: object) -> bool:
            layer.tables[9, self] = ()
            return False

    layer.tables = {(width, Meanwhile()): () for width in (7, 8)}
    assert len(layer._table(8, torch.device("cpu"))) == 5


CASES = [  # out, in, kernel, stride, padding, dilation, height, width
    (32, 16, (3, 3), 1, 1, 1, 9, 7),
    (20, 24, (3, 3), 2, 1, 1, 8, 8),
    (16, 20, (1, 1), 1, 0, 1, 5, 5),
    (40, 16, (5, 5), 2, 2, 2, 13, 12),
    (33, 9, (3, 1), 1, 0, 1, 6, 6),
    (16, 3, (7, 7), 3, 3, 1, 11, 10),
]


ENDS = [
    ("none", IDENTITY),
    ("before", Activation("clamp", 0.0)),
    ("after", Activation("silu")),
    ("before", Activation("clamp", 0.0, 6.0)),
    ("after", Activation("gelu")),
    ("none", Activation("leaky", slope=0.1)),
]


@needs_interpreter
@pytest.mark.parametrize(("case", "adding", "activation"), [(case, *end) for case, end in zip(CASES, ENDS, strict=True)])
def test_sparse_layer(case: tuple[int, int, tuple[int, int], int, int, int, int, int], adding: str, activation: Activation) -> None:
    out, channels, kernel, stride, padding, dilation, height, width = case
    torch.manual_seed(out)
    weight, bias = pruned(torch.randn(out, channels, *kernel), 0.4), torch.randn(out)
    weight[16:32] = 0
    x = torch.randn(3, channels, height, width)
    plain = F.conv2d(x, weight, bias, stride, padding, dilation)
    other = torch.randn_like(plain)
    window = {"sh": stride, "sw": stride, "ph": padding, "pw": padding, "dh": dilation, "dw": dilation}
    made = step(weight, bias, adding, activation, **window)
    named = {"silu": F.silu, "gelu": F.gelu, "leaky": lambda v: F.leaky_relu(v, 0.1)}
    act = named.get(activation.name, lambda v: v.clamp(activation.low, activation.high))
    expected = {"none": lambda: act(plain), "before": lambda: act(plain + other), "after": lambda: act(plain) + other}[adding]()
    given = (x,) if adding == "none" else (x, other)
    assert torch.allclose(Dense(made, plain.shape, torch.float32)(*given), expected, atol=1e-4)
    for tile in (Tile(16, 2, 1, 1), Tile(32, 4, 1, 2)):
        layer = Sparse(made, plain.shape, torch.float32, tile)
        assert torch.allclose(layer(*given), expected, atol=1e-4)


@needs_interpreter
def test_linear_on_rows_and_half_precision() -> None:
    torch.manual_seed(1)
    weight, bias, x = pruned(torch.randn(24, 40, 1, 1), 0.5), torch.randn(24), torch.randn(2, 5, 40)
    made = step(weight, bias, "none", IDENTITY)
    made.rows = True
    expected = F.linear(x, weight[:, :, 0, 0], bias)
    assert torch.allclose(Sparse(made, (2, 5, 24), torch.float32, Tile(16, 2, 1, 1))(x), expected, atol=1e-4)
    half = Sparse(made, (2, 5, 24), torch.float16, Tile(16, 2, 1, 1))(x.half())
    assert half.dtype == torch.float16
    assert torch.allclose(half.float(), expected, atol=0.05)


class Net(nn.Module):
    """Layers of every kind that is treated in its own way."""

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
            module.weight.data = pruned(module.weight.data, 0.5)
    return net


@needs_interpreter
def test_whole_network() -> None:
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


def test_what_a_gpu_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_an_example_of_any_floating_dtype(given: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU. Dense layers on the CPU, so that neither a GPU nor Triton is needed."""
    monkeypatch.setattr(network, "choose_layer", lambda step, shapes, dtype, device: Dense(step, shapes[step.node], dtype))
    net, x = make_network(), torch.randn(2, 3, 9, 11).to(given)
    fast = on_gpu(net.to(given), [(x,)], Options("bfloat16", 1, False), "cpu")
    for ours, theirs in zip(fast(x), net.float()(x.float()), strict=True):
        assert ours.dtype is torch.bfloat16
        assert float((ours.float() - theirs).abs().max()) < 0.1 * float(theirs.abs().max())


@pytest.mark.gpu
@on_gpu_machine
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gpu_whole_network(dtype: str) -> None:
    net, x = make_network().cuda(), torch.randn(8, 3, 40, 44, device="cuda")
    fast = on_gpu(net, [(x,)], Options(dtype, 1, False))
    for ours, theirs in zip(fast(x), net(x), strict=True):
        assert float((ours.float() - theirs).detach().abs().max()) < network.TOLERANCE[network.DTYPES[dtype]] * float(
            theirs.detach().abs().max()
        )


@pytest.mark.gpu
@on_gpu_machine
@pytest.mark.parametrize("case", CASES)
def test_gpu_every_tile(case: tuple[int, int, tuple[int, int], int, int, int, int, int]) -> None:
    out, channels, kernel, stride, padding, dilation, height, width = case
    torch.manual_seed(out)
    weight, bias, x = pruned(torch.randn(out, channels, *kernel), 0.4), torch.randn(out), torch.randn(70, channels, height, width)
    plain = F.conv2d(x, weight, bias, stride, padding, dilation)
    window = {"sh": stride, "sw": stride, "ph": padding, "pw": padding, "dh": dilation, "dw": dilation}
    made = step(weight, bias, "none", Activation("clamp", 0.0), **window)
    for tile in TILES:
        layer = Sparse(made, plain.shape, torch.bfloat16, tile).cuda()
        got = layer(x.cuda().bfloat16()).float().cpu()
        assert float((got - plain.relu()).abs().max()) < 0.03 * float(plain.max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_changes_in_place_stay_in_order(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense layers on the CPU, so that neither a GPU nor Triton is needed."""

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
    """Layers run on the CPU: sparse ones in the interpreter, else dense ones, which need neither a GPU nor Triton."""
    if not INTERPRETED:
        monkeypatch.setattr(network, "choose_layer", lambda step, shapes, dtype, device: Dense(step, shapes[step.node], dtype))


class Pixel(nn.Module):
    """What a linear layer gives becomes a map of one pixel, which a convolution reads or is added to."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.fc, self.conv, self.adds = nn.Linear(8, 16), nn.Conv2d(8 if adds else 16, 16, 1), adds

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).reshape(-1, 16, 1, 1)
        return self.conv(x.reshape(-1, 8, 1, 1)) + y if self.adds else torch.relu(self.conv(y))


@pytest.mark.parametrize("adds", [False, True])
@torch.no_grad()
def test_rows_of_numbers_become_pixels(adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dense_unless_interpreted(monkeypatch)
    torch.manual_seed(0)
    net = Pixel(adds)
    fast = on_gpu(net, [(torch.randn(2, 8),)], FLOAT, "cpu")
    for batch in (2, 3, 0):
        x = torch.randn(batch, 8)
        assert fast(x).shape == net(x).shape
        assert torch.allclose(fast(x), net(x), atol=1e-5)


class Spread(nn.Module):
    """Sums that torch spreads over images, pixels or tokens, unless the example has one of them."""

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
def test_sums_that_are_spread_where_the_example_has_one(
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
        (nn.Linear(8, 16), (2, 8), [(2, 4), (2, 9), (2, 2, 2, 2), (2, 1, 1, 8)]),  # of four axes, only a pixel
        (nn.Linear(8, 16), (2, 3, 8), [(2, 3, 4)]),
        (nn.Sequential(nn.Conv2d(8, 16, 1), nn.Flatten(), nn.Linear(16, 5)), (2, 8, 1, 1), [(2, 8, 2, 2)]),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    net: nn.Module, example: tuple[int, ...], wrong: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dense_unless_interpreted(monkeypatch)
    fast = on_gpu(net, [(torch.randn(example),)], FLOAT, "cpu")
    for size in wrong:
        with pytest.raises(SmartpruneError, match=r"channels and a \dx\d kernel got an input of"):
            fast(torch.randn(size))


class Flattened(nn.Module):
    """Convolutions that make one pixel of a picture; what follows them comes after it was laid flat."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.a, self.b, self.adds = nn.Conv2d(3, 16, 3), nn.Conv2d(3, 16, 5, padding=1), adds

    def forward(self, x: Tensor) -> Tensor:
        out = self.a(x).flatten(1)
        return torch.relu(out + self.b(x).flatten(1)) if self.adds else torch.relu(out)


@pytest.mark.parametrize("adds", [False, True])
@torch.no_grad()
def test_a_convolution_may_give_rows(adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dense_unless_interpreted(monkeypatch)
    torch.manual_seed(0)
    net = Flattened(adds)
    fast = on_gpu(net, [(torch.randn(2, 3, 3, 3),)], FLOAT, "cpu")
    for batch in (2, 1, 0):
        x = torch.randn(batch, 3, 3, 3)
        assert fast(x).shape == net(x).shape
        assert torch.allclose(fast(x), net(x), atol=1e-5)


class Squeezed(nn.Module):
    """With one image it gives one row of numbers without a batch, as torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.gate = nn.Conv2d(3, 16, 3), nn.Linear(16, 5), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.conv(x), 1).squeeze()
        return torch.relu(self.fc(x) + self.gate(x))


@torch.no_grad()
def test_axes_of_a_linear_layer_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
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
