"""The bytes of a packed file: order and alignment of its blocks, its hash, and the example of the documentation."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import zoo
from helpers.packed_files import FORMAT_PAGE, check_unpacks, documented_example, zero_random_blocks
from smartprune.artifacts.packfile import VALUES
from smartprune.artifacts.packfile_read import read_packed

LAYERS = {
    "linear": (lambda: nn.Linear(21, 35), 1, False),
    "conv1d": (lambda: nn.Conv1d(18, 20, 5), 1, False),
    "conv2d": (lambda: nn.Conv2d(19, 33, (3, 2)), 1, False),
    "conv3d": (lambda: nn.Conv3d(9, 17, (1, 2, 3)), 1, False),
    "grouped": (lambda: nn.Conv2d(27, 33, 3, groups=3), 3, False),
    "depthwise": (lambda: nn.Conv2d(24, 48, 3, groups=24), 24, False),
    "transposed": (lambda: nn.ConvTranspose2d(19, 33, (2, 3)), 1, True),
    "transposed grouped": (lambda: nn.ConvTranspose2d(27, 30, 3, groups=3), 3, True),
    "transposed 1d": (lambda: nn.ConvTranspose1d(9, 7, 4), 1, True),
    "transposed 3d": (lambda: nn.ConvTranspose3d(9, 7, 2), 1, True),
}


@pytest.mark.parametrize("block", [(16, 8), (4, 4), (5, 3), (4, None)])
@pytest.mark.parametrize("kind", LAYERS)
def test_blocks_are_stored_in_kernel_order(kind: str, block: tuple[int | None, ...], tmp_path: Path) -> None:
    """Compared with loops: rows are (group, output block), columns (kernel position, input block), output fastest."""
    torch.manual_seed(1)
    build, groups, transposed = LAYERS[kind]
    layer = zero_random_blocks(build(), block)
    path = tmp_path / "layer"
    sp.pack(layer, path, block)
    file = read_packed(path)
    if "weight" not in file.weights:
        assert file.plain["weight"].equal(layer.weight)
        return
    packed = file.weights["weight"]
    weight = layer.weight.detach().numpy()
    rows, cols, values = [0], [], []
    channels_out = weight.shape[1] if transposed else weight.shape[0] // groups
    channels_in = weight.shape[0] // groups if transposed else weight.shape[1]
    out_step, in_step = min(block[0] or channels_out, channels_out), min(block[1] or channels_in, channels_in)
    in_blocks = math.ceil(channels_in / in_step)
    for group in range(groups):
        for o in range(0, channels_out, out_step):
            for position, offset in enumerate(np.ndindex(*weight.shape[2:])):
                for i in range(0, channels_in, in_step):
                    part = np.zeros((in_step, out_step), dtype=np.float32)
                    for a in range(min(in_step, channels_in - i)):
                        for b in range(min(out_step, channels_out - o)):
                            channels = (group * channels_in + i + a, o + b) if transposed else (group * channels_out + o + b, i + a)
                            part[a, b] = weight[(*channels, *offset)]
                    if part.any():
                        cols.append(position * in_blocks + i // in_step)
                        values.append(part)
            rows.append(len(cols))
    assert packed.rows.tolist() == rows
    assert packed.cols.tolist() == cols
    assert np.array_equal(packed.values.reshape(len(cols), in_step, out_step).numpy(), np.stack(values))


def test_blocks_start_at_multiples_of_64_bytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = zero_random_blocks(zoo.plain_cnn()[0], (16, 8), 0.4)
    sp.pack(model, tmp_path / "p", (16, 8))
    data = (tmp_path / "p").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 64 == 0
    header = json.loads(data[8 : 8 + length])
    starts = [entry["data_offsets"][0] for name, entry in header.items() if name.endswith(VALUES)]
    assert starts
    assert all(start % 64 == 0 for start in starts)


TEXT = (
    '{"block":"2x2x1x1","edge":"pad","mask_hash":"sha256:bb1c062f77aaa0bae3a46742dfb7da77f5d5662b6c87a88084ba6b2c6474c9f3",'
    '"names":["conv.weight","conv.bias"],"receipt":null,"tied":{},"version":1,"weights":[{"block":[2,2,1,1],"blocks":3,'
    '"columns":4,"dtype":"F32","groups":1,"input_axis":1,"kernel":[1,2],"kind":"kernel","layer":"conv","name":"conv.weight",'
    '"output_axis":0,"rows":2,"shape":[3,4,1,2],"transposed":false}]}'
)


TENSORS = (
    '"conv.bias":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},'
    '"conv.weight#cols":{"dtype":"I32","shape":[3],"data_offsets":[12,24]},'
    '"conv.weight#rows":{"dtype":"I32","shape":[3],"data_offsets":[24,36]},'
    '"conv.weight#values":{"dtype":"F32","shape":[3,1,1,2,2],"data_offsets":[36,84]}'
)


DATA = bytes.fromhex(
    "0000003f000000bf0000803e 010000000200000003000000 000000000200000003000000"
    "0000803f000000400000404000008040 000000000000a0400000000000000000 00000000000000000000c04000000000"
)


def test_packed_bytes_are_fixed(tmp_path: Path) -> None:
    """The bytes of a version 1 file never change."""
    header = f'{{"__metadata__":{{"smartprune.packed":{json.dumps(TEXT)}}},{TENSORS}}}'.encode()
    golden = (824).to_bytes(8, "little") + header.ljust(824) + DATA
    for _ in range(2):
        sp.pack(documented_example(), tmp_path / "p", (2, 2))
        assert (tmp_path / "p").read_bytes() == golden
    check_unpacks(documented_example(), tmp_path / "p")


def test_the_documented_example_is_the_packed_file() -> None:
    shown = next(text for text in re.findall(r"```\n(.*?)```", FORMAT_PAGE, re.S) if "conv.bias" in text)
    assert bytes.fromhex("".join(re.findall(r"\b[0-9a-f]{8}\b", shown))) == DATA
    entry = json.loads(re.findall(r"```json\n(.*?)```", FORMAT_PAGE, re.S)[0])
    assert entry == json.loads(TEXT)["weights"][0]
    fields = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", FORMAT_PAGE.split("An entry of `weights`:")[1].split("The hash is")[0], re.M)
    assert sorted(entry) == sorted(re.findall(r"\w+", " ".join(fields)))


def test_hash_follows_the_documentation(tmp_path: Path) -> None:
    """Computed as docs/format.md describes."""
    import hashlib

    metadata = json.loads(TEXT)
    present = np.zeros((2, 2, 1, 2), dtype=bool)  # output blocks, input blocks, kernel
    present[0, 1, 0, 0] = present[0, 0, 0, 1] = present[1, 1, 0, 1] = True
    packed = bytes([sum(int(bit) << i for i, bit in enumerate(present.reshape(-1)))])
    digest = hashlib.sha256(b'block 2x2x1x1\nlayer 2x2x1x2 "conv.weight"\n' + packed).hexdigest()
    assert metadata["mask_hash"] == f"sha256:{digest}"
