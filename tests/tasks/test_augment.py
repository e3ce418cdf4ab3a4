"""Pictures that are changed for the search: each pixel by hand, the same wherever an epoch is entered and whoever shares it."""

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
from smartprune.tasks.augment import Augmented, augment, within
from smartprune.tasks.task import every_batch
from smartprune.training.check import check
from smartprune.training.run import data_of_stage
from smartprune.training.train import train

CPU = torch.device("cpu")


def slowly(picture: np.ndarray, draws: np.ndarray, strength: float) -> np.ndarray:
    """One picture [channels, height, width], pixel by pixel."""
    channels, height, width = picture.shape
    side = round(strength * min(height, width) / 4)
    top, left = (math.floor(draws[1 + axis] * (length - side + 1)) for axis, length in enumerate((height, width)))
    out = np.empty_like(picture)
    for c in range(channels):
        values = [float(v) for v in picture[c].ravel()]
        mean = sum(values) / len(values)
        spread = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
        for y in range(height):
            for x in range(width):
                blank = top <= y < top + side and left <= x < left + side
                kept = (picture[c, y, x] - mean) * (1 + strength * (0.6 * draws[0] - 0.3))
                out[c, y, x] = mean if blank else mean + kept + strength * (0.3 * draws[3 + c] - 0.15) * spread
    return out


@pytest.mark.parametrize("shape", [(4, 3, 8, 8), (3, 1, 9, 13), (2, 5, 16, 7)])
@pytest.mark.parametrize("strength", [0.5, 1.0, 3.0])
def test_against_a_loop_over_pixels(shape: tuple[int, ...], strength: float) -> None:
    draw = torch.Generator().manual_seed(5)
    pictures = torch.randn(*shape, generator=draw, dtype=torch.float64) * 3 + 2
    draws = torch.rand(shape[0], 3 + shape[1], generator=draw, dtype=torch.float64)
    wanted = [slowly(p.numpy(), d.numpy(), strength) for p, d in zip(pictures, draws, strict=True)]
    np.testing.assert_allclose(augment(pictures, draws, strength).numpy(), np.stack(wanted), rtol=1e-9, atol=1e-9)


def test_it_is_the_same_change_however_pictures_were_normalised() -> None:
    pictures, draws = torch.rand(6, 3, 12, 12, dtype=torch.float64), torch.rand(6, 6, dtype=torch.float64)
    torch.testing.assert_close(augment(4 * pictures - 1.5, draws, 1.0), 4 * augment(pictures, draws, 1.0) - 1.5)


@pytest.mark.parametrize("edge", [0.0, 1 - 2**-24])
def test_the_square_lies_in_the_picture_and_reaches_every_edge(edge: float) -> None:
    pictures = torch.randn(1, 3, 8, 12)
    out = augment(pictures, torch.full((1, 6), edge), 1.0)
    blank = torch.isclose(out, pictures.mean((2, 3), keepdim=True), atol=1e-6).all(1)[0]
    rows_, columns = (slice(0, 2), slice(0, 2)) if edge == 0 else (slice(6, 8), slice(10, 12))
    assert int(blank.sum()) == 4
    assert blank[rows_, columns].all()


def test_rounding_moves_no_square_out_of_its_picture() -> None:
    for length in (*range(1, 300), 1024, 2047, 4096, 4097):
        assert int(within(torch.tensor([1 - 2**-24]), 1, length).sum()) == 1  # the largest number that is drawn


def test_one_colour_all_over_stays_as_it_is() -> None:
    pictures = torch.full((2, 3, 8, 8), 0.25)
    assert torch.equal(augment(pictures, torch.rand(2, 6), 2.0), pictures)


def test_channels_last_stays() -> None:
    pictures = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    assert augment(pictures, torch.rand(4, 6), 1.0).is_contiguous(memory_format=torch.channels_last)


