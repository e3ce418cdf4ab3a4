"""Pictures in folders of classes: folder and tar read alike, augmentation from (seed, epoch) alone, errors name the file."""

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
from smartprune.tasks.pictures import MEAN, STD, Shelf, cut
from smartprune.training.config import configure, load
from smartprune.training.page import run_cycles
from smartprune.training.train import check, resume, train

Image = pytest.importorskip("PIL.Image")
CPU = torch.device("cpu")


def kept(task: ImageFolder, split: str) -> torch.Tensor:
    return task.data(split, CPU).shelf.kept  # type: ignore[attr-defined, no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classes(tmp_path_factory.mktemp("classes"))


def test_reads_every_picture_with_its_class(folder: Path) -> None:
    task = ImageFolder(folder=str(folder), size=16)
    for split, count, first in (("train", TRAIN, 0), ("test", VAL, 1000)):
        data = task.data(split, CPU)
        wanted = np.stack([pixels(label, i + first) for label in range(3) for i in range(count)])
        assert np.array_equal(kept(task, split).numpy(), wanted)
        assert data.labels.tolist() == [label for label in range(3) for _ in range(count)]  # type: ignore[attr-defined]
    assert task.data("validation", CPU).steps(4) == 0
    assert task.model("resnet8")(task.example()).shape == (1, 3)


