"""Stored models of every kind are read, and files that are damaged, hostile or of the wrong kind are refused."""

import copy
import io
import os
import pickle
import random
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from helpers import zoo
from helpers.pruned_models import model_and_receipt
from smartprune.artifacts.pack import pack
from smartprune.artifacts.receipt import Receipt
from smartprune.artifacts.source import copy_of
from smartprune.artifacts.verify import verify
from smartprune.core.block import Block
from smartprune.errors import SmartpruneError
from smartprune.hardware.npu import NPU
from smartprune.reports import report


def test_running_statistics_and_integers_are_not_weights() -> None:
    tensors = {
        "w": torch.ones(4, 4),
        "ids": torch.zeros(1, 512, dtype=torch.int64),
        "running_mean": torch.zeros(4, 4),
        "bias": torch.zeros(4),
        "q": torch.zeros(8, 4, dtype=torch.int8),
        "tied": torch.ones(1),
    }
    tensors["same"] = tensors["w"]
    assert [layer.name for layer in verify(tensors, block=(4, 4)).layers] == ["w", "q"]


def test_unusable_sources_are_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model, _ = zoo.plain_cnn()
    with pytest.raises(SmartpruneError, match=r"0.weight: the weight is on the meta device"):
        verify(model, block=(4, 4))
    with pytest.raises(SmartpruneError, match=r"model is a int; give a torch\.nn\.Module, a state dict"):
        verify(3)  # type: ignore[arg-type]
    with pytest.raises(SmartpruneError, match="holds no named tensors"):
        verify({})
    with pytest.raises(SmartpruneError, match=r"no weight can be cut .*no tensor has two axes"):
        verify({"bias": torch.zeros(3)}, block=(4, 4))
    with pytest.raises(SmartpruneError, match="no weight can be cut"):
        verify(nn.BatchNorm2d(3))
    with pytest.raises(SmartpruneError, match="not dense"):
        verify({"w": torch.eye(4).to_sparse()}, block=(4, 4))
    with pytest.raises(SmartpruneError, match="receipt is a int"):
        verify({"w": torch.eye(4)}, receipt=3)  # type: ignore[arg-type]
    with pytest.raises(SmartpruneError, match="no such file"):
        verify(tmp_path / "missing.pt")
    with pytest.raises(SmartpruneError, match=r"a run folder holds model.safetensors, and this folder does not"):
        verify(tmp_path)
    odd = tmp_path / "model.xyz"
    odd.write_bytes(b"")
    with pytest.raises(SmartpruneError, match=r"unknown file type '.xyz'; the types are: .safetensors, .pt"):
        verify(odd)


