"""Packed files: the bytes that are written, unpacking, and the reader shown in the documentation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import smartprune as sp
from helpers import zoo
from helpers.packed_files import check_unpacks, equal_states, raw_bytes, zero_random_blocks
from helpers.pruned_models import model_and_receipt
from smartprune.artifacts.packfile_read import read_packed
from smartprune.cli import main
from smartprune.core.block import Block
from smartprune.pruning.receipt import make_receipt


def random_sparse(shape: tuple[int, ...], block: Block, groups: int = 1, transposed: bool = False, keep: float = 0.3) -> Tensor:
    grid = block.grid(shape, groups, transposed)
    kept = torch.rand(grid.n) < keep
    return torch.where(grid.expand(kept), torch.randn(shape), 0.0)


# --- unpacking restores what was packed


@pytest.mark.parametrize("block", ["16x8", "4x4", "3x5", "1x1", "channel", "*x1", "4x4x3x3", "4x4x2x2", "2x*x1x1", "*x*"])
@pytest.mark.parametrize("name", sorted(zoo.SMALL))
def test_unpack_restores_every_model_and_block(name: str, block: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = zero_random_blocks(zoo.SMALL[name]()[0], block)
    path = tmp_path / "model.packed.safetensors"
    sp.pack(model, path, block)
    check_unpacks(dict(model.state_dict()), path)
    other = zoo.SMALL[name]()[0]
    sp.unpack(path, other)
    assert equal_states(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.float8_e4m3fn])
def test_every_dtype_is_restored(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {"w": random_sparse((40, 30, 3, 3), Block(16, 8)).mul(9).to(dtype), "bias": torch.randn(40).to(dtype)}
    packed = sp.pack(state, tmp_path / "p", (16, 8))
    assert packed.layers[0].packed
    check_unpacks(state, tmp_path / "p")


def test_odd_values_keep_their_bits(tmp_path: Path) -> None:
    weight = torch.zeros(8, 64)
    weight[0, 0], weight[0, 1], weight[3, 9], weight[1, 17], weight[2, 30] = -0.0, 1.0, math.nan, math.inf, -1e-45
    weight.view(torch.int32)[7, 40] = 0x7FC12345  # a NaN with a payload
    weight[4:, 60:] = -0.0
    sp.pack({"w": weight}, tmp_path / "p", (4, 4))
    unpacked = sp.unpack(tmp_path / "p")["w"]
    expected = weight.clone()
    expected[4:, 60:] = 0.0  # the only difference: blocks of zeros of either sign are not stored
    assert np.array_equal(raw_bytes(unpacked), raw_bytes(expected))
    assert read_packed(tmp_path / "p").weights["w"].occupied().sum() == 5


def test_strided_weights_are_restored(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Linear(32, 40)).to(memory_format=torch.channels_last)
    zero_random_blocks(model, (4, 4))
    model[1].weight = nn.Parameter(random_sparse((32, 40), Block(4, 4)).t())
    assert not model[0].weight.is_contiguous()
    assert not model[1].weight.is_contiguous()
    sp.pack(model, tmp_path / "p", (4, 4))
    check_unpacks(dict(model.state_dict()), tmp_path / "p")
    other = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Linear(32, 40)).to(memory_format=torch.channels_last)
    sp.unpack(tmp_path / "p", other)
    assert equal_states(dict(other.state_dict()), dict(model.state_dict()))
    assert other[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = zero_random_blocks(zoo.tied()[0], (4, 4))
    sp.pack(model, tmp_path / "p", (4, 4))
    file = read_packed(tmp_path / "p")
    assert file.tied == {"b.weight": "a.weight"}
    state = sp.unpack(tmp_path / "p")
    assert state["b.weight"] is state["a.weight"]
    plain = {"a": torch.randn(3), "w": torch.randn(4, 4)}
    plain["b"] = plain["a"]
    sp.pack(plain, tmp_path / "p", (4, 4))
    assert read_packed(tmp_path / "p").tied == {"b": "a"}
    check_unpacks(plain, tmp_path / "p")


def test_weights_that_save_no_bytes_are_stored_unchanged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {"dense": torch.randn(32, 32), "sparse": random_sparse((32, 32), Block(4, 4)), "empty": torch.zeros(32, 32)}
    packed = sp.pack(state, tmp_path / "p", (4, 4))
    assert [row.packed for row in packed.layers] == [False, True, True]
    with safe_open(tmp_path / "p", "pt") as file:
        assert sorted(file.keys()) == [
            "dense",
            *(f"{w}#{part}" for w in ("empty", "sparse") for part in ("cols", "rows", "values")),
        ]
    check_unpacks(state, tmp_path / "p")
    file = read_packed(tmp_path / "p")
    assert file.layouts["dense"].kind == "matrix"  # also for weights that are stored unchanged
    assert "unchanged" in str(packed)


def test_weights_of_many_axes_are_restored(tmp_path: Path) -> None:
    """Readers accept blocks of up to 8 axes, so weights with more are stored unchanged."""
    state = {f"w{n}": torch.zeros([4, 4] + [2] * (n - 2)) for n in (2, 8, 9, 12)}
    sp.pack(state, tmp_path / "p", (2, 2))
    check_unpacks(state, tmp_path / "p")
    assert all(torch.equal(tensor, state[name]) for name, tensor in sp.unpack(tmp_path / "p").items())
    assert [row.weight for row in sp.verify(tmp_path / "p").layers] == ["w2", "w8"]


def test_packed_size_of_a_resnet(tmp_path: Path) -> None:
    """With 95 % of the 16x8 blocks removed at random, the file takes at most 6.5 % of the dense file."""
    torch.manual_seed(0)
    model, _ = zoo.resnet18()
    plan = sp.plan(model, (16, 8), 0.95)
    mask = torch.zeros(plan.n, dtype=torch.bool)
    mask[torch.randperm(plan.n)[: plan.keep]] = True
    with torch.no_grad():
        for layer in plan.layers:
            model.get_parameter(layer.weight).masked_fill_(~layer.grid.expand(mask[layer.start : layer.stop]), 0.0)
    receipt = make_receipt(plan, model.state_dict(), mask, "random")
    packed = sp.pack(model, tmp_path / "p", receipt=receipt)
    save_file(model.state_dict(), tmp_path / "dense.safetensors")
    dense_size, packed_size = (tmp_path / "dense.safetensors").stat().st_size, (tmp_path / "p").stat().st_size
    assert packed_size / dense_size <= 0.065
    assert packed.size == packed_size
    assert abs(packed.dense - dense_size) < 1000  # the headers differ in the number of digits and in padding
    assert equal_states(sp.unpack(tmp_path / "p"), dict(model.state_dict()))
    result = sp.verify(tmp_path / "p")
    assert result.ok
    assert result.mask_hash == receipt.mask_hash


# --- receipts, verify and report


def test_verify_and_report_read_packed_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for name in sorted(zoo.SMALL):
        model, receipt = model_and_receipt(name)
        for file in ("p.packed.safetensors", "p", "p.bin.old"):
            sp.pack(model, tmp_path / file, receipt=receipt)
            result = sp.verify(tmp_path / file)
            assert result.ok, str(result)
            assert result.mask_hash == receipt.mask_hash
            assert result.receipt is not None
            assert result.receipt.to_json() == receipt.to_json()
        of_file, of_model = sp.report(tmp_path / "p"), sp.report(model, receipt=receipt)
        assert [row.to_json() for row in of_file.layers] == [row.to_json() for row in of_model.layers]  # with groups and axes
        assert (of_file.params, of_file.zeros, of_file.block) == (
            of_model.params,
            of_model.zeros,
            Block(4, 4),
        )


def test_verify_counts_the_packed_block(tmp_path: Path) -> None:
    model, _ = model_and_receipt("unet")
    sp.pack(model, tmp_path / "p", (4, 4))
    assert sp.verify(tmp_path / "p").block == Block(4, 4)
    assert sp.verify(tmp_path / "p").zero == sp.verify(model, (4, 4)).zero


def test_a_receipt_of_other_weights_is_refused(tmp_path: Path) -> None:
    _, receipt = model_and_receipt()
    dense, _ = zoo.plain_cnn()
    with pytest.raises(sp.SmartpruneError, match=r"does not match its receipt: 3\.weight"):
        sp.pack(dense, tmp_path / "p", receipt=receipt)
    assert not (tmp_path / "p").exists()


# --- wrong arguments


def test_wrong_arguments_raise(tmp_path: Path) -> None:
    model, _ = zoo.plain_cnn()
    with pytest.raises(sp.SmartpruneError, match="give block="):
        sp.pack(model, tmp_path / "p")
    with pytest.raises(sp.SmartpruneError, match="cannot be written"):
        sp.pack(model, tmp_path / "none" / "p", (4, 4))
    with pytest.raises(sp.SmartpruneError, match="no such file"):
        sp.unpack(tmp_path / "p")
    sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=3)
    with pytest.raises(sp.SmartpruneError, match=r"still being pruned; call smartprune\.bake"):
        sp.pack(model, tmp_path / "p", (4, 4))
    with torch.device("meta"):
        empty, _ = zoo.plain_cnn()
    with pytest.raises(sp.SmartpruneError, match=r"0\.weight is on the meta device"):
        sp.pack(empty, tmp_path / "p", (4, 4))
    with pytest.raises(sp.SmartpruneError, match="sparse_coo"):
        sp.pack({"w": torch.eye(4).to_sparse()}, tmp_path / "p", (4, 4))
    with pytest.raises(sp.SmartpruneError, match=r"w#rows is reserved for the blocks of w; rename"):
        sp.pack({"w": torch.zeros(64, 64), "w#rows": torch.zeros(1)}, tmp_path / "p", (4, 4))
    for kind in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        with pytest.raises(sp.SmartpruneError, match=f"w: {kind} cannot be stored"):
            sp.pack({"w": torch.eye(32).to(kind)}, tmp_path / "p", (8, 8))
    with pytest.raises(sp.SmartpruneError, match="complex64 cannot be stored"):
        sp.pack({"w": torch.zeros(4, 4), "c": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "p", (4, 4))
    save_file({"w": torch.zeros(4, 4)}, tmp_path / "plain.safetensors")
    with pytest.raises(sp.SmartpruneError, match="not a packed file"):
        sp.unpack(tmp_path / "plain.safetensors")
    with pytest.raises(sp.SmartpruneError, match="is the model itself"):
        sp.pack(tmp_path / "plain.safetensors", tmp_path / "plain.safetensors", (4, 4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.safetensors"]


def test_a_model_that_does_not_fit_is_not_changed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = zero_random_blocks(zoo.plain_cnn()[0], (4, 4))
    sp.pack(model, tmp_path / "p", (4, 4))
    wrong: list[tuple[nn.Module, str]] = [
        (
            zoo.plain_cnn()[0].double(),
            r"0\.bias is torch\.float32 16 in the file and torch\.float64 16|0\.weight is torch\.float32",
        ),
        (nn.Sequential(*zoo.plain_cnn()[0][:5]), "10.bias: the model has no such tensor"),
        (nn.Sequential(*zoo.plain_cnn()[0], nn.Linear(10, 3)), "11.bias: the file has no such tensor"),
    ]
    wider = zoo.plain_cnn()[0]
    wider[10] = nn.Linear(12, 11)
    wrong.append((wider, r"10\.weight is torch\.float32 10x12 in the file and torch\.float32 11x12 in the model"))
    for other, message in wrong:
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        with pytest.raises(sp.SmartpruneError, match=message):
            sp.unpack(tmp_path / "p", other)
        assert equal_states(dict(other.state_dict()), before)


class Versioned(nn.Linear):
    """Reads the version of its format from the metadata, like batch norms and torchvision's MNASNet."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        assert metadata["version"] == 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_state_dict_metadata_is_kept(tmp_path: Path) -> None:
    model, other = nn.Sequential(Versioned(32, 16)), nn.Sequential(Versioned(32, 16))
    sp.pack(model, tmp_path / "a.safetensors", (16, 8))
    sp.unpack(tmp_path / "a.safetensors", other)
    assert torch.equal(other[0].weight, model[0].weight)


