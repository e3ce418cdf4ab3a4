"""A pruner as text: its line and its table, in every phase."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import zoo


def attached(**options: object) -> tuple[nn.Module, sp.Pruner]:
    model, _ = zoo.plain_cnn()
    return model, sp.attach(model, "smart", block=(4, 4), sparsity=0.75, steps=10, **options)  # type: ignore[arg-type]


def numbers(pruner: sp.Pruner) -> dict[str, tuple[int, float]]:
    """Blocks and kept blocks of every row of the table."""
    rows = {}
    for line in pruner.summary().splitlines()[3:]:
        match = re.match(r"(all layers|\S+).*? +([\d,]+) +([\d,.]+) +[\d.]+%", line)
        assert match is not None, line
        rows[match[1]] = (int(match[2].replace(",", "")), float(match[3].replace(",", "")))
    return rows


def test_the_line_says_method_blocks_budget_and_phase() -> None:
    model, pruner = attached()
    text = f"smart: {pruner.plan.n:,} blocks of 4x4x1x1 in {len(pruner.plan.layers)} layers, remove 75% of the blocks; "
    assert repr(pruner) == f"<Pruner {text}search, step 0 of 10>"
    pruner.freeze(force=True)
    assert repr(pruner) == f"<Pruner {text}frozen>"
    sp.bake(model)
    assert repr(pruner) == f"<Pruner {text}baked>"
    assert "\n" not in repr(pruner)


def test_the_table_sums_the_soft_mask_by_layer() -> None:
    _, pruner = attached()
    rows = numbers(pruner)
    mask = pruner.mask.tolist()
    for layer in pruner.plan.layers:
        assert rows[layer.name] == (layer.n, pytest.approx(sum(mask[layer.start : layer.stop]), abs=0.051))
    assert rows["all layers"] == (pruner.plan.n, pytest.approx(pruner.plan.keep, abs=0.051))  # the soft mask meets the budget


def test_the_table_of_a_frozen_pruner_is_that_of_the_receipt() -> None:
    _, pruner = attached()
    pruner.freeze(force=True)
    rows, receipt = numbers(pruner), pruner.receipt()
    for row in receipt.layers:
        assert rows[row.name] == (row.blocks.total, row.blocks.kept)
    assert rows["all layers"] == (receipt.blocks.total, receipt.blocks.kept)
    assert max(map(len, pruner.summary().splitlines())) <= 100


def test_the_summary_does_not_change_the_search() -> None:
    masks = []
    for look in (False, True):
        torch.manual_seed(0)
        model, pruner = attached()
        x = zoo.plain_cnn()[1]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(10):
            nn.functional.cross_entropy(model(x), torch.tensor([1, 2, 3, 4])).backward()
            if look:
                pruner.summary()
            optimizer.step()
            pruner.step()
            optimizer.zero_grad()
            if look:
                pruner.summary()
        masks.append(pruner.mask)
    assert torch.equal(*masks)


def test_kept_blocks_are_named_by_layer() -> None:
    _, pruner = attached()
    assert pruner.telemetry()["kept"] == {}  # nothing is measured before the first step
    pruner.freeze(force=True)
    kept = pruner.telemetry()["kept"]
    assert kept == {row.name: row.blocks.kept for row in pruner.receipt().layers}
