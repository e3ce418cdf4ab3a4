"""Handlers of layers with weights: convolutions, linear layers and batch norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from .context import Context, numpy, on_rows, pair, window
from .steps import Step


def convolution(context: Context, node: fx.Node, module: nn.Conv1d | nn.Conv2d, x: fx.Node) -> Step | None:
    if not context.is_spatial(x) or module.padding_mode != "zeros":
        return None
    kernel, stride, dilation = on_rows(module.kernel_size), on_rows(module.stride), on_rows(module.dilation)
    (kh, kw), (dh, dw) = pair(kernel), pair(dilation)
    padding: Any = module.padding
    if padding == "same":  # torch pads an odd one at the end, where the margin is as wide as needed
        padding = dh * (kh - 1) // 2, dw * (kw - 1) // 2
    elif padding == "valid":
        padding = 0
    area = window(kernel, stride, on_rows(padding, 0), dilation)
    weight = numpy(module.weight).reshape(module.out_channels, -1, kh, kw)
    bias = numpy(module.bias) if module.bias is not None else np.zeros(module.out_channels, np.float32)
    if module.groups == module.in_channels == module.out_channels and module.groups > 1:
        return Step("depthwise", node, [x], weight=weight[:, 0], bias=bias, window=area)
    if module.groups > 1:  # as one dense weight: kernels skip the zeros between groups like all others
        per_out, per_in = module.out_channels // module.groups, module.in_channels // module.groups
        full = np.zeros((module.out_channels, module.in_channels, kh, kw), np.float32)
        for g in range(module.groups):
            rows = slice(g * per_out, (g + 1) * per_out)
            full[rows, g * per_in : (g + 1) * per_in] = weight[rows]
        weight = full
    return Step("conv", node, [x], weight=weight, bias=bias, window=area)


def linear(context: Context, node: fx.Node, module: nn.Linear, x: fx.Node) -> Step | None:
    shape = context.shape(x)
    if shape is None or len(shape) < 2 or not all(shape):
        return None
    rows = len(shape) > 2
    if not rows and x in context.rows:
        return None
    bias = numpy(module.bias) if module.bias is not None else np.zeros(module.out_features, np.float32)
    return Step("conv", node, [x], rows, weight=numpy(module.weight)[:, :, None, None], bias=bias, window=window(1))


def batch_norm(context: Context, node: fx.Node, module: nn.BatchNorm2d, x: fx.Node) -> Step | None:
    if not context.is_map(x) or module.running_mean is None or module.running_var is None:
        return None
    one = torch.ones(module.num_features, 1, 1, 1, dtype=torch.float64, device="cpu")
    weight = None if module.weight is None else module.weight.double()
    bias = None if module.bias is None else module.bias.double()
    mean, variance = module.running_mean.double(), module.running_var.double()
    scale, shift = fuse_conv_bn_weights(one, None, mean, variance, module.eps, weight, bias)
    return Step("affine", node, [x], scale=numpy(scale).reshape(-1), bias=numpy(shift))
