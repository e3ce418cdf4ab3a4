"""Uses of weights. Contract: for every kind of layer, the rows of a use times the weight's matrices are the layer's outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smartprune.core.block import Block
from smartprune.core.layers import find_layers
from smartprune.pruning.oneshot.matrix import as_matrices
from smartprune.pruning.oneshot.uses import Use, UseReader, run_with


class Conv1D(nn.Module):
    """The linear layer of transformers: its weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


IMAGE, SIGNAL, VOLUME = (2, 4, 7, 6), (2, 4, 9), (2, 4, 5, 4, 6)
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(6, 4), (3, 5, 6)),
    "conv1d": (nn.Conv1d(4, 6, 3, 2, 1), SIGNAL),
    "conv2d": (nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), (1, 2)), IMAGE),
    "conv3d": (nn.Conv3d(4, 6, 3, padding=1), VOLUME),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2), IMAGE),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4), IMAGE),
    "same": (nn.Conv2d(4, 6, (4, 3), padding="same", dilation=(2, 1)), IMAGE),
    "valid": (nn.Conv2d(4, 6, 3, padding="valid"), IMAGE),
    "circular": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), IMAGE),
    "unbatched": (nn.Conv2d(4, 6, 3), IMAGE[1:]),
    "transposed 1d": (nn.ConvTranspose1d(4, 6, 3, 2, 1, 1), SIGNAL),
    "transposed 2d": (nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), (1, 1), dilation=(2, 1)), IMAGE),
    "transposed 3d": (nn.ConvTranspose3d(4, 6, 2, 2), VOLUME),
    "transposed, cropped": (nn.ConvTranspose2d(4, 6, 1, 2, 2), IMAGE),
    "transposed, grouped": (nn.ConvTranspose2d(4, 6, 3, 2, 1, groups=2), IMAGE),
    "of transformers": (Conv1D(6, 4), (2, 3, 4)),
}


def uses_of(model: nn.Module, x: Any) -> list[tuple[Use, Tensor | None]]:
    layers, _ = find_layers(model, Block(2, 2), include="*")
    uses: list[tuple[Use, Tensor | None]] = []

    def on_use(use: Use, out: Tensor | None) -> Tensor | None:
        uses.append((use, out))
        return out

    run_with(model, x, UseReader(model, layers, on_use))
    return uses


@pytest.mark.parametrize("name", LAYERS)
def test_rows_times_weight_are_the_outputs(name: str) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    model = nn.Sequential(layer).eval()
    x = torch.randn(shape)
    [(use, out)] = uses_of(model, x)
    assert out is not None
    parts = find_layers(model, Block(2, 2), include="*")[0][0]
    matrices = as_matrices(layer.weight.detach(), parts.grid.axes[0].parts, parts.transposed)  # type: ignore[operator, union-attr]
    rows = use.rows(lambda count: None)
    outputs = (rows @ matrices.mT).transpose(0, 1).flatten(1) + layer.bias.detach()  # type: ignore[operator]
    assert torch.allclose(outputs, out.movedim(use.axis, -1).reshape(-1, outputs.shape[1]), atol=1e-5)
    assert torch.equal(out.detach(), model(x).detach())


@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 10}], ids=["packed", "separate"])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"add_bias_kv": True, "batch_first": True}], ids=["", "no bias", "bias kv"]
)
def test_projections_of_attention_are_uses(sizes: dict[str, int], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, **options, **sizes).eval()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.attention(q, k, v)[0]  # type: ignore[no-any-return]

    model = Model()
    inputs = (torch.randn(3, 2, 8), torch.randn(3, 2, sizes.get("kdim", 8)), torch.randn(3, 2, sizes.get("vdim", 8)))
    layers, _ = find_layers(model, Block(2, 2), include="*")
    results: list[Tensor] = []

    def on_use(use: Use, out: Tensor | None) -> Tensor | None:
        layer = layers[use.layer]
        weight = model.get_parameter(layer.weight).detach()
        matrices = as_matrices(weight, layer.grid.axes[0].parts, False)[use.parts]
        assert out is not None
        results.append(out - (use.rows(lambda count: None) @ matrices.mT)[0].view(out.shape))  # the bias
        return out

    out = run_with(model, inputs, UseReader(model, layers, on_use))
    assert torch.allclose(out, model(*inputs), atol=1e-6)
    assert len(results) == 4
    assert all(torch.allclose(rest, rest.flatten(0, -2)[0].expand_as(rest), atol=1e-5) for rest in results)


def test_cells_read_inputs_and_states() -> None:
    torch.manual_seed(0)
    cell = nn.LSTMCell(4, 6)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: Tensor) -> Tensor:
            state = None
            for step in x:
                state = self.cell(step, state)
            return state[0]  # type: ignore[index]

    uses = uses_of(Model(), torch.randn(3, 2, 4))
    assert [(use.layer, tuple(use.x.shape)) for use, _ in uses if use.layer == 0] == [(0, (2, 4))] * 3
    assert [tuple(use.x.shape) for use, _ in uses if use.layer == 1] == [(2, 6)] * 2  # the first step has no state


def test_a_weight_that_another_module_uses_is_found() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.first(x), self.first.weight)

    assert len(uses_of(nn.Sequential(Tied()), torch.randn(3, 4))) == 2
