"""ONNX graphs: export with torch, cleaning, running and quantization with onnxruntime."""

from __future__ import annotations

import ast
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import text
from ..core.block import Block
from ..errors import SmartpruneError
from .onnx_inputs import Arguments, Batch
from .onnx_read import ABSENT, BLOCK, QUANTIZED, RECEIPT, OnnxFile, need
from .quantized import simulates_quantization
from .receipt import Receipt
from .source import Cut

SCOPES = "pkg.torch.onnx.name_scopes"  # node metadata of torch's exporter: the modules that contain the operation


def export_graph(model: nn.Module, arguments: Arguments, batch: Batch, outputs: int, fold: bool, dynamic_batch: bool) -> Any:
    need("onnxscript")  # torch's exporter needs it
    if dynamic_batch and next(iter(batch.values())).shape[0] == 1:  # the exporter treats an axis of size 1 as constant
        batch = {name: torch.cat([x, x]) for name, x in batch.items()}
    shapes = arguments.dynamic_shapes(batch, torch.export.Dim("batch")) if dynamic_batch else None
    try:
        with _quiet():
            program = torch.onnx.export(
                model,
                arguments.positional(batch),
                kwargs=arguments.keywords(batch),
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=list(batch),
                output_names=["output", *(f"output{i}" for i in range(2, outputs + 1))],
                optimize=fold,
                verbose=False,
            )
    except Exception as error:  # the exporter raises many types of errors
        hint = ""
        if simulates_quantization(model):
            hint = (
                "; it is prepared for quantization-aware training: copy its weights into the float model and export that, with "
                "int8=True and calibration= for an int8 file"
            )
        raise SmartpruneError(f"export_onnx: torch could not export the model ({_cause(error)}){hint}") from error
    assert program is not None
    return program.model_proto


def _cause(error: BaseException) -> str:
    """The first line of the innermost error. Exporters wrap it in less specific errors, with colours and lists of steps."""
    errors = [error]
    while (inner := errors[-1].__cause__) is not None and inner not in errors:
        errors.append(inner)
    lines = [line for line in str(errors[-1]).strip().splitlines() if line.strip()] or [""]
    return text.escape(f"{type(errors[-1]).__name__}: {lines[0].strip()[:300]}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides warnings that exporters and quantizers give for every model, and sends what they print to stderr."""
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
    """Removes metadata of the exporter, such as paths of source files, and restores the names of weights.

    The exporter may store a weight transposed, under another of its names, or once for several equal ones. Returns the weights
    that are not in the graph.
    """
    arrays = {tensor.name: need("onnx").numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}
    free = [name for name in arrays if name not in {cut.weight for cut in cuts}]
    missing = []
    for cut in cuts:
        if cut.weight in arrays:
            continue
        same = (name for name in free if _equal(arrays[name], cut))
        if name := next(same, None):
            _rename(graph, name, cut.weight)
            free.remove(name)
            arrays[cut.weight] = arrays.pop(name)
        else:
            missing.append(cut)
    restored = _split_merged(graph, arrays, cuts, missing)
    graph.doc_string = ""
    del graph.metadata_props[:]
    for part in (graph.graph, *graph.graph.node, *graph.graph.value_info, *graph.graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]
    return [cut.weight for cut in missing if cut.weight not in restored]


def _equal(array: Any, cut: Cut) -> bool:
    weight = cut.tensor.numpy()
    return any(np.array_equal(array, form) for form in (weight, weight.T))


def _split_merged(graph: Any, arrays: Mapping[str, Any], cuts: Sequence[Cut], missing: Sequence[Cut]) -> set[str]:
    """Gives each weight that the exporter merged its own tensor, and returns their names. It merges small weights that are equal,
    such as those without kept blocks.

    The metadata of a node names its module, but after folding that may be the normalization. The remaining nodes go to the
    remaining weights in order, which changes no result because the values are equal.
    """
    done: set[str] = set()
    for name in [cut.weight for cut in cuts if cut.weight in arrays]:
        group = [cut for cut in missing if cut.weight not in done and _equal(arrays[name], cut)]
        if not group:
            continue
        group.insert(0, next(cut for cut in cuts if cut.weight == name))
        users = [(node, i) for node in graph.graph.node for i, entry in enumerate(node.input) if entry == name]
        owner: dict[int, Cut] = {}
        for place, (node, i) in enumerate(users):
            scopes = _scopes(node)
            named = [cut for cut in group if cut.weight.rpartition(".")[0] in scopes and _fits(node, i, arrays[name], cut)]
            if named:
                owner[place] = max(named, key=lambda cut: len(cut.weight))  # the innermost
        for cut in group:
            left = (place for place, (node, i) in enumerate(users) if place not in owner and _fits(node, i, arrays[name], cut))
            if cut not in owner.values() and (first := next(left, None)) is not None:
                owner[first] = cut
        for place, cut in owner.items():
            if cut.weight != name:
                node, i = users[place]
                node.input[i] = cut.weight
                if cut.weight not in done:
                    copied = graph.graph.initializer.add()
                    copied.CopyFrom(next(tensor for tensor in graph.graph.initializer if tensor.name == name))
                    copied.name = cut.weight
                done.add(cut.weight)
    return done


def _scopes(node: Any) -> list[str]:
    """The names of the modules that a node comes from, as torch's exporter writes them."""
    value = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "[]")
    try:
        scopes = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return []
    return [name for name in scopes[1:-1] if isinstance(name, str)] if isinstance(scopes, list) else []