def test_a_plan_needs_the_data_too(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Which says how many classes there are; the message that it is missing names a flag that there is."""
    monkeypatch.delenv("SMARTPRUNE_DATA", raising=False)
    with pytest.raises(SystemExit) as stop:
        main(["plan", "imagefolder"])
    assert stop.value.code == 2
    assert "with --data DIR" in capsys.readouterr().err
    assert main(["plan", "imagefolder", "--data", str(folder)]) == 0
    assert "183,168 in 52 layers" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "resnet18", "--data", str(folder)])
    assert "--data is that of a task, and resnet18 is none" in capsys.readouterr().err


@pytest.mark.parametrize("top", [".", "set-of-three"])
def test_a_tar_reads_as_the_folder_does(top: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = kept(ImageFolder(folder=str(folder), size=16), "test")
    tar = make_tar(folder, tmp_path / "imagenette128.tar", top)
    assert torch.equal(kept(ImageFolder(folder=str(tar), size=16), "test"), wanted)
    monkeypatch.setenv("SMARTPRUNE_DATA", str(tmp_path))  # the folder that holds the tar
    assert torch.equal(kept(ImageFolder(size=16), "test"), wanted)


def test_links_in_a_tar_are_followed_as_in_a_folder(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "set"
    shutil.copytree(folder, own)
    names = sorted(path.parent.name for path in own.glob("train/*/*"))
    first = min((own / "train" / names[0]).iterdir())
    os.link(first, first.with_name(f"hard{first.suffix}"))
    first.with_name(f"soft{first.suffix}").symlink_to(first.name)
    first.with_name(f"softer{first.suffix}").symlink_to(f"soft{first.suffix}")
    other = own / "train" / names[-1] / f"other{first.suffix}"
    other.symlink_to(f"../{names[0]}/{first.name}")
    for top in (".", "set"):
        tar = make_tar(own, tmp_path / f"{top.strip('.')}a.tar", top)
        a, b = (ImageFolder(folder=str(place), size=16) for place in (own, tar))
        assert len(kept(a, "train")) == len(names) + 4
        assert torch.equal(kept(a, "train"), kept(b, "train"))
        assert torch.equal(a.data("train", CPU).labels, b.data("train", CPU).labels)  # type: ignore[attr-defined]
    other.unlink()
    other.symlink_to("/elsewhere/1.png")
    with pytest.raises(SmartpruneError, match=rf"train/{names[-1]}/other\{first.suffix} leads to no file in it; .* --dereference"):
        ImageFolder(folder=str(make_tar(own, tmp_path / "b.tar")), size=16).data("train", CPU)


def test_linked_folders_in_a_tar_are_followed_as_in_a_folder(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "set"
    shutil.copytree(folder, own)
    first = min((own / "train").iterdir())
    count = len(list(own.glob("train/*/*"))) + len(list(first.iterdir()))
    (own / ".store").mkdir()
    first.rename(own / ".store" / first.name)
    first.symlink_to(f"../.store/{first.name}")
    (own / "train" / "zebra").symlink_to(f"../.store/{first.name}")
    for top in (".", "set"):
        tar = make_tar(own, tmp_path / f"{top.strip('.')}a.tar", top)
        a, b = (ImageFolder(folder=str(place), size=16) for place in (own, tar))
        assert len(kept(a, "train")) == count
        assert torch.equal(kept(a, "train"), kept(b, "train"))
        assert torch.equal(a.data("train", CPU).labels, b.data("train", CPU).labels)  # type: ignore[attr-defined]


def test_the_cycles_of_a_run_from_elsewhere_take_no_memory(folder: Path, tmp_path: Path) -> None:
    """Its weights fit pictures of any size."""
    save_file(ImageFolder(folder=str(folder)).model("resnet8").state_dict(), tmp_path / "model.safetensors")
    told: dict[str, object] = {"task": "imagefolder", "model": "resnet8"}
    for size, known in ((128, True), (10**6, True), (10**10, False), (10**30, False)):
        told["task_settings"] = {"folder": str(folder), "size": size}
        (tmp_path / "config.json").write_text(json.dumps(told))
        assert (run_cycles(tmp_path) is not None) is known


def test_evaluation_sees_the_middle_of_every_picture_once(folder: Path) -> None:
    seen = list(ImageFolder(folder=str(folder), size=8, side=16).data("test", CPU).batches(4, seed=5, epoch=7))
    images = torch.cat([images for images, _ in seen]).permute(0, 2, 3, 1)
    back = ((images * torch.tensor(STD) + torch.tensor(MEAN)) * 255).round().to(torch.uint8)
    assert torch.equal(back, kept(ImageFolder(folder=str(folder), size=16), "test")[:, 4:12, 4:12])
    assert torch.cat([labels for _, labels in seen]).tolist() == [0] * 3 + [1] * 3 + [2] * 3


def test_pictures_of_any_size_and_mode_are_brought_to_one(tmp_path: Path) -> None:
    write_classes(tmp_path, "jpg")
    wide = Image.fromarray(pixels(0, 0, 64, 32))
    wide.save(tmp_path / "train/ant/0.jpg", quality=100, subsampling=0)
    wide.convert("L").save(tmp_path / "train/ant/1.jpg")
    wide.convert("P").save(tmp_path / "train/ant/2.png")
    pictures = kept(ImageFolder(folder=str(tmp_path), size=16), "train")
    assert pictures.shape == (3 * TRAIN + 1, 16, 16, 3)
    centre = np.asarray(wide.crop((16, 0, 48, 32)).resize((16, 16))).astype(int)
    assert np.abs(pictures[0].numpy() - centre).mean() < 4
    assert torch.equal(pictures[1][..., 0], pictures[1][..., 1])


def test_draws_stay_within_the_picture_and_keep_their_bounds() -> None:
    data = Split(Shelf(lambda _: torch.empty(0), None, CPU), torch.zeros(4000), True, 16, 0.25, True)
    order, reach, centre = data._draw(seed=3, epoch=4)
    assert torch.equal(order.sort().values, torch.arange(4000))
    assert bool((reach.abs() + centre.abs() <= 1 + 1e-6).all())
    area = reach.abs().prod(1)
    assert 0.21 < float(area.min()) < 0.3
    assert float(area.max()) > 0.95
    ratio = (reach[:, 0] / reach[:, 1]).abs()
    assert 0.74 < float(ratio.min()) < 0.8 < 1.25 < float(ratio.max()) < 1.34
    assert 1800 < int((reach[:, 0] < 0).sum()) < 2200
    again = data._draw(3, 4)
    assert all(torch.equal(a, b) for a, b in zip((order, reach, centre), again, strict=True))
    assert not torch.equal(order, data._draw(3, 5)[0])


def test_training_pictures_keep_their_labels(folder: Path) -> None:
    seen = list(ImageFolder(folder=str(folder), size=16).data("train", CPU).batches(5, seed=0, epoch=0))
    for images, labels in seen:  # the higher the label, the brighter
        centre = (images[:, :, 4:12, 4:12] * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]).mean((1, 2, 3))
        assert torch.equal((centre * 255 / 80).floor().long(), labels)
    assert seen[0][1].tolist() != sorted(seen[0][1].tolist())


def test_cut_against_slow_interpolation() -> None:
    picture = torch.rand(1, 2, 7, 9)
    reach, centre, size = torch.tensor([[-0.5, 0.8]]), torch.tensor([[0.3, -0.4]]), (4, 5)
    out = cut(picture, reach, centre, size)
    for row in range(4):
        for column in range(5):
            x = ((2 * column + 1) / 5 - 1) * float(reach[0, 0]) + float(centre[0, 0])
            y = ((2 * row + 1) / 4 - 1) * float(reach[0, 1]) + float(centre[0, 1])
            px, py = (x + 1) * 9 / 2 - 0.5, (y + 1) * 7 / 2 - 0.5
            total = torch.zeros(2)
            for j in range(7):
                for i in range(9):
                    total += max(0.0, 1 - abs(px - i)) * max(0.0, 1 - abs(py - j)) * picture[0, :, j, i]
            torch.testing.assert_close(out[0, :, row, column], total, rtol=1e-4, atol=1e-5)


def test_disk_and_memory_give_the_same_batches_from_any_entry_point(folder: Path) -> None:
    memory, disk = (ImageFolder(folder=str(folder), size=16, memory=limit).data("train", CPU) for limit in (1.0, 0.0))
    assert disk.shelf.kept is None  # type: ignore[attr-defined]
    whole, late = list(memory.batches(5, seed=1, epoch=2)), list(disk.batches(5, seed=1, epoch=2, first=2))
    assert len(whole) == 4 == memory.steps(5)
    for a, b in zip(whole[2:], late, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    assert whole[0][0].is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(whole[0][0], next(iter(memory.batches(5, seed=1, epoch=3)))[0])
    assert not torch.equal(whole[0][0], next(iter(memory.batches(5, seed=2, epoch=2)))[0])


def test_holdout_takes_as_many_of_every_class(folder: Path) -> None:
    task = ImageFolder(folder=str(folder), size=16, holdout=2)
    train, held = kept(task, "train"), kept(task, "validation")
    assert (len(train), len(held)) == (18, 6)
    assert task.data("validation", CPU).labels.tolist() == [0, 0, 1, 1, 2, 2]  # type: ignore[attr-defined]
    assert len(torch.cat([train, held]).flatten(1).unique(dim=0)) == 24
    assert len(kept(ImageFolder(folder=str(folder), size=16, limit=4), "train")) == 12
    with pytest.raises(SmartpruneError, match="holdout=8 leaves none of the 8 pictures of train/ant to train on"):
        ImageFolder(folder=str(folder), holdout=8).data("train", CPU)


def remove(path: Path) -> None:
    shutil.rmtree(path)


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


def text(path: Path) -> None:
    path.write_text("no picture")


def add_class(path: Path) -> None:
    shutil.copytree(path.parent / "ant", path)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("damage", "name", "split", "message"),
    [
        (remove, "val", "test", r"val is missing or empty; the layout is val/CLASS/\*\.jpg"),
        (remove, "train", "train", r"train is missing or holds no folders with pictures"),
        (empty, "val/bee", "test", r"val/bee holds no pictures \(\.jpg"),
        (remove, "val/bee", "test", r"val/bee holds no pictures \(\.jpg"),
        (add_class, "val/dog", "test", r"val/dog is a class that train lacks; train has: ant, bee, cat"),
        (cut_short, "val/bee/1.png", "test", r"val/bee/1\.png cannot be read as a picture \(.*\); fetch it again"),
        (text, "train/cat/3.png", "train", r"train/cat/3\.png cannot be read as a picture \(cannot identify"),
    ],
)
def test_damage_is_named(damage: object, name: str, split: str, message: str, packed: bool, tmp_path: Path) -> None:
    damage(write_classes(tmp_path / "set") / name)  # type: ignore[operator]
    place = make_tar(tmp_path / "set", tmp_path / "set.tar") if packed else tmp_path / "set"
    with pytest.raises(SmartpruneError, match=message) as caught:
        ImageFolder(folder=str(place), size=16).data(split, CPU)
    assert str(place) in str(caught.value)


def test_hidden_folders_are_no_classes(tmp_path: Path) -> None:
    """Such as notebooks and file managers leave behind, with files in them or without."""
    write_classes(tmp_path)
    (tmp_path / "train/.ipynb_checkpoints").mkdir()
    shutil.copytree(tmp_path / "val/bee", tmp_path / "val/.thumbnails")
    task = ImageFolder(folder=str(tmp_path), size=16)
    assert task.data("train", CPU).steps(1) == 3 * TRAIN
    assert task.data("test", CPU).steps(1) == 3 * VAL


def test_an_empty_class_of_train_is_named(tmp_path: Path) -> None:
    empty(write_classes(tmp_path) / "train/bee")
    with pytest.raises(SmartpruneError, match="train/bee holds no pictures"):
        ImageFolder(folder=str(tmp_path)).data("train", CPU)


def test_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMARTPRUNE_DATA", raising=False)
    with pytest.raises(SmartpruneError, match="imagefolder: no data folder was given; say where the data lies with --data DIR"):
        ImageFolder().data("train", CPU)
    with pytest.raises(SmartpruneError, match="nowhere is neither a folder nor a tar"):
        ImageFolder(folder=str(tmp_path / "nowhere")).data("train", CPU)
    with pytest.raises(
        SmartpruneError, match=r"holds no data for imagefolder: none of the folders train, val .*imagenette128\.tar"
    ):
        ImageFolder(folder=str(tmp_path)).data("train", CPU)
    (tmp_path / "a.tar").write_bytes(b"x" * 2000)
    with pytest.raises(SmartpruneError, match=r"a\.tar cannot be read as a plain tar \(.*a compressed one must be unpacked"):
        ImageFolder(folder=str(tmp_path / "a.tar")).data("train", CPU)


def test_a_tar_that_ends_early_is_named(folder: Path, tmp_path: Path) -> None:
    tar = make_tar(folder, tmp_path / "short.tar")
    with tarfile.open(tar) as file:
        last = [member for member in file if member.isfile()][-1]
    tar.write_bytes(tar.read_bytes()[: last.offset_data + 10])
    with pytest.raises(SmartpruneError, match=r"short\.tar cannot be read as a plain tar \(unexpected end of data\)"):
        ImageFolder(folder=str(tar)).data("train", CPU)


def test_missing_pillow_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SmartpruneError, match="not installed; run: pip install pillow"):
        ImageFolder(folder=str(folder), size=24).data("test", CPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 4}, "size=4 should be at least 8"),
        ({"side": 64}, "side=64 should be at least size=128, or 0"),
        ({"area": 0.0}, "area=0.0 should be above 0"),
        ({"holdout": -1}, "holdout=-1 should not be negative"),
    ],
)
def test_wrong_settings(settings: dict[str, float], message: str) -> None:
    with pytest.raises(SmartpruneError, match=message):
        ImageFolder(**settings)  # type: ignore[arg-type]


def test_unknown_split(folder: Path) -> None:
    with pytest.raises(SmartpruneError, match="split='dev'; it is train, validation or test"):
        ImageFolder(folder=str(folder)).data("dev", CPU)


def test_a_run_and_one_that_was_stopped_end_alike(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--data", str(folder), "--task-set", "size=16", "--task-set", "holdout=2", "--model", "resnet8", "--block", "8x4",
        "--sparsity", "0.5", "--batch", "6", "--dense-epochs", "2", "--search-epochs", "1", "--finetune-epochs", "1",
        "--threads", "1", "--device", "cpu",
    ]  # fmt: skip
    assert main(["train", "imagefolder", *flags, "--out", str(tmp_path / "a")]) == 0
    assert "accuracy" in capsys.readouterr().out
    config = load(tmp_path / "a/config.json")
    steps = iter(range(100))
    with pytest.raises(SmartpruneError, match="stopped in dense, after step 5 of 6"):
        train(configure({**vars(config), "out": str(tmp_path / "b")}), stop=lambda: next(steps) == 4)
    resume(tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert [row["accuracy"] is None for row in metric_rows(tmp_path / "a")] == [False, False, True, False]


def test_the_real_data() -> None:
    place = Path(os.environ.get("SMARTPRUNE_DATA", ""))
    if not os.environ.get("SMARTPRUNE_DATA") or not any(place.glob("**/imagenette128.tar")):
        pytest.skip("SMARTPRUNE_DATA does not name a folder with imagenette128.tar")
    task = ImageFolder(limit=20)
    assert kept(task, "train").shape == kept(task, "test").shape == (200, 128, 128, 3)
    assert task.data("train", CPU).labels.bincount().tolist() == [20] * 10  # type: ignore[attr-defined]


def test_sixteen_bits_of_grey(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    write_classes(tmp_path)
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    image.fromarray(ramp).save(tmp_path / "train" / "cat" / "0.png")
    task = ImageFolder(folder=str(tmp_path), size=16)
    place = sorted(path.name for path in (tmp_path / "train").iterdir()).index("cat") * TRAIN
    assert np.array_equal(kept(task, "train")[place].numpy(), (ramp >> 8).astype(np.uint8)[:, :, None].repeat(3, axis=2))


@pytest.mark.parametrize("damage", ["gone", "class", "cut"])
def test_what_is_wrong_with_the_test_pictures_is_told_at_once(tmp_path: Path, damage: str) -> None:
    """Not after a dense stage of hours."""
    write_classes(tmp_path / "data")
    if damage == "gone":
        shutil.rmtree(tmp_path / "data" / "val")
    elif damage == "class":
        shutil.rmtree(tmp_path / "data" / "val" / "cat")
    else:
        (tmp_path / "data" / "val" / "cat" / "0.png").write_bytes(b"no picture")
    given = {"task": "imagefolder", "task_settings": {"folder": str(tmp_path / "data"), "size": 16}, "model": "resnet8", "batch": 4}
    with pytest.raises(SmartpruneError, match="val"):
        check(configure({**given, "block": "4x2", "sparsity": 0.5, "out": str(tmp_path / "run")}))


def test_pictures_from_disk_go_to_a_gpu_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies that are asked for, without a GPU: pinned, and nobody waits."""
    asked: list[object] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: asked.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *place, **how: asked.append((place, how)) or self)
    device = torch.device("cuda")
    shelf = Shelf(lambda number: torch.full((2, 2, 3), number, dtype=torch.uint8), None, device)
    batches = list(shelf.stream(torch.arange(4), [slice(0, 2), slice(2, 4)]))
    assert [int(batch[0, 0, 0, 0]) for batch in batches] == [0, 2]
    assert asked == ["pinned", ((device,), {"non_blocking": True})] * 2
