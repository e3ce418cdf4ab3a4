"""A task without batch norm, so results do not depend on how a batch is divided; and a command line with this task.

torchrun --nproc-per-node=2 tests/helpers/plain_task.py train plain ...
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from smartprune.recipe import Recipe
from smartprune.tasks import TASKS
from smartprune.tasks.digits import Digits


@dataclass(frozen=True)
class PlainTask(Digits):
    """The digits task with convolutions, a group norm and linear layers."""

    width: int = 8
    recipe: ClassVar[Recipe] = replace(Digits.recipe, model="plain", block="4x4", lr=0.1, search_lr=0.05, finetune_lr=0.05)
    models: ClassVar[tuple[str, ...]] = ("plain",)
    fails: ClassVar[int] = 0  # the loss is NaN after this many calls

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        PlainTask.fails -= 1
        return super().loss(model, batch) * (float("nan") if PlainTask.fails == 0 else 1)

    def model(self, name: str) -> nn.Module:
        wide = 2 * self.width
        trunk = nn.Sequential(nn.Conv2d(1, self.width, 3, padding=1), nn.ReLU(), nn.Conv2d(self.width, wide, 3, 2, padding=1))
        return nn.Sequential(
            trunk,
            nn.Sequential(nn.GroupNorm(4, wide), nn.ReLU(), nn.Conv2d(wide, wide, 3, 2, padding=1)),
            nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(4 * wide, 4 * wide), nn.ReLU()),
            nn.Linear(4 * wide, 10),
        )


TASKS["plain"] = PlainTask

if __name__ == "__main__":
    from smartprune.cli import main

    sys.exit(main())
