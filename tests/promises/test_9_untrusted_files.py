"""Promise 9: no code runs when a file is loaded, and damaged or hostile files give a clear error."""

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


class CodeOnLoad:
    """Unpickling this object creates a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def save_pruned_model(tmp_path: Path) -> tuple[Path, sp.Receipt]:
    case = Case("plain_cnn")
    pruner = case.attach(steps=2)
    case.train(pruner, case.optimizer(), 3)
    receipt = sp.bake(case.model)
    path = tmp_path / "model.safetensors"
    save_file(case.model.state_dict(), path)
    return path, receipt


@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_checkpoints_that_contain_code_are_refused(tmp_path: Path, suffix: str) -> None:
    marker, path = tmp_path / "ran", tmp_path / f"evil{suffix}"
    for write in (
        lambda: torch.save({"model": CodeOnLoad(marker)}, path),
        lambda: path.write_bytes(pickle.dumps(CodeOnLoad(marker))),
    ):
        write()
        with pytest.raises(sp.SmartpruneError, match=path.name):
            sp.verify(path)
        assert not marker.exists()


def test_duplicate_tensor_names_are_refused(tmp_path: Path) -> None:
    """Readers differ in which of the two entries they use."""
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


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.int64, torch.float8_e4m3fn])
def test_weights_of_other_kinds_of_numbers_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """torch converts them silently: a complex number loses its imaginary part, and a truth value becomes 0 or 1."""
    model, path = torch.nn.Linear(4, 4), tmp_path / "other.safetensors"
    save_file({name: value.detach().to(dtype) for name, value in model.state_dict().items()}, path)
    with pytest.raises(sp.SmartpruneError, match=rf"other\.safetensors does not fit the model: weight is {dtype} in the file"):
        load_weights(model, path)
    save_file({name: value.detach().to(torch.bfloat16) for name, value in model.state_dict().items()}, path)
    load_weights(model, path)


def test_pruner_states_load_with_weights_only(tmp_path: Path) -> None:
    case = Case("plain_cnn")
    pruner = case.attach(steps=4)
    case.train(pruner, case.optimizer(), 2)
    torch.save(pruner.state_dict(), tmp_path / "pruner.pt")
    state = torch.load(tmp_path / "pruner.pt", weights_only=True)
    Case("plain_cnn").attach(steps=4).load_state_dict(state)
    state["mask"] = torch.ones(3, dtype=torch.bool)
    with pytest.raises(sp.SmartpruneError, match="damaged"):
        Case("plain_cnn").attach(steps=4).load_state_dict(state)


def test_damaged_weights_give_a_clear_error(tmp_path: Path) -> None:
    path, receipt = save_pruned_model(tmp_path)
    assert sp.verify(path, receipt=receipt).ok
    intact = path.read_bytes()
    random.seed(0)
    refused = 0
    for _ in range(300):
        data = bytearray(intact)
        kind = random.choice(["cut", "flip", "header"])
        if kind == "cut":
            del data[random.randrange(len(data)) :]
        else:
            at = random.randrange(len(data) if kind == "flip" else 400)
            data[at] ^= 1 << random.randrange(8)
        path.write_bytes(data)
        try:
            sp.verify(path, receipt=receipt)  # a flipped bit in a kept weight is still a valid model
        except sp.SmartpruneError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 9}', json.dumps({"layers": [{}] * 3}), "\x00" * 50])
def test_damaged_receipts_give_a_clear_error(tmp_path: Path, text: str) -> None:
    path, _ = save_pruned_model(tmp_path)
    (tmp_path / "receipt.json").write_text(text)
    with pytest.raises(sp.SmartpruneError):
        sp.verify(path, receipt=tmp_path / "receipt.json")
