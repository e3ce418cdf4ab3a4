"""CIFAR-10: file formats, untrusted files, augmentation, and a run."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.cifar10_folders import TEST, TRAIN, WRITERS, splits, write_binary, write_python
from helpers.training_jobs import assert_same_run, metric_rows
from smartprune import SmartpruneError
from smartprune.cli import main
from smartprune.tasks.cifar10 import MEAN, STD, Cifar10, Split
from smartprune.tasks.cifar10_files import read

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_binary(tmp_path_factory.mktemp("data"))


def make_split(images: torch.Tensor, training: bool = True, pad: int = 4, flip: bool = True) -> Split:
    return Split(images, torch.arange(len(images)), training, pad, flip)


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize("name", ["train", "test"])
def test_every_format_gives_the_same_images(layout: str, name: str, tmp_path: Path) -> None:
    if layout == "mosaic":
        pytest.importorskip("PIL")
    images, labels = read(WRITERS[layout](tmp_path), name)
    expected, expected_labels = splits()[name]
    assert np.array_equal(labels, expected_labels)
    assert images.shape == expected.shape
    assert images.dtype == np.uint8
    error = np.abs(images.astype(int) - expected)
    assert error.mean() < 2 if (layout, name) == ("mosaic", "train") else error.max() == 0


@pytest.mark.parametrize("protocol", range(5))
def test_python_batches_of_every_pickle_protocol_are_read(protocol: int, tmp_path: Path) -> None:
    images, _ = read(write_python(tmp_path, protocol), "test")
    assert np.array_equal(images, splits()["test"][0])


def test_the_folder_may_be_a_parent_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cifar-10-batches-bin").mkdir()
    write_binary(tmp_path / "cifar-10-batches-bin")
    monkeypatch.setenv("SMARTPRUNE_DATA", str(tmp_path))
    assert Cifar10().data("train", CPU).steps(100) == TRAIN // 100


class CodeOnLoad:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("created",)


def test_batches_that_contain_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_python(tmp_path)
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps({"data": CodeOnLoad(), "labels": []}))
    with pytest.raises(SmartpruneError, match=r"data_batch_3 cannot be read as a batch .*refers to posix\.mkdir"):
        read(tmp_path, "train")
    assert not (tmp_path / "created").exists()


def test_errors_name_the_damaged_file(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    for layout, name, keep, message in [
        ("python", "data_batch_2", 1000, "data_batch_2 cannot be read as a batch of CIFAR-10"),
        ("python", "data_batch_2", 0, "data_batch_2 cannot be read as a batch of CIFAR-10"),
        ("python", "data_batch_2", None, r"data_batch_2: cannot be read \(No such file"),
        ("binary", "data_batch_5.bin", 5000, r"data_batch_5.bin has 5000 bytes; expected a multiple of 3073"),
        ("binary", "test_batch.bin", None, r"test_batch.bin: cannot be read \(No such file"),
        ("binary", "test_batch.bin", 0, "the test set of CIFAR-10 is empty"),
        ("mosaic", "train_1.jpg", 700, "train_1.jpg cannot be read as an image"),
        ("mosaic", "train_4.jpg", None, r"train_4.jpg: cannot be read \(No such file"),
        ("mosaic", "train_labels.npy", 50, "train_labels.npy cannot be read as an .npy array"),
        ("mosaic", "test_labels.npy", -1, "test_labels.npy has 39 labels for 40 images"),
    ]:
        place = tmp_path / f"{layout}-{name}-{keep}"
        place.mkdir()
        path = WRITERS[layout](place) / name
        if keep is None:
            path.unlink()
        elif keep < 0:
            np.save(path, np.load(path)[:keep])
        else:
            path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(SmartpruneError, match=message):
            read(place, "test" if name.startswith("test") else "train")


def test_errors_name_invalid_labels(tmp_path: Path) -> None:
    path = write_binary(tmp_path) / "data_batch_1.bin"
    path.write_bytes(b"\x0a" + path.read_bytes()[1:])
    with pytest.raises(SmartpruneError, match=r"data_batch_1\.bin: label 10 is outside 0 to 9; download it again"):
        read(tmp_path, "train")
    labels = np.zeros(4, np.float32)
    np.save(tmp_path / "train_labels.npy", labels)
    for name in tmp_path.glob("*.bin"):
        name.unlink()
    with pytest.raises(SmartpruneError, match=r"train_labels\.npy holds an array of 1 axes of float32"):
        read(tmp_path, "train")


def test_missing_data_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMARTPRUNE_DATA", raising=False)
    with pytest.raises(SmartpruneError, match="no data folder is given; pass --data DIR"):
        Cifar10().data("train", CPU)
    with pytest.raises(SmartpruneError, match=r"holds no CIFAR-10; .*should hold one of data_batch_1, .*unpack cifar-10-python"):
        Cifar10(folder=str(tmp_path)).data("train", CPU)
    with pytest.raises(SmartpruneError, match="nowhere is not a folder"):
        Cifar10(folder=str(tmp_path / "nowhere")).data("train", CPU)


def test_pillow_is_only_needed_for_mosaics(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    WRITERS["mosaic"](tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SmartpruneError, match="not installed; run: pip install pillow"):
        read(tmp_path, "test")
    read.cache_clear()
    read(folder, "test")


def test_crops_and_flips_match_the_draws() -> None:
    images = torch.randint(0, 256, (60, 32, 32, 3), dtype=torch.uint8)
    data = make_split(images)
    order, down, right, flipped = data._draw(0, 0)
    ((batch, labels),) = data.batches(60, seed=0, epoch=0)
    padded = torch.nn.functional.pad(images, (0, 0, 4, 4, 4, 4))
    for i in range(60):
        crop = padded[order[i], down[i] : down[i] + 32, right[i] : right[i] + 32]
        crop = crop.flip(1) if flipped[i] else crop
        expected = (crop / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
        torch.testing.assert_close(batch[i], expected.permute(2, 0, 1), rtol=1e-5, atol=1e-5)
    assert torch.equal(labels, order)
    assert set(down.tolist()) == set(range(9)) == set(right.tolist())
    assert 15 < int(flipped.sum()) < 45
    assert batch.is_contiguous(memory_format=torch.channels_last)


def test_batches_do_not_depend_on_chunks_or_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_split(torch.randint(0, 256, (100, 32, 32, 3), dtype=torch.uint8))
    whole = list(data.batches(8, seed=1, epoch=2))
    assert len(whole) == 12 == data.steps(8)
    monkeypatch.setattr("smartprune.tasks.cifar10.CHUNK", 24)
    late = list(data.batches(8, seed=1, epoch=2, first=5))
    for (a, b), (c, d) in zip(whole[5:], late, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)
    assert not torch.equal(whole[0][1], next(iter(data.batches(8, seed=1, epoch=3)))[1])


def test_evaluation_sees_every_image_once_unchanged(folder: Path) -> None:
    expected, expected_labels = splits()["test"]
    batches = list(Cifar10(folder=str(folder)).data("test", CPU).batches(16, seed=5, epoch=7))
    assert torch.equal(torch.cat([labels for _, labels in batches]), torch.from_numpy(expected_labels).long())
    images = torch.cat([images for images, _ in batches]).permute(0, 2, 3, 1)
    pixels = (images * torch.tensor(STD) + torch.tensor(MEAN)) * 255
    assert torch.equal(pixels.round().to(torch.uint8), torch.from_numpy(expected))


def test_holdout_is_the_end_of_the_training_set(folder: Path) -> None:
    labels = torch.from_numpy(splits()["train"][1]).long()
    for holdout, limit, end in [(0, 0, TRAIN), (50, 0, TRAIN), (50, 120, 120)]:
        task = Cifar10(folder=str(folder), holdout=holdout, limit=limit)
        train, validation = (task.data(name, CPU) for name in ("train", "validation"))
        assert torch.equal(train.labels, labels[: end - holdout])  # type: ignore[attr-defined]
        assert torch.equal(validation.labels, labels[end - holdout : end])  # type: ignore[attr-defined]
        assert (validation.steps(128) == 0) == (holdout == 0)
        assert task.data("test", CPU).steps(1) == min(limit or TEST, TEST)
    with pytest.raises(SmartpruneError, match="holdout=400 leaves none of 400 images for training"):
        Cifar10(folder=str(folder), holdout=400).data("train", CPU)


def test_invalid_settings_raise() -> None:
    with pytest.raises(SmartpruneError, match="holdout=-1 is negative"):
        Cifar10(holdout=-1)
    with pytest.raises(SmartpruneError, match="pad=33 is outside 0 to 32"):
        Cifar10(pad=33)
    with pytest.raises(SmartpruneError, match="split='dev'"):
        Cifar10().data("dev", CPU)


def test_a_run_from_the_command_line_is_reproducible(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--data", str(folder), "--task-set", "limit=32", "--model", "mobilenetv2", "--sparsity", "0.9", "--batch", "8",
        "--dense-epochs", "1", "--search-epochs", "1", "--finetune-epochs", "1", "--threads", "1", "--device", "cpu",
    ]  # fmt: skip
    assert main(["train", "cifar10", *flags, "--out", str(tmp_path / "a")]) == 0
    assert main(["train", "--config", str(tmp_path / "a/config.json"), "--out", str(tmp_path / "b")]) == 0
    assert "budget   remove 90% of the blocks: keep exactly 1,708 of 17,078" in capsys.readouterr().out
    assert_same_run(tmp_path / "a", tmp_path / "b")
    rows = metric_rows(tmp_path / "a")
    assert [row["accuracy"] for row in rows] == [None, None, None]  # there is no validation split
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert (config["amp"], config["schedule_over"], config["search_lr"]) == ("off", "pruning", 0.02)
    assert rows[1]["lr"] == pytest.approx(0.02 * (1 + np.cos(np.pi * 3 / 8)) / 2)
    assert rows[2]["lr"] == pytest.approx(0.02 * (1 + np.cos(np.pi * 7 / 8)) / 2)
