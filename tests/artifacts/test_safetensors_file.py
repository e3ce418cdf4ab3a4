"""Files that smartprune writes, read by the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from smartprune.artifacts.safetensors_file import ALIGNMENT, check_header, dtype_code, safetensors_bytes, safetensors_size
from smartprune.errors import SmartpruneError


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "odd": torch.randn(5, 3, generator=generator),
        "half": torch.randn(7, generator=generator).to(torch.float16),
        "brain": torch.randn(33, generator=generator).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "aligned": torch.randn(64, generator=generator),
        "view": torch.randn(4, 6, generator=generator).t(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7),
    }


def test_the_library_reads_the_same_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"".join(safetensors_bytes(tensors(), {"key": "value"})))
    check_header(path)
    stored = load_file(path)
    assert stored.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert stored[name].dtype == tensor.dtype
        assert torch.equal(stored[name], tensor)


def test_the_size_is_that_of_the_file_and_the_data_is_aligned() -> None:
    data = b"".join(safetensors_bytes(tensors()))
    assert safetensors_size(tensors().items()) == len(data)
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % ALIGNMENT == 0
    header = json.loads(data[8:start])
    assert header["aligned"]["data_offsets"][0] == 0


def test_the_order_of_the_tensors_does_not_change_the_file() -> None:
    reordered = dict(reversed(tensors().items()))
    assert b"".join(safetensors_bytes(reordered)) == b"".join(safetensors_bytes(tensors()))


def test_a_header_with_one_name_twice_is_refused(tmp_path: Path) -> None:
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = f'{{"a":{entry},"a":{entry}}}'.encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(SmartpruneError, match="header"):
        check_header(path)


def test_a_dtype_that_files_cannot_hold_is_named() -> None:
    with pytest.raises(SmartpruneError, match=r"w: torch\.complex64 cannot be stored; it can be F64"):
        dtype_code("w", torch.zeros(1, dtype=torch.complex64))
