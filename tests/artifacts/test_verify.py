"""Verification of models and files against receipts, and of files from any source."""

import copy
import dataclasses
import io
import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import prune

import smartprune as sp
from helpers import zoo
from helpers.pruned_models import model_and_receipt
from smartprune.artifacts.pack import pack
from smartprune.artifacts.receipt import Receipt
from smartprune.artifacts.verify import verify
from smartprune.core.block import Block
from smartprune.errors import SmartpruneError
from smartprune.hardware.npu import NPU
from smartprune.pruning.plan import plan
from smartprune.pruning.receipt import make_receipt
from smartprune.reports import report


def state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model, receipt = model_and_receipt()
    save_file(state(model), tmp_path / "model.safetensors")
    receipt.save(tmp_path / "receipt.json")
    return tmp_path


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


def test_masked_models_are_verified_by_their_stored_weights() -> None:
    sp = pytest.importorskip("smartprune")
    model, _ = zoo.plain_cnn()
    sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.75, steps=3)
    before = {name: value.clone() for name, value in model.named_parameters() if name in ("3.weight", "6.weight")}
    result = verify(model, block=(4, 4))
    assert result.zero == 0  # the weights themselves are not pruned yet
    assert [layer.name for layer in result.layers] == ["0", "3", "6", "10"]
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters() if name in before)


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
    with pytest.raises(SmartpruneError, match="claims 10,000,000,000,000 numbers and stores fewer"):
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


# --- axes that files do not define


def ambiguous_model() -> tuple[nn.Module, tuple[int, int]]:
    """Layers whose zero blocks depend on axes that files do not define. Each layer keeps one of four blocks."""
    model = nn.Sequential(nn.ConvTranspose2d(32, 16, 1), nn.Conv2d(16, 16, 1, groups=4), nn.Flatten(), nn.Linear(32, 16))
    with torch.no_grad():
        for i in (0, 1, 3):
            model[i].weight.zero_()
        model[0].weight[:8, :16] = 1
        model[1].weight[:4] = 1
        model[3].weight[:16, :8] = 1
    return model, (16, 8)


def test_axes_are_assumed_only_if_they_are_unknown(tmp_path: Path) -> None:
    model, block = ambiguous_model()
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    torch.save({"model": model.state_dict()}, tmp_path / "m.pt")
    expected = [(layer.blocks, layer.zero) for layer in verify(model, block).layers]
    assert expected == [(4, 3)] * 3
    assert verify(model, block).assumed == ()
    for stored in (model.state_dict(), tmp_path / "m.safetensors", tmp_path / "m.pt"):
        without_model = verify(stored, block)
        assert without_model.assumed == ("0.weight", "1.weight")
        assert [(layer.blocks, layer.zero) for layer in without_model.layers] == [(4, 2), (1, 0), (4, 3)]
        assert without_model.to_json()["axes_assumed"] == ["0.weight", "1.weight"]
        printed = " ".join(str(without_model).split())
        assert "the axes of 2 weights are assumed to be (out, in, ...), without groups" in " ".join(printed.split())
        assert "0.weight, 1.weight. To be sure, give the model, by model= or --model NAME" in printed
        assert max(map(len, str(without_model).splitlines()[1:])) <= 80
        with_model = verify(stored, block, model=model)
        assert [(layer.blocks, layer.zero) for layer in with_model.layers] == expected
        assert with_model.assumed == ()
        assert "assumed to be" not in str(with_model)
        assert verify(stored).assumed == ("0.weight", "1.weight")  # also when common shapes are tried
        assert verify(stored, model=model).assumed == ()
    assert verify(model.state_dict(), (1, 1)).assumed == ()  # the axes do not matter for single weights
    assert verify({"fc.weight": torch.zeros(8, 8)}, (4, 4)).assumed == ()
    assert verify({"a.in_proj_weight": torch.zeros(24, 8)}, (16, 8)).assumed == ("a.in_proj_weight",)  # three stacked matrices


