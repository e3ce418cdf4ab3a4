"""Segmentation: loss, metric, files, crops, scenes, and runs."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.image_folders import HEIGHT, PAIRS, WIDTH, image_and_mask, make_tar, save_image, write_pairs
from helpers.training_jobs import assert_same_run, metric_rows
from smartprune import SmartpruneError
from smartprune.models import MODELS
from smartprune.tasks.camvid import Camvid
from smartprune.tasks.images import MEAN, STD, ImageStore, normalize
from smartprune.tasks.scenes import SCENES, Scenes, compose
from smartprune.tasks.segmentation import IGNORE, Crops, Segmentation, Split, confusion, hard_pixel_loss, loss, mean_iou, metric
from smartprune.training.config import configure
from smartprune.training.train import resume, train

pytest.importorskip("PIL")
CPU = torch.device("cpu")


def make_task(path: Path, **changes: object) -> Segmentation:
    return Segmentation(**{"folder": str(path), "height": 32, "width": 32, **changes})  # type: ignore[arg-type]


def slow_loss(logits: Tensor, masks: Tensor) -> float:
    values = []
    for n in range(len(masks)):
        for y in range(masks.shape[1]):
            for x in range(masks.shape[2]):
                label = int(masks[n, y, x])
                if label != IGNORE:
                    powers = [math.exp(float(v)) for v in logits[n, :, y, x]]
                    values.append(-math.log(powers[label] / sum(powers)))
    values.sort(reverse=True)
    hard = [v for v in values if v > -math.log(0.7)]
    selected = hard if len(hard) >= len(values) // 16 else values[: len(values) // 16]
    return sum(selected) / len(selected)


@pytest.mark.parametrize("margin", [0.0, 3.0, 8.0, 30.0])  # from all pixels hard to none
def test_loss_matches_slow_loops(margin: float) -> None:
    masks = torch.randint(0, 5, (2, 12, 11))
    masks[torch.rand(masks.shape) < 0.3] = IGNORE
    target = torch.nn.functional.one_hot(masks.clamp(max=4), 5).permute(0, 3, 1, 2)
    logits = (torch.randn(2, 5, 12, 11) + margin * target).double().requires_grad_()
    value = hard_pixel_loss(logits, masks)
    assert float(value.detach()) == pytest.approx(slow_loss(logits.detach(), masks), rel=1e-9)
    value.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert bool((logits.grad.abs().sum(1)[masks == IGNORE] == 0).all())
    counted = int((logits.grad.abs().sum(1) > 0).sum())
    assert counted >= int((masks != IGNORE).sum()) // 16


def test_loss_without_classes_is_zero() -> None:
    assert float(hard_pixel_loss(torch.randn(1, 3, 8, 8), torch.full((1, 8, 8), IGNORE))) == 0


class Heads(nn.Module):
    """A main head, and in training a second head with half the resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.other = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 2, 2)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return (self.main(x), self.other(x)) if self.training else self.main(x)  # type: ignore[no-any-return]


def test_losses_of_all_heads_are_summed() -> None:
    model, images, masks = Heads(), torch.randn(2, 3, 8, 8), torch.randint(0, 4, (2, 8, 8))
    other = torch.nn.functional.interpolate(model.other(images), (8, 8), mode="bilinear")
    expected = hard_pixel_loss(model.main(images), masks) + hard_pixel_loss(other, masks)
    torch.testing.assert_close(loss(model, (images, masks)), expected)
    model.eval()
    torch.testing.assert_close(loss(model, (images, masks)), hard_pixel_loss(model.main(images), masks))


def slow_iou(predictions: Tensor, masks: Tensor, classes: int) -> float:
    values = []
    for c in range(classes):
        intersection = union = 0
        for f, m in zip(predictions.flatten().tolist(), masks.flatten().tolist(), strict=True):
            if m != IGNORE:
                intersection += f == c and m == c
                union += f == c or m == c
        if union:
            values.append(intersection / union)
    return sum(values) / len(values)


