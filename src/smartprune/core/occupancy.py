"""Occupancy: which blocks of a weight contain a nonzero value, as booleans, as bits and as a hash."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import SmartpruneError
from .block import Block, Grid
from .memory import check_memory


def nonzero(weight: Tensor) -> Tensor:
    """Which elements of a stored tensor are not zero, bool. NaN is nonzero, -0.0 is zero."""
    if weight.is_meta:
        raise SmartpruneError("the weight is on the meta device and has no values; load the model first")
    if weight.layout is not torch.strided:  # a dense copy may not fit into memory
        raise SmartpruneError(f"{weight.layout} weights are not dense")
    check_memory(weight, "the weight")
    return comparable(weight) != 0


def comparable(weight: Tensor) -> Tensor:
    """The same values in a dtype that can be compared on every device: quantized and 8-bit floating-point tensors are converted."""
    weight = weight.detach()
    if weight.is_quantized or has_own_values(weight):
        weight = weight.dequantize()
    try:
        return weight.float() if weight.is_floating_point() and weight.element_size() == 1 else weight
    except NotImplementedError:  # two 4-bit floats per byte
        raise SmartpruneError(f"torch cannot read {weight.dtype} weights; convert them first") from None


def has_own_values(tensor: Tensor) -> bool:
    """Whether a tensor is of a class that stores its numbers in another form, and can convert them, as quantized classes do."""
    return type(tensor).dequantize is not Tensor.dequantize


def is_finite(weight: Tensor) -> bool:
    """Whether a dense tensor has no NaN and no infinity.

    >>> is_finite(torch.zeros(2, dtype=torch.float8_e5m2)), is_finite(torch.tensor([1.0, torch.nan]))
    (True, False)
    """
    if weight.layout is not torch.strided or not weight.is_floating_point():
        return True
    return bool(comparable(weight).isfinite().all())


def occupied(grid: Grid, weight: Tensor) -> Tensor:
    """Which blocks contain a nonzero value, bool [n] on the CPU.

    >>> occupied(Block(2, 2).grid((2, 4)), torch.tensor([[0., 0., 0., 3.], [0., 0., 0., 0.]])).tolist()
    [False, True]
    """
    return grid.sum(nonzero(weight)).bool().cpu()


def pack_bits(bits: Tensor) -> str:
    """Booleans [n] as base64 text: eight per byte, the first in the lowest bit."""
    packed = np.packbits(bits.cpu().numpy(), bitorder="little").tobytes()
    return base64.b64encode(packed).decode("ascii")


def unpack_bits(text: str, n: int) -> Tensor:
    """The ``n`` booleans of a text from :func:`pack_bits`. Raises for any other text."""
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise SmartpruneError("it is not base64") from None
    if len(data) != -(-n // 8):
        raise SmartpruneError(f"it has {len(data)} bytes, and {n} blocks take {-(-n // 8)}")
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")
    if bits[n:].any():
        raise SmartpruneError("bits after the last block are set")
    return torch.from_numpy(bits[:n].astype(bool))


def map_hash(block: Block, maps: Iterable[tuple[str, Sequence[int], Tensor]]) -> str:
    """Hash of the occupied blocks of all layers, from (weight name, grid shape, bool [n]) in order.

    SHA-256 of the line ``block 16x8x1x1``, followed for every layer by the line ``layer 4x8x3x3 "conv1.weight"`` (the name
    as a JSON string in ASCII) and its bits, eight per byte, the first in the lowest bit. Lines end with a line feed.

    >>> map_hash(Block(16, 8), [("conv1.weight", (1, 2, 1, 1), torch.tensor([True, False]))])[:19]
    'sha256:524932b8f4ff'
    """
    digest = hashlib.sha256(f"block {block}\n".encode())
    for name, shape, bits in maps:
        digest.update(f"layer {'x'.join(map(str, shape))} {json.dumps(name)}\n".encode())
        digest.update(np.packbits(bits.cpu().numpy(), bitorder="little").tobytes())
    return f"sha256:{digest.hexdigest()}"