def test_a_bias_says_which_axis_of_a_matrix_holds_the_outputs(tmp_path: Path) -> None:
    model = nn.ModuleDict({"up": zoo.Conv1D(10, 6), "proj": zoo.Conv1D(6, 6), "linear": nn.Linear(6, 10)})
    with torch.no_grad():
        for name in ("up", "proj"):
            model[name].weight[:4, :3] = 0  # 4 inputs and 3 outputs
        model["linear"].weight[:3, :4] = 0
    torch.save(model.state_dict(), tmp_path / "model.pt")
    from_model, from_file = verify(model, (3, 4)), verify(tmp_path / "model.pt", (3, 4))
    assert [(layer.name, layer.blocks, layer.zero) for layer in from_model.layers] == [
        ("up", 2 * 4, 1),
        ("proj", 2 * 2, 1),
        ("linear", 4 * 2, 1),
    ]
    assert from_file.layers[0] == from_model.layers[0]
    assert from_file.layers[2] == from_model.layers[2]
    assert from_file.assumed == ("proj.weight",)  # the bias of a square matrix says nothing
    assert verify(tmp_path / "model.pt", (3, 4), model=model).layers == from_model.layers
    linear = {"fc.weight": torch.zeros(8, 8), "fc.bias": torch.zeros(8)}
    assert verify(linear, (4, 4)).assumed == ()  # no other layer of the file stores inputs first


def test_reports_name_assumed_axes() -> None:
    model, block = ambiguous_model()
    without_model, with_model = report(model.state_dict(), block), report(model.state_dict(), block, model=model)
    assert without_model.assumed == ("0.weight", "1.weight")
    assert without_model.to_json()["axes_assumed"] == ["0.weight", "1.weight"]
    assert "the axes of 2 weights are assumed to be (out, in, ...)" in " ".join(str(without_model).split())
    assert with_model.assumed == ()
    assert [row.blocks for row in with_model.layers] == [row.blocks for row in report(model, block).layers]
    assert report(model=model, block=block).blocks == with_model.blocks


def test_the_model_can_be_a_keyword_argument() -> None:
    model, block = ambiguous_model()
    assert verify(model=model, block=block) == verify(model, block)
    assert verify(model=model.state_dict(), block=block).zero == verify(model.state_dict(), block).zero
    with pytest.raises(SmartpruneError, match=r"verify: give a torch\.nn\.Module, a state dict, or the path"):
        verify(block=block)
    with pytest.raises(SmartpruneError, match=r"verify: model= is a dict; give the torch\.nn\.Module"):
        verify(model.state_dict(), block, model={})


def test_a_model_of_other_weights_is_refused() -> None:
    model, block = ambiguous_model()
    state = model.state_dict()
    with pytest.raises(SmartpruneError, match=r"does not belong to the model: 0\.weight is 8x8 in the model and 32x16x1x1 here"):
        verify(state, block, model=nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(SmartpruneError, match=r"4\.weight \(4x4\) is not in the model"):
        verify({**state, "4.weight": torch.zeros(4, 4)}, block, model=model)
    del state["3.weight"]
    with pytest.raises(SmartpruneError, match=r"3\.weight is 16x32 in the model and missing here"):
        verify(state, block, model=model)
    with pytest.raises(SmartpruneError, match=r"0\.weight has no shape yet"):
        verify(state, block, model=nn.Sequential(nn.LazyLinear(8)))


def test_a_model_on_the_meta_device_defines_axes() -> None:
    model, block = ambiguous_model()
    wrapped = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    assert verify(wrapped, block, model=model.to("meta")).zero == 9


def test_a_receipt_with_other_axes_is_a_problem() -> None:
    model, receipt = model_and_receipt("unet")
    assert verify(model.state_dict(), receipt=receipt, model=model).ok
    row = next(row for row in receipt.layers if row.transposed)
    other = dataclasses.replace(row, transposed=False)
    layers = tuple(other if each is row else each for each in receipt.layers)
    result = verify(model.state_dict(), receipt=dataclasses.replace(receipt, layers=layers), model=model)
    assert any("transposed=False, the model groups=1, transposed=True" in problem for problem in result.problems)


# --- other forms of weights


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


@pytest.mark.parametrize("block", [(np.int64(4), np.int32(4)), np.array([4, 4])])
def test_blocks_can_be_numpy_integers(block: object) -> None:
    assert verify({"a.weight": torch.zeros(8, 8)}, block).block == Block(4, 4)  # type: ignore[arg-type]