@pytest.mark.parametrize("classes", [2, 5, 9])
def test_metric_matches_slow_loops(classes: int) -> None:
    masks = torch.randint(0, max(2, classes - 2), (6, 10, 9))  # some classes are neither true nor predicted
    predictions = torch.where(torch.rand(masks.shape) < 0.6, masks, torch.randint(0, max(2, classes - 1), masks.shape))
    masks[torch.rand(masks.shape) < 0.2] = IGNORE
    table = sum(confusion(f, m, classes) for f, m in zip(predictions.split(4), masks.split(4), strict=True))
    assert isinstance(table, Tensor)
    assert int(table.sum()) == int((masks != IGNORE).sum())
    assert mean_iou(table) == pytest.approx(slow_iou(predictions, masks, classes))
    assert mean_iou(torch.zeros(3, 3)) == 0


def test_metric_ignores_padding(tmp_path: Path) -> None:
    path = write_pairs(tmp_path)
    model = Heads().eval()
    data = make_task(path).data("test", CPU)
    pixels = data.store.cached  # type: ignore[attr-defined]
    with torch.no_grad():
        predictions = model(normalize(pixels[..., :3])).argmax(1)
        assert metric(model, data) == pytest.approx(slow_iou(predictions, pixels[..., 3], 4))
    images, masks = next(iter(data.batches(2, seed=0, epoch=0)))
    assert (images.shape, masks.shape) == ((2, 3, 64, 64), (2, 64, 64))
    assert bool((masks[:, HEIGHT:] == IGNORE).all() and (masks[:, :, WIDTH:] == IGNORE).all())
    assert bool((images[:, :, HEIGHT:] == 0).all())


@pytest.mark.parametrize("as_tar", [False, True])
@pytest.mark.parametrize("city", [False, True])
def test_every_layout_is_read(city: bool, as_tar: bool, tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "set", city)
    path = make_tar(path, tmp_path / "set.tar") if as_tar else path
    task = make_task(path)
    for split, folder in (("train", "train"), ("validation", None if city else "val"), ("test", "val" if city else "test")):
        data = task.data(split, CPU)
        if folder is None:
            assert data.steps(4) == 0  # the test masks of Cityscapes are not public, so val is the test split
            assert list(data.batches(4, seed=0, epoch=0)) == []
            continue
        pairs = [image_and_mask(folder, i) for i in range(PAIRS[folder])]
        cached = data.store.cached.numpy()  # type: ignore[attr-defined]
        assert np.array_equal(cached[..., :3], np.stack([image for image, _ in pairs]))
        assert np.array_equal(cached[..., 3], np.stack([mask for _, mask in pairs]))


def test_number_of_classes_comes_from_setting_file_or_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setitem(MODELS, "bisenetv2", lambda num_classes: counts.append(num_classes) or nn.Identity())
    write_pairs(tmp_path / "own", test=False)
    make_task(tmp_path / "own").model("bisenetv2")
    make_task(tmp_path / "own", classes=7).model("bisenetv2")
    (write_pairs(tmp_path / "named") / "classes.json").write_text(json.dumps({"classes": ["a", "b", "c", "d", "e"]}))
    make_task(tmp_path / "named").model("bisenetv2")
    make_task(write_pairs(tmp_path / "city", city=True)).model("bisenetv2")
    assert counts == [4, 7, 5, 19]
    assert make_task(tmp_path / "own").data("validation", CPU).steps(4) == 0
    assert make_task(tmp_path / "own").data("test", CPU).steps(1) == PAIRS["val"]
    (write_pairs(tmp_path / "bad") / "classes.json").write_text("[]")
    with pytest.raises(SmartpruneError, match=r'classes\.json must hold \{"classes": \[names\]\}'):
        make_task(tmp_path / "bad").model("bisenetv2")