def _fits(node: Any, index: int, array: Any, cut: Cut) -> bool:
    """Whether a node that reads ``array`` can belong to this weight, judging by the axes that it expects."""
    transposed = index == 1 and (
        node.op_type == "MatMul" or (node.op_type == "Gemm" and not any(a.name == "transB" and a.i for a in node.attribute))
    )
    shape = tuple(cut.tensor.shape)
    stored_transposed = cut.transposed and len(shape) == 2
    return tuple(array.shape) == (shape[::-1] if transposed != stored_transposed else shape)


def _rename(graph: Any, old: str, new: str) -> None:
    for tensor in graph.graph.initializer:
        if tensor.name == old:
            tensor.name = new
    for node in graph.graph.node:
        for i, name in enumerate(node.input):
            if name == old:
                node.input[i] = new


def add_metadata(graph: Any, block: Block, receipt: Receipt | None, absent: Sequence[str]) -> None:
    """``absent`` are the weights of the receipt that are not in the graph."""
    metadata = {BLOCK: str(block)}
    if receipt is not None:
        metadata[RECEIPT] = json.dumps(receipt.to_json(), sort_keys=True)
        if absent:
            metadata[ABSENT] = json.dumps(list(absent))
    need("onnx").helper.set_model_props(graph, metadata)
    graph.producer_name, graph.producer_version = "smartprune", ""


def serialize(graph: Any, full_check: bool = True) -> bytes:
    """The file, after the checks of onnx. Its full check also infers types, which it cannot do for sparse weights."""
    try:
        need("onnx").checker.check_model(graph, full_check=full_check)
        data: bytes = graph.SerializeToString(deterministic=True)
    except Exception as error:
        raise SmartpruneError(f"export_onnx: the graph is invalid ({str(error)[:300]})") from error
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


def outputs_of(session: Any, batch: Batch) -> list[Tensor]:
    try:
        outputs = session.run(None, _feed(session, batch))
    except Exception as error:
        shapes = ", ".join(text.format_shape(x.shape) for x in batch.values())
        raise SmartpruneError(f"export_onnx: the graph failed on inputs of {shapes} ({str(error)[:300]})") from error
    return [torch.from_numpy(np.asarray(out)) for out in outputs]


def _feed(session: Any, batch: Batch) -> dict[str, Any]:
    names = [entry.name for entry in session.get_inputs()]
    if set(names) != set(batch):
        raise SmartpruneError(
            f"export_onnx: the inputs {', '.join(batch)} were given, and the graph uses {', '.join(names) or 'none'}; "
            "leave out what the model does not use"
        )
    return {name: batch[name].numpy() for name in names}


def quantize(data: bytes, batches: Sequence[Batch]) -> tuple[bytes, list[str]]:
    """The graph with int8 weights and activations between QuantizeLinear and DequantizeLinear nodes, and the nodes left in float.

    Grouped transposed convolutions with a bias stay in float, because onnxruntime has the scales of only one group for them.
    """
    quantization = need("onnxruntime.quantization")
    session = session_of(data)
    nodes = need("onnx").load_model_from_string(data).graph.node
    transposed = [node for node in nodes if node.op_type == "ConvTranspose" and len(node.input) > 2]
    unquantized = [node.name for node in transposed if any(a.name == "group" and a.i > 1 for a in node.attribute)]
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
                nodes_to_exclude=unquantized,
                extra_options={"WeightSymmetric": True},
            )
        except Exception as error:
            raise SmartpruneError(f"export_onnx: onnxruntime could not quantize the graph ({str(error)[:300]})") from error
        return after.read_bytes(), unquantized


def check_half_steps(graph: Any, before: OnnxFile) -> None:
    """Raises unless every int8 weight is within half a step of the float one, and zero represents zero."""
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
