"""Tasks: their data is fixed, its order depends on (seed, epoch) alone, and every task keeps the contract."""

from __future__ import annotations

import sys
from dataclasses import asdict, is_dataclass
from pathlib import Path

import pytest
import torch

from helpers.task_folders import SETTINGS
from smartprune import SmartpruneError
from smartprune.models import MODELS
from smartprune.recipe import Recipe
from smartprune.tasks import TASKS, generator
from smartprune.tasks.detection_score import evaluator
from smartprune.tasks.digits import MEAN, STD, Digits, load, shifted
from smartprune.tasks.sceneboxes import SceneBoxes, truth
from smartprune.tasks.scenes import compose
from smartprune.training.config import make_task
from smartprune.training.evaluate import judge

CPU = torch.device("cpu")
OWN = {"segnet", "boxnet"}  # models that only a task has
OURS = [name for name, task in TASKS.items() if task.__module__.startswith("smartprune.")]  # other tests add some


@pytest.fixture(autouse=True)
def _data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMARTPRUNE_DATA", str(folder))


@pytest.mark.parametrize("name", OURS)
def test_contract(name: str) -> None:
    task = TASKS[name](**SETTINGS.get(name, {}))
    assert is_dataclass(task)
    assert isinstance(task.recipe, Recipe)
    assert task.recipe.model in task.models
    assert set(task.models) <= {*MODELS, *OWN}
    assert make_task(name, asdict(task)) == task  # type: ignore[call-overload]
    model = task.model(task.recipe.model)
    data = task.data("train", CPU)
    batch = next(iter(data.batches(8, seed=0, epoch=0)))
    loss = task.loss(model, batch)
    assert loss.shape == ()
    loss.backward()  # type: ignore[no-untyped-call]
    model.eval()
    model(task.example())
    with torch.no_grad():
        value = task.metric(model, task.data("test", CPU))
    if value is None:  # what judges it is not installed
        assert evaluator() is None
        assert isinstance(task.predictions(model, task.data("test", CPU)), list)  # type: ignore[attr-defined]
    else:
        assert 0 <= value <= 1
    assert task.data("validation", CPU).steps(8) >= 0