def test_images_and_masks_are_cropped_together(tmp_path: Path) -> None:
    """The red channel encodes the class, so it must match the mask except at borders between classes."""
    data = make_task(write_pairs(tmp_path), smallest=0.5, largest=2.0).data("train", CPU)
    padding = 0
    for epoch in range(5):
        for images, masks in data.batches(3, seed=0, epoch=epoch):
            assert (images.shape, masks.shape) == ((3, 3, 32, 32), (3, 32, 32))
            red = ((images[:, 0] * STD[0] + MEAN[0]) * 255 / 40).round().long()
            counted = masks != IGNORE
            assert float((red == masks)[counted].float().mean()) > 0.75
            assert set(masks.unique().tolist()) <= {0, 1, 2, 3, IGNORE}
            padding += int((images.abs().sum(1) == 0).sum())
            assert bool((masks[images.abs().sum(1) == 0] == IGNORE).all())
    assert padding > 0  # some images were smaller than the crop


def test_crops_without_scaling_copy_the_mask() -> None:
    pixels = torch.randint(0, 4, (5, 64, 96, 4), dtype=torch.uint8)
    data = Split(ImageStore(lambda i: pixels[i], pixels, CPU), 5, (64, 96), Crops(64, 96, 1.0, 1.0, flip=True))
    order, extent, _ = data._draw(Crops(64, 96, 1.0, 1.0, flip=True), 0, 0)
    assert 0 < int((extent[:, 0] < 0).sum()) < 5
    ((_, masks),) = data.batches(5, seed=0, epoch=0)
    for i in range(5):
        mask = pixels[order[i], :, :, 3].long()
        assert torch.equal(masks[i], mask.flip(1) if extent[i, 0] < 0 else mask)


def test_disk_and_memory_give_the_same_batches(tmp_path: Path) -> None:
    path = write_pairs(tmp_path)
    memory, disk = (make_task(path, memory=limit).data("train", CPU) for limit in (1.0, 0.0))
    assert disk.store.cached is None  # type: ignore[attr-defined]
    whole, late = list(memory.batches(2, seed=1, epoch=2)), list(disk.batches(2, seed=1, epoch=2, first=1))
    assert len(whole) == 3 == memory.steps(2)
    for a, b in zip(whole[1:], late, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(whole[0][0], next(iter(memory.batches(2, seed=1, epoch=3)))[0])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "labels/train/3.png").unlink(), r"images/train/3\.png has no mask; add .*labels/train/3\.png"),
        (lambda p: (p / "images/train/3.png").unlink(), r"labels/train/3\.png is a mask without an image in images/train"),
        (lambda p: shutil.rmtree(p / "images/train"), r"images/train is missing or holds no images"),
        (lambda p: (p / "images/train/2.png").write_bytes(b"no"), r"images/train/2\.png cannot be read as an image"),
        (lambda p: (p / "labels/train/2.png").write_bytes(b"no"), r"labels/train/2\.png cannot be read as an image"),
        (
            lambda p: save_image(p / "labels/train/2.png", image_and_mask("train", 2)[0]),
            r"labels/train/2\.png has the mode RGB; a mask has one",
        ),
        (
            lambda p: save_image(p / "labels/train/2.png", np.full((HEIGHT, WIDTH), 9, np.uint8)),
            r"2\.png holds the class 9; use 0 to 3",
        ),
        (
            lambda p: save_image(p / "labels/train/2.png", np.zeros((8, 9), np.uint8)),
            r"train/2\.png has 9x8 pixels, but its image has 48x40",
        ),
    ],
)
def test_errors_name_the_damaged_file(damage: object, message: str, tmp_path: Path) -> None:
    damage(write_pairs(tmp_path))  # type: ignore[operator]
    with pytest.raises(SmartpruneError, match=message):
        make_task(tmp_path, classes=4).data("train", CPU)


