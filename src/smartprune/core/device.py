"""What a device can compute."""

from __future__ import annotations

from functools import cache

import torch

from ..errors import SmartpruneError


@cache
def has_float64(kind: str) -> bool:
    """Whether devices of a kind have float64 numbers. The GPUs of Apple (``mps``) and some of Intel (``xpu``) have none.

    >>> has_float64("cpu")
    True
    """
    try:
        return bool(torch.ones((), dtype=torch.float64, device=kind) + 1 == 2)
    except (TypeError, RuntimeError):
        return False


def require_float64(device: torch.device, where: str, remedy: str) -> None:
    """Raises an error that starts with ``where`` if a device has no float64 numbers."""
    if device.type not in ("cpu", "meta") and not has_float64(device.type):
        raise SmartpruneError(
            f"{where}: the tensors are on {device}, which has no float64 numbers, and thresholds need their precision; {remedy}"
        )
