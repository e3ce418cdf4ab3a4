"""Folders for the Hugging Face Hub with the real huggingface_hub, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import smartprune as sp
from smartprune.integrations.hub import from_pretrained, save_pretrained

hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed; run make hosts")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def save(folder: Path) -> nn.Module:
    model = make()
    sp.attach(model, "magnitude", block=(8, 8), sparsity=0.75, steps=1).freeze()
    receipt = sp.bake(model)
    save_pretrained(model, folder, receipt, metadata={"license": "mit", "base_model": "user/dense"})
    return model


def test_the_library_reads_the_card(tmp_path: Path) -> None:
    save(tmp_path)
    card = hub.ModelCard.load(tmp_path / "README.md")
    assert (card.data.library_name, card.data.license, card.data.base_model) == ("smartprune", "mit", "user/dense")
    assert "block-sparsity" in card.data.tags


def test_a_repository_in_the_cache_loads_offline(tmp_path: Path) -> None:
    """The layout of the cache is that of the documentation of huggingface_hub: refs name a commit, snapshots have its files."""
    repository = tmp_path / "models--user--pruned"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    model = save(repository / "snapshots" / COMMIT)
    loaded = from_pretrained(make(), "user/pruned", cache_dir=str(tmp_path), local_files_only=True)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    with pytest.raises(sp.SmartpruneError, match="user/other is no folder, and cannot be downloaded"):
        from_pretrained(make(), "user/other", cache_dir=str(tmp_path), local_files_only=True)