class Bomb:
    """Runs a command when unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.target}",)


def test_code_in_files_is_never_run(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    torch.save({"w": torch.eye(4), "x": Bomb(target)}, tmp_path / "zip.pt")
    (tmp_path / "raw.pth").write_bytes(pickle.dumps(Bomb(target)))
    torch.save(Bomb(target), tmp_path / "legacy.bin", _use_new_zipfile_serialization=False)
    for file in ("zip.pt", "raw.pth", "legacy.bin"):
        with pytest.raises(SmartpruneError, match=file):
            verify(tmp_path / file)
    model, _ = zoo.plain_cnn()
    torch.save(model, tmp_path / "whole.pt")
    with pytest.raises(SmartpruneError, match=r"Save model.state_dict\(\) instead"):
        verify(tmp_path / "whole.pt")
    assert not target.exists()


def test_hostile_checkpoints_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(10**6, 10**7)}, tmp_path / "huge.pt")
    with pytest.raises(SmartpruneError, match="its tensors claim 40,000,000,000,000 bytes, and the file has"):
        verify(tmp_path / "huge.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(SmartpruneError, match="holds a list"):
        verify(tmp_path / "list.pt")
    torch.save({"w": torch.zeros(1000, 1000)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as old,
        zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(SmartpruneError, match="its entries are compressed"):
        verify(tmp_path / "small.pt")


def test_a_checkpoint_with_overlapping_entries_is_refused(tmp_path: Path) -> None:
    """Entries that share their bytes would let a small file fill the memory."""
    torch.save({"w": torch.zeros(300, 300)}, tmp_path / "plain.pt")
    assert verify(tmp_path / "plain.pt", block=(4, 4)).blocks
    with zipfile.ZipFile(tmp_path / "plain.pt") as old, zipfile.ZipFile(tmp_path / "shared.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        for i in range(1, 50):
            entry = copy.copy(new.getinfo("plain/data/0"))
            entry.filename = entry.orig_filename = f"plain/data/{i}"
            new.filelist.append(entry)
    with pytest.raises(SmartpruneError, match="its entries claim more bytes than the file has"):
        verify(tmp_path / "shared.pt")


def test_a_damaged_receipt_in_a_run_folder_is_named(run: Path) -> None:
    assert verify(run).ok
    (run / "receipt.json").write_text("{")
    with pytest.raises(SmartpruneError, match=r"receipt.json: not readable as JSON"):
        verify(run)
    (run / "receipt.json").unlink()
    assert verify(run, block=(4, 4)).receipt is None


def damage(good: bytes, rng: random.Random) -> bytes:
    data = bytearray(good)
    kind = rng.random()
    if kind < 0.3:
        del data[rng.randrange(len(data)) :]
    elif kind < 0.5:
        at = rng.randrange(len(data))
        data[at:at] = rng.randbytes(rng.randrange(1, 20))
    else:
        reach = len(data) if kind < 0.7 else 1200  # mostly the header
        for _ in range(rng.choice((1, 2, 8))):
            data[rng.randrange(min(reach, len(data)))] = rng.randrange(256)
    return bytes(data)


def is_refused(path: Path, receipt: Receipt | None, name: str) -> bool:
    """Whether verify raises an error that names the file. Otherwise the result must be printable."""
    try:
        printed = str(verify(path, receipt=receipt))
    except SmartpruneError as error:
        if name not in str(error):
            raise
        return True
    assert printed
    return False


def test_fuzzed_safetensors_are_read_or_refused(run: Path) -> None:
    rng = random.Random(0)
    path = run / "model.safetensors"
    good = path.read_bytes()
    refused = 0
    for _ in range(400):
        path.write_bytes(damage(good, rng))
        refused += is_refused(run, None, "model.safetensors")
    assert refused > 150
    for header in (b"", b"\xff" * 8, (2**40).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"{}", b"\0" * 8):
        path.write_bytes(header)
        with pytest.raises(SmartpruneError, match=r"model.safetensors"):
            verify(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_fuzzed_checkpoints_are_read_or_refused(zipped: bool, tmp_path: Path) -> None:
    rng = random.Random(1)
    model, receipt = model_and_receipt()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer, _use_new_zipfile_serialization=zipped)
    path = tmp_path / "model.pt"
    refused = 0
    for _ in range(200):
        path.write_bytes(damage(buffer.getvalue(), rng))
        refused += is_refused(path, receipt, "model.pt")
    assert refused > 80


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_eight_bit_floats_are_counted(dtype: torch.dtype) -> None:
    weight = torch.zeros(8, 8)
    weight[:4, :4] = 1
    result = verify({"a.weight": weight.to(dtype)}, (4, 4))
    assert (result.ok, result.zero, result.blocks) == (True, 3, 4)
    assert verify({"a.weight": weight.to(dtype)}).block == Block(4, 4)
    weight[0, 0] = torch.nan
    assert verify({"a.weight": weight.to(dtype)}, (4, 4)).problems == ("a.weight: holds NaN or infinity",)


def test_four_bit_floats_are_refused() -> None:
    """Two values share a byte, and torch can neither compare nor convert them."""
    state = {"a.weight": torch.zeros(8, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "b.weight": torch.zeros(8, 8)}
    for read in (verify, report):
        with pytest.raises(SmartpruneError, match=r"a\.weight: torch cannot read torch\.float4_e2m1fn_x2"):
            read(state, (4, 4))


def test_masks_of_torch_prune_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    for i in (0, 2):
        prune.ln_structured(model[i], "weight", 0.5, 2, 0)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    message = r"0\.weight is masked by torch\.nn\.utils\.prune.*torch\.nn\.utils\.prune\.remove\(module, 'weight'\)"
    for stored in (model, model.state_dict(), tmp_path / "m.pt"):
        for read in (verify, report):
            with pytest.raises(SmartpruneError, match=message):
                read(stored, "channel")
        with pytest.raises(SmartpruneError, match=message):
            pack(stored, tmp_path / "p", "channel")
    with pytest.raises(SmartpruneError, match=message):
        NPU.edge().estimate(model, torch.zeros(1, 8, 9, 9))
    for i in (0, 2):
        prune.remove(model[i], "weight")
    assert verify(model, "channel").zero == 8
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]


def test_a_receipt_that_is_a_broken_link_is_named(run: Path) -> None:
    (run / "receipt.json").unlink()
    (run / "receipt.json").symlink_to("gone.json")
    with pytest.raises(SmartpruneError, match=r"receipt\.json: is a link to gone\.json, which does not exist"):
        verify(run, (4, 4))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_copies_without_values_are_refused() -> None:
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(4, 4))
    for model, problem in (
        (meta, r"the model cannot be copied, because 0\.weight is on the meta device and has no values"),
        (nn.Sequential(nn.LazyLinear(4)), r"the model cannot be copied, because 0\.weight has no shape yet \(a lazy layer\)"),
        (torch.jit.script(nn.Linear(4, 4)), "the model cannot be copied"),
    ):
        with pytest.raises(SmartpruneError, match=f"here: {problem}"):
            copy_of(model, "here")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_models_with_scripted_parts_are_copied() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 8)), nn.Linear(8, 4))
    x = torch.randn(3, 4)
    copied = copy_of(model, "here")
    assert torch.equal(copied(x), model(x))
    assert not any(parameter.requires_grad for parameter in copied.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
