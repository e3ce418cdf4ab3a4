"""Promise 9: pipes, devices, loops of links and small files with huge content are refused at once."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import smartprune as sp
from helpers.image_folders import write_classes
from helpers.mutated_formats import FORMATS, Format
from smartprune.artifacts.torch_file import read_torch_file
from smartprune.pruning.oneshot.store import Store
from smartprune.tasks.cifar10_files import read_binary, read_python
from smartprune.tasks.imagefolder import ImageFolder
from smartprune.training.config import read_config
from smartprune.training.folder import trim_metrics

Image = pytest.importorskip("PIL.Image")
CPU = torch.device("cpu")
needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")


def read_store(path: Path) -> object:
    (path.parent / "key").write_text("k")
    return Store(path.parent, "k").get("x", dict)


READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("config.json", read_config),
    ("metrics.jsonl", lambda path: trim_metrics(path.parent, lambda stage, step: True)),
    ("data_batch_1", lambda path: read_python(path.parent, "train")),
    ("data_batch_1.bin", lambda path: read_binary(path.parent, "train")),
    ("key", lambda path: Store(path.parent, "k")),
    ("x.safetensors", read_store),
    ("x.odd", sp.verify),
]


@needs_pipes
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(("name", "read"), READERS, ids=[name for name, _ in READERS])
def test_files_that_never_end_are_refused(name: str, read: Callable[[Path], object], kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(sp.SmartpruneError):
        read(path)


def load(folder: Path, size: int = 16) -> object:
    return ImageFolder(folder=str(folder), size=size).data("train", CPU)


@needs_pipes
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pictures_that_never_end_are_refused(kind: str, tmp_path: Path) -> None:
    path = write_classes(tmp_path, train=1) / "train/ant/x.png"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(sp.SmartpruneError, match=rf"x\.png cannot be read \(it is a {kind}"):
        load(tmp_path)


@pytest.mark.parametrize("link", ["train/loop", "train/ant/loop", "loop"])
def test_loops_of_links_are_refused(link: str, tmp_path: Path) -> None:
    (write_classes(tmp_path, train=1) / link).symlink_to(tmp_path)
    with pytest.raises(sp.SmartpruneError, match=r"loop.* is a folder that links lead to again and again"):
        load(tmp_path)


def test_links_that_double_at_every_step_are_refused(tmp_path: Path) -> None:
    write_classes(tmp_path, train=1)
    for number in range(24):
        (tmp_path / f".{number}").mkdir()
        for name in "ab":
            (tmp_path / f".{number}" / name).symlink_to(f"../.{number + 1}")
    (tmp_path / ".24").mkdir()
    (tmp_path / "train/ant/more").symlink_to("../../.0")
    with pytest.raises(sp.SmartpruneError, match="links lead to again and again"):
        load(tmp_path)


@pytest.mark.parametrize(("size", "message"), [((9000, 9000), "9000x9000 pixels in"), ((1, 60000), "too elongated")])
def test_pictures_larger_than_their_files_explain_are_refused(size: tuple[int, int], message: str, tmp_path: Path) -> None:
    Image.new("RGB", size).save(write_classes(tmp_path, train=1) / "train/ant/x.png")
    with pytest.raises(sp.SmartpruneError, match=message):
        load(tmp_path, size=512)


def test_a_picture_that_claims_gigabytes_is_not_read(tmp_path: Path) -> None:
    with (write_classes(tmp_path, train=1) / "train/ant/x.png").open("wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(sp.SmartpruneError, match="has 68,719,476,736 bytes; it may have at most"):
        load(tmp_path)


def test_tensors_that_overlap_thousands_of_times_are_refused(tmp_path: Path) -> None:
    numbers = torch.zeros(100_000)
    torch.save({"a": numbers, "b": numbers[:], "c": numbers[1:]}, tmp_path / "few.pt")
    assert set(read_torch_file(tmp_path / "few.pt")) == set("abc")  # type: ignore[call-overload]
    torch.save({f"w{i}": numbers[i : i + 90_000].reshape(300, 300) for i in range(1000)}, tmp_path / "many.pt")
    with pytest.raises(sp.SmartpruneError, match=r"its tensors claim .* bytes, and the file has"):
        sp.verify(tmp_path / "many.pt")


def test_numbers_without_end_in_an_onnx_file_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    (tmp_path / "x.onnx").write_bytes(b"\x08" + b"\xff" * 1_000_000)
    with pytest.raises(sp.SmartpruneError, match="not a readable ONNX file"):
        sp.verify(tmp_path / "x.onnx")


def test_tensors_of_many_axes_are_left_out(tmp_path: Path) -> None:
    header = b'{"w":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}' % b",".join([b"1"] * 100)
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(sp.SmartpruneError, match="more than 8 axes"):
        sp.verify(tmp_path / "x.safetensors", (4, 4))


@pytest.mark.parametrize(
    "form", [form for form in FORMATS if not form.name.startswith(("run", "tar", "PNG"))], ids=lambda form: form.name
)
def test_mutated_files_work_or_raise(form: Format, tmp_path: Path) -> None:
    """A few of the mutations that bench/mutate.py tries."""
    valid = form.prepare(tmp_path / "valid")
    form.read(form.write(valid, tmp_path / "damaged", None))
    refused = 0
    for number in range(15):
        path = form.write(valid, tmp_path / "damaged", random.Random(f"test {form.name} {number}"))
        try:
            form.read(path)
        except sp.SmartpruneError:
            refused += 1
    assert refused > 2
