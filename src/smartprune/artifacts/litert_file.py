"""Writes LiteRT files: the flatbuffer, sparse weights, and what smartprune stores about itself."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import SmartpruneError
from .litert_graph import Net, Operation, Value

IDENTIFIER = b"TFL3"
BLOCKS = (1, 4, 8, 16)  # lengths of the blocks along the last axis that sparse weights may be stored in
KERNEL_BLOCK = 4  # the kernel of LiteRT for sparse float32 linear layers skips blocks of this length,
KERNEL_SHARE = 0.2  # and is faster than the dense kernel if at most about this share of them is left (records/litert-cpu)
SPARSE_SHARE = 0.9  # sparse weights must take at most this share of the bytes of dense ones

# Versions of operations where these are not 1: (float32, int8). They matter to delegates, not to the kernels.
VERSIONS = {
    "CONV_2D": (1, 3), "DEPTHWISE_CONV_2D": (2, 3), "FULLY_CONNECTED": (5, 5), "ADD": (1, 2), "SUB": (1, 3), "MUL": (1, 2),
    "MAX_POOL_2D": (1, 2), "AVERAGE_POOL_2D": (1, 2), "CONCATENATION": (1, 2), "TRANSPOSE": (1, 2), "MEAN": (1, 2),
    "SOFTMAX": (1, 2), "LOGISTIC": (1, 2), "TANH": (1, 2), "PAD": (1, 2), "PADV2": (1, 2), "SLICE": (1, 2),
    "STRIDED_SLICE": (1, 2), "RESIZE_BILINEAR": (3, 3), "RESIZE_NEAREST_NEIGHBOR": (3, 3), "TRANSPOSE_CONV": (3, 3),
    "LEAKY_RELU": (1, 2), "RELU": (1, 2), "RELU6": (1, 2), "DEQUANTIZE": (2, 2), "MAXIMUM": (1, 2), "MINIMUM": (1, 2),
    "REDUCE_MAX": (1, 2), "SUM": (1, 2), "BATCH_MATMUL": (1, 2), "GELU": (1, 2), "BROADCAST_TO": (2, 2), "QUANTIZE": (1, 2),
}  # fmt: skip
SPARSE_LINEAR_VERSION = 8
ENUMS = {"padding": "Padding", "fusedActivationFunction": "ActivationFunctionType", "mode": "MirrorPadMode"}


def need(module: str) -> Any:
    """A module of ai-edge-litert, or an error that says how to install it."""
    try:
        return importlib.import_module(f"ai_edge_litert.{module}")
    except ImportError as error:
        raise SmartpruneError(
            f"ai-edge-litert is needed for LiteRT and cannot be imported ({error}); install it with: pip install ai-edge-litert"
        ) from None


def file_bytes(net: Net, metadata: Mapping[str, bytes], sparse: bool) -> tuple[bytes, tuple[str, ...]]:
    """The file, and the weights in it that are sparse."""
    writer = _Writer(net)
    if sparse:
        writer.make_sparse()
    return writer.bytes(metadata), tuple(sorted(writer.sparse_names))


class _Writer:
    def __init__(self, net: Net) -> None:
        self.net = net
        self.schema = need("schema_py_generated")
        self.operations = list(net.operations)
        self.sparse: dict[int, tuple[Any, Any]] = {}  # id of a value -> numbers, SparsityParametersT
        self.sparse_names: list[str] = []
        self.buffers = [self.schema.BufferT()]  # the first is empty by convention
        self.by_digest: dict[bytes, int] = {}
        self.codes: dict[tuple[str, int], int] = {}
        self.tensors: dict[int, int] = {}  # id of a value -> index
        self.table: list[Any] = []

    def make_sparse(self) -> None:
        """Stores weights sparse where that is smaller. Kernels that cannot read them get a DENSIFY before them, which runs once."""
        operations: list[Operation] = []
        for operation in self.operations:
            place = {"CONV_2D": 1, "FULLY_CONNECTED": 1, "TRANSPOSE_CONV": 1}.get(operation.code)
            weight = None if place is None else operation.inputs[place]
            if weight is not None and weight.array is not None and (found := self._encode(weight, operation.code)) is not None:
                self.sparse[id(weight)] = found[:2]
                self.sparse_names.append(weight.weight or weight.name)
                if not found[2]:
                    dense = Value(f"{weight.name}:dense", weight.shape, weight.dtype, quantized=weight.quantized)
                    operations.append(Operation("DENSIFY", [weight], [dense], "DensifyOptions"))
                    inputs = [dense if i == place else value for i, value in enumerate(operation.inputs)]
                    operation = Operation(operation.code, inputs, operation.outputs, operation.table, operation.options)
            operations.append(operation)
        self.operations = operations

    def _encode(self, weight: Value, code: str) -> tuple[Any, Any, bool] | None:
        """Numbers, their places, and whether the kernel reads them as they are. None if dense weights are as small."""
        rows = weight.array.reshape(-1, weight.shape[-1])
        if code == "FULLY_CONNECTED" and weight.dtype == "int8":
            return None  # the default delegate cannot read these
        if code == "FULLY_CONNECTED" and weight.dtype == "float32" and rows.shape[1] % KERNEL_BLOCK == 0:
            live = _live(rows, KERNEL_BLOCK)
            if live.mean() <= KERNEL_SHARE:
                return *self._sparsity(weight, rows, live, KERNEL_BLOCK), True
        sizes = {}
        for block in BLOCKS:
            if rows.shape[1] % block == 0:
                live = _live(rows, block)
                index = _index_type(rows.shape[1] // block - 1).itemsize
                segment = _index_type(int(live.sum())).itemsize
                sizes[block] = int(live.sum()) * (block * rows.itemsize + index) + (len(rows) + 1) * segment
        block = min(sizes, key=lambda block: sizes[block])
        if sizes[block] > SPARSE_SHARE * rows.nbytes:
            return None
        return *self._sparsity(weight, rows, _live(rows, block), block), False

    def _sparsity(self, weight: Value, rows: Any, live: Any, block: int) -> tuple[Any, Any]:
        schema, rank = self.schema, len(weight.shape)
        parameters = schema.SparsityParametersT()
        blocked = block > 1
        parameters.traversalOrder = list(range(rank + blocked))
        if blocked:
            parameters.blockMap = [rank - 1]
        parameters.dimMetadata = [self._dense_axis(size) for size in weight.shape[:-1]]
        axis = schema.DimensionMetadataT()
        axis.format = schema.DimensionType.SPARSE_CSR
        axis.arraySegmentsType, axis.arraySegments = self._vector(np.concatenate([[0], np.cumsum(live.sum(1))]))
        axis.arrayIndicesType, axis.arrayIndices = self._vector(np.nonzero(live)[1])
        parameters.dimMetadata.append(axis)
        if blocked:
            parameters.dimMetadata.append(self._dense_axis(block))
        numbers = rows.reshape(len(rows), -1, block)[live].reshape(-1)
        return numbers, parameters

    def _dense_axis(self, size: int) -> Any:
        axis = self.schema.DimensionMetadataT()
        axis.format, axis.denseSize = self.schema.DimensionType.DENSE, size
        return axis

    def _vector(self, numbers: Any) -> tuple[Any, Any]:
        dtype = _index_type(int(numbers.max(initial=0)))
        name = {1: "Uint8Vector", 2: "Uint16Vector", 4: "Int32Vector"}[dtype.itemsize]
        vector = getattr(self.schema, f"{name}T")()
        vector.values = numbers.astype(dtype)
        return getattr(self.schema.SparseIndexVector, name), vector

    def bytes(self, metadata: Mapping[str, bytes]) -> bytes:
        schema = self.schema
        graph = schema.SubGraphT()
        graph.name = b"main"
        graph.inputs = [self._tensor(value) for value in self.net.inputs]
        operators = [self._operator(operation) for operation in self.operations]
        graph.outputs = [self._tensor(value) for value in self.net.outputs]
        graph.operators, graph.tensors = operators, self.table
        model = schema.ModelT()
        model.version, model.description, model.subgraphs = 3, b"smartprune", [graph]
        model.operatorCodes = [self._code(*key) for key in self.codes]
        model.signatureDefs = [self._signature()]
        model.metadata = []
        for name, data in metadata.items():
            entry = schema.MetadataT()
            entry.name, entry.buffer = name.encode(), self._buffer(np.frombuffer(data, np.uint8))
            model.metadata.append(entry)
        model.buffers = self.buffers
        builder = importlib.import_module("flatbuffers").Builder(1 << 16)
        builder.Finish(model.Pack(builder), IDENTIFIER)
        return bytes(builder.Output())

    def _signature(self) -> Any:
        signature = self.schema.SignatureDefT()
        signature.signatureKey, signature.subgraphIndex = b"serving_default", 0
        signature.inputs = self._named(self.net.inputs)
        signature.outputs = self._named(self.net.outputs)
        return signature

    def _named(self, values: Sequence[Value]) -> list[Any]:
        out = []
        for value in values:
            entry = self.schema.TensorMapT()
            entry.name, entry.tensorIndex = value.name.encode(), self._tensor(value)
            out.append(entry)
        return out

    def _buffer(self, array: Any) -> int:
        data = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        digest = hashlib.sha256(data.tobytes()).digest()
        if digest not in self.by_digest:
            buffer = self.schema.BufferT()
            buffer.data = data
            self.by_digest[digest] = len(self.buffers)
            self.buffers.append(buffer)
        return self.by_digest[digest]

    def _tensor(self, value: Value) -> int:
        if id(value) not in self.tensors:
            tensor = self.schema.TensorT()
            tensor.name, tensor.shape = value.name.encode(), list(value.shape)
            tensor.type = getattr(self.schema.TensorType, value.dtype.upper())
            numbers, tensor.sparsity = self.sparse.get(id(value), (value.array, None))
            tensor.buffer = 0 if numbers is None else self._buffer(numbers)
            if value.quantized is not None:
                quantization = self.schema.QuantizationParametersT()
                quantization.scale = np.asarray(value.quantized.scale, np.float32)
                quantization.zeroPoint = np.full(len(quantization.scale), value.quantized.zero_point, np.int64)
                quantization.quantizedDimension = value.quantized.axis
                tensor.quantization = quantization
            self.tensors[id(value)] = len(self.table)
            self.table.append(tensor)
        return self.tensors[id(value)]

    def _operator(self, operation: Operation) -> Any:
        operator = self.schema.OperatorT()
        operator.inputs = [-1 if value is None else self._tensor(value) for value in operation.inputs]
        operator.outputs = [self._tensor(value) for value in operation.outputs]
        key = (operation.code, self._version(operation))
        operator.opcodeIndex = self.codes.setdefault(key, len(self.codes))
        if operation.table:
            options = getattr(self.schema, f"{operation.table}T")()
            for name, value in operation.options.items():
                setattr(options, name, getattr(getattr(self.schema, ENUMS[name]), value) if name in ENUMS else value)
            operator.builtinOptionsType = getattr(self.schema.BuiltinOptions, operation.table)
            operator.builtinOptions = options
        return operator

    def _version(self, operation: Operation) -> int:
        if operation.code == "FULLY_CONNECTED" and id(operation.inputs[1]) in self.sparse:
            return SPARSE_LINEAR_VERSION
        return VERSIONS.get(operation.code, (1, 1))[any(value and value.dtype == "int8" for value in operation.inputs)]

    def _code(self, name: str, version: int) -> Any:
        code = self.schema.OperatorCodeT()
        code.builtinCode = getattr(self.schema.BuiltinOperator, name)
        code.deprecatedBuiltinCode = min(code.builtinCode, 127)
        code.version = version
        return code


def _live(rows: Any, block: int) -> Any:
    """Which blocks along the last axis hold a number other than zero, bool [rows, blocks]."""
    live = (rows != 0).reshape(len(rows), -1, block).any(2)
    live[0, 0] = live[0, 0] or not live.any()  # a tensor without numbers would not be constant for LiteRT
    return live


def _index_type(largest: int) -> Any:
    return np.dtype(np.uint8 if largest < 1 << 8 else np.uint16 if largest < 1 << 16 else np.int32)
