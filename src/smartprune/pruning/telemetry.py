"""Telemetry: what a search is doing, measured on the device in every step and copied to the host only when it is read."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .multiply import kernels

if TYPE_CHECKING:
    from .state import SearchState

UNDECIDED = 0.01  # a mask between this and one minus this is undecided
DECIDED = 0.1  # if a soft mask is closer than this to its hard form, it is known which layers have lost all blocks


class Telemetry:
    """The measurements of the last step, kept on the device. Only ``read`` waits for the device."""

    def __init__(self, starts: list[int], keep: float) -> None:
        self.starts = starts
        self.keep = max(keep, 1.0)
        self.values: Tensor | None = None
        self.side: Tensor | None = None  # bool [n]: on which side of one half each block is

    def to(self, device: torch.device) -> None:
        self.values = None if self.values is None else self.values.to(device)
        self.side = None if self.side is None else self.side.to(device)

    def state(self, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The last side of every block, bool [n], and the last measurements, [3], which are NaN before the first step.

        The shapes are the same at every step, so torch.distributed.checkpoint can load one state into another.
        """
        side = torch.zeros(n, dtype=torch.bool, device=device) if self.side is None else self.side.clone()
        dtype = torch.float32 if device.type == "mps" else torch.float64  # which MPS lacks
        if self.values is None:
            return side, torch.full((3,), math.nan, dtype=dtype, device=device)
        return side, self.values.to(dtype).reshape(-1, 3).sum(0)

    def load(self, side: Tensor | None, values: Tensor | None, device: torch.device) -> None:
        """Continues from the last measurements of another search."""
        if side is None or values is None or bool(values.isnan().any()):
            self.side = self.values = None
            return
        self.side, self.values = side.to(device, copy=True), values.to(device, copy=True)

    def measure(self, mask: Tensor) -> None:
        """Counts undecided blocks and blocks that changed sides since the last step, and measures the distance to the hard mask."""
        mask = mask.detach()
        before = None if self.side is None else self.side.to(mask.device)
        module = kernels(mask)
        if module is not None and mask.dtype == torch.float32:
            self.values, self.side = module.measure(mask, before, UNDECIDED, 2 * self.keep)
            return
        self.side = mask > 0.5
        distance = torch.minimum(mask, 1 - mask)  # to the side that the block is on
        undecided = (distance > UNDECIDED).sum()
        changed = torch.zeros_like(undecided) if before is None else (self.side ^ before).sum()
        self.values = torch.stack([undecided.to(distance.dtype), changed.to(distance.dtype), distance.sum() / (2 * self.keep)])

    def read(self) -> dict[str, object]:
        """The last measurement as plain numbers."""
        if self.values is None or self.side is None:
            return {"undecided": 0, "changed": 0, "gap": 0.0, "kept": []}
        values = self.values if self.values.dim() == 1 else self.values.double().sum(0)  # kernels write partial sums
        undecided, changed, gap = values.tolist()
        total = [0, *self.side.to("cpu", torch.int64).cumsum(0).tolist()]
        kept = [total[stop] - total[start] for start, stop in pairwise(self.starts)]
        return {"undecided": int(undecided), "changed": int(changed), "gap": gap, "kept": kept}


def describe(search: SearchState) -> dict[str, Any]:
    """The position of a search and its last measurements, as plain values by the names of layers."""
    out: dict[str, Any] = {"step": search.count, "phase": search.phase, "progress": search.progress, "tau": search.tau}
    out |= search.telemetry.read()
    names = [layer.name for layer in search.plan.layers]
    out["kept"] = dict(zip(names, out["kept"], strict=False))  # empty before the first step
    is_decided = search.phase != "search" or out["gap"] < DECIDED  # few blocks of a soft mask are above one half
    out["collapsed"] = [name for name, kept in out["kept"].items() if kept == 0] if is_decided else []
    theta = search.tensors.get("theta")
    out["theta"] = None if theta is None else float(theta[1].sum())
    if theta is not None and search.hard is None and math.isfinite(out["theta"]):
        out["theorem_3_7"] = theorem_3_7(search.scores(), out["theta"], search.tau, search.count)
    return out


def theorem_3_7(scores: Tensor, theta: float, tau: float, step: int) -> dict[str, float | bool]:
    """The paper's condition for convergence, ``tau(s) <= min((m_i - theta)^2, |m_i - theta| / s)`` for every block i.

    Paper: the condition bounds the trajectory and not only the schedule, and cannot be met in practice (a block at the threshold
    would need tau = 0). So this is a diagnostic: the largest temperature that satisfies it now, and whether tau does.
    """
    nearest = float((scores.detach().double() - theta).abs().min())
    bound = min(nearest**2, nearest / max(step, 1))
    return {"nearest": nearest, "bound": bound, "holds": tau <= bound}
