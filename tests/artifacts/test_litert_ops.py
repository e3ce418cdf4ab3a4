"""Activations, arithmetic and operations that move data: LiteRT files compute what torch computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smartprune as sp
from helpers.litert_files import check_module, operations

pytest.importorskip("ai_edge_litert", reason="ai-edge-litert is not installed")

IMAGE = (2, 6, 5, 7)
VECTOR = torch.linspace(0.5, 2, 6)


class After(nn.Module):
    """Functions, each after a convolution, so that its input has its channels last in the file."""

    def __init__(self, *functions: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.convs, self.functions = nn.ModuleList(nn.Conv2d(6, 6, 1) for _ in functions), functions

    def forward(self, x: Tensor) -> Any:
        return tuple(function(conv(x)) for function, conv in zip(self.functions, self.convs, strict=True))


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "relu": F.relu,
    "relu twice": lambda x: F.relu(F.relu(x)),
    "relu6": F.relu6,
    "clamp": lambda x: x.clamp(-0.2, 0.3),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "elu": F.elu,
    "exp": torch.exp,
    "square": lambda x: x**2,
    "root": lambda x: (x * x + 1).sqrt(),
    "abs and neg": lambda x: -x.abs(),
    "add": lambda x: x + 2 * x,
    "add scaled": lambda x: torch.add(x, x.relu(), alpha=0.5),
    "sub": lambda x: x.relu() - x,
    "sub from": lambda x: 1 - x,
    "div": lambda x: x / (x * x + 1),
    "scale by channel": lambda x: x * VECTOR.view(1, 6, 1, 1),
    "scale by channel without batch": lambda x: x * VECTOR.view(6, 1, 1),
    "gate": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "gate of vectors": lambda x: x * x.mean((2, 3)).sigmoid()[:, :, None, None],
    "lower rank": lambda x: x + x.mean((0, 1)),
    "softmax over channels": lambda x: x.softmax(1),
    "softmax over the last axis": lambda x: x.softmax(-1),
    "mean": lambda x: x.mean((2, 3)),
    "mean of one axis": lambda x: x.mean(1),
    "mean of all": lambda x: x.mean().view(1),
    "sum": lambda x: x.sum(2, keepdim=True),
    "amax": lambda x: x.amax((1, 2)),
    "flatten": lambda x: x.flatten(1),
    "view": lambda x: x.view(2, 3, 2, -1),
    "permute": lambda x: x.permute(0, 3, 1, 2),
    "transpose": lambda x: x.transpose(1, 3) * 2,
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.mean(3, keepdim=True).squeeze(3),
    "expand": lambda x: x.mean(1, keepdim=True).expand(-1, 4, -1, -1),
    "cat": lambda x: torch.cat([x, x.relu(), x], 1),
    "cat of rows": lambda x: torch.cat([x, x], -2),
    "cat with a constant": lambda x: torch.cat([x, torch.ones(2, 1, 5, 7)], 1),
    "stack": lambda x: torch.stack([x.mean(1), x.amax(1)], 1),
    "slice": lambda x: x[:, 1:5, ::2, -3:],
    "select": lambda x: x[:, -1],
    "split": lambda x: torch.split(x, [2, 4], 1)[1],
    "chunk": lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1],
    "shuffle": lambda x: x.view(2, 2, 3, 5, 7).transpose(1, 2).reshape(2, 6, 5, 7),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
    "pad with ones": lambda x: F.pad(x, (1, 2, 0, 1), value=1.0),
    "reflect": lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest to a size": lambda x: F.interpolate(x, size=(7, 9)),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear corners": lambda x: F.interpolate(x, size=(9, 13), mode="bilinear", align_corners=True),
    "layer_norm": lambda x: F.layer_norm(x, (7,), torch.linspace(0.5, 2, 7), torch.ones(7)),
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "matmul with a constant": lambda x: x @ torch.linspace(-1, 1, 21).view(7, 3),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "replicate": lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate"),
    "circular": lambda x: F.pad(x, (1, 2, 2, 0), mode="circular"),
    "prelu": lambda x: F.prelu(x, VECTOR - 1),
    "prelu of vectors": lambda x: F.prelu(x.mean((2, 3)), VECTOR[:1]),
    "softplus": lambda x: F.softplus(50 * x),
    "softplus beta": lambda x: F.softplus(x, beta=3),
    "mish": F.mish,
    "pixel_shuffle": lambda x: F.pixel_shuffle(x[:, :4], 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(F.interpolate(x, size=(4, 6)), 2),
    "group_norm": lambda x: F.group_norm(x, 3, VECTOR, VECTOR - 1),
    "instance_norm": lambda x: F.instance_norm(x, weight=VECTOR, bias=VECTOR),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 1.5),
    "glu": lambda x: F.glu(x, 1),
    "log": lambda x: (x * x + 1).log(),
    "log_softmax": lambda x: F.log_softmax(100 * x, 1),
    "norm": lambda x: F.normalize(x, dim=1),
    "norm of all": lambda x: torch.linalg.vector_norm(x).view(1),
    "sum of magnitudes": lambda x: torch.linalg.vector_norm(x, 1, dim=(2, 3)),
    "rms_norm": lambda x: F.rms_norm(x, (7,), torch.linspace(0.5, 2, 7)),
    "unbind": lambda x: x.unbind(1)[2] * x.unbind(1)[3] + x.unbind(-1)[4].mean(1)[:, :, None],
    "queries, keys and values": lambda x: F.scaled_dot_product_attention(
        *x.reshape(2, 2, 3, 5, 7).permute(2, 0, 1, 3, 4).unbind(0)
    ),
    "max": lambda x: x.max(1, keepdim=True)[0],
    "min": lambda x: x.min(-1).values,
    "amin": lambda x: x.amin((2, 3)),
    "max_pool1d": lambda x: F.max_pool1d(x.flatten(2), 3, 2, padding=1),
    "avg_pool1d": lambda x: F.avg_pool1d(x.flatten(2), 3, 2),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x.flatten(2), 5),
    "einsum": lambda x: torch.einsum("bchw,cd->bdhw", x, torch.linspace(-1, 1, 24).view(6, 4)),
    "einsum of activations": lambda x: torch.einsum("bchw,bdhw->bcd", x, x.relu()),
    "dropout": lambda x: F.dropout(x, training=False),
}


@pytest.mark.parametrize("part", range(4))
def test_functions_agree_with_torch(part: int, tmp_path: Path) -> None:
    """Many functions in one file, because an export of each takes long."""
    torch.manual_seed(0)
    cases = dict(list(FUNCTIONS.items())[part::4])
    check_module(After(*cases.values()), torch.randn(IMAGE), tmp_path / "m.tflite", names=list(cases))


def test_outputs_may_be_equal_or_several(tmp_path: Path) -> None:
    torch.manual_seed(0)
    check_module(After(lambda x: (x, x, x.mean(1), x.relu())), torch.randn(IMAGE), tmp_path / "m.tflite")


def test_channels_last_leaves_out_transposes(tmp_path: Path) -> None:
    model, path = After(F.relu).eval(), tmp_path / "m.tflite"
    sp.export_litert(model, path, torch.randn(IMAGE), channels_last=True)
    assert operations(path) == {"CONV_2D": 1}


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "operation": (lambda x: torch.cumsum(x, 1), r"computes aten.cumsum.default, which .* the operations are: .*; replace it"),
    "power": (lambda x: x**3, "the power 3"),
    "masked attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), "a mask"),
    "constant output": (lambda x: (x, torch.ones(3)), "does not depend on its inputs"),
    "integers": (lambda x: x.to(torch.int32), "compute in floating point"),
    "places of a maximum": (
        lambda x: x.max(1)[1].float(),
        "result 1 of max.dim cannot be exported to LiteRT; use its first result",
    ),
    "places of a pooling": (lambda x: F.max_pool2d(x, 2, return_indices=True)[1].float(), "result 1 of max_pool2d_with_indices"),
    "negative padding": (lambda x: F.pad(x, (1, -1, 1, 1)), "padding by a negative number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operations_that_cannot_be_exported_are_named(name: str, tmp_path: Path) -> None:
    function, message = REFUSED[name]
    with pytest.raises(sp.SmartpruneError, match=message):
        sp.export_litert(After(function).eval(), tmp_path / "m.tflite", torch.randn(IMAGE))


def test_integer_inputs_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)).eval()
    with pytest.raises(sp.SmartpruneError, match="the input input has dtype int64; it must be float32"):
        sp.export_litert(model, tmp_path / "m.tflite", torch.zeros(2, 3, dtype=torch.long))
