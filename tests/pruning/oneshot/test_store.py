"""Interrupted calls continue, and give the same bits as an uninterrupted call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import smartprune as sp
from smartprune.pruning.oneshot.store import Store, key_of


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 4)
    ).eval()


DATA = [torch.randn(16, 4, 6, 6, generator=torch.Generator().manual_seed(i)) for i in range(4)]


class Interrupt(Exception):  # noqa: N818
    pass


def call(model: nn.Module, folder: Path | None, stop: tuple[str, int] | None = None, **options: object) -> sp.Receipt:
    def progress(step: str, done: int, total: int) -> None:
        if (step, done) == stop:
            raise Interrupt

    arguments = {"block": (4, 2), "sparsity": 0.6, "include": "*", **options}
    return sp.prune(model, DATA, folder=folder, progress=progress, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [("sensitivities", 2), ("order", 1), ("refit", 1), ("refit", 2), ("tune", 3)], ids=str)
def test_a_continued_call_gives_the_same_bits(stop: tuple[str, int], tmp_path: Path) -> None:
    whole, parts = network(), network()
    call(whole, None)
    with pytest.raises(Interrupt):
        call(parts, tmp_path / "a", stop)
    before = set((tmp_path / "a").iterdir())
    assert (len(before) > 1) == (stop[0] != "sensitivities")
    call(parts, tmp_path / "a")
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), parts.state_dict().values(), strict=True))
    assert not (tmp_path / "a").exists()


def test_finished_steps_are_not_repeated(tmp_path: Path) -> None:
    model, steps = network(), []
    with pytest.raises(Interrupt):
        call(model, tmp_path / "a", ("refit", 1))
    sp.prune(
        model,
        DATA,
        (4, 2),
        0.6,
        include="*",
        folder=tmp_path / "a",
        progress=lambda step, done, total: steps.append(step),
    )
    assert "sensitivities" not in steps


SCRIPT = """
import os, sys
sys.path.insert(0, sys.argv[2])
from test_store import call, network
import smartprune as sp, test_store

def kill(step, done, total):
    if step == "refit" and done == 1:
        os.kill(os.getpid(), 9)

sp.prune(network(), test_store.DATA, (4, 2), 0.6, include="*", folder=sys.argv[1], progress=kill)
"""


def test_resume_after_sigkill_is_bit_exact(tmp_path: Path) -> None:
    here = Path(__file__).parent
    code = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path / "a", here], check=False, capture_output=True).returncode
    assert code == -9
    assert list((tmp_path / "a").glob("refit-*"))
    whole, parts = network(), network()
    call(whole, None)
    call(parts, tmp_path / "a")
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), parts.state_dict().values(), strict=True))


def test_results_of_another_call_are_refused(tmp_path: Path) -> None:
    model = network()
    with pytest.raises(Interrupt):
        call(model, tmp_path / "a", ("refit", 1))
    for options in ({"sparsity": 0.5}, {"block": (2, 2)}, {"seed": 1}, {"floor": 0.1}):
        with pytest.raises(sp.SmartpruneError, match="another model, other data or other settings"):
            call(model, tmp_path / "a", **options)
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] += 1  # type: ignore[index, operator]
    with pytest.raises(sp.SmartpruneError, match="another model"):
        call(model, tmp_path / "a")


def test_damaged_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    model = network()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(sp.SmartpruneError, match="is not empty"):
        call(model, tmp_path / "b")
    with pytest.raises(sp.SmartpruneError, match="cannot be used"):
        call(model, tmp_path / "b" / "notes.txt")
    with pytest.raises(Interrupt):
        call(model, tmp_path / "a", ("refit", 1))
    next((tmp_path / "a").glob("costs-*")).write_bytes(b"short")
    with pytest.raises(sp.SmartpruneError, match=r"costs-1-\d+.safetensors cannot be read .*delete it"):
        call(model, tmp_path / "a")


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call(network(), None)
    assert list(tmp_path.iterdir()) == []


def test_the_key_depends_on_values_names_and_facts() -> None:
    x = torch.zeros(3)
    keys = [
        key_of({"a": 1}, [("x", x)]),
        key_of({"a": 2}, [("x", x)]),
        key_of({"a": 1}, [("y", x)]),
        key_of({"a": 1}, [("x", x + 1)]),
    ]
    assert len(set(keys)) == 4
    assert key_of({"a": 1}, [("x", x.clone())]) == keys[0]


def test_stored_tensors_are_returned(tmp_path: Path) -> None:
    store = Store(tmp_path / "a", "key")
    assert store.get("x", lambda: {"v": torch.ones(2)})["v"].tolist() == [1, 1]
    assert store.has("x")
    assert Store(tmp_path / "a", "key").get("x", lambda: {"v": torch.zeros(2)})["v"].tolist() == [1, 1]
