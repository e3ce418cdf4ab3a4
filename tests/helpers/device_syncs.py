"""Finds operations that would make a GPU wait, without a GPU: tensors on the meta device stand in for GPU tensors."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SYNCHRONIZING = ("_local_scalar_dense", "nonzero", "masked_select", "equal.", "bincount", "_unique")


class DeviceSyncs(TorchDispatchMode):
    """Records operations on the meta device that synchronize with the host, and cumulative sums of floats.

    Cumulative sums of floats are not deterministic on a GPU and raise under ``torch.use_deterministic_algorithms``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [value for value in tree_leaves((args, kwargs, out)) if isinstance(value, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        name = str(func).removeprefix("aten.")
        indices = tree_leaves(args[1:2]) if name.startswith("index") else []
        boolean_index = any(isinstance(index, torch.Tensor) and index.dtype is torch.bool for index in indices)
        copy_between_devices = "copy" in name and len(devices) > 1
        float_cumsum = name.startswith("cumsum") and args[0].is_floating_point()
        if "meta" in devices and (copy_between_devices or boolean_index or float_cumsum or name.startswith(SYNCHRONIZING)):
            self.operations.append(f"{name} {sorted(devices)}")
        return out