def test_images_of_two_sizes_need_the_setting_resize(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    save_image(tmp_path / "images/train/4.png", np.zeros((80, 96, 3), np.uint8))
    save_image(tmp_path / "labels/train/4.png", np.ones((80, 96), np.uint8))
    with pytest.raises(
        SmartpruneError, match=r"images/train/4\.png has 96x80 pixels, but the first image has 48x40; .*resize=WIDTHxHEIGHT"
    ):
        make_task(tmp_path).data("train", CPU)
    cached = make_task(tmp_path, resize="64x32").data("train", CPU).store.cached  # type: ignore[attr-defined]
    assert cached.shape == (6, 32, 64, 4)
    assert set(cached[..., 3].unique().tolist()) <= {0, 1, 2, 3, IGNORE}


def test_missing_data_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMARTPRUNE_DATA", raising=False)
    with pytest.raises(SmartpruneError, match="camvid: no data folder is given"):
        Camvid().data("train", CPU)
    with pytest.raises(
        SmartpruneError, match=r"camvid: .* holds no data for this task; .* one of the folders images, leftImg8bit, or camvid\.tar"
    ):
        Camvid(folder=str(tmp_path)).data("train", CPU)
    with pytest.raises(SmartpruneError, match="split='dev' is unknown; use train, validation or test"):
        make_task(write_pairs(tmp_path)).data("dev", CPU)
    with pytest.raises(SmartpruneError, match="split='dev' is unknown; use train, validation or test"):
        Scenes().data("dev", CPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"height": 100}, "height=100 is not a positive multiple of 32"),
        ({"width": 0}, "width=0 is not a positive multiple of 32"),
        ({"smallest": 3.0}, r"smallest=3.0 and largest=2.0 are not a range of positive factors"),
        ({"resize": "big"}, "resize='big' is not a size; use WIDTHxHEIGHT"),
        ({"classes": 255}, "classes=255 is outside 0 to 254"),
        ({"memory": -1.0}, "memory=-1.0 is negative"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(SmartpruneError, match=message):
        Segmentation(**settings)  # type: ignore[arg-type]
    with pytest.raises(SmartpruneError, match="width=0 is too small; use at least 1"):
        Scenes(width=0)


@pytest.fixture
def few_scenes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for split, count in (("train", 48), ("validation", 12), ("test", 12)):
        monkeypatch.setitem(SCENES, split, count)
    compose.cache_clear()
    yield
    compose.cache_clear()


@pytest.mark.usefixtures("few_scenes")
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    short = {"dense_epochs": 2, "search_epochs": 1, "finetune_epochs": 1, "task_settings": {"width": 8}, "device": "cpu"}
    result = train(configure({"task": "scenes", **short, "out": str(tmp_path / "a")}))
    assert (result.measure, result.verified) == ("mIoU", True)
    steps = iter(range(100))
    with pytest.raises(SmartpruneError, match="stopped in search, after step 2 of 3"):
        train(configure({"task": "scenes", **short, "out": str(tmp_path / "b")}), stop=lambda: next(steps) == 7)
    resume(tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert [row["mIoU"] is None for row in metric_rows(tmp_path / "a")] == [False] * 4  # the search has a metric, too
    compose.cache_clear()


@pytest.mark.parametrize("name", ["camvid", "segmentation"])
def test_a_run_from_a_tar_file(name: str, tmp_path: Path) -> None:
    if "bisenetv2" not in MODELS:
        pytest.skip("bisenetv2 is not in MODELS")
    tar = make_tar(write_pairs(tmp_path / "set"), tmp_path / "set.tar")
    short = {"dense_epochs": 1, "search_epochs": 1, "finetune_epochs": 1, "batch": 3, "device": "cpu", "threads": 1}
    settings = {"folder": str(tar), "height": 32, "width": 32}
    result = train(configure({"task": name, "task_settings": settings, **short, "out": str(tmp_path / "run")}))
    assert result.verified
    assert 0 <= result.pruned <= 1


def test_camvid_is_read_where_installed() -> None:
    path = Path(os.environ.get("SMARTPRUNE_DATA", ""))
    if not os.environ.get("SMARTPRUNE_DATA") or not any(path.glob("**/camvid.tar")):
        pytest.skip("SMARTPRUNE_DATA does not name a folder with camvid.tar")
    data = Camvid().data("validation", CPU)
    assert data.store.cached.shape == (101, 360, 480, 4)  # type: ignore[attr-defined]
    masks = data.store.cached[..., 3]  # type: ignore[attr-defined]
    assert masks.unique().tolist() == [*range(11), IGNORE]
    assert float((masks == 3).float().mean()) == pytest.approx(0.29, abs=0.01)  # road
