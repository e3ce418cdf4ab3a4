"""Receipts in a report: given, inside the file or folder, next to the file, and of other weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import smartprune as sp
from helpers import zoo
from helpers.pruned_models import model_and_receipt
from smartprune.cli import main
from smartprune.pruning.receipt import make_receipt
from smartprune.reports.page import write_page
from smartprune.reports.view import gather


@pytest.fixture
def pruned() -> tuple[nn.Module, sp.Receipt]:
    """A model with two transposed convolutions, whose axes a file does not define."""
    torch.manual_seed(1)
    return model_and_receipt("unet", (4, 8), 0.6)


def line(receipt: sp.Receipt) -> str:
    blocks = receipt.blocks
    share = f"{100 * blocks.removed / blocks.total:.2f}%"
    return f"sparsity {share}: {blocks.removed:,} of {blocks.total:,} blocks of the pruned layers removed"


def test_a_receipt_gives_sparsity_block_and_axes(pruned: tuple[nn.Module, sp.Receipt], tmp_path: Path) -> None:
    model, receipt = pruned
    torch.save(model.state_dict(), tmp_path / "a.pt")
    receipt.save(tmp_path / "of_a.json")
    for given in (receipt, receipt.to_json(), tmp_path / "of_a.json", str(tmp_path / "of_a.json")):
        for weights in (model, model.state_dict(), tmp_path / "a.pt"):
            result = sp.report(weights, receipt=given)
            assert str(result).splitlines()[2] == line(receipt)
            assert result.sparsity == receipt.sparsity
            assert result.block == receipt.block
            assert {row.name: (row.blocks, row.weights) for row in result.pruned} == {
                row.name: (row.blocks, row.weights) for row in receipt.layers
            }
            assert not {row.weight for row in receipt.layers} & set(result.assumed)
            assert result.to_json()["mask_hash"] == receipt.mask_hash


def test_without_a_receipt_assumed_axes_are_not_the_headline(pruned: tuple[nn.Module, sp.Receipt], tmp_path: Path) -> None:
    model, receipt = pruned
    torch.save(model.state_dict(), tmp_path / "a.pt")
    result = sp.report(tmp_path / "a.pt", receipt.block)
    zeros = sum(int((p == 0).sum()) for p in model.parameters())
    params = sum(p.numel() for p in model.parameters())
    shown = str(result).splitlines()
    assert shown[2] == f"zeros    {100 * zeros / params:.2f}%: {zeros:,} of {params:,} single weights of the model are zero"
    assert "axes assumed" in str(result)
    assert [row.split()[-1] for row in shown if row.startswith("up")] == ["*", "*"]
    page = tmp_path / "page.html"
    write_page(page, tmp_path / "a.pt", receipt.block)
    assert f"Zero weights: {100 * zeros / params:.2f}&nbsp;%" in page.read_text()
    assert "the order of axes is assumed in" in page.read_text()
    assert f"{100 * result.blocks.removed / result.blocks.total:.2f}" not in page.read_text()
    with_model = sp.report(tmp_path / "a.pt", receipt.block, model=zoo.unet()[0])
    total = with_model.blocks
    assert f"zeros    {total.percent}: {total.removed} of {total.total} blocks of all {len(with_model.layers)} layers" in str(
        with_model
    )


def test_a_receipt_next_to_the_file_is_used_if_it_matches(pruned: tuple[nn.Module, sp.Receipt], tmp_path: Path) -> None:
    model, receipt = pruned
    receipt.save(tmp_path / "receipt.json")
    save_file({key: value.clone() for key, value in model.state_dict().items()}, tmp_path / "a.safetensors")
    assert line(receipt) in str(sp.report(tmp_path / "a.safetensors"))
    assert "sparsity" in gather(tmp_path / "a.safetensors").report.text()
    other_block = sp.report(tmp_path / "a.safetensors", (8, 8))
    assert other_block.receipt is None
    assert "its sparsity is not shown" in str(other_block)
    assert not {row.weight for row in receipt.layers} & set(other_block.assumed)
    torch.save(zoo.unet()[0].state_dict(), tmp_path / "dense.pt")
    dense = sp.report(tmp_path / "dense.pt")
    assert dense.receipt is None
    assert "receipt.json next to the file is not used" in str(dense)
    torch.save(zoo.plain_cnn()[0].state_dict(), tmp_path / "other.pt")
    assert "does not match" not in str(sp.report(tmp_path / "other.pt", (4, 4)))
    assert "is in the receipt, but not in" in sp.report(tmp_path / "other.pt", (4, 4)).note
    (tmp_path / "receipt.json").write_text("[]")
    assert "receipt.json next to the file cannot be used" in sp.report(tmp_path / "a.safetensors").note


def test_a_given_receipt_of_other_weights_is_an_error(pruned: tuple[nn.Module, sp.Receipt], tmp_path: Path) -> None:
    model, receipt = pruned
    receipt.save(tmp_path / "r.json")
    with pytest.raises(sp.SmartpruneError, match=r"does not match the receipt: .* is in the receipt, but not in"):
        sp.report(zoo.plain_cnn()[0], receipt=receipt)
    with pytest.raises(sp.SmartpruneError, match=r"is removed in the receipt, but not zero \(and .* more problems; smartprune"):
        sp.report(zoo.unet()[0], receipt=receipt)
    with pytest.raises(sp.SmartpruneError, match="leave one of the two out"):
        sp.report(model, (8, 8), receipt=receipt)
    with pytest.raises(sp.SmartpruneError, match="report: receipt is a int; give a Receipt"):
        sp.report(model, receipt=3)  # type: ignore[arg-type]
    torch.save(zoo.unet()[0].state_dict(), tmp_path / "dense.pt")
    assert main(["report", str(tmp_path / "dense.pt"), "--receipt", str(tmp_path / "r.json")]) == 1
    assert main(["report", str(tmp_path / "dense.pt"), "--receipt", str(tmp_path / "r.json"), "--html", str(tmp_path / "p")]) == 1
    assert not (tmp_path / "p").exists()


def test_the_command_reads_a_receipt_and_does_not_overwrite_it(
    pruned: tuple[nn.Module, sp.Receipt], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, receipt = pruned
    folder = tmp_path / "files"
    folder.mkdir()
    torch.save(model.state_dict(), folder / "a.pt")
    receipt.save(tmp_path / "r.json")
    arguments = ["report", str(folder / "a.pt"), "--receipt", str(tmp_path / "r.json")]
    assert main(arguments) == 0
    assert line(receipt) in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pruned_blocks"] == receipt.blocks.to_json()
    assert main([*arguments, "--html", str(tmp_path / "a.html")]) == 0
    assert f"{100 * receipt.sparsity:.2f} %" in (tmp_path / "a.html").read_text()
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--html", str(tmp_path / "r.json")])
    receipt.save(folder / "receipt.json")
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(folder / "a.pt"), "--html", str(folder / "receipt.json")])
    with pytest.raises(sp.SmartpruneError, match="is the receipt itself"):
        write_page(folder / "receipt.json", folder / "a.pt")


def test_weights_of_a_run_that_do_not_match_are_counted_from_the_weights(
    pruned: tuple[nn.Module, sp.Receipt], tmp_path: Path
) -> None:
    model, receipt = pruned
    receipt.save(tmp_path / "receipt.json")
    with torch.no_grad():
        model.get_parameter(receipt.layers[0].weight).fill_(1)
    save_file({key: value.clone() for key, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    result = sp.report(tmp_path, model=zoo.unet()[0])
    assert result.receipt is None
    assert result.problems
    assert "the weights do NOT match the receipt" in str(result)
    assert line(receipt) not in str(result)
    removed = sum(row.blocks.removed for row in receipt.layers[1:])
    assert f"{removed:,} of {result.blocks.total:,} blocks of all" in str(result)


def test_kept_blocks_that_are_zero_do_not_change_the_sparsity() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    plan = sp.plan(model, (4, 4), 0.5)
    with torch.no_grad():
        for layer in plan.layers:
            model.get_parameter(layer.weight).zero_()
        model[0].weight[:4, :4] = 1
    mask = torch.arange(plan.n) < plan.keep
    receipt = make_receipt(plan, model.state_dict(), mask, "magnitude")
    assert receipt.kept_but_zero > 0
    result = sp.report(model, receipt=receipt)
    assert line(receipt) in str(result)
    assert f"{receipt.kept_but_zero} kept blocks hold only zeros" in str(result)
    assert result.weights.removed == receipt.weights.removed


def test_repr_is_one_short_line(pruned: tuple[nn.Module, sp.Receipt], tmp_path: Path) -> None:
    model, receipt = pruned
    results = (receipt, sp.report(model, receipt=receipt), sp.verify(model, receipt=receipt))
    for result in (*results, sp.pack(model, tmp_path / "p", receipt=receipt)):
        assert "\n" not in repr(result)
        assert len(repr(result)) < 200


def test_a_model_of_this_process_has_its_receipt() -> None:
    model, x = zoo.SMALL["plain_cnn"]()
    receipt = sp.prune(model, [x], block=(4, 4), sparsity=0.5)
    for given in (model, torch.compile(model, backend="eager"), nn.DataParallel(model)):
        assert sp.report(given).sparsity == receipt.sparsity
        assert line(receipt) in str(sp.report(given))
    assert sp.report(model, block=(4, 4)).receipt is None  # the blocks that are zero are counted
    with torch.no_grad():
        model[3].weight.fill_(1)
    changed = sp.report(model)
    assert changed.receipt is None
    assert "the receipt of this model is not used, because the weights do not match it" in changed.note