class Simple:
    """Data that knows no ``every``."""

    def steps(self, size: int) -> int:
        return 96 // size

    def batches(self, size: int, seed: int, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        pictures = torch.arange(96.0)[:, None, None, None] + torch.linspace(0, 1, 64).reshape(1, 1, 8, 8)
        for step in range(first, self.steps(size)):
            yield pictures[step * size :][:size], torch.arange(96)[step * size :][:size]


@pytest.mark.parametrize("name", ["digits", "scenes", "sceneboxes", "simple"])
def test_a_sample_is_changed_by_its_place_alone(name: str) -> None:
    plain: Any = Simple() if name == "simple" else TASKS[name]().data("train", CPU)
    data = Augmented(plain, 1.0)
    whole = list(data.batches(8, seed=3, epoch=5))
    assert len(whole) == data.steps(8) == plain.steps(8)
    for (pictures, *others), (before, *same) in zip(whole, plain.batches(8, seed=3, epoch=5), strict=True):
        assert pictures.shape == before.shape
        assert not torch.equal(pictures, before)
        assert all(torch.equal(a, b) for a, b in zip(others, same, strict=True))  # which are not touched
    torch.rand(7)
    for a, b in zip(whole[4:], data.batches(8, seed=3, epoch=5, first=4), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    halves = [list(every_batch(data, 4, 3, 5, start, 2)) for start in (0, 1)]  # two processes share each batch
    for (pictures, *_), left, right in zip(whole, *(half[: len(whole)] for half in halves), strict=True):
        assert torch.equal(pictures, torch.cat([left[0], right[0]]))
    other = next(data.batches(8, seed=3, epoch=6))[0], next(data.batches(8, seed=4, epoch=5))[0]
    assert not any(torch.equal(whole[0][0], pictures) for pictures in other)


@pytest.mark.parametrize(
    ("over", "stages"), [("search", {"search"}), ("pruning", {"search", "finetune"}), ("all", {"dense", "search", "finetune"})]
)
def test_the_stages_that_it_is_for(over: str, stages: set[str], tmp_path: Path) -> None:
    config, data = small_config(tmp_path / "a", augment=1.0, augment_over=over), Simple()
    augmented = {stage for stage in STAGES if isinstance(data_of_stage(data, config, stage), Augmented)}
    assert augmented == stages
    assert data_of_stage(data, small_config(tmp_path / "a", augment_over=over), "search") is data


def test_a_run_sees_them_in_its_search_alone(tmp_path: Path) -> None:
    for name, setting in (("plain", {}), ("search", {"augment": 1.0}), ("pruning", {"augment": 1.0, "augment_over": "pruning"})):
        train(small_config(tmp_path / name, **setting))
    dense, model = ({name: (tmp_path / name / f"{kind}.safetensors").read_bytes() for name in ("plain", "search", "pruning")}
                    for kind in ("dense", "model"))  # fmt: skip
    assert len(set(dense.values())) == 1
    assert len(set(model.values())) == 3
    losses = {name: [row["loss"] for row in metric_rows(tmp_path / name) if row["stage"] == "search"] for name in dense}
    assert losses["search"] == losses["pruning"]
    assert losses["search"][0] > losses["plain"][0]  # they are harder


class Words:
    def steps(self, size: int) -> int:
        return 1

    def batches(self, size: int, seed: int, epoch: int, first: int = 0) -> Iterator[Any]:
        yield {"text": torch.zeros(4, 3)}


def test_a_task_without_pictures_is_told_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smartprune.tasks.digits.Digits.data", lambda *_: Words())
    with pytest.raises(
        SmartpruneError, match=r"augment=1 is for batches that begin with pictures, .* begin with dict. Use --augment 0"
    ):
        check(small_config(tmp_path / "a", augment=1.0))
    assert not (tmp_path / "a").exists()
    for wrong in (torch.zeros(2, 3), torch.zeros(2, 3, 8, 8, dtype=torch.uint8)):
        monkeypatch.setattr(Words, "batches", lambda *_, wrong=wrong: iter([(wrong, torch.zeros(2))]))
        with pytest.raises(SmartpruneError, match=r"begin with torch\.\w+ of shape \(2, 3"):
            next(Augmented(Words(), 1.0).batches(2, 0, 0))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"augment": -0.5}, r"augment=-0\.5 must not be negative"),
        ({"augment": 3.5}, r"augment=3\.5 must be from 0 to 3"),
        ({"augment": "strong"}, r"augment='strong' must be float"),
        ({"augment_over": "finetune"}, r"augment_over='finetune' must be one of search, pruning, all"),
    ],
)
def test_wrong_settings(setting: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SmartpruneError, match=message):
        small_config(tmp_path / "a", **setting)
