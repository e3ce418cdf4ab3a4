"""Tensors in parts (FSDP2's DTensors): the whole of one, and the part that this rank holds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import SmartpruneError


def is_sharded(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # who has not imported it has no such tensor
    return module is not None and isinstance(tensor, module.DTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """All of it, on every rank; all ranks must ask together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local_tensor(tensor: Tensor) -> Tensor:
    """What lies in the memory of this rank: writing to it writes to the tensor."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def reshard(model: nn.Module) -> None:
    """Weights that FSDP holds whole after a forward pass without a backward one, as its root does, are in parts again: what is
    written to the whole ones is lost."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def local_rows(tensor: Tensor) -> slice:
    """Which part of the first axis of the whole tensor this rank holds."""
    first, length, mesh = 0, tensor.shape[0], tensor.device_mesh  # type: ignore[attr-defined]
    for i, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if placement.is_replicate():
            continue
        size = -(-length // mesh.size(i))
        start = min(mesh.get_local_rank(i) * size, length)
        first, length = first + start, min(size, length - start)
    local = tuple(local_tensor(tensor).shape)
    if local != (length, *tensor.shape[1:]):
        raise SmartpruneError(
            f"a weight of {tuple(tensor.shape)} is split as {tensor.placements}, of which this rank holds {local}; "  # type: ignore[attr-defined]
            "smartprune knows weights that are split along their first axis in equal parts, as fully_shard does by default"
        )
    return slice(first, first + length)


def from_local(local: Tensor, like: Any) -> Tensor:
    """Every rank's part as one tensor that is split as ``like`` is; where that is whole, the part itself."""
    if not is_sharded(like):
        return local
    made: Tensor = type(like).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


def shard_like(value: Any, like: Any) -> Any:
    """A whole tensor in the parts of another one of its shape; where that is whole, and for other values, as it is."""
    if not is_sharded(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return from_local(value[local_rows(like)].to(like.device).contiguous(), like)


def shard_state(values: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """:func:`shard_like` for two dictionaries, such as state dicts."""
    return {name: shard_like(value, like.get(name)) for name, value in values.items()}
