"""Reading LiteRT files: files of other origins, and damaged or hostile ones."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import zoo
from helpers.pruned_models import model_and_receipt, randomly_pruned
from smartprune.artifacts import litert_read
from smartprune.artifacts.litert_read import parse_litert

pytest.importorskip("ai_edge_litert", reason="ai-edge-litert is not installed")
flatbuffers = pytest.importorskip("flatbuffers")

from ai_edge_litert import schema_py_generated as schema  # noqa: E402


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file with sparse and dense weights, and a receipt."""
    torch.manual_seed(0)
    model, receipt = model_and_receipt("plain_cnn", sparsity=0.9)
    path = tmp_path_factory.mktemp("litert") / "m.tflite"
    sp.export_litert(model, path, zoo.plain_cnn()[1], receipt=receipt)
    return path


def changed(path: Path, change: Any) -> bytes:
    """The file after ``change(model)`` on its objects."""
    model = schema.ModelT.InitFromPackedBuf(path.read_bytes(), 0)
    change(model)
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def test_weights_have_the_axes_of_torch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    modules: list[tuple[nn.Module, tuple[int, ...]]] = [
        (nn.Conv2d(6, 4, (3, 2)), (1, 6, 5, 5)),
        (nn.Conv2d(6, 4, 3, groups=2), (1, 6, 5, 5)),
        (nn.Conv2d(6, 12, 3, groups=6), (1, 6, 5, 5)),
        (nn.ConvTranspose2d(6, 4, 3), (1, 6, 5, 5)),
        (nn.Conv1d(6, 4, 3), (1, 6, 5)),
        (nn.Linear(6, 4), (2, 6)),
    ]
    for module, shape in modules:
        path = tmp_path / "m.tflite"
        sp.export_litert(module, path, torch.randn(shape))
        read = litert_read.read_litert(path)
        assert torch.equal(read.weights["weight"], module.weight)
        layout = read.layouts()["weight"]
        assert layout.parts == getattr(module, "groups", 1)
        assert layout.transposed == isinstance(module, nn.ConvTranspose2d)


def test_sparse_weights_are_read_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for width, block in ((1024, 4), (60, 4), (63, 1), (70_000, 1)):
        model = randomly_pruned(nn.Sequential(nn.Linear(width, 20)), 0.9, (4, block))
        exported = sp.export_litert(model, tmp_path / "m.tflite", torch.randn(1, width))
        assert exported.sparse == ("0.weight",)
        read = litert_read.read_litert(tmp_path / "m.tflite")
        assert read.sparse == ("0.weight",)
        assert torch.equal(read.weights["0.weight"], model[0].weight)


def test_a_file_without_our_metadata_is_read(file: Path) -> None:
    def strip(model: Any) -> None:
        model.metadata = []

    read = parse_litert(changed(file, strip), "other")
    assert (read.receipt, read.block) == (None, None)
    assert torch.equal(read.weights["0.weight"], litert_read.read_litert(file).weights["0.weight"])


def test_two_weights_of_one_name_are_kept_apart(file: Path) -> None:
    def rename(model: Any) -> None:
        for tensor in model.subgraphs[0].tensors:
            tensor.name = b"same"

    assert {"same", "same#2", "same#3"} <= set(parse_litert(changed(file, rename), "other").weights)


def test_the_reader_needs_no_other_package(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ai_edge_litert", None)
    assert sp.verify(file).ok


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.tflite"
    for data in (b"", b"short", b"\0" * 100, b"\x08\0\0\0TFL3"):
        path.write_bytes(data)
        with pytest.raises(sp.SmartpruneError, match="LiteRT file"):
            sp.verify(path)


def test_damaged_files_give_a_clear_error_or_are_read(file: Path) -> None:
    """Cut off at any place, or with random bytes: an error of smartprune, and never another one."""
    data, rng = file.read_bytes(), random.Random(0)
    damaged = [data[: rng.randrange(8, len(data))] for _ in range(150)]
    for _ in range(600):
        wrong = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(0, len(data) - 4)
            wrong[place : place + 4] = struct.pack("<I", rng.choice([0, 1, 255, 1 << 16, (1 << 31) - 1, (1 << 32) - 1]))
        damaged.append(bytes(wrong))
    refused = 0
    for wrong_data in damaged:
        try:
            parse_litert(bytes(wrong_data), "damaged")
        except sp.SmartpruneError:
            refused += 1
    assert refused > 150


def sparse_tensor(model: Any) -> Any:
    return next(tensor for tensor in model.subgraphs[0].tensors if tensor.sparsity is not None)


WRONG_SPARSITY = {
    "column": lambda p, axis: axis.arrayIndices.values.__setitem__(0, 255),
    "segments fall": lambda p, axis: axis.arraySegments.values.__setitem__(1, 255),
    "first segment": lambda p, axis: axis.arraySegments.values.__setitem__(0, 1),
    "shape": lambda p, axis: setattr(p.dimMetadata[0], "denseSize", 3),
    "order": lambda p, axis: setattr(p, "traversalOrder", list(reversed(p.traversalOrder))),
    "dense": lambda p, axis: setattr(axis, "format", 0),
}


@pytest.mark.parametrize("name", WRONG_SPARSITY)
def test_wrong_indices_of_sparse_weights_are_refused(name: str, file: Path) -> None:
    def change(model: Any) -> None:
        tensor = sparse_tensor(model)
        axis = next(x for x in tensor.sparsity.dimMetadata if x.format == 1)
        axis.arrayIndices.values, axis.arraySegments.values = (np.array(x.values) for x in (axis.arrayIndices, axis.arraySegments))
        WRONG_SPARSITY[name](tensor.sparsity, axis)

    with pytest.raises(sp.SmartpruneError, match="a sparse tensor has"):
        parse_litert(changed(file, change), "wrong")


def test_a_small_file_cannot_claim_large_weights(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litert_read, "growth_limit", lambda size: 1000)
    with pytest.raises(sp.SmartpruneError, match="its weights take more than 1,000 bytes"):
        parse_litert(file.read_bytes(), "large")


def test_many_tensors_with_one_long_name_take_bounded_time(file: Path) -> None:
    def grow(model: Any) -> None:
        model.subgraphs[0].tensors[0].name = b"x" * 5_000_000
        for tensor in model.subgraphs[0].tensors:
            tensor.name = model.subgraphs[0].tensors[0].name

    started = time.process_time()
    with pytest.raises(sp.SmartpruneError, match="at most 1000 are allowed"):
        parse_litert(changed(file, grow), "long")
    assert time.process_time() - started < 5


def test_wrong_metadata_is_refused(file: Path) -> None:
    for name, text in {
        "smartprune.receipt": b"{}",
        "smartprune.block": b"0x0",
        "smartprune.shapes": b"[1]",
        "smartprune.absent": b"1",
    }.items():

        def change(model: Any, name: str = name, text: bytes = text) -> None:
            entry = schema.MetadataT()
            entry.name, entry.buffer = name.encode(), len(model.buffers)
            model.buffers.append(schema.BufferT())
            model.buffers[-1].data = np.frombuffer(text, np.uint8)
            model.metadata = [*[x for x in model.metadata if x.name != name.encode()], entry]

        with pytest.raises(sp.SmartpruneError, match=name):
            parse_litert(changed(file, change), "wrong")
