"""Sharded tensors (the DTensors of FSDP2): full tensors from shards, and shards from full tensors."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import SmartpruneError


def is_sharded(tensor: Any) -> bool:
    """Whether the value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # no DTensor exists before this module is imported
    return module is not None and isinstance(tensor, module.DTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, on every rank. All ranks must call this together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local_tensor(tensor: Tensor) -> Tensor:
    """The shard on this rank. It shares memory with the tensor."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def reshard(model: nn.Module) -> None:
    """Reshards the weights that FSDP left unsharded after a forward pass without backward.

    The root module, for example, then stays unsharded, and writes to its unsharded weights are lost.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def local_rows(tensor: Tensor) -> slice:
    """The rows of the full tensor that this rank holds."""
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
            f"a weight of shape {tuple(tensor.shape)} is sharded as {tensor.placements} with {local} on this rank; "  # type: ignore[attr-defined]
            "smartprune supports weights that are sharded evenly along their first axis, the default of fully_shard"
        )
    return slice(first, first + length)


def from_local(local: Tensor, like: Any) -> Tensor:
    """A tensor sharded as ``like``, from the shard of every rank. Returns ``local`` if ``like`` is not sharded."""
    if not is_sharded(like):
        return local
    out: Tensor = type(like).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return out


def shard_like(value: Any, like: Any) -> Any:
    """Shards a full tensor as ``like``. Returns ``value`` if ``like`` is not sharded or has another shape."""
    if not is_sharded(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return from_local(value[local_rows(like)].to(like.device).contiguous(), like)


def shard_state(values: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """:func:`shard_like` for every entry of a state dict."""
    return {name: shard_like(value, like.get(name)) for name, value in values.items()}
