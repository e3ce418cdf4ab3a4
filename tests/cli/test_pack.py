"""smartprune pack and unpack: run folders, arguments, and files that they do not overwrite."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import smartprune as sp
from helpers.packed_files import equal_states
from helpers.pruned_models import model_and_receipt
from helpers.training_jobs import run_cli
from smartprune.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model, receipt = model_and_receipt()
    save_file({name: tensor.clone() + 0.0 for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    receipt.save(tmp_path / "receipt.json")
    return tmp_path


def test_a_run_folder_is_packed_and_unpacked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "model.safetensors").read_bytes()
    assert run_cli("pack", folder) == 0
    text = capsys.readouterr().out
    assert "dense " in text
    assert "packed " in text
    assert max(map(len, text.splitlines()[:-1])) <= 80
    packed = folder / "model.packed.safetensors"
    assert run_cli("verify", packed) == 0
    assert "ok: matches the receipt" in capsys.readouterr().out
    assert run_cli("report", packed) == 0
    assert "blocks of 4x4x1x1" in capsys.readouterr().out
    assert run_cli("unpack", packed, "--out", folder / "second.safetensors") == 0
    unpacked, original = load_file(folder / "second.safetensors"), load_file(folder / "model.safetensors")
    assert equal_states({name: unpacked[name] for name in sorted(unpacked)}, {name: original[name] for name in sorted(original)})
    assert (folder / "model.safetensors").read_bytes() == before
    capsys.readouterr()
    assert run_cli("pack", folder, "--json", "--out", folder / "b") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["size"] == (folder / "b").stat().st_size
    assert data["share"] == data["size"] / data["dense"]
    assert data["block"] == "4x4x1x1"
    assert (folder / "b").read_bytes() == packed.read_bytes()


def test_wrong_command_line_arguments(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder / "model.safetensors"
    assert run_cli("pack", model) == 2
    assert "add --block" in capsys.readouterr().err
    assert run_cli("pack", model, "--block", "4y4") == 2
    assert run_cli("pack", folder / "missing.safetensors", "--block", "4x4") == 1
    assert run_cli("pack", model, "--block", "4x4") == 0
    assert run_cli("pack", model, "--receipt", folder / "receipt.json", "--out", folder / "q") == 0
    assert run_cli("verify", folder / "q") == 0
    packed = folder / "model.packed.safetensors"
    assert run_cli("unpack", packed, "--out", packed) == 2
    assert run_cli("unpack", packed, "--out", folder / "a.pt") == 2
    assert run_cli("unpack", model, "--out", folder / "a.safetensors") == 1
    assert run_cli("unpack", packed, "--out", folder / "a.safetensors", "--limit", "10") == 1
    assert run_cli("unpack", packed, "--out", folder / "a.safetensors", "--limit", "-1") == 2
    assert not (folder / "a.safetensors").exists()
    for verb in ("pack", "unpack"):
        assert run_cli(verb, "--help") == 0
        assert f"example:\n  smartprune {verb}" in capsys.readouterr().out


def test_pack_does_not_overwrite_its_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, receipt = model_and_receipt()
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    receipt.save(tmp_path / "receipt.json")
    sp.pack(tmp_path, tmp_path / "p.safetensors")
    (tmp_path / "link").symlink_to("model.safetensors")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    run, file, receipt_path, packed = (str(tmp_path / name) for name in (".", "model.safetensors", "receipt.json", "p.safetensors"))
    for target in ("model.safetensors", "receipt.json", "link"):
        with pytest.raises(sp.SmartpruneError, match=r"is the (model|receipt) itself"):
            sp.pack(tmp_path, tmp_path / target)
    for arguments, message in (
        (["pack", run, "--out", file], "--out .* is the model.safetensors of the run itself"),
        (["pack", run, "--out", receipt_path], "--out .* is the receipt.json of the run itself"),
        (["pack", file, "--receipt", receipt_path, "--out", receipt_path], "--out .* is the receipt itself"),
        (["pack", file, "--block", "4x4", "--out", str(tmp_path / "link")], "--out .* is the model itself"),
        (["unpack", packed, "--out", packed], "--out .* is the packed file itself"),
        (["report", file, "--html", file], "--html .* is the model itself"),
        (["report", run, "--html", receipt_path], "--html .* is the receipt.json of the run itself"),
        (["pack", run, "--out", str(tmp_path)], "--out .*it is a folder; add the name of a file"),
        (["unpack", packed, "--out", str(tmp_path / "no" / "a.safetensors")], "--out .*the folder .* does not exist"),
        (["report", file, "--html", str(tmp_path / "no" / "a.html")], "--html .*the folder .* does not exist"),
        (["report", file, "--figures", file], "is a file; give a folder"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2, arguments
        assert re.search(message, capsys.readouterr().err), arguments
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_special_files_are_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "p")
    packed = sp.pack(nn.Linear(8, 8), path, (4, 4))
    assert sp.pack(nn.Linear(8, 8), "/dev/null", (4, 4)).size == packed.size
    (tmp_path / "null.safetensors").symlink_to("/dev/null")
    assert main(["unpack", path, "--out", str(tmp_path / "null.safetensors"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dense"] == packed.dense
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