def test_packing_does_not_change_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = zero_random_blocks(zoo.transformer_block()[0], (4, 4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = [id(p) for p in model.parameters()]
    sp.pack(model, tmp_path / "p", (4, 4))
    assert equal_states(dict(model.state_dict()), before)
    assert ids == [id(p) for p in model.parameters()]


# --- models that cannot be packed or loaded


def test_models_without_tensors_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    path = tmp_path / "p"
    with pytest.raises(sp.SmartpruneError, match="pack: ReLU has no tensors, so there is nothing to store"):
        sp.pack(nn.ReLU(), path, (4, 4))
    with pytest.raises(sp.SmartpruneError, match=r"pack: 0\.weight of the model has no shape yet"):
        sp.pack(nn.Sequential(nn.LazyLinear(4)), path, (4, 4))
    with pytest.raises(sp.SmartpruneError, match=r"made by smartprune\.accelerate.*give the original model"):
        sp.pack(sp.accelerate(model, backend="reference"), path, (4, 4))

    class Odd(nn.Module):  # cannot be traced, so each layer is accelerated separately
        def __init__(self) -> None:
            super().__init__()
            self.a, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * self.scale if x.sum() > 0 else self.a(-x)

    with pytest.raises(sp.SmartpruneError, match=r"made by smartprune\.accelerate"):
        sp.pack(sp.accelerate(Odd().eval(), backend="reference"), path, (4, 4))
    assert not path.exists()


def test_models_without_weights_to_cut_are_reported(tmp_path: Path) -> None:
    packed = sp.pack(nn.BatchNorm2d(3), tmp_path / "p", (4, 4))
    assert packed.layers == ()
    assert str(packed).startswith("no weight can be cut into blocks of 4x4x1x1: every tensor is stored unchanged\n")
    assert sp.unpack(tmp_path / "p").keys() == nn.BatchNorm2d(3).state_dict().keys()


def test_assumed_axes_are_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(8, 4, 1), nn.Linear(8, 8))
    packed = sp.pack(model.state_dict(), tmp_path / "p", (4, 2))
    assert packed.assumed == ("0.weight",)
    assert packed.to_json()["axes_assumed"] == ["0.weight"]
    assert "the axes of 1 weight are assumed to be (out, in, ...), without groups" in " ".join(str(packed).split())
    assert "To be sure, pack the model itself" in " ".join(str(packed).split())
    assert sp.pack(model, tmp_path / "p", (4, 2)).assumed == ()
    assert sp.pack(tmp_path / "p", tmp_path / "q").assumed == ()  # stored in the file


def test_meta_and_lazy_models_cannot_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "p"
    sp.pack(nn.Linear(8, 8), path, (4, 4))
    for model, message in (
        (nn.Linear(8, 8, device="meta"), r"weight of the model is on the meta device.*model\.to_empty\(device='cpu'\)"),
        (nn.LazyLinear(8), "weight of the model has no shape yet .*run one forward pass first"),
        ({"weight": torch.zeros(8, 8)}, r"model is a dict; give a torch\.nn\.Module"),
    ):
        with pytest.raises(sp.SmartpruneError, match=message):
            sp.unpack(path, model)  # type: ignore[arg-type]
    empty = nn.Linear(8, 8, device="meta").to_empty(device="cpu")
    assert torch.equal(sp.unpack(path, empty)["weight"], empty.weight)


def test_wrong_paths_names_and_limits_are_refused(tmp_path: Path) -> None:
    model, path = nn.Linear(8, 8), tmp_path / "p"
    for wrong in (None, 3, "a\0b"):
        with pytest.raises(sp.SmartpruneError, match=r"pack: path: .* is not a path"):
            sp.pack(model, wrong, (4, 4))  # type: ignore[arg-type]
    with pytest.raises(sp.SmartpruneError, match="the name '__metadata__' is reserved in safetensors files"):
        sp.pack({"__metadata__": torch.zeros(8, 8)}, path, (4, 4))
    with pytest.raises(sp.SmartpruneError, match=r"pack: receipt is a str; give a Receipt"):
        sp.pack(model, path, (4, 4), receipt="receipt.json")  # type: ignore[arg-type]
    assert not path.exists()
    sp.pack(model, path, (4, 4))
    for limit in ("1", -1, 1.5, True):
        with pytest.raises(sp.SmartpruneError, match=r"unpack: limit=.* must be a number of bytes"):
            sp.unpack(path, limit=limit)  # type: ignore[arg-type]
    with pytest.raises(sp.SmartpruneError, match=r"unpack: path: .* is not a path"):
        sp.unpack("a\0b")


def test_pack_uses_the_block_of_a_packed_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(8, 8)
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    sp.pack(model, first, (2, 4))
    assert sp.pack(first, second).block == Block(2, 4)
    assert second.read_bytes() == first.read_bytes()
    assert main(["pack", str(first), "--out", str(tmp_path / "third"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["block"] == "2x4x1x1"


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_state_dict_is_cut_as_its_receipt_says(prefix: str, tmp_path: Path) -> None:
    """The receipt defines groups and transposed axes, which a state dict does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(12, 12, 3, groups=2, padding=1), nn.ConvTranspose2d(12, 6, 2))
    sp.attach(model, sp.Magnitude(), block=(4, 4), sparsity=0.5, steps=1, include="*").step()
    receipt = sp.bake(model)
    packed_model = sp.pack(model, tmp_path / "model", receipt=receipt)
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    packed = sp.pack(state, tmp_path / "state", receipt=receipt)
    assert packed.assumed == ()
    assert [row.size for row in packed.layers] == [row.size for row in packed_model.layers]
    layouts = read_packed(tmp_path / "state").layouts
    assert [(x.parts, x.transposed) for x in layouts.values()] == [(2, False), (1, True)]
    assert sp.verify(tmp_path / "state").ok
    assert equal_states(sp.unpack(tmp_path / "state"), state)
    save_file(state, tmp_path / "plain.safetensors")
    assert sp.pack(tmp_path / "plain.safetensors", tmp_path / "file", receipt=receipt).assumed == ()


def test_pack_prints_the_mask_hash_of_the_receipt_and_that_of_the_stored_blocks(tmp_path: Path) -> None:
    """One pruned layer keeps all its blocks, so the file stores it unchanged and its hash does not cover it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    plan = sp.plan(model, (4, 4), 0.5)
    mask = torch.tensor([True] * 16 + [False] * 16)
    with torch.no_grad():
        model[1].weight.zero_()
    receipt = make_receipt(plan, model.state_dict(), mask, "magnitude")
    packed = sp.pack(model, tmp_path / "m", receipt=receipt)
    assert packed.mask_hash == receipt.mask_hash == sp.verify(tmp_path / "m").mask_hash
    assert packed.stored_hash not in ("", receipt.mask_hash)
    with safe_open(tmp_path / "m", "pt") as file:
        assert json.loads(file.metadata()["smartprune.packed"])["mask_hash"] == packed.stored_hash
    lines = str(packed).splitlines()
    assert f"mask     {receipt.mask_hash}" in lines
    assert f"stored   {packed.stored_hash}" in lines
    assert "sparsity 50.00%: 16 of 32 blocks of the pruned layers removed" in lines
    alone = sp.pack(model, tmp_path / "n", (4, 4))
    assert alone.pruned is None
    assert alone.mask_hash == alone.stored_hash == packed.stored_hash
    assert "mask  " not in str(alone)
