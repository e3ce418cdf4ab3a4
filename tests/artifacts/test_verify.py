"""Verification of models and files against receipts, and of files from any source."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import smartprune as sp
from helpers import zoo
from helpers.pruned_models import model_and_receipt
from smartprune.artifacts.verify import verify
from smartprune.core.block import Block
from smartprune.pruning.plan import plan
from smartprune.pruning.receipt import make_receipt


def state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("wrap", [nn.DataParallel, partial(torch.compile, backend="eager")], ids=["DataParallel", "compile"])
def test_receipt_of_a_model_that_was_wrapped_before_attach(wrap: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    model, _ = zoo.plain_cnn()
    wrapped = wrap(model)
    sp.attach(wrapped, sp.Magnitude(), block=(4, 4), sparsity=0.5, steps=2).freeze()
    receipt = sp.bake(wrapped)
    for source in (wrapped, wrapped.state_dict(), model, model.state_dict()):
        result = verify(source, receipt=receipt)
        assert result.ok, str(result)
        assert result.mask_hash == receipt.mask_hash
    sp.pack(model, tmp_path / "packed", receipt=receipt)
    assert verify(tmp_path / "packed").ok
    with torch.no_grad():
        model[3].weight.fill_(1.0)
    assert not verify(model, receipt=receipt).ok


@pytest.mark.parametrize("name", sorted(zoo.SMALL))
def test_all_kinds_of_sources_agree(name: str, tmp_path: Path) -> None:
    model, receipt = model_and_receipt(name)
    receipt.save(tmp_path / "receipt.json")
    save_file(state(model), tmp_path / "model.safetensors")
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "nested.pth")
    torch.save({"state_dict": model.state_dict()}, tmp_path / "lightning.ckpt")
    wrapped = {f"module._orig_mod.{key}": value for key, value in model.state_dict().items()}
    sources = [model, model.state_dict(), tmp_path, str(tmp_path), wrapped]
    sources += [tmp_path / file for file in ("model.safetensors", "plain.pt", "nested.pth", "lightning.ckpt")]
    for source in sources:
        for receipt_source in (receipt, receipt.to_json(), tmp_path / "receipt.json", str(tmp_path / "receipt.json")):
            result = verify(source, receipt=receipt_source)
            assert result.ok, str(result)
            assert (result.blocks, result.zero) == (receipt.blocks.total, receipt.blocks.removed)
            assert result.mask_hash == receipt.mask_hash
    assert verify(tmp_path).ok
    assert "ok: matches the receipt, sha256:" in str(verify(tmp_path))


def test_every_difference_is_listed() -> None:
    model, receipt = model_and_receipt()
    tensors = state(model)
    grid = receipt.layers[0].cut(receipt.block)
    removed = (~receipt.layers[0].mask()).nonzero().flatten().tolist()
    kept = receipt.layers[0].mask().nonzero().flatten().tolist()
    weight = tensors["3.weight"]
    weight[grid.expand(torch.arange(grid.n)) == removed[2]] = 1e-30
    weight[grid.expand(torch.arange(grid.n)) == kept[0]] = 0
    tensors["6.weight"] = torch.zeros(12, 21, 1, 1)
    result = verify(tensors, receipt=receipt)
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(removed[2]), grid.shape))
    assert result.problems == (
        f"3.weight: block {removed[2]} at {place} of the grid 5x4x3x3 is removed in the receipt, but not zero",
        f"3.weight: {len(kept) - 1} kept blocks are not zero, the receipt says {len(kept)}",
        "6.weight: has shape 12x21x1x1, the receipt says 12x20x1x1",
    )
    assert not result.ok
    assert result.layers[0].wrong == (removed[2],)
    assert result.mask_hash is None
    assert "NOT ok, 3 problems:" in str(result)
    del tensors["6.weight"]
    assert verify(tensors, receipt=receipt).problems[-1] == "6.weight: is in the receipt, but not in the state dict"


def test_one_revived_block_changes_the_hash() -> None:
    model, receipt = model_and_receipt()
    index = int((~receipt.layers[1].mask()).nonzero()[0])
    with torch.no_grad():
        grid = receipt.layers[1].cut(receipt.block)
        model[6].weight += (grid.expand(torch.arange(grid.n)) == index) * 0.5
    result = verify(model, receipt=receipt)
    assert len(result.problems) == 2
    assert result.problems[0].startswith(f"6.weight: block {index} at ")
    assert result.problems[1].startswith("the hash is sha256:")


def test_wrong_blocks_of_a_dense_model_are_summarized() -> None:
    _, receipt = model_and_receipt()
    dense, _ = zoo.plain_cnn()
    result = verify(dense, receipt=receipt)
    assert len([p for p in result.problems if p.startswith("3.weight: block")]) == 5
    assert any("more removed blocks are not zero" in p for p in result.problems)
    assert sum(len(layer.wrong) for layer in result.layers) == receipt.blocks.removed  # the result lists all of them


def test_nan_values_are_a_problem() -> None:
    model, receipt = model_and_receipt()
    with torch.no_grad():
        model[3].weight[model[3].weight != 0] = float("nan")
    assert verify(model, receipt=receipt).problems == ("3.weight: holds NaN or infinity",)
    assert verify(model, block=(4, 4)).problems == ("3.weight: holds NaN or infinity",)


def test_a_block_other_than_the_receipts_is_a_problem() -> None:
    model, receipt = model_and_receipt()
    assert verify(model, block=(4, 4), receipt=receipt).ok
    result = verify(model, block=(16, 8), receipt=receipt)
    assert result.problems == ("block 16x8x1x1 was given, and the receipt is about blocks of 4x4x1x1",)


def test_a_receipt_with_an_unmet_budget_is_a_problem() -> None:
    model, _ = zoo.plain_cnn()
    pruning_plan = plan(model, (4, 4), 0.75)
    receipt = make_receipt(pruning_plan, model.state_dict(), torch.ones(pruning_plan.n), "magnitude")
    assert verify(model, receipt=receipt).problems == (
        "the receipt itself does not meet its budget: 195 blocks were kept, 49 were requested",
    )


def test_counting_without_a_receipt() -> None:
    model, receipt = model_and_receipt()
    result = verify(model, block=(4, 4))
    assert result.ok
    assert [(layer.name, layer.zero, layer.blocks) for layer in result.layers] == [
        ("0", 0, 4 * 1 * 9),
        *[(row.name, row.blocks.removed, row.blocks.total) for row in receipt.layers],
        ("10", 0, 9),
    ]
    assert "no receipt to compare with" in str(result)
    assert max(map(len, str(result).splitlines())) <= 80
    assert json.loads(json.dumps(result.to_json()))["zero"] == receipt.blocks.removed


@pytest.mark.parametrize("shape", ["32x32", "16x16", "16x8", "8x16", "8x8", "8x4", "4x4", "16x1", "channel", "1x1"])
@pytest.mark.parametrize("sparsity", [0.2, 0.5, 0.97, 0.99])
def test_the_block_shape_is_found(shape: str, sparsity: float) -> None:
    block = Block.of(shape)
    weights = {"a.weight": torch.randn(256, 128, 3, 3), "b.weight": torch.randn(128, 256)}
    for key, weight in weights.items():
        grid = block.grid(weight.shape)
        weights[key] = weight * grid.expand((torch.rand(grid.n) > sparsity).float())
    result = verify(weights)
    assert result.block == block, str(result)
    assert f"sparse in blocks of {block}" in str(result)
    assert max(map(len, str(result).splitlines())) <= 80
    assert json.loads(json.dumps(result.to_json()))["block"] == str(block)


def test_a_dense_file_is_not_sparse_in_any_shape() -> None:
    weight = torch.randn(64, 64)
    weight[0, 0] = 0
    result = verify({"a": weight})
    assert result.block is None
    assert "not sparse in any block shape" in str(result)
    assert result.ok


def test_masked_models_are_verified_by_their_stored_weights() -> None:
    sp = pytest.importorskip("smartprune")
    model, _ = zoo.plain_cnn()
    sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.75, steps=3)
    before = {name: value.clone() for name, value in model.named_parameters() if name in ("3.weight", "6.weight")}
    result = verify(model, block=(4, 4))
    assert result.zero == 0  # the weights themselves are not pruned yet
    assert [layer.name for layer in result.layers] == ["0", "3", "6", "10"]
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters() if name in before)


@pytest.mark.parametrize("block", [(np.int64(4), np.int32(4)), np.array([4, 4])])
def test_blocks_can_be_numpy_integers(block: object) -> None:
    assert verify({"a.weight": torch.zeros(8, 8)}, block).block == Block(4, 4)  # type: ignore[arg-type]
