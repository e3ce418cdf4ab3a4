"""Times single layers in an engine, with the inputs that they have in the network and without the overhead of a call."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import text
from ...errors import SmartpruneError
from ...runtime import accelerate
from ...runtime.speed import fastest_call
from .adapters import Run, onnxruntime_engine, openvino_engine
from .engines import OURS, TORCH

LAYER_FILE = "layer.onnx"
OPSET = 17


def time_layers(
    name: str, model: nn.Module, x: Tensor, threads: int, folder: Path, seconds: float = 0.05
) -> dict[str, tuple[str, float]]:
    """The kind and the time of every convolution and linear layer alone, in seconds.

    The overhead of a call, measured with a layer of a single weight in the same engine, is subtracted.
    """
    overheads = {
        "conv": _time(name, nn.Conv2d(1, 1, 1), torch.zeros(1, 1, 1, 1), threads, folder, seconds),
        "linear": _time(name, nn.Linear(1, 1), torch.zeros(1, 1), threads, folder, seconds),
    }
    times = {}
    for path, layer_input in layer_inputs(model, x).items():
        layer: Any = model.get_submodule(path)
        kind = "linear" if isinstance(layer, nn.Linear) else f"{text.format_shape(layer.kernel_size)} conv"
        try:
            duration = _time(name, layer, layer_input, threads, folder, seconds)
        except SmartpruneError:  # an option that one node of ONNX does not have
            continue
        times[path] = (kind, max(0.0, duration - overheads["linear" if kind == "linear" else "conv"]))
    return times


def layer_inputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The input of every convolution and linear layer in one forward pass, by the name of the layer."""
    inputs: dict[str, Tensor] = {}

    def record(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.setdefault(path, (args[0] if args else kwargs["input"]).clone())

    hooks = [
        module.register_forward_pre_hook(partial(record, path), with_kwargs=True)
        for path, module in model.named_modules()
        if type(module) in (nn.Conv2d, nn.Linear)
    ]
    try:
        with torch.no_grad():
            model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


def _time(name: str, layer: nn.Conv2d | nn.Linear, x: Tensor, threads: int, folder: Path, seconds: float) -> float:
    run: Run
    if name in TORCH:
        run = partial(layer, x)
    elif name == OURS:
        run = partial(accelerate(nn.Sequential(layer), example=x, threads=threads, backend="native"), x)
    else:
        save_layer(layer, x, folder / LAYER_FILE)
        x = x.contiguous()
        run = (openvino_engine if name.startswith("openvino") else onnxruntime_engine)(folder / LAYER_FILE, x, threads)
    with torch.inference_mode():
        return fastest_call(run, seconds)


def save_layer(layer: nn.Conv2d | nn.Linear, x: Tensor, path: Path) -> None:
    """Writes one convolution or linear layer as an ONNX file with one node."""
    import onnx
    from onnx import helper, numpy_helper

    attributes: dict[str, Any] = {}
    weight = layer.weight.detach()
    if isinstance(layer, nn.Conv2d):
        if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
            raise SmartpruneError(f"bench: padding={layer.padding!r} with mode {layer.padding_mode} is not timed as a single layer")
        attributes = {"strides": layer.stride, "pads": [*layer.padding] * 2, "dilations": layer.dilation, "group": layer.groups}
        kind = "Conv"
    elif x.dim() == 2:
        attributes, kind = {"transB": 1}, "Gemm"
    else:
        raise SmartpruneError(f"bench: a linear layer with an input of {x.dim()} dimensions is not timed as a single layer")
    arrays = {"weight": weight} | ({} if layer.bias is None else {"bias": layer.bias.detach()})
    with torch.no_grad():
        y = layer(x)
    float32 = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node(kind, ["x", *arrays], ["y"], **attributes)],
        "layer",
        [helper.make_tensor_value_info("x", float32, list(x.shape))],
        [helper.make_tensor_value_info("y", float32, list(y.shape))],
        [numpy_helper.from_array(array.float().contiguous().numpy(), name) for name, array in arrays.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8), path)
