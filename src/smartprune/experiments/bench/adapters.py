"""Adapters: every engine as a function without arguments that runs the model once and returns its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime import accelerate
from .engines import GPU, ONNX_FILES, OURS, OURS_INT8, TORCH, is_ours

Run = Callable[[], Any]


def load_engine(name: str, model: nn.Module, x: Tensor, calibration: Sequence[Tensor], threads: int, folder: Path) -> Run:
    """Prepares an engine for one input. ``folder`` holds the ONNX files that some engines read."""
    if name in GPU:
        return _cuda(name, model, x)
    if name in TORCH:
        return _torch(name, model, x)
    if name == OURS:
        accelerated = accelerate(model, example=x, threads=threads)
        return lambda: accelerated(x)
    if name == OURS_INT8:
        accelerated = accelerate(model, dtype="int8", example=[x, *calibration], threads=threads)
        return lambda: accelerated(x)
    path = folder / next(file for file, names in ONNX_FILES.items() if name in names)
    return openvino_engine(path, x, threads) if name.startswith("openvino") else onnxruntime_engine(path, x, threads)


def _torch(name: str, model: nn.Module, x: Tensor) -> Run:
    layout = torch.channels_last if name.endswith("channels-last") and x.dim() == 4 else torch.contiguous_format
    model, y = model.to(memory_format=layout), x.contiguous(memory_format=layout)  # type: ignore[call-overload]
    return torch.inference_mode()(lambda: model(y))


def onnxruntime_engine(path: Path, x: Tensor, threads: int) -> Run:
    import onnxruntime  # type: ignore[import-untyped,import-not-found,unused-ignore]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, inputs)


def openvino_engine(path: Path, x: Tensor, threads: int) -> Run:
    import openvino  # type: ignore[import-untyped,import-not-found,unused-ignore]

    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
    data = x.numpy()
    return lambda: list(request.infer([data], share_inputs=True, share_outputs=True).values())


def _cuda(name: str, model: nn.Module, x: Tensor) -> Run:
    """Records a CUDA graph, so that launches from Python do not count."""
    torch.backends.cudnn.benchmark = True
    y = x.cuda().bfloat16()
    y = y.contiguous(memory_format=torch.channels_last) if y.dim() == 4 else y
    if is_ours(name):
        model = accelerate(model, example=x.cuda(), device="cuda", dtype="bfloat16")
    else:
        model = model.cuda().bfloat16().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    side = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):
            model(y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        outputs = model(y)

    def run() -> Any:
        graph.replay()
        torch.cuda.synchronize()
        return outputs

    return run
