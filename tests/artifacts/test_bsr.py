"""Weights as BSR matrices of torch, compared with the dense weight and with convolutions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smartprune as sp
from helpers import zoo
from helpers.packed_files import zero_random_blocks
from helpers.pruned_models import model_and_receipt


def occupied_tiles(matrix: Tensor, rows: int, columns: int) -> int:
    return sum(bool(tile.any()) for row in matrix.split(rows) for tile in row.split(columns, dim=1))


@pytest.mark.parametrize(
    ("layer", "block", "channels_last", "tile"),
    [
        (nn.Linear(24, 32), (16, 8), False, (16, 8)),
        (nn.Linear(24, 32), (16, 8), True, (16, 8)),
        (nn.Conv2d(24, 32, 1), (16, 8), False, (16, 8)),
        (nn.Conv2d(24, 32, 3), (16, 8), True, (16, 8)),
        (nn.Conv2d(24, 32, 3), (8, 1), False, (8, 1)),
        (nn.Conv2d(24, 32, (2, 3)), (16, 8, 2, 3), False, (16, 48)),
        (nn.Conv2d(24, 32, (2, 3)), (16, 8, 2, 3), True, None),
        (nn.Conv2d(24, 32, (2, 3)), (16, None, 1, 3), True, (16, 72)),
        (nn.Conv2d(24, 32, 3), "channel", False, (1, 216)),
        (nn.Conv2d(24, 32, 3, groups=2), (16, 4), True, (16, 4)),
        (nn.Conv3d(8, 16, 3), (8, 8, 1, 1, 1), True, (8, 8)),
    ],
)
def test_the_matrix_holds_the_weight_without_its_zero_blocks(
    layer: nn.Module, block: object, channels_last: bool, tile: tuple[int, int] | None
) -> None:
    torch.manual_seed(0)
    zero_random_blocks(layer, block)
    weight = layer.weight.detach()
    dense = (weight.movedim(1, -1) if channels_last else weight).flatten(1)
    if tile is None:
        with pytest.raises(sp.SmartpruneError, match="the blocks span several kernel positions"):
            sp.bsr(layer, "weight", block, channels_last=channels_last)  # type: ignore[arg-type]
        return
    matrix = sp.bsr(layer, "weight", block, channels_last=channels_last)  # type: ignore[arg-type]
    assert matrix.layout == torch.sparse_bsr
    assert matrix.to_dense().equal(dense)
    assert tuple(matrix.values().shape) == (occupied_tiles(dense, *tile), *tile)
    assert 0 < len(matrix.values()) < dense.numel() // (tile[0] * tile[1])


def test_the_matrix_computes_the_convolution() -> None:
    torch.manual_seed(0)
    layer, x = zero_random_blocks(nn.Conv2d(8, 16, 3, bias=False), (8, 8)), torch.randn(1, 8, 6, 6)
    columns = F.unfold(x, 3)[0]  # (input * kernel) x positions
    out = F.conv2d(x, layer.weight).flatten(2)[0]
    whole = sp.bsr(layer, "weight", (8, 8, 3, 3)).to_dense()
    last = sp.bsr(layer, "weight", (8, 8), channels_last=True).to_dense()
    assert torch.allclose(whole @ columns, out, atol=1e-5)
    assert torch.allclose(last @ columns.unflatten(0, (8, 9)).transpose(0, 1).flatten(0, 1), out, atol=1e-5)


def test_transposed_layers_have_their_outputs_as_rows() -> None:
    torch.manual_seed(0)
    layer = zero_random_blocks(nn.ConvTranspose2d(16, 8, 1), (4, 8))
    assert sp.bsr(layer, "weight", (4, 8)).to_dense().equal(layer.weight.detach()[:, :, 0, 0].t())
    with pytest.raises(sp.SmartpruneError, match="is transposed and grouped"):
        sp.bsr(nn.ConvTranspose2d(16, 8, 1, groups=2), "weight", (4, 8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_values_keep_their_dtype_and_nan(dtype: torch.dtype) -> None:
    weight = torch.zeros(8, 16, dtype=dtype)
    weight[0, 0], weight[5, 9] = torch.nan, 1.5
    matrix = sp.bsr({"fc.weight": weight}, "fc", (4, 4))
    assert matrix.dtype == dtype
    assert matrix.values().shape == (2, 4, 4)
    assert matrix.to_dense().nan_to_num(7).equal(weight.nan_to_num(7))


def test_names_blocks_and_receipts_are_found(run: Path) -> None:
    model, receipt = model_and_receipt("transformer_block")
    row = next(row for row in receipt.layers if row.name == "mlp.0")
    by_name = [sp.bsr(nn.Sequential(model), f"0.{name}", receipt.block) for name in (row.name, row.weight)]
    by_receipt = sp.bsr(dict(model.state_dict()), row.weight, receipt=receipt)
    assert by_name[0].to_dense().equal(by_receipt.to_dense())
    assert by_name[1].to_dense().equal(model.get_parameter(row.weight))
    assert sp.bsr(run, "3.weight", channels_last=True).layout == torch.sparse_bsr


def test_layouts_that_bsr_cannot_hold_are_explained() -> None:
    model = zoo.plain_cnn()[0]
    with pytest.raises(sp.SmartpruneError, match=r"not adjacent in the matrix of 3\.weight .* channels_last=True puts them"):
        sp.bsr(model, "3", (4, 4))
    with pytest.raises(sp.SmartpruneError, match=r"blocks of 16x8x1x1 do not divide 3\.weight \(20x16x3x3\)"):
        sp.bsr(model, "3", (16, 8), channels_last=True)
    with pytest.raises(sp.SmartpruneError, match="has groups of 12 outputs"):
        sp.bsr(nn.Conv2d(24, 24, 1, groups=2), "weight", (8, 4))
    with pytest.raises(sp.SmartpruneError, match="there is no layer 'conv' with blocks; the layers are: 0, 3, 6, 10"):
        sp.bsr(model, "conv", (4, 4))
    with pytest.raises(sp.SmartpruneError, match="no block was given"):
        sp.bsr(model, "3")
    with pytest.raises(sp.SmartpruneError, match="bsr: layer=3 is not a name"):
        sp.bsr(model, 3, (4, 4))  # type: ignore[arg-type]
    with pytest.raises(sp.SmartpruneError, match="bsr: weight is on the meta device and has no values"):
        sp.bsr(nn.Linear(8, 8, device="meta"), "weight", (4, 4))
    sp.attach(model, "magnitude", block=(4, 4), sparsity=0.5, steps=1)
    with pytest.raises(sp.SmartpruneError, match="still being pruned"):
        sp.bsr(model, "3", (4, 4), channels_last=True)
