"""When a resumed Trainer of transformers is bit-exact. Without a pruner the tests show what the trainer itself does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import trainers

for package in ("transformers", "accelerate"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; run make hosts", allow_module_level=True)
STOP = 4  # a step in the middle of an epoch


class Dropout(trainers.Body):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, nn.Dropout(0.5))


class Data(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples that change at every access, by numbers of ``draw``."""

    def __init__(self, draw: Any) -> None:
        self.samples, self.draw = trainers.data(), draw

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index]
        return {**sample, "x": sample["x"] + self.draw(index)}


def nothing(index: int) -> Tensor:
    return torch.zeros(16)


def from_the_global_generator(index: int) -> Tensor:
    return torch.randn(16)


def from_a_generator_of_the_sample(index: int) -> Tensor:
    return torch.randn(16, generator=torch.Generator().manual_seed(index))


def is_bit_exact(folder: Path, draw: Any, prune: bool, **options: Any) -> bool:
    """Whether a training that resumes from its checkpoint of step STOP ends with the weights of the uninterrupted one."""
    from transformers import Trainer

    from smartprune.integrations.transformers import PruneCallback

    real = trainers.RealTransformers(folder)
    ends = []
    for resume in (None, str(real.path(STOP))):
        module = Dropout()
        callbacks = [PruneCallback(block=(4, 4), sparsity=0.75, include="*", steps=10)] if prune else []
        args = real.trainer(trainers.Body(), [], max_grad_norm=1.0, save_steps=STOP, **options).args
        Trainer(module, args, train_dataset=Data(draw), callbacks=callbacks).train(resume_from_checkpoint=resume)
        ends.append(module.state_dict())
    return all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.parametrize("prune", [False, True])
@pytest.mark.parametrize("draw", [nothing, from_a_generator_of_the_sample])
def test_resuming_with_dropout_and_shuffling_is_bit_exact(prune: bool, draw: Any, tmp_path: Path) -> None:
    assert is_bit_exact(tmp_path, draw, prune)


@pytest.mark.parametrize("prune", [False, True])
def test_resuming_is_not_bit_exact_if_reading_data_draws_from_the_global_generator(prune: bool, tmp_path: Path) -> None:
    """The trainer reads the first batch before it restores the generator, and its loader reads one batch ahead."""
    assert not is_bit_exact(tmp_path, from_the_global_generator, prune)


def test_resuming_is_not_bit_exact_if_the_trainer_does_not_skip_batches(tmp_path: Path) -> None:
    assert not is_bit_exact(tmp_path, nothing, prune=False, ignore_data_skip=True)
