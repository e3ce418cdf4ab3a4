"""The table and the text map of ``report()``."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from helpers import reference, zoo
from helpers.pruned_models import model_and_receipt
from smartprune import text
from smartprune.core.block import Block
from smartprune.errors import SmartpruneError
from smartprune.reports import report
from smartprune.reports.table import Report


def sparse_model() -> nn.Module:
    """Layer 3 keeps the blocks of its first row and one corner; layer 6 nothing but its last."""
    model, _ = zoo.plain_cnn()
    with torch.no_grad():
        model[3].weight[4:] = 0
        model[3].weight[19, 15, 2, 1] = 1
        model[6].weight[:8] = 0
        model[6].weight[:, :16] = 0
    return model


def test_counts_match_a_slow_reference() -> None:
    model = sparse_model()
    for block in ((4, 4), (16, 8), (3, 5), (1, None, None)):
        result = report(model, block)
        for row in result.layers:
            weight = model.get_parameter(row.weight)
            index = reference.block_index(weight.shape, block)
            bits = reference.occupied(weight.flatten().tolist(), index)
            sizes = reference.block_counts(index)
            assert row.occupied.tolist() == bits
            assert (row.blocks.total, row.blocks.kept) == (len(bits), sum(bits))
            assert row.weights.kept == sum(n for n, bit in zip(sizes, bits, strict=True) if bit)
            assert row.zeros == int((weight == 0).sum())
        assert result.params == sum(p.numel() for p in model.parameters())
        assert result.zeros == sum(int((p == 0).sum()) for p in model.parameters())
        assert [row.name for row in result.layers] == ["0", "3", "6", "10"]
        assert result.sparsity == result.blocks.removed / result.blocks.total


def test_table_of_a_small_model() -> None:
    result = report(sparse_model(), (4, 4))
    assert (
        result.text(ascii_only=True)
        == """\
Sequential, blocks of 4x4x1x1

zeros    65.42%: 157 of 240 blocks of all 4 layers are zero
note     no receipt found, so it is not known which layers were pruned; give it
         by receipt= or --receipt FILE

layer  weight     kept/blocks  kept            sparsity
0      16x3x3x3         36/36  ##############     0.00%
3      20x16x3x3       37/180  ###...........    79.44%
6      12x20x1x1         1/15  #.............    93.33%
10     10x12              9/9  ##############     0.00%

                                          total   zero   share
zero blocks, all layers above               240    157  65.42%
weights in zero blocks, all layers above  3,672  2,512  68.41%
weights in zero blocks, of the model      3,782  2,512  66.42%
single zeros, of all stored weights       3,782  2,563  67.77%"""
    )
    assert "███" in result.text(ascii_only=False)


def test_map_has_a_panel_per_kernel_position() -> None:
    result = report(sparse_model(), (4, 4))
    assert (
        result.map("3", ascii_only=True)
        == """\
3: 37 of 180 blocks of 4x4x1x1 kept; # kept, . zero
0,0   0,1   0,2
####  ####  ####
....  ....  ....
....  ....  ....
....  ....  ....
....  ....  ....
1,0   1,1   1,2
####  ####  ####
....  ....  ....
....  ....  ....
....  ....  ....
....  ....  ....
2,0   2,1   2,2
####  ####  ####
....  ....  ....
....  ....  ....
....  ....  ....
....  ...#  ...."""
    )
    assert result.map("6.weight", ascii_only=False).splitlines()[2:] == ["·····", "·····", "····█"]
    with pytest.raises(SmartpruneError, match="there is no layer 'conv9'; choose one of: 0, 3, 6, 10"):
        result.map("conv9")


def test_map_of_a_transposed_convolution_has_outputs_downwards() -> None:
    layer = nn.ConvTranspose2d(8, 6, 1)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[:2, 4:] = 1  # stored as inputs, outputs
    assert report(layer, (2, 2)).map("weight", ascii_only=True).splitlines()[2:] == ["....", "....", "#..."]


