"""ONNX graphs: made by torch's exporter, cleaned, run in onnxruntime and quantized."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import text
from .block import Block
from .errors import SmartpruneError
from .onnxfile import BLOCK, QUANTIZED, RECEIPT, OnnxFile, need
from .receipt import Receipt
from .source import Cut


def export_graph(model: nn.Module, inputs: tuple[Tensor, ...], outputs: int, fold: bool, dynamic_batch: bool) -> Any:
    need("onnxscript")  # torch's exporter is written in it
    if dynamic_batch and inputs[0].shape[0] == 1:  # the exporter takes an axis of one entry for a constant
        inputs = tuple(torch.cat([x, x]) for x in inputs)
    shapes = tuple({0: torch.export.Dim("batch")} for _ in inputs) if dynamic_batch else None
    try:
        with _quiet():
            program = torch.onnx.export(
                model,
                inputs,
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=["input", *(f"input{i}" for i in range(2, len(inputs) + 1))],
                output_names=["output", *(f"output{i}" for i in range(2, outputs + 1))],
                optimize=fold,
                verbose=False,
            )
    except Exception as error:  # the exporter has many ways to fail, each with its own type
        first = (str(error).strip().splitlines() or [""])[0][:300]
        raise SmartpruneError(f"export_onnx: torch could not export the model ({type(error).__name__}: {first})") from error
    assert program is not None
    return program.model_proto


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that exporters and quantizers give on every model; what they print is no result of ours."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "root")]
    loggers.append(logging.getLogger("torch.onnx._internal.exporter._registration"))
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def clean(graph: Any, cuts: Sequence[Cut]) -> list[str]:
    """Drops what only the exporter cares about (paths of source files among it), and gives weights their own names back
    where it stores them turned, or under another name that they have. Returns the weights that are not in the graph."""
    graph.doc_string = ""
    del graph.metadata_props[:]
    for part in (graph.graph, *graph.graph.node, *graph.graph.value_info, *graph.graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]
    arrays = {tensor.name: need("onnx").numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}
    free = [name for name in arrays if name not in {cut.weight for cut in cuts}]
    missing = []
    for cut in cuts:
        if cut.weight in arrays:
            continue
        given = cut.tensor.numpy()
        same = (name for name in free if any(np.array_equal(arrays[name], form) for form in (given, given.T)))
        if name := next(same, None):
            _rename(graph, name, cut.weight)
            free.remove(name)
        else:
            missing.append(cut.weight)
    return missing


def _rename(graph: Any, old: str, new: str) -> None:
    for tensor in graph.graph.initializer:
        if tensor.name == old:
            tensor.name = new
    for node in graph.graph.node:
        for i, name in enumerate(node.input):
            if name == old:
                node.input[i] = new


def describe(graph: Any, block: Block, receipt: Receipt | None) -> None:
    said = {BLOCK: str(block)}
    if receipt is not None:
        said[RECEIPT] = json.dumps(receipt.to_json(), sort_keys=True)
    need("onnx").helper.set_model_props(graph, said)
    graph.producer_name, graph.producer_version = "smartprune", ""


def serialized(graph: Any) -> bytes:
    try:
        need("onnx").checker.check_model(graph, full_check=True)
        data: bytes = graph.SerializeToString(deterministic=True)
    except Exception as error:
        raise SmartpruneError(f"export_onnx: the graph is not sound ({str(error)[:300]})") from error
    return data


def session_of(data: bytes) -> Any:
    runtime = need("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        return runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its error types are not public
        raise SmartpruneError(f"export_onnx: onnxruntime cannot run the graph ({str(error)[:300]})") from error


def outputs_of(session: Any, batch: tuple[Tensor, ...]) -> list[Tensor]:
    try:
        found = session.run(None, _feed(session, batch))
    except Exception as error:
        shapes = ", ".join(text.sizes(x.shape) for x in batch)
        raise SmartpruneError(f"export_onnx: the graph failed on inputs of {shapes} ({str(error)[:300]})") from error
    return [torch.from_numpy(np.asarray(out)) for out in found]


def _feed(session: Any, batch: tuple[Tensor, ...]) -> dict[str, Any]:
    names = [entry.name for entry in session.get_inputs()]
    if len(names) != len(batch):
        raise SmartpruneError(f"export_onnx: {len(batch)} inputs were given, and the graph uses {len(names)}: {', '.join(names)}")
    return {name: x.numpy() for name, x in zip(names, batch, strict=True)}


def quantized(data: bytes, batches: Sequence[tuple[Tensor, ...]]) -> bytes:
    """The same graph with int8 weights and activations between QuantizeLinear and DequantizeLinear nodes."""
    quantization = need("onnxruntime.quantization")
    session = session_of(data)
    feeds = iter([_feed(session, batch) for batch in batches])
    reader = type("Reader", (quantization.CalibrationDataReader,), {"get_next": lambda self: next(feeds, None)})
    with tempfile.TemporaryDirectory() as folder, _quiet():
        before, after = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        before.write_bytes(data)
        try:
            quantization.quantize_static(
                str(before),
                str(after),
                reader(),
                quant_format=quantization.QuantFormat.QDQ,
                per_channel=True,
                activation_type=quantization.QuantType.QInt8,
                weight_type=quantization.QuantType.QInt8,
                extra_options={"WeightSymmetric": True},
            )
        except Exception as error:
            raise SmartpruneError(f"export_onnx: onnxruntime could not quantize the graph ({str(error)[:300]})") from error
        return after.read_bytes()


def check_half_steps(graph: Any, before: OnnxFile) -> None:
    """Every int8 weight must lie within half a step of the float one, and zero must stand for zero."""
    numpy_helper = need("onnx").numpy_helper
    stored = {tensor.name: tensor for tensor in graph.graph.initializer}
    floats = {weight.initializer: weight for weight in before.weights.values()}
    for node in graph.graph.node:
        name = node.input[0].removesuffix(QUANTIZED) if node.op_type == "DequantizeLinear" else None
        if name not in floats or node.input[0] not in stored:
            continue
        numbers, scale, point = (numpy_helper.to_array(stored[entry]) for entry in node.input[:3])
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
        shape = [1] * numbers.ndim
        if scale.size > 1:
            shape[axis] = -1
        step = scale.astype(np.float64).reshape(shape)
        off = np.abs(numbers * step - floats[name].array.numpy())
        if point.any() or (off > step * (0.5 + 1e-3)).any():
            raise SmartpruneError(f"export_onnx: {name} is not within half a step of its float values after quantization")
