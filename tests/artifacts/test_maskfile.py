"""Mask files: the bits that are written, the documented reader, applying a mask, and files that are damaged or hostile."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import zoo
from helpers.packed_files import FORMAT_PAGE, zero_random_blocks
from helpers.pruned_models import model_and_receipt
from smartprune.artifacts.safetensors_file import MASK


def documented_reader() -> Callable[[Path], dict[str, np.ndarray]]:
    scope: dict[str, Any] = {}
    exec(next(text for text in re.findall(r"```python\n(.*?)```", FORMAT_PAGE, re.S) if "def read_mask_file" in text), scope)
    return scope["read_mask_file"]  # type: ignore[no-any-return]


def expected_grid(weight: np.ndarray, block: tuple[int, int], groups: int, transposed: bool) -> np.ndarray:
    """Which blocks hold a nonzero number, with loops over single elements."""
    steps = [1] * weight.ndim
    steps[0], steps[1] = (block[1], block[0]) if transposed else block
    per_group = weight.shape[0] // groups
    steps[0] = min(steps[0], per_group)
    shape = [groups * -(-per_group // steps[0]), -(-weight.shape[1] // steps[1]), *weight.shape[2:]]
    out = np.zeros(shape, dtype=bool)
    for place in np.argwhere(weight != 0):
        group, row = divmod(int(place[0]), per_group)
        out[(group * -(-per_group // steps[0]) + row // steps[0], place[1] // steps[1], *place[2:])] = True
    return out


@pytest.mark.parametrize("name", sorted(zoo.SMALL))
def test_the_documented_reader_finds_the_nonzero_blocks(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = zero_random_blocks(zoo.SMALL[name]()[0], (4, 3), keep=0.4)
    path = tmp_path / "net.mask.safetensors"
    saved, read, loaded = sp.save_mask(model, path, block=(4, 3)), documented_reader()(path), sp.load_mask(path)
    assert list(read) == list(loaded.grids) == list(saved.grids)
    assert loaded.hash == saved.hash
    state = model.state_dict()
    for layer in loaded.layers:
        expected = expected_grid(state[layer.weight].numpy(), (4, 3), layer.layout.parts, layer.layout.transposed)
        assert np.array_equal(read[layer.weight], expected)
        assert np.array_equal(loaded.grids[layer.weight].numpy(), expected)
        assert not expected.all()
    assert loaded.blocks.total == sum(grid.size for grid in read.values())
    assert loaded.sparsity == sum(int((~grid).sum()) for grid in read.values()) / loaded.blocks.total


def test_the_page_lists_every_key(tmp_path: Path) -> None:
    sp.save_mask(zero_random_blocks(zoo.unet()[0], (4, 4)), tmp_path / "m", block=(4, 4))
    text = read_json((tmp_path / "m").read_bytes())
    section = FORMAT_PAGE.split("## The mask file")[1].split("## The mask of an ONNX file")[0]
    general, entry = (
        re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", part, re.M))) for part in section.split("An entry of")
    )
    assert sorted(text) == sorted(general)
    assert sorted(text["layers"][0]) == sorted(entry)


@pytest.mark.parametrize("name", ["plain_cnn", "unet", "transformer_block"])
def test_the_hash_is_that_of_the_receipt(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, receipt = model_and_receipt(name)
    receipt.save(tmp_path / "receipt.json")
    for given in (receipt, receipt.to_json(), tmp_path / "receipt.json"):
        mask = sp.save_mask(model, tmp_path / "m", receipt=given)  # type: ignore[arg-type]
        assert mask.hash == sp.load_mask(tmp_path / "m").hash == receipt.mask_hash
        assert mask.sparsity == receipt.sparsity
    assert sp.save_mask(dict(model.state_dict()), tmp_path / "m", receipt=receipt).hash == receipt.mask_hash


def test_run_folders_and_packed_files_bring_their_receipt(run: Path, tmp_path: Path) -> None:
    receipt = sp.Receipt.load(run / "receipt.json")
    assert sp.save_mask(run, tmp_path / "m").hash == receipt.mask_hash
    sp.pack(run, tmp_path / "p.packed.safetensors")
    assert sp.save_mask(tmp_path / "p.packed.safetensors", tmp_path / "m").hash == receipt.mask_hash


def test_frozen_models_give_the_mask_of_their_pruner(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = zoo.plain_cnn()[0]
    pruner = sp.attach(model, "magnitude", block=(4, 4), sparsity=0.5, steps=2)
    with pytest.raises(sp.SmartpruneError, match="the search is at step 0 of 2"):
        sp.save_mask(model, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    pruner.freeze()
    mask = sp.save_mask(model, tmp_path / "m")
    assert torch.cat([grid.reshape(-1) for grid in mask.grids.values()]).equal(pruner.mask.bool())
    wrapped = sp.save_mask(nn.Sequential(model), tmp_path / "m")
    receipt = sp.bake(model)
    assert mask.hash == wrapped.hash == receipt.mask_hash == sp.save_mask(model, tmp_path / "m", receipt=receipt).hash


def test_apply_zeros_the_same_blocks_of_another_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, receipt = model_and_receipt("unet")
    sp.save_mask(model, tmp_path / "m", receipt=receipt)
    other = zoo.unet()[0]
    with torch.no_grad():
        other.get_parameter(receipt.layers[0].weight)[:] = torch.nan
    before, weights = copy.deepcopy(other.state_dict()), dict(other.named_parameters())
    mask = sp.load_mask(tmp_path / "m")
    assert mask.apply(other) == receipt.blocks.removed
    assert mask.apply(other) == 0
    assert all(other.get_parameter(name) is weight for name, weight in weights.items())
    pruned = {row.weight: row for row in receipt.layers}
    for name, tensor in other.state_dict().items():
        kept = pruned[name].cut(receipt.block).expand(pruned[name].mask()) if name in pruned else torch.ones_like(tensor).bool()
        assert tensor[kept].isnan().equal(before[name][kept].isnan())
        assert tensor[kept].nan_to_num().equal(before[name][kept].nan_to_num())
        assert not tensor[~kept].any()
    assert sp.save_mask(nn.Sequential(other), tmp_path / "n", block=receipt.block).blocks.removed >= receipt.blocks.removed
    mask.apply(nn.DataParallel(zoo.unet()[0]))


def test_a_mask_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = zero_random_blocks(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv2d(8, 8, 3)), (4, 4))
    sp.save_mask(model, tmp_path / "m", block=(4, 4))
    mask = sp.load_mask(tmp_path / "m")
    others = {
        "has no such weight": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        "it is 8x4x3x3 in the model": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv2d(8, 8, 3, groups=2)),
        r"it is \(in, out, ...\) with 1 group in the model": nn.Sequential(
            nn.Linear(8, 8), nn.Linear(8, 8), nn.ConvTranspose2d(8, 8, 3)
        ),
        "it is on the meta device": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv2d(8, 8, 3, device="meta")),
        "it is lazy in the model": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LazyConv2d(8, 3)),
    }
    for message, other in others.items():
        before = [other[i].weight.detach().clone() for i in (0, 1)]
        with pytest.raises(sp.SmartpruneError, match=rf"mask\.apply: 2\.weight of .*m does not fit Sequential: .*{message}"):
            mask.apply(other)
        assert all(other[i].weight.equal(before[i]) for i in (0, 1))
    sp.attach(model, "magnitude", block=(4, 4), sparsity=0.5, steps=1)
    with pytest.raises(sp.SmartpruneError, match="the model has a pruner"):
        mask.apply(model)


def test_a_model_that_was_just_pruned_needs_no_receipt(tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    baked, pruned = (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2))
    sp.attach(baked, "magnitude", block=(4, 4), sparsity=0.5, steps=1).freeze()
    for model, receipt in [(baked, sp.bake(baked)), (pruned, sp.prune(pruned, [x], block=(4, 4), sparsity=0.5))]:
        assert sp.save_mask(model, tmp_path / "m").hash == receipt.mask_hash
        assert sp.bsr(model, "0").to_dense().equal(model[0].weight)
        with pytest.raises(sp.SmartpruneError, match="no block was given and there is no receipt"):
            sp.save_mask(copy.deepcopy(model), tmp_path / "m")
        with torch.no_grad():
            model[0].weight.add_(1)
        with pytest.raises(sp.SmartpruneError, match="does not match its receipt"):
            sp.save_mask(model, tmp_path / "m")


def test_wrong_arguments_are_explained(tmp_path: Path) -> None:
    model, receipt = model_and_receipt()
    path = tmp_path / "m"
    with pytest.raises(sp.SmartpruneError, match="no block was given and there is no receipt"):
        sp.save_mask(model, path)
    with pytest.raises(sp.SmartpruneError, match="the receipt is about blocks of 4x4x1x1"):
        sp.save_mask(model, path, block=(8, 8), receipt=receipt)
    with pytest.raises(sp.SmartpruneError, match="does not match its receipt"):
        sp.save_mask(zoo.plain_cnn()[0], path, receipt=receipt)
    with pytest.raises(sp.SmartpruneError, match="has no zero block of 4x4x1x1"):
        sp.save_mask(zoo.plain_cnn()[0], path, block=(4, 4))
    with pytest.raises(sp.SmartpruneError, match=r"the axes of 3\.weight are not known"):
        sp.save_mask(dict(model.state_dict()), path, block=(4, 4))
    assert not path.exists()
    sp.pack(model, path, receipt=receipt)
    with pytest.raises(sp.SmartpruneError, match="not a mask file"):
        sp.load_mask(path)
    sp.save_mask(model, path, receipt=receipt)
    with pytest.raises(sp.SmartpruneError, match="not a packed file"):
        sp.unpack(path)
    with pytest.raises(sp.SmartpruneError, match="is a mask file and holds no weights"):
        sp.verify(path)


def read_json(data: bytes) -> dict[str, Any]:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"][MASK])  # type: ignore[no-any-return]


def with_json(data: bytes, text: dict[str, Any], header: dict[str, Any] | None = None) -> bytes:
    stop = 8 + int.from_bytes(data[:8], "little")
    header = {**json.loads(data[8:stop]), "__metadata__": {MASK: json.dumps(text)}, **(header or {})}
    head = json.dumps({key: value for key, value in header.items() if value is not None}).encode()
    return len(head).to_bytes(8, "little") + head + data[stop:]


HOSTILE: list[Any] = [0, -1, 7, 2**31, 2**63, 2**200, 1.5, True, None, "", "x", "\x00", "*x*", [], {}, [2**40, 2**40], [0, 8], [[]]]


def test_hostile_entries_are_refused(tmp_path: Path) -> None:
    """Every value of the metadata is replaced by every hostile one. Nothing is read but the original."""
    torch.manual_seed(0)
    path = tmp_path / "m"
    saved = sp.save_mask(zero_random_blocks(zoo.mobilenet_block()[0], (4, 4)), path, block=(4, 4))
    good = path.read_bytes()
    text = read_json(good)
    names = [*text, *(("layers", 1, key) for key in text["layers"][1])]
    assert len(names) == 15
    for name in names:
        for value in (*HOSTILE, "missing"):
            changed = copy.deepcopy(text)
            holder = changed if isinstance(name, str) else changed["layers"][1]
            key = name if isinstance(name, str) else name[2]
            if json.dumps(holder[key]) == json.dumps(value):
                continue
            holder[key] = value
            if value == "missing":
                del holder[key]
            if key in ("layer", "kind") and isinstance(value, str) and value.isprintable() and value != "missing":
                continue  # for information only
            path.write_bytes(with_json(good, changed))
            with pytest.raises(sp.SmartpruneError):
                sp.load_mask(path)
    huge = copy.deepcopy(text)
    huge["layers"][0] |= {"shape": [2**31, 2**31], "step": [4, 4], "grid": [2**29, 2**29], "groups": 1}
    path.write_bytes(with_json(good, huge))
    with pytest.raises(sp.SmartpruneError, match="it must be U8"):
        sp.load_mask(path)
    path.write_bytes(with_json(good, {**text, "extra": 1}))
    with pytest.raises(sp.SmartpruneError, match="unknown key 'extra'"):
        sp.load_mask(path)
    path.write_bytes(with_json(good, {**text, "layers": [*text["layers"], text["layers"][0]]}))
    with pytest.raises(sp.SmartpruneError, match="missing or used twice"):
        sp.load_mask(path)
    path.write_bytes(with_json(good, {**text, "layers": text["layers"][1:]}))
    with pytest.raises(sp.SmartpruneError, match="belongs to no layer"):
        sp.load_mask(path)
    path.write_bytes(with_json(good, text))
    assert sp.load_mask(path).hash == saved.hash


def test_random_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path, rng = tmp_path / "m", random.Random(0)
    saved = sp.save_mask(zero_random_blocks(zoo.unet()[0], (4, 4)), path, block=(4, 4))
    good, refused = path.read_bytes(), 0
    for _ in range(600):
        data = bytearray(good)
        kind = rng.randrange(4)
        if kind == 0:
            del data[rng.randrange(len(data)) :]
        elif kind == 1:
            data[rng.randrange(len(data)) :] = rng.randbytes(rng.choice((1, 8, 64)))
        else:
            for _ in range(rng.choice((1, 2, 8))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            mask = sp.load_mask(path)
        except sp.SmartpruneError:
            refused += 1
        else:  # a space, or a name that is for information only
            assert mask.hash == saved.hash
    assert refused > 400