def test_map_of_1d_3d_and_linear_layers() -> None:
    for name in ("conv1d_net", "conv3d_net", "transformer_block"):
        model, _ = zoo.SMALL[name]()
        result = report(model, (4, 4))
        for row in result.layers:
            drawn = result.map(row.name, ascii_only=True)
            assert max(map(len, drawn.splitlines()[1:])) <= 80
            assert drawn.split("\n", 1)[1].count("#") == row.blocks.kept == row.blocks.total


def test_map_of_a_wide_layer_shares_characters() -> None:
    weight = torch.zeros(20, 200)
    weight[:, :50] = 1
    weight[0, 100] = 1
    drawn = report({"fc.weight": weight}, (1, 1)).map("fc", ascii_only=True).splitlines()
    assert max(map(len, drawn)) <= 80
    assert drawn[1] == "3x3 blocks per character"
    assert drawn[3] == "#" * 16 + "*" + "." * 16 + ":" + "." * 33
    assert len(drawn) == 3 + 7
    assert len({len(line) for line in drawn[3:]}) == 1


def test_all_kinds_of_sources_give_the_same_counts(tmp_path: Path) -> None:
    model = sparse_model()
    torch.save(model.state_dict(), tmp_path / "a.pt")
    save_file({k: v.clone() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors")
    expected = report(model, (4, 4))
    for source in (model.state_dict(), tmp_path / "a.pt", tmp_path / "model.safetensors", tmp_path):
        result = report(source, (4, 4))
        assert {row.name: row.blocks for row in result.layers} == {row.name: row.blocks for row in expected.layers}
        assert (result.params, result.zeros) == (expected.params, expected.zeros)
    assert report(model).block == Block(16, 8)
    with pytest.raises(SmartpruneError, match="no weight can be cut"):
        report(nn.ReLU())


def test_layers_that_cannot_be_divided_are_listed() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    result = report(model, (2, 2))
    assert "Embedding is neither a convolution nor a linear layer" in str(result)
    assert [s.name for s in result.skipped] == ["0"]
    assert result.params == 60


@pytest.mark.parametrize("name", sorted(zoo.SMALL))
def test_json_is_plain_data_and_text_fits_80_columns(name: str) -> None:
    model, _ = zoo.SMALL[name]()
    result = report(model, (4, 4))
    data = result.to_json()
    assert json.loads(json.dumps(data)) == data
    assert max(map(len, str(result).splitlines())) <= 80


def test_text_is_ascii_where_the_terminal_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    result = report(sparse_model(), (4, 4))

    def shown(encoding: str) -> str:
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        print(result)
        print(result.map("3"))
        stream.flush()
        return stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]

    assert shown("ascii").isascii()
    assert shown("latin-1").isascii()
    assert "█" in shown("utf-8")
    monkeypatch.setattr(sys, "stdout", None)
    assert text.stdout_is_ascii()
    monkeypatch.undo()
    assert isinstance(result, Report)


def test_html_writes_the_page_of_a_model(tmp_path: Path) -> None:
    """The same page as for its file, and the same result as without a page."""
    model, receipt = model_and_receipt("plain_cnn", (4, 4), 0.5)
    result = report(model, receipt=receipt, html=tmp_path / "page.html")
    assert str(result) == str(report(model, receipt=receipt))
    page = (tmp_path / "page.html").read_text()
    assert receipt.mask_hash in page
    assert all(f"{row.blocks.kept:,} / {row.blocks.total:,}" in page for row in receipt.layers)


def test_html_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(8, 8)}, tmp_path / "a.safetensors")
    with pytest.raises(SmartpruneError, match=r"the folder .* does not exist"):
        report({"w": torch.zeros(8, 8)}, (4, 4), html=tmp_path / "none" / "page.html")
    with pytest.raises(SmartpruneError, match="report:"):
        report(tmp_path / "a.safetensors", (4, 4), html=tmp_path / "a.safetensors")
    assert load_file(tmp_path / "a.safetensors")["w"].shape == (8, 8)
