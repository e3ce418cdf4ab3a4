"""Promise 9: loading never unpickles foreign code; a damaged or hostile file gets a clear error."""

import json
import os
import pickle
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import smartprune as sp
from helpers.training_cases import Case
from smartprune.training.folder import load_weights


class Trap:
    """Unpickling this runs code."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def pruned(tmp_path: Path) -> tuple[Path, sp.Receipt]:
    case = Case("plain_cnn")
    pruner = case.attach(steps=2)
    case.train(pruner, case.optimizer(), 3)
    receipt = sp.bake(case.model)
    path = tmp_path / "model.safetensors"
    save_file(case.model.state_dict(), path)
    return path, receipt


@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_a_checkpoint_with_code_in_it_is_refused_and_not_run(tmp_path: Path, suffix: str) -> None:
    mark, path = tmp_path / "ran", tmp_path / f"evil{suffix}"
    for write in (lambda: torch.save({"model": Trap(mark)}, path), lambda: path.write_bytes(pickle.dumps(Trap(mark)))):
        write()
        with pytest.raises(sp.SmartpruneError, match=path.name):
            sp.verify(path)
        assert not mark.exists()


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    """Readers differ in which of them they take."""
    model = torch.nn.Linear(8, 8, bias=False)
    packed, plain = tmp_path / "packed.safetensors", tmp_path / "plain.safetensors"
    sp.pack(model, packed, (4, 4))
    save_file(model.state_dict(), plain)
    for path in (packed, plain):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        entry = json.loads(data[8:start])["weight"]
        other = json.dumps({**entry, "dtype": "I32"})
        header = data[8:start].rstrip().replace(b"{", f'{{"weight":{other},'.encode(), 1)
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[start:])
        with pytest.raises(sp.SmartpruneError, match="duplicate key"):
            sp.verify(path, (4, 4))
    with pytest.raises(sp.SmartpruneError, match="duplicate key"):
        sp.unpack(packed)
    with pytest.raises(sp.SmartpruneError, match="duplicate key"):
        load_weights(model, plain)


def test_a_pruners_state_loads_without_pickled_code(tmp_path: Path) -> None:
    case = Case("plain_cnn")
    pruner = case.attach(steps=4)
    case.train(pruner, case.optimizer(), 2)
    torch.save(pruner.state_dict(), tmp_path / "pruner.pt")
    state = torch.load(tmp_path / "pruner.pt", weights_only=True)
    Case("plain_cnn").attach(steps=4).load_state_dict(state)
    state["mask"] = torch.ones(3, dtype=torch.bool)
    with pytest.raises(sp.SmartpruneError, match="damaged"):
        Case("plain_cnn").attach(steps=4).load_state_dict(state)


def test_damaged_weights_are_told_from_sound_ones(tmp_path: Path) -> None:
    path, receipt = pruned(tmp_path)
    assert sp.verify(path, receipt=receipt).ok
    sound = path.read_bytes()
    random.seed(0)
    refused = 0
    for _ in range(300):
        data = bytearray(sound)
        kind = random.choice(["cut", "flip", "header"])
        if kind == "cut":
            del data[random.randrange(len(data)) :]
        else:
            at = random.randrange(len(data) if kind == "flip" else 400)
            data[at] ^= 1 << random.randrange(8)
        path.write_bytes(data)
        try:
            sp.verify(path, receipt=receipt)  # a flipped bit of a kept weight is a different, sound model
        except sp.SmartpruneError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 9}', json.dumps({"layers": [{}] * 3}), "\x00" * 50])
def test_hostile_receipts(tmp_path: Path, text: str) -> None:
    path, _ = pruned(tmp_path)
    (tmp_path / "receipt.json").write_text(text)
    with pytest.raises(sp.SmartpruneError):
        sp.verify(path, receipt=tmp_path / "receipt.json")
