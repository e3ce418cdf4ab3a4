"""MACs of the operations that a model runs: matrix products, convolutions, attention and recurrent layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

COUNTED = "convolutions, matrix products, attention and recurrent layers"

# operators of torch that multiply and have no formula here, by a part of their name
OTHER_PRODUCTS = re.compile("mm|linear|conv|attention|rnn|lstm|gru|trilinear|transformer|_fft_|linalg|cdist_forward")
NO_PRODUCTS = re.compile("backward|_prepack|pad_|_convert_|im2col|rnn_cell|_fused_sdp_choice|_reorder_|_fused_(lstm|gru)_cell")
KNOWN_SPACES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "smartprune", "dtensor")

# matrix products: the position of the left operand among the arguments
PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "vdot": 0, "linear": 0, "mkldnn_linear": 0, "_int_mm": 0, "_scaled_mm": 0}
PRODUCTS |= {"addmm": 1, "baddbmm": 1, "addmv": 1, "_addmm_activation": 1}
PRODUCTS |= {"_weight_int8pack_mm": 0, "_weight_int4pack_mm": 0, "_weight_int4pack_mm_for_cpu": 0}
FLASH = {"_flash_attention_forward": 3, "_efficient_attention_forward": 4}  # the position of the first row of every sequence


def _convolution(args: Sequence[Any], out: Tensor, name: str) -> int:
    x, weight = args[:2]
    transposed = bool(args[6]) if name in ("convolution", "_convolution", "convolution_overrideable") else "transpose" in name
    positions = (x if transposed else out).numel() // weight.shape[0]  # both store this channel axis first
    return int(positions * weight.numel())


def _attention(args: Sequence[Any], out: Any, name: str) -> int:
    """Query times keys, and the result times values. Causal masks save nothing: every pair counts."""
    query, key, value = args[:3]
    rows = query.numel() // query.shape[-1]
    return int(rows * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _flash_attention(args: Sequence[Any], out: Any, name: str) -> int:
    """Attention on tensors of shape (batch, length, heads, width), or (all rows, heads, width) with the first row of every
    sequence in two more arguments."""
    query, key, value = args[:3]
    width = query.shape[-1] + value.shape[-1]
    starts = args[FLASH[name] : FLASH[name] + 2]
    if len(starts) == 2 and isinstance(starts[0], Tensor) and isinstance(starts[1], Tensor):
        queries, keys = (ends.diff().long() for ends in starts)
        return int((queries * keys).sum()) * int(query.shape[-2]) * int(width)
    return int(query.numel() // query.shape[-1] * key.shape[-3] * width)


def _recurrent(args: Sequence[Any], out: Any, name: str) -> int:
    """Every row of the input is multiplied by every element of the weight matrices once."""
    x = args[0]
    lists = [value for value in args[1:5] if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor)]
    weights = [value for value in args[1:5] if isinstance(value, Tensor)] if name == "mkldnn_rnn_layer" else lists[-1]
    return int(x.numel() // x.shape[-1]) * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _product(args: Sequence[Any], out: Tensor, name: str) -> int:
    return int(out.numel()) * int(args[PRODUCTS[name]].shape[-1])


def _sum_of_products(args: Sequence[Any], out: Tensor, name: str) -> int:
    return int(args[1].numel()) * int(args[2].shape[-1])


def _grouped_product(args: Sequence[Any], out: Tensor, name: str) -> int:
    """One product per expert. Two matrices share their inner axis among the experts."""
    left, right = args[:2]
    if left.dim() == right.dim() == 2:
        return int(left.numel()) * int(right.shape[-1])
    return int(out.numel()) * int(left.shape[-1])


Formula = Callable[[Sequence[Any], Any, str], int]
FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(FLASH, _flash_attention),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm"), _grouped_product),
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_lstm_mps"), _recurrent),
    **dict.fromkeys(("convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution"), _convolution),
    **dict.fromkeys(("cudnn_convolution", "cudnn_convolution_transpose", "miopen_convolution"), _convolution),
    **dict.fromkeys(("miopen_convolution_transpose", "miopen_depthwise_convolution", "_mps_convolution"), _convolution),
    "addbmm": _sum_of_products,
    "flex_attention": _attention,
}


class MacCounter(TorchDispatchMode):
    """Adds up the MACs of the operations that run below it in ``macs``, and names those that it cannot count."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.macs = 0
        self.not_counted: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            space, name = "higher_order", func.name()
        else:
            space, _, name = func._schema.name.partition("::")
        formula = _formula(space, name)
        if formula is None and space == "aten" and torch.is_inference_mode_enabled():
            with self:  # in inference mode, operators arrive before they are divided into simpler ones
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if formula is not None:
            self.macs += formula(args, out, name)
        elif _is_other_product(space, name):
            self.not_counted.add(f"{space}::{name}")
        return out


def _formula(space: str, name: str) -> Formula | None:
    if space not in ("aten", "higher_order"):
        return None
    return _attention if name.startswith("_scaled_dot_product_") and "backward" not in name else FORMULAS.get(name)


def _is_other_product(space: str, name: str) -> bool:
    if space not in KNOWN_SPACES:
        return True  # an operator of another library may compute anything
    return space == "aten" and OTHER_PRODUCTS.search(name) is not None and NO_PRODUCTS.search(name) is None
