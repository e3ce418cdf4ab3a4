"""Reads ONNX files: finds the weights by the nodes that use them. Files are not trusted, and nothing is run."""

from __future__ import annotations

import importlib
import math
from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.block import Block, Layout
from ..errors import SmartpruneError
from ..fields import Fields
from ..files import growth_limit, parse_json, read_limited
from .receipt import Receipt

MAX_BYTES = 1 << 31  # the limit of one protobuf message
MAX_STEPS = 8  # nodes between a weight and the layer that uses it
BLOCK, RECEIPT, ABSENT = "smartprune.block", "smartprune.receipt", "smartprune.absent"  # entries of the model's metadata
MAX_ABSENT = 100_000
MAX_GRAPHS = 10_000
FIXED_SIZES = {1: 8, 5: 4}  # bytes of the fields of protobuf that have a fixed size, by their type
FREE_MESSAGES, BYTES_PER_MESSAGE = 100_000, 8  # how many parts any file may have, and the average size of more
QUANTIZED = "_quantized"  # appended to the name of a weight by onnxruntime's quantizer
STORED = {"value": "t", "sparse_value": "sparse_tensor"}  # attributes of Constant nodes: where their tensor is
WEIGHT = {"Conv": 1, "ConvTranspose": 1, "Gemm": 1, "MatMul": 1, "QLinearConv": 3, "QLinearMatMul": 3}  # which input is the weight
WEIGHT |= {"ConvInteger": 1, "MatMulInteger": 1}
WEIGHT |= {"FusedConv": 1, "FusedGemm": 1, "FusedMatMul": 1, "QGemm": 3}  # fused by onnxruntime's optimizer
SCALERS = ("QuantizeLinear", "DequantizeLinear")  # their other inputs, scales and zero points, are not learned
ZERO_POINT = {"QLinearConv": 5, "QLinearMatMul": 5, "QGemm": 5, "ConvInteger": 3, "MatMulInteger": 3}


