"""What a GPU would be waited for, or could not repeat, seen without one: the meta device stands in for it."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal.", "bincount", "_unique")


class Waits(TorchDispatchMode):
    """Notes operations on the meta device that a GPU is waited for: copies to and from the host, numbers read there; and running
    sums of floats, which come out otherwise every time, and raise where deterministic algorithms are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [value for value in tree_leaves((args, kwargs, out)) if isinstance(value, torch.Tensor)]
        places = {tensor.device.type for tensor in tensors}
        name = str(func).removeprefix("aten.")
        indices = tree_leaves(args[1:2]) if name.startswith("index") else []
        chosen = any(isinstance(index, torch.Tensor) and index.dtype is torch.bool for index in indices)
        copied = "copy" in name and len(places) > 1
        summed = name.startswith("cumsum") and args[0].is_floating_point()
        if "meta" in places and (copied or chosen or summed or name.startswith(WAITING)):
            self.found.append(f"{name} {sorted(places)}")
        return out
