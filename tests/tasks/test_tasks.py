"""The contract of every task, and the digits."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from pathlib import Path

import pytest
import torch

from helpers.task_folders import SETTINGS
from smartprune import SmartpruneError
from smartprune.models import MODELS
from smartprune.recipe import Recipe
from smartprune.tasks import TASKS
from smartprune.tasks.coco_eval import evaluator
from smartprune.tasks.digits import Digits, load
from smartprune.tasks.sceneboxes import SceneBoxes, ground_truth
from smartprune.tasks.scenes import compose
from smartprune.training.config import make_task
from smartprune.training.evaluate import evaluate

CPU = torch.device("cpu")
TASK_MODELS = {"segnet", "boxnet"}  # models that are not in MODELS
NAMES = [name for name, task in TASKS.items() if task.__module__.startswith("smartprune.")]  # other tests add tasks


@pytest.fixture(autouse=True)
def _data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMARTPRUNE_DATA", str(folder))


@pytest.mark.parametrize("name", NAMES)
def test_every_task_keeps_the_contract(name: str) -> None:
    task = TASKS[name](**SETTINGS.get(name, {}))
    assert is_dataclass(task)
    assert isinstance(task.recipe, Recipe)
    assert task.recipe.model in task.models
    assert set(task.models) <= {*MODELS, *TASK_MODELS}
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
    if value is None:  # no evaluator is installed
        assert evaluator() is None
        assert isinstance(task.predictions(model, task.data("test", CPU)), list)  # type: ignore[attr-defined]
    else:
        assert 0 <= value <= 1
    assert task.data("validation", CPU).steps(8) >= 0


@pytest.mark.parametrize("name", NAMES)
def test_batches_do_not_depend_on_the_first_batch(name: str) -> None:
    data = TASKS[name](**SETTINGS.get(name, {})).data("train", CPU)
    whole = list(data.batches(50, seed=3, epoch=5))
    assert len(whole) == data.steps(50) > 5
    torch.rand(7)  # must not change the batches
    late = list(data.batches(50, seed=3, epoch=5, first=4))
    for a, b in zip(whole[4:], late, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_still_training_data_has_every_sample_once(name: str) -> None:
    data = TASKS[name](**SETTINGS.get(name, {})).data("train", CPU)
    still = data.still()  # type: ignore[attr-defined]
    one, seven = (torch.cat([batch[0] for batch in still.batches(size, seed=3, epoch=5)]) for size in (1, 7))
    assert torch.equal(one, seven)  # independent of the batch size
    assert torch.equal(one, torch.cat([batch[0] for batch in still.batches(7, seed=4, epoch=6)]))  # independent of seed and epoch
    assert len(one) >= len(torch.cat([batch[0] for batch in data.batches(1, seed=3, epoch=5)]))
    assert data.steps(len(one) - 1) == 1  # the training split itself is unchanged


class Lookup(torch.nn.Module):
    """Returns the true boxes of training images, and none for other images."""

    def __init__(self) -> None:
        super().__init__()
        images = [image.numpy().tobytes() for image in compose("train", 0)[..., :3]]
        self.known = dict(zip(images, ground_truth("train", 0).images, strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(x), 4, 15)
        for rows, image in zip(out, x.permute(0, 2, 3, 1).mul(255).round().to(torch.uint8), strict=True):
            truth = self.known.get(image.contiguous().numpy().tobytes())
            for row, (x1, y1, x2, y2), label in zip(rows, truth.boxes, truth.classes, strict=False) if truth else ():
                row[:5] = torch.tensor([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1, 1.0])
                row[5 + label] = 1.0
        return out


def test_evaluation_on_the_training_split_sees_unchanged_images() -> None:
    _, predictions, _ = evaluate(SceneBoxes(), Lookup(), "train", CPU)
    detections = {(row["image_id"], row["category_id"], *row["bbox"]) for row in predictions or ()}
    expected = {
        (image.id, label, x1, y1, x2 - x1, y2 - y1)
        for image in ground_truth("train", 0).images
        for (x1, y1, x2, y2), label in zip(image.boxes, image.classes, strict=True)
    }
    assert detections == expected

    class DigitLookup(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            images, labels = load("train")
            equal = (x.flatten(1)[:, None] == images.flatten(1)).all(2)
            return (
                torch.nn.functional.one_hot(labels[equal.int().argmax(1)], 10) * equal.any(1)[:, None]
                - 1.0 * (~equal.any(1))[:, None]
            )

    figures, *_ = evaluate(Digits(), DigitLookup(), "train", CPU)
    assert figures == {"accuracy": 1.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 0}, "width=0 is too small; use at least 1"),
        ({"shift": 4}, "shift=4 is outside 0 to 3"),
        ({"widht": 8}, "unknown setting 'widht' for digits; its settings are: width, shift"),
        ({"width": "8"}, "digits: width='8' must be int"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SmartpruneError, match=message):
        make_task("digits", settings)


def test_unknown_splits_raise() -> None:
    with pytest.raises(SmartpruneError, match="split='dev' is unknown; use train, validation or test"):
        Digits().data("dev", CPU)
