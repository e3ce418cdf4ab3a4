"""NPU descriptions: presets, files, and settings that raise."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers import zoo
from helpers.npus import IDEAL
from smartprune import NPU, SmartpruneError
from smartprune.hardware.npu import PRESETS, read_npu


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": 0}, "rows=0 must be an integer, 1 or more"),
        ({"columns": 2.0}, "columns=2.0 must be an integer"),
        ({"lanes": True}, "lanes=True must be an integer"),
        ({"index_bytes": -1}, "index_bytes=-1 must be an integer, 0 or more"),
        ({"buffer_bytes": 0}, "buffer_bytes=0"),
        ({"dataflow": "row_stationary"}, "it is one of: output_stationary, weight_stationary"),
        ({"weight_bandwidth": 0}, r"weight_bandwidth=0 must be a number above 0, in bytes per cycle"),
        ({"activation_bandwidth": math.nan}, "activation_bandwidth=nan"),
        ({"clock_mhz": math.inf}, "clock_mhz=inf must be a number above 0"),
        ({"clock_mhz": "1 GHz"}, "clock_mhz='1 GHz'"),
    ],
)
def test_wrong_settings_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SmartpruneError, match=message):
        NPU(**settings)


def test_wrong_inputs_raise() -> None:
    model, x = zoo.plain_cnn()
    with pytest.raises(SmartpruneError, match=r"model is a str; give the torch\.nn\.Module"):
        NPU().estimate("model.safetensors", x)  # type: ignore[arg-type]
    with pytest.raises(SmartpruneError, match="an example input is needed"):
        NPU().estimate(model, None)
    with pytest.raises(SmartpruneError, match="the model does not run on it"):
        NPU().estimate(model, torch.zeros(1, 5, 8, 8))
    with pytest.raises(SmartpruneError, match="reaches no convolution or linear layer"):
        NPU().estimate(nn.Sequential(nn.ReLU()), x)
    with torch.device("meta"):
        empty = nn.Linear(8, 8)
    with pytest.raises(SmartpruneError, match=r"weight: the weight is on the meta device"):
        NPU().estimate(empty, torch.zeros(1, 8, device="meta"))


def test_presets_and_files_are_read(tmp_path: Path) -> None:
    for name, npu in PRESETS.items():
        assert read_npu(name) == npu == getattr(NPU, name)()
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(npu.to_json()))
        assert read_npu(str(path)) == npu
    (tmp_path / "ideal.json").write_text(json.dumps(IDEAL.to_json()))
    assert read_npu(str(tmp_path / "ideal.json")) == IDEAL
    for text, message in (
        ("[]", "is a list; it must be a JSON object"),
        ('{"colour": 1}', "has 'colour'; it must be"),
        ('{"rows": "many"}', "rows='many' must be an integer"),
        ("{", "not readable as JSON"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(SmartpruneError, match=message):
            read_npu(str(tmp_path / "bad.json"))
    with pytest.raises(SmartpruneError, match=r"npu 'huge' is not known; there are: small, edge, server; or give a \.json file"):
        read_npu("huge")
    assert NPU.server().macs_per_cycle == 4096
    assert str(NPU(lanes=4)) == "4 lanes of 16x8 MACs, output stationary, 1000 MHz, 16+16 B/cycle"
