"""Receipts of pruned models: their counts equal counts by loops, and they name what was left out."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import smartprune as sp
from helpers import reference, zoo
from helpers.pruned_models import pruned_weights, random_mask
from smartprune.artifacts.counts import Count
from smartprune.artifacts.receipt import Receipt
from smartprune.core.occupancy import map_hash, occupied
from smartprune.errors import SmartpruneError
from smartprune.pruning.plan import plan
from smartprune.pruning.receipt import make_receipt


@pytest.mark.parametrize("name", sorted(zoo.SMALL))
def test_counts_equal_counts_by_loops(name: str) -> None:
    model, x = zoo.SMALL[name]()
    pruning_plan = plan(model, (4, 3), 0.7, include="*", example=x)
    mask = random_mask(pruning_plan, pruning_plan.keep or 0)
    weights = pruned_weights(pruning_plan, model, mask)
    receipt = make_receipt(pruning_plan, weights, mask, "magnitude")
    kept_weights = 0
    for row, layer in zip(receipt.layers, pruning_plan.layers, strict=True):
        index = reference.block_index(row.shape, (4, 3), row.parts, row.transposed)
        sizes, bits = reference.block_counts(index), mask[layer.start : layer.stop].tolist()
        kept = sum(n for n, bit in zip(sizes, bits, strict=True) if bit)
        kept_weights += kept
        assert row.grid == reference.grid_shape(row.shape, (4, 3), row.parts, row.transposed)
        assert row.blocks == Count(len(sizes), sum(bits))
        assert row.weights == Count(sum(sizes), kept)
        assert row.occupied == sum(reference.occupied(weights[row.weight].flatten().tolist(), index))
        assert row.mask().tolist() == bits
    total = sum(p.numel() for p in model.parameters())
    assert receipt.weights.kept == kept_weights
    assert receipt.model_weights == Count(total, total - receipt.weights.removed)
    assert receipt.blocks == Count(pruning_plan.n, pruning_plan.keep or 0)
    assert receipt.met
    assert receipt.kept_but_zero == 0
    assert torch.equal(receipt.mask(), mask)
    assert receipt.macs is not None
    assert receipt.model_macs is not None
    assert receipt.macs.removed == receipt.model_macs.removed
    assert pruning_plan.uses is not None
    assert receipt.macs.total == pruning_plan.macs
    maps = [
        (row.weight, row.grid, occupied(layer.grid, weights[row.weight]))
        for row, layer in zip(receipt.layers, pruning_plan.layers, strict=True)
    ]
    assert receipt.mask_hash == map_hash(pruning_plan.block, maps)


def test_kept_blocks_of_zeros_are_counted() -> None:
    model, _ = zoo.plain_cnn()
    pruning_plan = plan(model, (4, 4), 0.5)
    mask = random_mask(pruning_plan, pruning_plan.keep or 0)
    weights = pruned_weights(pruning_plan, model, mask)
    weights["6.weight"].zero_()
    receipt = make_receipt(pruning_plan, weights, mask, "magnitude")
    assert receipt.kept_but_zero == receipt.layers[1].blocks.kept > 0
    assert receipt.layers[1].occupied == 0
    assert "kept blocks hold only zeros" in str(receipt)
    assert Receipt.from_json(receipt.to_json()) == receipt


def test_layers_without_kept_blocks_are_named() -> None:
    layers = [nn.Linear(8, 8) for _ in range(6)]
    with torch.no_grad():
        for layer, size in zip(layers, (1.0, 0.01, 0.01, 0.01, 0.01, 1.0), strict=True):
            layer.weight.fill_(size)
    receipts = []
    for floor in (None, 0.01):
        model = copy.deepcopy(nn.Sequential(*layers))
        sp.attach(model, sp.Magnitude(), block=(4, 4), sparsity=0.7, steps=1, include="*", floor=floor).freeze()
        receipts.append(" ".join(str(sp.bake(model)).split()))
    assert "no block is kept in 4 of 6 layers, which pass nothing on (floor=0.01 prevents this): 1, 2, 3 and 1 more" in receipts[0]
    assert "no block is kept" not in receipts[1]


def test_removed_blocks_must_be_zero() -> None:
    model, _ = zoo.plain_cnn()
    pruning_plan = plan(model, (4, 4), 0.5)
    mask = torch.ones(pruning_plan.n, dtype=torch.bool)
    mask[7] = mask[11] = False
    weights = {layer.weight: model.get_parameter(layer.weight) for layer in pruning_plan.layers}
    with pytest.raises(SmartpruneError, match=r"3.weight has 2 removed blocks that are not zero, the first at 7"):
        make_receipt(pruning_plan, weights, mask, "magnitude")
    with pytest.raises(SmartpruneError, match=r"6\.weight is missing from the weights"):
        make_receipt(pruning_plan, {"3.weight": weights["3.weight"]}, torch.ones(pruning_plan.n), "magnitude")
    with pytest.raises(SmartpruneError, match="a mask of 3 entries was given for 195 blocks"):
        make_receipt(pruning_plan, weights, torch.ones(3), "magnitude")
    with pytest.raises(SmartpruneError, match=r"settings.f is .*must be plain data"):
        make_receipt(pruning_plan, weights, torch.ones(pruning_plan.n), "magnitude", {"f": print})


def test_layers_that_inference_never_uses_are_named(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.aux, self.fixed, self.fc = (nn.Linear(8, 8) for _ in range(4))
            self.fixed.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fixed(self.body(x).relu()).relu())  # type: ignore[no-any-return]

    model = Net()
    pruner = sp.attach(model, sp.Magnitude(), block=(4, 4), sparsity=0.5, steps=1, example=torch.randn(2, 8))
    pruner.freeze()
    receipt = sp.bake(model)
    expected = (
        ("aux", "inference on the example never uses it"),
        ("fixed", "frozen: requires_grad is False"),
        ("fc", "output layer: no other layer reads its result"),
    )
    assert receipt.not_pruned == expected
    assert receipt.blocks.total == 4
    assert "note     not pruned: aux (inference on the example never uses it)" in str(receipt)
    receipt.save(tmp_path / "receipt.json")
    assert Receipt.load(tmp_path / "receipt.json") == receipt
