"""Augmented images: compared with a loop over pixels, and independent of where an epoch is entered and who shares it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.training_jobs import metric_rows, small_config
from smartprune import SmartpruneError
from smartprune.run_files import STAGES
from smartprune.tasks import TASKS
from smartprune.tasks.augment import Augmented, augment, interval
from smartprune.tasks.task import every_batch
from smartprune.training.check import check
from smartprune.training.run import data_of_stage
from smartprune.training.train import train

CPU = torch.device("cpu")


def augment_by_pixel(image: np.ndarray, draws: np.ndarray, strength: float) -> np.ndarray:
    """Augments one image [channels, height, width], pixel by pixel."""
    channels, height, width = image.shape
    side = round(strength * min(height, width) / 4)
    top, left = (math.floor(draws[1 + axis] * (length - side + 1)) for axis, length in enumerate((height, width)))
    out = np.empty_like(image)
    for c in range(channels):
        values = [float(v) for v in image[c].ravel()]
        mean = sum(values) / len(values)
        deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
        for y in range(height):
            for x in range(width):
                blank = top <= y < top + side and left <= x < left + side
                contrasted = (image[c, y, x] - mean) * (1 + strength * (0.6 * draws[0] - 0.3))
                out[c, y, x] = mean if blank else mean + contrasted + strength * (0.3 * draws[3 + c] - 0.15) * deviation
    return out


@pytest.mark.parametrize("shape", [(4, 3, 8, 8), (3, 1, 9, 13), (2, 5, 16, 7)])
@pytest.mark.parametrize("strength", [0.5, 1.0, 3.0])
def test_augment_equals_a_loop_over_pixels(shape: tuple[int, ...], strength: float) -> None:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(*shape, generator=generator, dtype=torch.float64) * 3 + 2
    draws = torch.rand(shape[0], 3 + shape[1], generator=generator, dtype=torch.float64)
    expected = [augment_by_pixel(image.numpy(), row.numpy(), strength) for image, row in zip(images, draws, strict=True)]
    np.testing.assert_allclose(augment(images, draws, strength).numpy(), np.stack(expected), rtol=1e-9, atol=1e-9)


def test_the_change_does_not_depend_on_the_normalization() -> None:
    images, draws = torch.rand(6, 3, 12, 12, dtype=torch.float64), torch.rand(6, 6, dtype=torch.float64)
    torch.testing.assert_close(augment(4 * images - 1.5, draws, 1.0), 4 * augment(images, draws, 1.0) - 1.5)


@pytest.mark.parametrize("edge", [0.0, 1 - 2**-24])
def test_the_square_stays_inside_the_image_and_reaches_every_edge(edge: float) -> None:
    images = torch.randn(1, 3, 8, 12)
    out = augment(images, torch.full((1, 6), edge), 1.0)
    blank = torch.isclose(out, images.mean((2, 3), keepdim=True), atol=1e-6).all(1)[0]
    rows, columns = (slice(0, 2), slice(0, 2)) if edge == 0 else (slice(6, 8), slice(10, 12))
    assert int(blank.sum()) == 4
    assert blank[rows, columns].all()


def test_rounding_does_not_move_the_square_out_of_the_image() -> None:
    for length in (*range(1, 300), 1024, 2047, 4096, 4097):
        assert int(interval(torch.tensor([1 - 2**-24]), 1, length).sum()) == 1  # the largest random number


def test_an_image_of_one_color_is_unchanged() -> None:
    images = torch.full((2, 3, 8, 8), 0.25)
    assert torch.equal(augment(images, torch.rand(2, 6), 2.0), images)


def test_channels_last_is_preserved() -> None:
    images = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    assert augment(images, torch.rand(4, 6), 1.0).is_contiguous(memory_format=torch.channels_last)


class DataWithoutEvery:
    """Data whose ``batches`` has no parameter ``every``."""

    def steps(self, size: int) -> int:
        return 96 // size

    def batches(self, size: int, seed: int, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        images = torch.arange(96.0)[:, None, None, None] + torch.linspace(0, 1, 64).reshape(1, 1, 8, 8)
        for step in range(first, self.steps(size)):
            yield images[step * size :][:size], torch.arange(96)[step * size :][:size]


@pytest.mark.parametrize("name", ["digits", "scenes", "sceneboxes", "simple"])
def test_the_change_of_a_sample_depends_only_on_its_position(name: str) -> None:
    plain: Any = DataWithoutEvery() if name == "simple" else TASKS[name]().data("train", CPU)
    data = Augmented(plain, 1.0)
    epoch = list(data.batches(8, seed=3, epoch=5))
    assert len(epoch) == data.steps(8) == plain.steps(8)
    for (images, *labels), (plain_images, *plain_labels) in zip(epoch, plain.batches(8, seed=3, epoch=5), strict=True):
        assert images.shape == plain_images.shape
        assert not torch.equal(images, plain_images)
        assert all(torch.equal(a, b) for a, b in zip(labels, plain_labels, strict=True))
    torch.rand(7)
    for a, b in zip(epoch[4:], data.batches(8, seed=3, epoch=5, first=4), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    halves = [list(every_batch(data, 4, 3, 5, start, 2)) for start in (0, 1)]  # two processes share each batch
    for (images, *_), left, right in zip(epoch, *(half[: len(epoch)] for half in halves), strict=True):
        assert torch.equal(images, torch.cat([left[0], right[0]]))
    other_draws = next(data.batches(8, seed=3, epoch=6))[0], next(data.batches(8, seed=4, epoch=5))[0]
    assert not any(torch.equal(epoch[0][0], images) for images in other_draws)


@pytest.mark.parametrize(
    ("over", "stages"), [("search", {"search"}), ("pruning", {"search", "finetune"}), ("all", {"dense", "search", "finetune"})]
)
def test_augment_over_selects_the_stages(over: str, stages: set[str], tmp_path: Path) -> None:
    config, data = small_config(tmp_path / "a", augment=1.0, augment_over=over), DataWithoutEvery()
    augmented = {stage for stage in STAGES if isinstance(data_of_stage(data, config, stage), Augmented)}
    assert augmented == stages
    assert data_of_stage(data, small_config(tmp_path / "a", augment_over=over), "search") is data


def test_a_run_augments_only_the_selected_stages(tmp_path: Path) -> None:
    for name, setting in (("plain", {}), ("search", {"augment": 1.0}), ("pruning", {"augment": 1.0, "augment_over": "pruning"})):
        train(small_config(tmp_path / name, **setting))
    dense, model = ({name: (tmp_path / name / f"{kind}.safetensors").read_bytes() for name in ("plain", "search", "pruning")}
                    for kind in ("dense", "model"))  # fmt: skip
    assert len(set(dense.values())) == 1
    assert len(set(model.values())) == 3
    losses = {name: [row["loss"] for row in metric_rows(tmp_path / name) if row["stage"] == "search"] for name in dense}
    assert losses["search"] == losses["pruning"]
    assert losses["search"][0] > losses["plain"][0]  # augmented images are harder


class TextData:
    def steps(self, size: int) -> int:
        return 1

    def batches(self, size: int, seed: int, epoch: int, first: int = 0) -> Iterator[Any]:
        yield {"text": torch.zeros(4, 3)}


def test_a_task_without_images_raises_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smartprune.tasks.digits.Digits.data", lambda *_: TextData())
    with pytest.raises(
        SmartpruneError, match=r"augment=1 needs batches that begin with floating-point images .* begin with dict. Use --augment 0"
    ):
        check(small_config(tmp_path / "a", augment=1.0))
    assert not (tmp_path / "a").exists()
    for wrong in (torch.zeros(2, 3), torch.zeros(2, 3, 8, 8, dtype=torch.uint8)):
        monkeypatch.setattr(TextData, "batches", lambda *_, wrong=wrong: iter([(wrong, torch.zeros(2))]))
        with pytest.raises(SmartpruneError, match=r"begin with torch\.\w+ of shape \(2, 3"):
            next(Augmented(TextData(), 1.0).batches(2, 0, 0))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"augment": -0.5}, r"augment=-0\.5 must not be negative"),
        ({"augment": 3.5}, r"augment=3\.5 must be from 0 to 3"),
        ({"augment": "strong"}, r"augment='strong' must be float"),
        ({"augment_over": "finetune"}, r"augment_over='finetune' must be one of search, pruning, all"),
    ],
)
def test_wrong_settings_raise(setting: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SmartpruneError, match=message):
        small_config(tmp_path / "a", **setting)
