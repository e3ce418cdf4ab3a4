"""Errors of CUDA calls. A call cannot raise without waiting for the device, so it returns NaN and a code; the next call raises."""

from typing import Any

import torch
from torch import Tensor

from ..core.hard import ERRORS
from ..errors import SmartpruneError

device_flags: dict[int, tuple[Tensor, Any, Tensor]] = {}  # by index of the device, see device_flag


def device_flag(device: torch.device) -> tuple[Tensor, Any, Tensor]:
    """Where a device stores its error code: a pinned int32 on the host, an array of the same memory, and an int32 on the device."""
    index = _index(device)
    if index not in device_flags:
        with torch.inference_mode(False):  # later calls outside of inference mode write to these tensors, too
            pinned = torch.zeros(1, dtype=torch.int32, pin_memory=index >= 0, device="cpu")
            device_flags[index] = (pinned, pinned.numpy(), torch.zeros(1, dtype=torch.int32, device=device))
    return device_flags[index]


def _index(device: torch.device) -> int:
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def check_device(device: torch.device | str | int | None = None) -> None:
    """Raises if an earlier soft_topk on this CUDA device (None: on any device) got invalid values. Never waits for the device."""
    if device is None:
        indices = list(device_flags)
    else:
        indices = [_index(torch.device("cuda", device) if isinstance(device, int) else torch.device(device))]
    for index in indices:
        if index in device_flags and device_flags[index][1][0]:
            code = int(device_flags[index][1][0])
            device_flags[index][1][0] = 0
            device_flags[index][2].zero_()
            raise_code(code, f"soft_topk: in an earlier call on cuda:{index} (its mask is NaN) ")


def raise_code(code: int, where: str) -> None:
    """Raises if a code, a sum of keys of ERRORS, is not zero."""
    if code:
        raise SmartpruneError(where + "; ".join(text for bit, text in ERRORS.items() if code & bit))
