"""Error codes of devices: where they are stored, and who raises them."""

import pytest
import torch

from smartprune.errors import SmartpruneError
from smartprune.topk import check_device, device_errors


def test_check_device_passes_without_errors() -> None:
    check_device()


def test_flag_created_in_inference_mode_is_writable_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call may be an evaluation in inference mode. Training writes to the same flag later."""
    monkeypatch.setattr(device_errors, "device_flags", {})
    with torch.inference_mode():
        flag = device_errors.device_flag(torch.device("cpu"))
    assert flag is device_errors.device_flag(torch.device("cpu"))
    flag[0].copy_(flag[2].bitwise_or_(torch.tensor(1)))
    with pytest.raises(SmartpruneError, match="NaN or infinity"):
        check_device("cpu")
    assert not flag[0].any()
    assert not flag[2].any()