def need(package: str) -> Any:
    """Imports an optional package, or raises an error that says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise SmartpruneError(
            f"{package} is needed for ONNX and cannot be imported ({error}); run: pip install onnx onnxscript onnxruntime"
        ) from None


@dataclass(frozen=True, eq=False)
class OnnxWeight:
    """One weight of a graph: ``array`` and ``layout`` as stored under ``initializer``, minus its zero point.

    ``name`` is the initializer's name before quantization. ``matrix`` is true if the axes are (in, out).
    """

    name: str
    initializer: str
    array: Tensor = field(repr=False)
    layout: Layout
    matrix: bool

    @property
    def tensor(self) -> Tensor:
        """The weight as torch stores it; a matrix is (out, in)."""
        return self.array.t() if self.matrix else self.array


@dataclass(frozen=True, eq=False)
class OnnxFile:
    """The stored weights of an ONNX file, its other tensors, and its metadata."""

    where: str
    weights: Mapping[str, OnnxWeight] = field(repr=False)
    others: Mapping[str, Tensor] = field(repr=False)
    block: Block | None = None
    receipt: Receipt | None = field(default=None, repr=False)
    absent: tuple[str, ...] = ()  # weights of the receipt that no node uses

    def tensors(self) -> dict[str, Tensor]:
        return {**{name: weight.tensor for name, weight in self.weights.items()}, **self.others}

    def layouts(self) -> dict[str, Layout]:
        """The layouts of the tensors that :meth:`tensors` returns."""
        return {
            name: Layout(w.layout.name, w.layout.kind, tuple(w.tensor.shape), w.layout.parts, w.layout.transposed and not w.matrix)
            for name, w in self.weights.items()
        }


def read_onnx(path: Path) -> OnnxFile:
    """Reads an ONNX file of any origin."""
    return parse_onnx(read_limited(path, MAX_BYTES), str(path))


def parse_onnx(data: bytes, where: str) -> OnnxFile:
    onnx = need("onnx")
    check_messages(data, onnx.ModelProto.DESCRIPTOR, where)
    try:
        model = onnx.load_model_from_string(data)
    except Exception as error:  # the error types of protobuf depend on its version
        raise SmartpruneError(f"{where}: not a readable ONNX file ({type(error).__name__}); it may be damaged or cut off") from None
    weights: dict[str, OnnxWeight] = {}
    used: set[str] = set()
    seen: set[int] = set()
    times: Counter[str] = Counter()  # several branches may have a weight of the same name
    graphs = list(islice(_graphs(onnx, model.graph, where), MAX_GRAPHS + 1))
    if len(graphs) > MAX_GRAPHS:
        raise SmartpruneError(f"{where}: has more than {MAX_GRAPHS:,} graphs inside its nodes; the file is damaged or hostile")
    graphs[0].limit = growth_limit(len(data))
    for graph in graphs:
        used |= {name for node in graph.nodes if node.op_type in SCALERS for name in node.input[1:]}
        for weight in (weight for node in graph.nodes for weight in graph.weights(node, seen)):
            used.add(weight.initializer)
            name = weight.name
            while name in weights:
                times[weight.name] += 1
                name = f"{weight.name}#{times[weight.name] + 1}"
            weights[name] = replace(weight, name=name)
    rest = {name: graph for graph in graphs for name in graph.initializers.maps[0] if name not in used and name not in weights}
    others = {name: graph.tensor(name) for name, graph in rest.items()}
    if not weights:
        raise SmartpruneError(f"{where}: no Conv, ConvTranspose, Gemm or MatMul node has a stored weight; is this the right file?")
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    receipt = None
    absent: tuple[str, ...] = ()
    if RECEIPT in metadata:
        receipt = Receipt.from_json(parse_json(metadata[RECEIPT], f"{where}: {RECEIPT}"), f"{where}: {RECEIPT}")
    if ABSENT in metadata:
        absent = Fields({ABSENT: parse_json(metadata[ABSENT], f"{where}: {ABSENT}")}, where).texts(ABSENT, MAX_ABSENT)
    try:
        block = Block.of(metadata[BLOCK][:100]) if BLOCK in metadata else None
    except SmartpruneError as error:
        raise SmartpruneError(f"{where}: {BLOCK}: {error}") from None
    return OnnxFile(where, weights, others, block, receipt, absent)


def check_messages(data: bytes, descriptor: Any, where: str) -> None:
    """Raises if a protobuf file has far more parts than its size explains: an empty part takes 2 bytes in the file, and 100 in
    memory."""
    left, todo = FREE_MESSAGES + len(data) // BYTES_PER_MESSAGE, [(0, len(data), descriptor)]
    try:
        while todo:
            at, stop, message = todo.pop()
            inner = {number: field.message_type for number, field in message.fields_by_number.items()}
            while at < stop:
                key, at = _varint(data, at)
                size = FIXED_SIZES.get(key & 7)
                if size is None:
                    size, at = _varint(data, at) if key & 7 == 2 else (0, _varint(data, at)[1])
                if key & 7 == 2 and inner.get(key >> 3) is not None:
                    left -= 1
                    todo.append((at, min(at + size, stop), inner[key >> 3]))
                at += size
                if left < 0:
                    raise SmartpruneError(
                        f"{where}: has far more parts than a file of {len(data):,} bytes should; it is damaged or hostile"
                    )
    except IndexError:
        return  # cut off or damaged, which the library reports


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of variable length, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise IndexError("a number is longer than 64 bits")


def _graphs(onnx: Any, graph: Any, where: str, outer: _Graph | None = None) -> Iterator[_Graph]:
    """A graph and all graphs inside its nodes. The format limits how deeply they are nested."""
    reader = _Graph(onnx, graph, where, outer)
    yield reader
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            yield from _graphs(onnx, inner, where, reader)


@dataclass(frozen=True)
class _StoredTensor:
    """A stored tensor, as the node that uses it sees it."""

    initializer: str
    array: Tensor
    transposed: bool = False  # the node sees its two axes swapped
    scales: tuple[tuple[_StoredTensor | None, int], ...] = ()  # zero points to subtract, and their axes


class _Graph:
    """Finds the stored tensors behind the inputs of nodes, in the graph itself and in the graphs around it."""

    def __init__(self, onnx: Any, graph: Any, where: str, outer: _Graph | None) -> None:
        self.onnx = onnx
        self.where = where
        self.nodes = graph.node
        stored = {tensor.name: tensor for tensor in graph.initializer}
        stored |= {tensor.values.name: tensor for tensor in graph.sparse_initializer}
        if len(stored) < len(graph.initializer) + len(graph.sparse_initializer):
            raise SmartpruneError(f"{where}: two tensors of a graph have one name, and readers differ in which one they use")
        producers = {name: node for node in graph.node for name in node.output}
        self.initializers: ChainMap[str, Any] = ChainMap(stored, *(outer.initializers.maps if outer else ()))
        self.producers: ChainMap[str, Any] = ChainMap(producers, *(outer.producers.maps if outer else ()))
        self.root: _Graph = outer.root if outer else self
        self.ready: dict[int, Tensor] = {}  # decoded tensors of the whole file, by the id of their message
        self.claimed, self.limit = 0, 0  # bytes of decoded sparse tensors; a small file can claim any number

    def weights(self, node: Any, seen: set[int]) -> Iterable[OnnxWeight]:
        """The weight of a node, if it has one that is not yet ``seen``. Many nodes can name one weight, and each costs time."""
        kind = node.op_type
        index = WEIGHT.get(kind)
        if index is None or node.domain not in ("", "ai.onnx", "com.microsoft") or len(node.input) <= index:
            return
        convolution, transposed = "Conv" in kind, bool(_attribute(node, "transB", 0))
        stored, matrix = self.find(node.input[index]), not convolution and not transposed
        if stored is None and kind == "MatMul":  # weight x input: its axes are (out, in)
            stored, matrix = self.find(node.input[0]), False
        if stored is None or stored.array.dim() < 2 or (not convolution and stored.array.dim() != 2):
            return
        if (message := id(self.message(stored.initializer))) in seen:
            return
        seen.add(message)
        array = stored.array
        for scale in stored.scales:
            array = self.subtract_zero_point(array, *scale)
        point = ZERO_POINT.get(kind, len(node.input))
        if len(node.input) > point and node.input[point]:
            axis = 0 if convolution or transposed else 1
            array = self.subtract_zero_point(array, self.find(node.input[point]), axis)
        matrix ^= stored.transposed
        groups = _attribute(node, "group", 1) if convolution else 1
        name = stored.initializer.removesuffix(QUANTIZED)
        layout = Layout(name.removesuffix(".weight"), kind, tuple(array.shape), groups, kind == "ConvTranspose" or matrix)
        yield OnnxWeight(name, stored.initializer, array, layout, matrix)

    def find(self, name: str) -> _StoredTensor | None:
        """The stored tensor behind a name, through nodes that only rename, transpose or scale it."""
        transposed = False
        scales: list[tuple[_StoredTensor | None, int]] = []
        for _ in range(MAX_STEPS):
            if self.message(name) is not None:
                array = self.tensor(name)
                if transposed and array.dim() != 2:  # all axes are reversed, which is not a layout of a weight
                    return None
                return _StoredTensor(name, array, transposed, tuple(scales))
            node = self.producers.get(name)
            if node is None or not node.input:
                return None
            if node.op_type == "Transpose" and not scales and list(_attribute(node, "perm", [1, 0])) == [1, 0]:
                transposed = not transposed
            elif node.op_type == "DequantizeLinear":
                axis = _attribute(node, "axis", 1)
                point = self.find_plain(node.input[2]) if len(node.input) > 2 and node.input[2] else None
                scales.append((point, axis))
            elif node.op_type == "QuantizeLinear":  # before a DequantizeLinear: the stored numbers are not quantized
                scales.clear()
            elif node.op_type not in ("Identity", "Cast"):
                return None
            name = node.input[0]
        return None

    def message(self, name: str) -> Any:
        """The initializer or Constant node of that name, or None."""
        if name in self.initializers:
            return self.initializers[name]
        node = self.producers.get(name)
        return node if node is not None and node.op_type == "Constant" and any(a.name in STORED for a in node.attribute) else None

    def find_plain(self, name: str) -> _StoredTensor | None:
        return None if self.message(name) is None else _StoredTensor(name, self.tensor(name))

    def subtract_zero_point(self, array: Tensor, point: _StoredTensor | None, axis: int) -> Tensor:
        """Quantized numbers minus their zero point, so that zero is represented by zero."""
        if point is None or point.array.numel() > array.numel() or not bool(point.array.any()):
            return array
        shift = point.array.to(torch.float32).reshape(-1)
        if shift.numel() > 1:
            if not -array.dim() <= axis < array.dim() or shift.numel() != array.shape[axis]:
                raise SmartpruneError(f"{self.where}: the zero point {point.initializer} does not fit the weight it belongs to")
            shape = [1] * array.dim()
            shape[axis] = -1
            shift = shift.reshape(shape)
        return array.to(torch.float32) - shift

    def tensor(self, name: str) -> Tensor:
        message, ready = self.message(name), self.root.ready
        if id(message) not in ready:
            inside = () if name in self.initializers else message.attribute
            stored = next((getattr(a, STORED[a.name]) for a in inside if a.name in STORED), message)
            ready[id(message)] = self.decode(stored, name)
        return ready[id(message)]

    def decode(self, stored: Any, name: str) -> Tensor:
        """A stored tensor, after checking that its bytes exist and match its shape."""
        if isinstance(stored, self.onnx.SparseTensorProto):
            return self.sparse(stored, name)
        if stored.data_location == self.onnx.TensorProto.EXTERNAL or stored.external_data:
            raise SmartpruneError(
                f"{self.where}: the data of {name} is in another file, which is not read; save the model in one file"
            )
        shape = list(stored.dims)
        if any(n < 0 for n in shape) or len(shape) > 16 or math.prod(shape) > MAX_BYTES:
            raise SmartpruneError(f"{self.where}: {name} has the impossible shape {str(shape)[:80]}; the file is damaged")
        try:
            array = np.asarray(self.onnx.numpy_helper.to_array(stored))
        except Exception as error:  # unknown types, too few bytes and others
            raise SmartpruneError(f"{self.where}: {name} cannot be read ({str(error)[:100]})") from None
        if list(array.shape) != shape:
            raise SmartpruneError(f"{self.where}: {name} has the shape {list(array.shape)}, and its header says {shape}")
        if array.dtype.kind in "SUO":
            array = np.zeros(0, dtype=np.float32)  # strings cannot be weights
        elif array.dtype.isbuiltin != 1:  # bfloat16, 8-bit floats and 4-bit integers of ml_dtypes
            array = array.astype(np.int8 if "int" in array.dtype.name else np.float32)
        elif array.dtype.kind == "u" and array.dtype.itemsize > 1:
            array = array.astype(np.int64)
        return torch.from_numpy(np.array(array))

    def sparse(self, stored: Any, name: str) -> Tensor:
        """A sparse tensor: its nonzero numbers and their places, as one index each or one per axis."""
        shape = list(stored.dims)
        values, index = self.decode(stored.values, name), self.decode(stored.indices, f"the indices of {name}")
        if any(n < 0 for n in shape) or len(shape) > 16:
            raise SmartpruneError(f"{self.where}: {name} has the impossible shape {str(shape)[:80]}; the file is damaged")
        self.root.claimed += math.prod(shape) * values.element_size()
        if self.root.claimed > self.root.limit:
            raise SmartpruneError(
                f"{self.where}: {name} has the shape {str(shape)[:80]}, and the sparse tensors of the file "
                f"would take more than {self.root.limit:,} bytes; the file is damaged or hostile"
            )
        sizes, index = (shape, index) if index.dim() != 1 else ([math.prod(shape)], index[:, None])
        fits = values.dim() == 1 and index.shape == (len(values), len(sizes)) and index.dtype == torch.int64
        if not fits or bool(((index < 0) | (index >= torch.tensor(sizes, device="cpu"))).any()):
            raise SmartpruneError(f"{self.where}: {name} has indices that do not fit its shape {shape}")
        strides = [math.prod(sizes[axis:]) for axis in range(1, len(sizes) + 1)]
        places = index @ torch.tensor(strides, dtype=torch.int64, device="cpu")
        if len(places.unique()) < len(places):
            raise SmartpruneError(f"{self.where}: {name} has two numbers for one place")
        out = values.new_zeros(math.prod(shape))
        out[places] = values
        return out.reshape(shape)


def _attribute(node: Any, name: str, default: Any) -> Any:
    for attribute in node.attribute:
        if attribute.name == name:
            return list(attribute.ints) if isinstance(default, list) else int(attribute.i)
    return default
