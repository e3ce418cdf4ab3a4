"""Devices without float64 numbers, such as the GPUs of Apple. No such device is here, so a test says that a device is one."""

from __future__ import annotations

import pytest
import torch

import smartprune as sp
from smartprune.core import device
from smartprune.core.device import has_float64, require_float64


class Device:
    """Stands for a device that this machine does not have."""

    type = "mps"

    def __str__(self) -> str:
        return "mps:0"


def test_this_machine_has_float64() -> None:
    assert has_float64("cpu")
    require_float64(torch.device("cpu"), "here", "do nothing")


def test_devices_that_refuse_float64_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def ones(*shape: object, dtype: torch.dtype, device: str) -> torch.Tensor:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")

    monkeypatch.setattr(device.torch, "ones", ones)
    has_float64.cache_clear()
    try:
        assert not has_float64("mps")
    finally:
        has_float64.cache_clear()


def test_the_error_says_where_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_float64", lambda kind: False)
    with pytest.raises(sp.SmartpruneError, match=r"^attach: the tensors are on mps:0, which has no float64 numbers.*; use a CPU$"):
        require_float64(Device(), "attach", "use a CPU")  # type: ignore[arg-type]
