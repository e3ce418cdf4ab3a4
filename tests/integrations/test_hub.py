"""Folders for the Hub: the round trip is exact, and the card says what the receipt says."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smartprune as sp
from smartprune.integrations.hub import FILES, from_pretrained, save_pretrained


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


@pytest.fixture
def pruned() -> tuple[nn.Module, sp.Receipt]:
    torch.manual_seed(0)
    model = make()
    sp.attach(model, "magnitude", block=(8, 8), sparsity=0.75, steps=1).freeze()
    receipt = sp.bake(model)
    return model, receipt


def test_the_round_trip_is_exact(pruned: tuple[nn.Module, sp.Receipt], tmp_path: Path) -> None:
    model, receipt = pruned
    save_pretrained(model, tmp_path / "pruned", receipt)
    assert {path.name for path in (tmp_path / "pruned").iterdir()} == set(FILES)
    loaded = from_pretrained(make(), tmp_path / "pruned")
    assert not loaded.training
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    assert sp.Receipt.load(tmp_path / "pruned" / "receipt.json") == receipt


def test_the_card_says_what_the_receipt_says(pruned: tuple[nn.Module, sp.Receipt], tmp_path: Path) -> None:
    model, receipt = pruned
    metadata = {"license": "mit", "base_model": 'a "quoted": name', "tags": ["pruning", "example"]}
    save_pretrained(model, tmp_path / "pruned", receipt, name="ResNet\n# small", metadata=metadata, report="``` <b>report</b>")
    card = (tmp_path / "pruned" / "README.md").read_text()
    _, head, body = card.split("---\n", 2)
    fields = dict(line.split(": ", 1) for line in head.strip().splitlines())
    assert {name: json.loads(value) for name, value in fields.items()} == {"library_name": "smartprune", **metadata}
    assert body.startswith("\n# ResNet # small\n")
    tiles = [model.get_parameter(row.weight).reshape(-1, 8, row.shape[1] // 8, 8) for row in receipt.layers]
    kept = sum(int((tile != 0).any(3).any(1).sum()) for tile in tiles)
    assert f"| blocks kept | {kept} of {receipt.blocks.total} |" in card
    assert receipt.mask_hash in card
    assert str(receipt) in card
    assert "````text\n``` <b>report</b>\n````" in card, "a report cannot end its code block"


def test_weights_that_do_not_match_are_refused_and_change_nothing(pruned: tuple[nn.Module, sp.Receipt], tmp_path: Path) -> None:
    model, receipt = pruned
    save_pretrained(model, tmp_path / "good", receipt)
    other = nn.Sequential(nn.Linear(16, 8))
    before = [value.clone() for value in other.state_dict().values()]
    with pytest.raises(sp.SmartpruneError):
        from_pretrained(other, tmp_path / "good")
    assert all(torch.equal(a, b) for a, b in zip(before, other.state_dict().values(), strict=True))
    with torch.no_grad():
        model.get_parameter("3.weight").add_(1)
    with pytest.raises(sp.SmartpruneError):
        save_pretrained(model, tmp_path / "other", receipt)


@pytest.mark.parametrize("name", ["model.packed.safetensors", "receipt.json"])
def test_a_missing_file_is_named(name: str, pruned: tuple[nn.Module, sp.Receipt], tmp_path: Path) -> None:
    save_pretrained(pruned[0], tmp_path, pruned[1])
    (tmp_path / name).unlink()
    with pytest.raises(sp.SmartpruneError, match=f"has no {name}"):
        from_pretrained(make(), tmp_path)


def test_a_receipt_of_another_mask_is_refused(pruned: tuple[nn.Module, sp.Receipt], tmp_path: Path) -> None:
    save_pretrained(pruned[0], tmp_path, pruned[1])
    torch.manual_seed(1)
    other = make()
    sp.attach(other, "magnitude", block=(8, 8), sparsity=0.75, steps=1).freeze()
    sp.bake(other).save(tmp_path / "receipt.json")
    loaded = make()
    before = [value.clone() for value in loaded.state_dict().values()]
    with pytest.raises(sp.SmartpruneError, match="does not match its receipt"):
        from_pretrained(loaded, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, loaded.state_dict().values(), strict=True))


def test_a_repository_is_downloaded(pruned: tuple[nn.Module, sp.Receipt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_pretrained(pruned[0], tmp_path, pruned[1])
    calls: list[Any] = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append((name, options))
        if name != "user/pruned":
            raise OSError("404 Client Error\nmore")
        return str(tmp_path)

    library = types.ModuleType("huggingface_hub")
    library.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    from_pretrained(make(), "user/pruned", revision="main")
    assert calls == [("user/pruned", {"allow_patterns": list(FILES), "revision": "main"})]
    with pytest.raises(sp.SmartpruneError, match=r"user/none is no folder, and cannot be downloaded \(404 Client Error\)"):
        from_pretrained(make(), "user/none")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(sp.SmartpruneError, match="huggingface_hub cannot be imported"):
        from_pretrained(make(), "user/pruned")
