"""Networks whose operations have no kernel of their own: they are written with those that have one, or as tables of positions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smartprune as sp
from helpers.exported_c import FLAGS, SANITIZE, STRICT, Written, needs_compiler, relative_errors
from helpers.pruned_models import randomly_pruned
from smartprune.runtime.c_source.graph import Graph

MAPS = torch.randn(2, 12, 6, 8, generator=torch.Generator().manual_seed(3))
ROWS = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(4))
SIGNALS = torch.randn(2, 6, 24, generator=torch.Generator().manual_seed(5))


class Model(nn.Module):
    """A function of some layers."""

    def __init__(self, function: Callable[..., object], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Tensor) -> object:
        return self.function(self, *inputs)


def moves(m: Model, x: Tensor) -> list[Tensor]:
    """Reshaping, slicing and padding; most of them before another operation."""
    y = m.conv(x)
    n, c, h, w = y.shape
    first, second = y.chunk(2, 1)
    return [
        m.head(F.relu(y).flatten(1)),
        m.head(torch.tanh(y).view(n, -1)),
        first * second.sigmoid(),
        y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w),
        y.view(n, 4, 3, h, w).permute(0, 1, 3, 4, 2).contiguous(),
        m.norm(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) + x,
        m.rows(y.flatten(2).transpose(1, 2)),
        torch.cat([y[..., ::2, ::2], y[..., 1::2, 1::2]], 1),
        F.pad(y, (1, 0, 2, 1)),
        F.pad(y, (1, 2, 1, 1), mode="reflect"),
        F.pixel_shuffle(y, 2),
        F.interpolate(y, size=(7, 11)),
        y * y.mean((2, 3), keepdim=True).expand_as(y),
        F.adaptive_max_pool2d(y, 1),
        y.amax((2, 3)),
    ]


def layers(m: Model, x: Tensor) -> list[Tensor]:
    return [layer(x) for layer in m.children()]


def activations(m: Model, x: Tensor) -> list[Tensor]:
    y = m.conv(x) * 3.0
    functions = (
        torch.tanh,
        F.elu,
        F.mish,
        m.prelu,
        m.slopes,
        m.selu,
        lambda v: F.elu(v, 0.3),
        lambda v: F.gelu(v, approximate="tanh"),
    )
    numbers = [(y - m.shift) / m.scale, 1.5 - y, y - x[:, :12], -y, y / 4.0]
    return [*(f(y) for f in functions), *numbers, y.softmax(1), F.log_softmax(y, dim=1)]


def rows(m: Model, x: Tensor) -> Tensor:
    """A block of an MLP mixer."""
    x = x + m.tokens(m.first(x).transpose(1, 2)).transpose(1, 2)
    return (x + F.gelu(m.channels(m.second(x)))).softmax(-1)


def signals(m: Model, x: Tensor) -> list[Tensor]:
    x = (x - 0.1) / 0.5
    y = F.relu(m.norm(m.conv(x)))
    z = torch.cat([m.group(y), y], 1)
    pooled = F.avg_pool1d(m.pool(z), 2)
    return [m.head(pooled.mean(-1)), m.last(pooled.flatten(1)), m.reflect(x), m.frames(y.transpose(1, 2)), m.depthwise(y) + y]


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    transposed = {
        f"layer{number}": nn.ConvTranspose2d(12, *settings)
        for number, settings in enumerate(
            (
                (16, 2, 2),
                (5, 3, 2, 1, 1),
                (16, 4, 2, 1, 0, 2),
                (8, 5, 3, 0, 2, 4),
                (8, 1, 2),
                (8, 2, 2, 0, 1),
                (8, (2, 3), (1, 3), (0, 1), (0, 2)),
            )
        )
    }
    padded = {mode: nn.Conv2d(12, 20, (3, 5), padding=(1, 2), padding_mode=mode) for mode in ("reflect", "replicate", "circular")}
    pointwise = Model(activations, conv=nn.Conv2d(12, 12, 1), prelu=nn.PReLU(), slopes=nn.PReLU(12), selu=nn.SELU())
    pointwise.register_buffer("shift", torch.rand(1, 12, 1, 1))
    pointwise.register_parameter("scale", nn.Parameter(0.5 + torch.rand(12, 1, 1)))
    return {
        "moves": (
            Model(
                moves, conv=nn.Conv2d(12, 12, 3, padding=1), head=nn.Linear(576, 7), norm=nn.LayerNorm(12), rows=nn.Linear(12, 5)
            ),
            MAPS,
        ),
        "layers": (Model(layers, **transposed, **padded), MAPS),
        "activations": (pointwise, MAPS),
        "rows": (
            Model(
                rows,
                first=nn.LayerNorm(16),
                tokens=nn.Linear(5, 5),
                second=nn.LayerNorm(16, bias=False),
                channels=nn.Linear(16, 16),
            ),
            ROWS,
        ),
        "signals": (
            Model(
                signals,
                conv=nn.Conv1d(6, 16, 5, 2, padding=4, dilation=2),
                norm=nn.BatchNorm1d(16),
                group=nn.Conv1d(16, 20, 5, padding="same", groups=2),
                pool=nn.MaxPool1d(3, 1, 1),
                head=nn.Linear(36, 4),
                last=nn.Linear(216, 3),
                reflect=nn.Conv1d(6, 9, 3, padding=2, padding_mode="reflect"),
                frames=nn.Linear(16, 8),
                depthwise=nn.Conv1d(16, 16, 3, padding=1, groups=16),
            ),
            SIGNALS,
        ),
    }


@needs_compiler
def test_activations_are_right_far_from_zero(tmp_path: Path) -> None:
    functions = (torch.tanh, F.elu, F.mish, F.silu, F.gelu, lambda v: F.gelu(v, approximate="tanh"), lambda v: v.softmax(-1))
    x = torch.tensor([-1e30, -1e4, -90.0, -20.0, 0.0, 1e-6, 20.0, 90.0, 1e4, 1e30]).repeat(3, 1).t().reshape(2, 5, 3)
    model = Model(lambda m, x: [f(m.same(x)) for f in functions], same=nn.Linear(3, 3, bias=False)).eval()
    model.same.weight.data = torch.eye(3)
    written = Written(model, [x], tmp_path, "portable")
    for output, wanted in zip(written.run(), exact(model, x), strict=True):
        assert torch.allclose(output.double(), wanted, rtol=1e-6, atol=1e-6)


def exact(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return torch.utils._pytree.tree_leaves(copy.deepcopy(model).double()(x.double()))


@needs_compiler
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-6), ("float16", 3e-3), ("int8", 0.04)])
@pytest.mark.parametrize("name", ["moves", "layers", "activations", "rows", "signals"])
def test_networks_compute_what_torch_computes_in_float64(name: str, dtype: str, most: float, tmp_path: Path) -> None:
    model, x = networks()[name]
    model = randomly_pruned(model.eval(), 0.3, (4, 2))
    written = Written(model, [x], tmp_path, "portable", int8=dtype == "int8", fp16=dtype == "float16")
    outputs = written.run("gcc", FLAGS if dtype == "int8" and name != "moves" else (*STRICT, "-Wno-psabi", "-O1", *SANITIZE))
    errors = relative_errors(outputs, [y.float() for y in exact(model, x)])
    assert max(errors) < most, errors


@pytest.mark.parametrize("value", [1.0, 0.5, -2.0])
def test_padding_with_a_number_is_not_a_move(value: float, tmp_path: Path) -> None:
    with pytest.raises(sp.SmartpruneError, match="the kernels do not have these operations: ConstantPad2d 0"):
        sp.export_c(nn.Sequential(nn.ConstantPad2d(1, value), nn.Conv2d(3, 4, 1)), tmp_path / "net.c", torch.randn(1, 3, 4, 4))


def test_a_chain_of_moves_is_one_step() -> None:
    from smartprune.artifacts.onnx_inputs import read_example

    model = Model(lambda m, x: m.conv(x.view(2, 2, 6, 6, 8).transpose(1, 2).reshape(2, 12, 6, 8)), conv=nn.Conv2d(12, 4, 1)).eval()
    with torch.no_grad():
        graph = Graph(model, *read_example(model, MAPS))
    assert [step.kind for step in graph.steps] == ["gather", "conv"]


@needs_compiler
def test_weights_that_are_not_a_number_are_written(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 1)
    model.weight.data[0, 0] = float("nan")
    model.weight.data[1, 0] = float("inf")
    sp.export_c(model, tmp_path / "net.c", torch.randn(1, 3, 4, 4))
    assert "NAN" in (tmp_path / "net.c").read_text()


@needs_compiler
def test_an_accelerated_model_is_exported_like_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval(), torch.randn(1, 3, 6, 6)
    for name, given in (("a", model), ("b", sp.accelerate(model, example=x, threads=1))):
        sp.export_c(given, tmp_path / f"{name}.c", x)
    assert (tmp_path / "b.c").read_text() == (tmp_path / "a.c").read_text().replace("a.h", "b.h").replace("a_run", "b_run").replace(
        "a: a", "b: a"
    ).replace("a.c", "b.c")
    for dtype, addition in (("int8", "int8=True and calibration="), ("float16", "fp16=True, or")):
        small = sp.accelerate(model, example=x, dtype=dtype, threads=1)
        with pytest.raises(sp.SmartpruneError, match=f"accelerated in {dtype}.*add {addition}"):
            sp.export_c(small, tmp_path / "c.c", x)
    assert sp.export_c(small, tmp_path / "c.c", x, int8=True, calibration=[x]).int8_error < 0.05