@pytest.mark.parametrize("name", OURS)
def test_batches_do_not_depend_on_where_an_epoch_is_entered(name: str) -> None:
    data = TASKS[name](**SETTINGS.get(name, {})).data("train", CPU)
    whole = list(data.batches(50, seed=3, epoch=5))
    assert len(whole) == data.steps(50) > 5
    torch.rand(7)  # nor on the global random numbers
    late = list(data.batches(50, seed=3, epoch=5, first=4))
    for a, b in zip(whole[4:], late, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", OURS)
def test_training_data_to_judge_by_is_every_sample_once(name: str) -> None:
    data = TASKS[name](**SETTINGS.get(name, {})).data("train", CPU)
    still = data.still()  # type: ignore[attr-defined]
    one, seven = (torch.cat([batch[0] for batch in still.batches(size, seed=3, epoch=5)]) for size in (1, 7))
    assert torch.equal(one, seven)  # none is left out because of the others of its batch
    assert torch.equal(one, torch.cat([batch[0] for batch in still.batches(7, seed=4, epoch=6)]))  # nothing is drawn
    assert len(one) >= len(torch.cat([batch[0] for batch in data.batches(1, seed=3, epoch=5)]))
    assert data.steps(len(one) - 1) == 1  # what one trains on is as it was


class KnowsByHeart(torch.nn.Module):
    """Finds in every picture the boxes of the one that has just these bytes, and nothing in others."""

    def __init__(self) -> None:
        super().__init__()
        pictures = [own.numpy().tobytes() for own in compose("train", 0)[..., :3]]
        self.known = dict(zip(pictures, truth("train", 0).pictures, strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(x), 4, 15)
        for own, picture in zip(out, x.permute(0, 2, 3, 1).mul(255).round().to(torch.uint8), strict=True):
            found = self.known.get(picture.contiguous().numpy().tobytes())
            for row, (x1, y1, x2, y2), label in zip(own, found.boxes, found.classes, strict=False) if found else ():
                row[:5] = torch.tensor([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1, 1.0])
                row[5 + label] = 1.0
        return out


def test_who_knows_the_training_pictures_is_right_about_each() -> None:
    _, found = judge(SceneBoxes(), KnowsByHeart(), "train", CPU)
    told = {(each["image_id"], each["category_id"], *each["bbox"]) for each in found or ()}
    wanted = {
        (picture.number, label, x1, y1, x2 - x1, y2 - y1)
        for picture in truth("train", 0).pictures
        for (x1, y1, x2, y2), label in zip(picture.boxes, picture.classes, strict=True)
    }
    assert told == wanted

    class Lookup(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            images, labels = load("train")
            same = (x.flatten(1)[:, None] == images.flatten(1)).all(2)
            return (
                torch.nn.functional.one_hot(labels[same.int().argmax(1)], 10) * same.any(1)[:, None] - 1.0 * (~same.any(1))[:, None]
            )

    figures, _ = judge(Digits(), Lookup(), "train", CPU)
    assert figures == {"accuracy": 1.0}


def test_digits_split_is_fixed_disjoint_and_stratified() -> None:
    splits = {split: load(split) for split in ("train", "validation", "test")}
    sizes = {split: len(labels) for split, (_, labels) in splits.items()}
    assert sum(sizes.values()) == 1797
    assert sizes == {"train": 899, "validation": 359, "test": 539}
    for _, labels in splits.values():
        share = labels.bincount(minlength=10) / len(labels)
        assert (share - 0.1).abs().max() < 0.006
    images = torch.cat([images for images, _ in splits.values()]).flatten(1)
    assert len(images.unique(dim=0)) == 1797
    assert abs(float(images.mean())) < 0.01
    assert abs(float(images.std()) - 1) < 0.01


def test_digits_order_depends_on_seed_and_epoch() -> None:
    data = Digits().data("train", CPU)
    first = {key: next(iter(data.batches(64, *key)))[1].tolist() for key in [(0, 0), (0, 1), (1, 0)]}
    assert first[0, 0] != first[0, 1] != first[1, 0] != first[0, 0]
    seen = torch.cat([labels for _, labels in data.batches(1, seed=0, epoch=0)])
    assert torch.equal(seen.sort().values, load("train")[1].sort().values)


def test_digits_evaluation_sees_every_image_once_as_it_is() -> None:
    images, labels = load("test")
    seen = list(Digits().data("test", CPU).batches(100, seed=0, epoch=0))
    assert torch.equal(torch.cat([x for x, _ in seen]), images)
    assert torch.equal(torch.cat([y for _, y in seen]), labels)


def test_shift_moves_each_image_by_its_own_amount() -> None:
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    moves = torch.tensor([[1, 2, 0], [1, 1, 2]])  # down 0, 1, -1; right 0, 0, 1
    still, down, up_right = shifted(image.expand(3, 1, 4, 4), moves, reach=1)[:, 0]
    ground = -MEAN / STD
    assert torch.equal(still, image[0, 0])
    assert torch.equal(down[1:], image[0, 0, :3])
    assert torch.allclose(down[0], torch.full((4,), ground))
    assert torch.equal(up_right[:3, 1:], image[0, 0, 1:, :3])
    assert torch.allclose(up_right[:, 0], torch.full((4,), ground))


def test_shift_zero_still_shuffles() -> None:
    data = Digits(shift=0).data("train", CPU)
    images, labels = next(iter(data.batches(899, seed=0, epoch=0)))
    own, own_labels = load("train")
    assert not torch.equal(labels, own_labels)
    assert torch.equal(images.flatten(1).unique(dim=0), own.flatten(1).unique(dim=0))


def test_generator_differs_for_seed_and_epoch() -> None:
    draws = {torch.randint(2**60, (1,), generator=generator(s, e)).item() for s in range(5) for e in range(50)}
    assert len(draws) == 250


def test_missing_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    load.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SmartpruneError, match=r"pip install 'smartprune\[digits\]'"):
        load("train")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 0}, "width=0 should be at least 1"),
        ({"shift": 4}, "shift=4 should be 0 to 3"),
        ({"widht": 8}, "unknown setting 'widht' for digits; it has: width, shift"),
        ({"width": "8"}, "digits: width='8' should be int"),
    ],
)
def test_wrong_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SmartpruneError, match=message):
        make_task("digits", settings)


def test_unknown_split() -> None:
    with pytest.raises(SmartpruneError, match="split='dev'; it is train, validation or test"):
        Digits().data("dev", CPU)
