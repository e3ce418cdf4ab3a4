"""Occupied blocks, their bits and their hash."""

import pytest
import torch
from torch import Tensor

from smartprune.core.block import Block
from smartprune.core.occupancy import map_hash, nonzero, occupied, pack_bits, unpack_bits
from smartprune.errors import SmartpruneError


def test_hash_of_two_blocks_is_fixed() -> None:
    """SHA-256 of: block 16x8x1x1, layer 1x2x1x1 "conv1.weight", one byte with the first bit set."""
    got = map_hash(Block(16, 8), [("conv1.weight", (1, 2, 1, 1), torch.tensor([True, False]))])
    assert got == "sha256:524932b8f4ff5f5eea54e449d63a84f5efbcf195d5b146a0a3baca6faa5061df"


def test_hash_depends_on_block_names_shapes_and_bits() -> None:
    bits = torch.tensor([True, False, True])
    base: tuple[Block, list[tuple[str, tuple[int, ...], Tensor]]] = (Block(2, 2), [("a", (3, 1), bits)])
    others = [
        (Block(2, 3), [("a", (3, 1), bits)]),
        (Block(2, 2), [("b", (3, 1), bits)]),
        (Block(2, 2), [("a", (1, 3), bits)]),
        (Block(2, 2), [("a", (3, 1), ~bits)]),
        (Block(2, 2), [("a", (3, 1), bits), ("a", (3, 1), bits)]),
        (Block(2, 2), [('a"\nlayer', (3, 1), bits)]),
    ]
    assert len({map_hash(*case) for case in [base, *others]}) == 7


def test_packed_bits_round_trip_and_wrong_texts_raise() -> None:
    assert pack_bits(torch.tensor([True] + [False] * 8)) == "AQA="
    for n in (1, 7, 8, 9, 100):
        bits = torch.rand(n) < 0.5
        assert torch.equal(unpack_bits(pack_bits(bits), n), bits)
    for wrong, n in (("AQA=", 8), ("AQA=", 17), ("!", 1), ("é", 1), ("/w==", 4)):
        with pytest.raises(SmartpruneError):
            unpack_bits(wrong, n)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
)
def test_blocks_are_occupied_in_every_dtype(dtype: torch.dtype) -> None:
    weight = torch.zeros(4, 6)
    weight[0, 0], weight[3, 5] = 1, -2
    grid = Block(2, 3).grid((4, 6))
    assert occupied(grid, weight.to(dtype)).tolist() == [True, False, False, True]


@pytest.mark.filterwarnings("ignore")  # torch deprecates quantized tensors
def test_nonzero_of_special_values_and_layouts() -> None:
    assert nonzero(torch.tensor([float("nan"), -0.0, 0.0, 1e-45, float("-inf")])).tolist() == [
        True,
        False,
        False,
        True,
        True,
    ]
    quantized = torch.quantize_per_tensor(torch.tensor([[0.0, 1.0]]), 0.1, 5, torch.quint8)
    assert nonzero(quantized).tolist() == [[False, True]]
    with pytest.raises(SmartpruneError, match="meta device"):
        nonzero(torch.zeros(2, device="meta"))
    with pytest.raises(SmartpruneError, match="not dense"):
        nonzero(torch.zeros(2, 2).to_sparse())
