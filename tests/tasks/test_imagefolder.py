"""Images in one folder per class: folders and tar files, augmentation, errors that name the file, and a run."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from helpers.image_folders import TRAIN, VAL, make_tar, pixels, write_classes
from helpers.training_jobs import assert_same_run, metric_rows
from smartprune import SmartpruneError
from smartprune.cli import main
from smartprune.tasks.imagefolder import ImageFolder, Split
from smartprune.tasks.images import MEAN, STD, ImageStore, crop_and_resize
from smartprune.training.check import check
from smartprune.training.config import configure, load_config
from smartprune.training.page import run_cycles
from smartprune.training.train import resume, train

Image = pytest.importorskip("PIL.Image")
CPU = torch.device("cpu")


def images_of(task: ImageFolder, split: str) -> torch.Tensor:
    return task.data(split, CPU).store.cached  # type: ignore[attr-defined, no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classes(tmp_path_factory.mktemp("classes"))


def test_every_image_is_read_with_its_class(folder: Path) -> None:
    task = ImageFolder(folder=str(folder), size=16)
    for split, count, first in (("train", TRAIN, 0), ("test", VAL, 1000)):
        data = task.data(split, CPU)
        expected = np.stack([pixels(label, i + first) for label in range(3) for i in range(count)])
        assert np.array_equal(images_of(task, split).numpy(), expected)
        assert data.labels.tolist() == [label for label in range(3) for _ in range(count)]  # type: ignore[attr-defined]
    assert task.data("validation", CPU).steps(4) == 0
    assert task.model("resnet8")(task.example()).shape == (1, 3)


def test_the_plan_command_reads_the_classes_from_the_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SMARTPRUNE_DATA", raising=False)
    with pytest.raises(SystemExit) as stop:
        main(["plan", "imagefolder"])
    assert stop.value.code == 2
    assert "pass --data DIR" in capsys.readouterr().err
    assert main(["plan", "imagefolder", "--data", str(folder)]) == 0
    assert "183,168 in 52 layers" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "resnet18", "--data", str(folder)])
    assert "--data is for tasks, and resnet18 is not a task" in capsys.readouterr().err


@pytest.mark.parametrize("top", [".", "set-of-three"])
def test_a_tar_file_reads_like_the_folder(top: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = images_of(ImageFolder(folder=str(folder), size=16), "test")
    tar = make_tar(folder, tmp_path / "imagenette128.tar", top)
    assert torch.equal(images_of(ImageFolder(folder=str(tar), size=16), "test"), expected)
    monkeypatch.setenv("SMARTPRUNE_DATA", str(tmp_path))  # the folder that holds the tar file
    assert torch.equal(images_of(ImageFolder(size=16), "test"), expected)


def test_links_in_tar_files_are_followed(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "set"
    shutil.copytree(folder, data)
    names = sorted(path.parent.name for path in data.glob("train/*/*"))
    first = min((data / "train" / names[0]).iterdir())
    os.link(first, first.with_name(f"hard{first.suffix}"))
    first.with_name(f"soft{first.suffix}").symlink_to(first.name)
    first.with_name(f"softer{first.suffix}").symlink_to(f"soft{first.suffix}")
    other = data / "train" / names[-1] / f"other{first.suffix}"
    other.symlink_to(f"../{names[0]}/{first.name}")
    for top in (".", "set"):
        tar = make_tar(data, tmp_path / f"{top.strip('.')}a.tar", top)
        a, b = (ImageFolder(folder=str(path), size=16) for path in (data, tar))
        assert len(images_of(a, "train")) == len(names) + 4
        assert torch.equal(images_of(a, "train"), images_of(b, "train"))
        assert torch.equal(a.data("train", CPU).labels, b.data("train", CPU).labels)  # type: ignore[attr-defined]
    other.unlink()
    other.symlink_to("/elsewhere/1.png")
    with pytest.raises(
        SmartpruneError, match=rf"train/{names[-1]}/other\{first.suffix} is a link to a file outside of it; .* --dereference"
    ):
        ImageFolder(folder=str(make_tar(data, tmp_path / "b.tar")), size=16).data("train", CPU)


def test_linked_folders_in_tar_files_are_followed(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "set"
    shutil.copytree(folder, data)
    first = min((data / "train").iterdir())
    count = len(list(data.glob("train/*/*"))) + len(list(first.iterdir()))
    (data / ".store").mkdir()
    first.rename(data / ".store" / first.name)
    first.symlink_to(f"../.store/{first.name}")
    (data / "train" / "zebra").symlink_to(f"../.store/{first.name}")
    for top in (".", "set"):
        tar = make_tar(data, tmp_path / f"{top.strip('.')}a.tar", top)
        a, b = (ImageFolder(folder=str(path), size=16) for path in (data, tar))
        assert len(images_of(a, "train")) == count
        assert torch.equal(images_of(a, "train"), images_of(b, "train"))
        assert torch.equal(a.data("train", CPU).labels, b.data("train", CPU).labels)  # type: ignore[attr-defined]


def test_run_cycles_reject_inputs_that_are_too_large(folder: Path, tmp_path: Path) -> None:
    """The weights fit images of any size, so the configured size must be checked."""
    save_file(ImageFolder(folder=str(folder)).model("resnet8").state_dict(), tmp_path / "model.safetensors")
    config: dict[str, object] = {"task": "imagefolder", "model": "resnet8"}
    for size, expected in ((128, True), (10**6, True), (10**10, False), (10**30, False)):
        config["task_settings"] = {"folder": str(folder), "size": size}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert (run_cycles(tmp_path) is not None) is expected


def test_evaluation_sees_the_center_of_every_image_once(folder: Path) -> None:
    batches = list(ImageFolder(folder=str(folder), size=8, side=16).data("test", CPU).batches(4, seed=5, epoch=7))
    images = torch.cat([images for images, _ in batches]).permute(0, 2, 3, 1)
    pixels_seen = ((images * torch.tensor(STD) + torch.tensor(MEAN)) * 255).round().to(torch.uint8)
    assert torch.equal(pixels_seen, images_of(ImageFolder(folder=str(folder), size=16), "test")[:, 4:12, 4:12])
    assert torch.cat([labels for _, labels in batches]).tolist() == [0] * 3 + [1] * 3 + [2] * 3


def test_images_of_any_size_and_mode_are_resized_to_rgb(tmp_path: Path) -> None:
    write_classes(tmp_path, "jpg")
    wide = Image.fromarray(pixels(0, 0, 64, 32))
    wide.save(tmp_path / "train/ant/0.jpg", quality=100, subsampling=0)
    wide.convert("L").save(tmp_path / "train/ant/1.jpg")
    wide.convert("P").save(tmp_path / "train/ant/2.png")
    images = images_of(ImageFolder(folder=str(tmp_path), size=16), "train")
    assert images.shape == (3 * TRAIN + 1, 16, 16, 3)
    center = np.asarray(wide.crop((16, 0, 48, 32)).resize((16, 16))).astype(int)
    assert np.abs(images[0].numpy() - center).mean() < 4
    assert torch.equal(images[1][..., 0], images[1][..., 1])


def test_random_crops_stay_in_the_image_and_in_their_ranges() -> None:
    data = Split(ImageStore(lambda _: torch.empty(0), None, CPU), torch.zeros(4000), True, 16, 0.25, True)
    order, extent, center = data._draw(seed=3, epoch=4)
    assert torch.equal(order.sort().values, torch.arange(4000))
    assert bool((extent.abs() + center.abs() <= 1 + 1e-6).all())
    area = extent.abs().prod(1)
    assert 0.21 < float(area.min()) < 0.3
    assert float(area.max()) > 0.95
    ratio = (extent[:, 0] / extent[:, 1]).abs()
    assert 0.74 < float(ratio.min()) < 0.8 < 1.25 < float(ratio.max()) < 1.34
    assert 1800 < int((extent[:, 0] < 0).sum()) < 2200
    repeated = data._draw(3, 4)
    assert all(torch.equal(a, b) for a, b in zip((order, extent, center), repeated, strict=True))
    assert not torch.equal(order, data._draw(3, 5)[0])


def test_training_images_keep_their_labels(folder: Path) -> None:
    batches = list(ImageFolder(folder=str(folder), size=16).data("train", CPU).batches(5, seed=0, epoch=0))
    for images, labels in batches:  # brightness grows with the label
        center = (images[:, :, 4:12, 4:12] * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]).mean((1, 2, 3))
        assert torch.equal((center * 255 / 80).floor().long(), labels)
    assert batches[0][1].tolist() != sorted(batches[0][1].tolist())


def test_crop_and_resize_matches_slow_interpolation() -> None:
    image = torch.rand(1, 2, 7, 9)
    extent, center, size = torch.tensor([[-0.5, 0.8]]), torch.tensor([[0.3, -0.4]]), (4, 5)
    out = crop_and_resize(image, extent, center, size)
    for row in range(4):
        for column in range(5):
            x = ((2 * column + 1) / 5 - 1) * float(extent[0, 0]) + float(center[0, 0])
            y = ((2 * row + 1) / 4 - 1) * float(extent[0, 1]) + float(center[0, 1])
            px, py = (x + 1) * 9 / 2 - 0.5, (y + 1) * 7 / 2 - 0.5
            total = torch.zeros(2)
            for j in range(7):
                for i in range(9):
                    total += max(0.0, 1 - abs(px - i)) * max(0.0, 1 - abs(py - j)) * image[0, :, j, i]
            torch.testing.assert_close(out[0, :, row, column], total, rtol=1e-4, atol=1e-5)


def test_disk_and_memory_give_the_same_batches(folder: Path) -> None:
    memory, disk = (ImageFolder(folder=str(folder), size=16, memory=limit).data("train", CPU) for limit in (1.0, 0.0))
    assert disk.store.cached is None  # type: ignore[attr-defined]
    whole, late = list(memory.batches(5, seed=1, epoch=2)), list(disk.batches(5, seed=1, epoch=2, first=2))
    assert len(whole) == 4 == memory.steps(5)
    for a, b in zip(whole[2:], late, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    assert whole[0][0].is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(whole[0][0], next(iter(memory.batches(5, seed=1, epoch=3)))[0])
    assert not torch.equal(whole[0][0], next(iter(memory.batches(5, seed=2, epoch=2)))[0])


def test_holdout_takes_the_same_number_of_every_class(folder: Path) -> None:
    task = ImageFolder(folder=str(folder), size=16, holdout=2)
    train, validation = images_of(task, "train"), images_of(task, "validation")
    assert (len(train), len(validation)) == (18, 6)
    assert task.data("validation", CPU).labels.tolist() == [0, 0, 1, 1, 2, 2]  # type: ignore[attr-defined]
    assert len(torch.cat([train, validation]).flatten(1).unique(dim=0)) == 24
    assert len(images_of(ImageFolder(folder=str(folder), size=16, limit=4), "train")) == 12
    with pytest.raises(SmartpruneError, match="holdout=8 leaves none of the 8 images of train/ant for training"):
        ImageFolder(folder=str(folder), holdout=8).data("train", CPU)


def remove(path: Path) -> None:
    shutil.rmtree(path)


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


def write_text(path: Path) -> None:
    path.write_text("no image")


def add_class(path: Path) -> None:
    shutil.copytree(path.parent / "ant", path)


@pytest.mark.parametrize("as_tar", [False, True])
@pytest.mark.parametrize(
    ("damage", "name", "split", "message"),
    [
        (remove, "val", "test", r"val is missing or empty; the layout is val/CLASS/\*\.jpg"),
        (remove, "train", "train", r"train holds no folders with images"),
        (empty, "val/bee", "test", r"val/bee holds no images \(\.jpg"),
        (remove, "val/bee", "test", r"val/bee holds no images \(\.jpg"),
        (add_class, "val/dog", "test", r"val/dog is a class that train does not have; its classes are ant, bee, cat"),
        (truncate, "val/bee/1.png", "test", r"val/bee/1\.png cannot be read as an image \(.*\); download it again"),
        (write_text, "train/cat/3.png", "train", r"train/cat/3\.png cannot be read as an image \(cannot identify"),
    ],
)
def test_errors_name_the_damaged_file(damage: object, name: str, split: str, message: str, as_tar: bool, tmp_path: Path) -> None:
    damage(write_classes(tmp_path / "set") / name)  # type: ignore[operator]
    path = make_tar(tmp_path / "set", tmp_path / "set.tar") if as_tar else tmp_path / "set"
    with pytest.raises(SmartpruneError, match=message) as caught:
        ImageFolder(folder=str(path), size=16).data(split, CPU)
    assert str(path) in str(caught.value)


def test_hidden_folders_are_ignored(tmp_path: Path) -> None:
    """Notebooks and file managers create hidden folders, empty or with files."""
    write_classes(tmp_path)
    (tmp_path / "train/.ipynb_checkpoints").mkdir()
    shutil.copytree(tmp_path / "val/bee", tmp_path / "val/.thumbnails")
    task = ImageFolder(folder=str(tmp_path), size=16)
    assert task.data("train", CPU).steps(1) == 3 * TRAIN
    assert task.data("test", CPU).steps(1) == 3 * VAL


def test_errors_name_an_empty_training_class(tmp_path: Path) -> None:
    empty(write_classes(tmp_path) / "train/bee")
    with pytest.raises(SmartpruneError, match="train/bee holds no images"):
        ImageFolder(folder=str(tmp_path)).data("train", CPU)


def test_missing_data_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMARTPRUNE_DATA", raising=False)
    with pytest.raises(SmartpruneError, match="imagefolder: no data folder is given; pass --data DIR"):
        ImageFolder().data("train", CPU)
    with pytest.raises(SmartpruneError, match="nowhere is not a folder or tar file"):
        ImageFolder(folder=str(tmp_path / "nowhere")).data("train", CPU)
    with pytest.raises(
        SmartpruneError,
        match=r"imagefolder: .* holds no data for this task; .* one of the folders train, val, or imagenette128\.tar",
    ):
        ImageFolder(folder=str(tmp_path)).data("train", CPU)
    (tmp_path / "a.tar").write_bytes(b"x" * 2000)
    with pytest.raises(SmartpruneError, match=r"a\.tar cannot be read as a plain tar file \(.*decompress it first"):
        ImageFolder(folder=str(tmp_path / "a.tar")).data("train", CPU)


def test_errors_name_a_truncated_tar_file(folder: Path, tmp_path: Path) -> None:
    tar = make_tar(folder, tmp_path / "short.tar")
    with tarfile.open(tar) as file:
        last = [member for member in file if member.isfile()][-1]
    tar.write_bytes(tar.read_bytes()[: last.offset_data + 10])
    with pytest.raises(SmartpruneError, match=r"short\.tar cannot be read as a plain tar file \('.*' was cut off\)"):
        ImageFolder(folder=str(tar)).data("train", CPU)


def test_missing_pillow_names_the_package_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SmartpruneError, match="not installed; run: pip install pillow"):
        ImageFolder(folder=str(folder), size=24).data("test", CPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 4}, "size=4 is too small; use at least 8"),
        ({"side": 64}, "side=64 is smaller than size=128; use at least size, or 0"),
        ({"area": 0.0}, "area=0.0 is outside \\(0, 1\\]"),
        ({"holdout": -1}, "holdout=-1 is negative"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, float], message: str) -> None:
    with pytest.raises(SmartpruneError, match=message):
        ImageFolder(**settings)  # type: ignore[arg-type]


def test_unknown_splits_raise(folder: Path) -> None:
    with pytest.raises(SmartpruneError, match="split='dev' is unknown; use train, validation or test"):
        ImageFolder(folder=str(folder)).data("dev", CPU)


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--data", str(folder), "--task-set", "size=16", "--task-set", "holdout=2", "--model", "resnet8", "--block", "8x4",
        "--sparsity", "0.5", "--batch", "6", "--dense-epochs", "2", "--search-epochs", "1", "--finetune-epochs", "1",
        "--threads", "1", "--device", "cpu",
    ]  # fmt: skip
    assert main(["train", "imagefolder", *flags, "--out", str(tmp_path / "a")]) == 0
    assert "accuracy" in capsys.readouterr().out
    config = load_config(tmp_path / "a/config.json")
    steps = iter(range(100))
    with pytest.raises(SmartpruneError, match="stopped in dense, after step 5 of 6"):
        train(configure({**vars(config), "out": str(tmp_path / "b")}), stop=lambda: next(steps) == 4)
    resume(tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert [row["accuracy"] is None for row in metric_rows(tmp_path / "a")] == [False] * 4  # the search has a metric, too


def test_imagenette_is_read_where_installed() -> None:
    path = Path(os.environ.get("SMARTPRUNE_DATA", ""))
    if not os.environ.get("SMARTPRUNE_DATA") or not any(path.glob("**/imagenette128.tar")):
        pytest.skip("SMARTPRUNE_DATA does not name a folder with imagenette128.tar")
    task = ImageFolder(limit=20)
    assert images_of(task, "train").shape == images_of(task, "test").shape == (200, 128, 128, 3)
    assert task.data("train", CPU).labels.bincount().tolist() == [20] * 10  # type: ignore[attr-defined]


def test_images_with_16_bits_keep_the_upper_8(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    write_classes(tmp_path)
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    image.fromarray(ramp).save(tmp_path / "train" / "cat" / "0.png")
    task = ImageFolder(folder=str(tmp_path), size=16)
    index = sorted(path.name for path in (tmp_path / "train").iterdir()).index("cat") * TRAIN
    assert np.array_equal(images_of(task, "train")[index].numpy(), (ramp >> 8).astype(np.uint8)[:, :, None].repeat(3, axis=2))


@pytest.mark.parametrize("damage", ["missing", "class", "truncated"])
def test_problems_of_the_test_split_raise_before_training(tmp_path: Path, damage: str) -> None:
    write_classes(tmp_path / "data")
    if damage == "missing":
        shutil.rmtree(tmp_path / "data" / "val")
    elif damage == "class":
        shutil.rmtree(tmp_path / "data" / "val" / "cat")
    else:
        (tmp_path / "data" / "val" / "cat" / "0.png").write_bytes(b"no image")
    settings = {
        "task": "imagefolder",
        "task_settings": {"folder": str(tmp_path / "data"), "size": 16},
        "model": "resnet8",
        "batch": 4,
    }
    with pytest.raises(SmartpruneError, match="val"):
        check(configure({**settings, "block": "4x2", "sparsity": 0.5, "out": str(tmp_path / "run")}))


def test_copies_to_a_gpu_are_pinned_and_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked without a GPU, through the arguments of the copy."""
    calls: list[object] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: calls.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: calls.append((args, kwargs)) or self)
    device = torch.device("cuda")
    store = ImageStore(lambda number: torch.full((2, 2, 3), number, dtype=torch.uint8), None, device)
    batches = list(store.stream(torch.arange(4), [slice(0, 2), slice(2, 4)]))
    assert [int(batch[0, 0, 0, 0]) for batch in batches] == [0, 2]
    assert calls == ["pinned", ((device,), {"non_blocking": True})] * 2
