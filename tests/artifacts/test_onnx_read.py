"""ONNX files of any origin: weights are found by the nodes that use them, and damaged files are refused."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import zoo
from helpers.pruned_models import model_and_receipt
from smartprune import files
from smartprune.artifacts import onnx_read as onnxfile
from smartprune.artifacts.onnx_read import read_onnx
from smartprune.artifacts.source import read_source
from smartprune.core.block import Block

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402


def random_sparse(shape: tuple[int, ...], block: Block, groups: int = 1, transposed: bool = False) -> np.ndarray:
    grid = block.grid(shape, groups, transposed)
    values = torch.randn(shape) + 3
    return torch.where(grid.expand(torch.rand(grid.n) < 0.4), values, 0.0).numpy()


def graph(nodes: list[Any], arrays: dict[str, np.ndarray], **options: Any) -> Any:
    """A model of nodes and stored arrays. Shapes need not match, because the model is never run."""
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y")]
    return helper.make_model(helper.make_graph(nodes, "g", info[:1], info[1:], tensors), **options)


def write_model(model: Any, path: Path) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


BLOCK = Block(8, 4)


def sparse_tensor(array: np.ndarray, by_axis: bool) -> Any:
    """The nonzero values and their indices: flat indices, or one per axis."""
    places = np.argwhere(array) if by_axis else np.flatnonzero(array)
    values = numpy_helper.from_array(array[array != 0], "w")
    return helper.make_sparse_tensor(values, numpy_helper.from_array(places.astype(np.int64), "places"), array.shape)


def count_zero_blocks(weight: np.ndarray, groups: int = 1, swapped: bool = False) -> int:
    """The number of zero blocks of 8 output x 4 input channels, counted with loops."""
    weight = weight.reshape(groups, -1, *weight.shape[1:])
    weight = weight.swapaxes(1, 2) if swapped else weight  # (group, out, in, *kernel)
    count = 0
    for g in range(groups):
        for o in range(0, weight.shape[1], 8):
            for i in range(0, weight.shape[2], 4):
                part = weight[g, o : o + 8, i : i + 4]
                count += int((~part.reshape(*part.shape[:2], -1).any((0, 1))).sum())
    return count


Case = tuple[list[Any], dict[str, np.ndarray], int]  # nodes, arrays and the number of zero blocks


def float_cases() -> dict[str, Case]:
    """Graphs with float weights."""
    torch.manual_seed(3)
    cases: dict[str, Case] = {}
    w = random_sparse((24, 10, 3, 3), BLOCK)
    cases["conv"] = [helper.make_node("Conv", ["x", "w", "b"], ["y"])], {"w": w, "b": np.ones(24, np.float32)}, count_zero_blocks(w)
    w = random_sparse((24, 6, 3, 3), BLOCK, 2)
    cases["fused conv"] = (
        [helper.make_node("FusedConv", ["x", "w"], ["y"], group=2, domain="com.microsoft")],
        {"w": w},
        count_zero_blocks(w, 2),
    )
    w = random_sparse((24, 6, 3), BLOCK, 2)
    cases["grouped"] = [helper.make_node("Conv", ["x", "w"], ["y"], group=2)], {"w": w}, count_zero_blocks(w, 2)
    w = random_sparse((24, 20, 2, 2), BLOCK, 3, True)
    cases["transposed"] = [helper.make_node("ConvTranspose", ["x", "w"], ["y"], group=3)], {"w": w}, count_zero_blocks(w, 3, True)
    w = random_sparse((40, 20), BLOCK)
    cases["gemm"] = [helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)], {"w": w}, count_zero_blocks(w)
    cases["gemm in out"] = [helper.make_node("Gemm", ["x", "w"], ["y"])], {"w": w.T.copy()}, count_zero_blocks(w)
    cases["matmul"] = [helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": w.T.copy()}, count_zero_blocks(w)
    cases["matmul from the left"] = [helper.make_node("MatMul", ["w", "x"], ["y"])], {"w": w}, count_zero_blocks(w)
    transpose = helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0])
    cases["behind a transpose"] = [transpose, helper.make_node("MatMul", ["x", "t"], ["y"])], {"w": w}, count_zero_blocks(w)
    rename = helper.make_node("Identity", ["w"], ["t"])
    cases["renamed"] = [rename, helper.make_node("Gemm", ["x", "t"], ["y"], transB=1)], {"w": w}, count_zero_blocks(w)
    constant = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(w))
    cases["constant"] = [constant, helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)], {}, count_zero_blocks(w)
    sparse = helper.make_node("Constant", [], ["w"], sparse_value=sparse_tensor(w, by_axis=True))
    cases["sparse constant"] = [sparse, helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)], {}, count_zero_blocks(w)
    transpose, matmul = helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]), helper.make_node("MatMul", ["x", "t"], ["y"])
    cases["constant behind a transpose"] = [constant, transpose, matmul], {}, count_zero_blocks(w)
    cast = helper.make_node("Cast", ["w"], ["t"], to=TensorProto.FLOAT)
    cases["cast"] = [cast, helper.make_node("MatMul", ["x", "t"], ["y"])], {"w": w.T.astype(np.float16)}, count_zero_blocks(w)
    microsoft = {"domain": "com.microsoft"}
    cases["fused gemm"] = [helper.make_node("FusedGemm", ["x", "w"], ["y"], transB=1, **microsoft)], {"w": w}, count_zero_blocks(w)
    cases["fused matmul"] = (
        [helper.make_node("FusedMatMul", ["x", "w"], ["y"], transB=1, **microsoft)],
        {"w": w},
        count_zero_blocks(w),
    )
    half = w.astype(np.float16)
    cases["half"] = [helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)], {"w": half}, count_zero_blocks(half)
    return cases


def quantized_cases() -> dict[str, Case]:
    """Graphs with weights in 8-bit integers."""
    torch.manual_seed(4)
    cases: dict[str, Case] = {}
    w = random_sparse((40, 20), BLOCK)
    q = np.round(w * 9).astype(np.int8)
    stored = {"w": q.astype(np.uint8) + np.uint8(128), "z": np.full((), 128, np.uint8), "s": np.float32(0.1).reshape(())}
    constants = [helper.make_node("Constant", [], [key], value=numpy_helper.from_array(stored[key])) for key in stored]
    scale = helper.make_node("DequantizeLinear", ["w", "s", "z"], ["t"])
    cases["scaled constant"] = [*constants, scale, helper.make_node("Gemm", ["x", "t"], ["y"], transB=1)], {}, count_zero_blocks(q)
    qgemm = helper.make_node("QGemm", ["x", "s", "z", "w", "s", "wz"], ["y"], transB=1, domain="com.microsoft")
    points = np.arange(40, dtype=np.uint8)[:, None]
    scalars_and_points = {"s": np.float32(0.1).reshape(()), "z": np.zeros((), np.uint8), "wz": points.reshape(-1)}
    cases["qgemm"] = [qgemm], {"w": (q.astype(np.int16) + points).astype(np.uint8), **scalars_and_points}, count_zero_blocks(q)
    gemm = helper.make_node("Gemm", ["x", "t"], ["y"], transB=1)
    scale = {"s": np.full(40, 0.1, np.float32)}
    dequantize = helper.make_node("DequantizeLinear", ["w_quantized", "s", "z"], ["t"], axis=0)
    cases["int8"] = [dequantize, gemm], {"w_quantized": q, **scale, "z": np.zeros(40, np.int8)}, count_zero_blocks(q)
    point = np.arange(40, dtype=np.uint8)[:, None]
    shifted = {"w_quantized": (q.astype(np.int16) + point).astype(np.uint8), **scale, "z": point.reshape(-1)}
    cases["int8 with zero points"] = [dequantize, gemm], shifted, count_zero_blocks(q)
    quantize = helper.make_node("QuantizeLinear", ["w", "s", "z"], ["w_quantized"], axis=0)
    cases["quantization-aware training"] = (
        [quantize, dequantize, gemm],
        {"w": w, **scale, "z": np.zeros(40, np.int8)},
        count_zero_blocks(w),
    )
    w = random_sparse((24, 10, 3, 3), BLOCK)
    q = np.round(w * 9).astype(np.int8)
    scalars = {"s": np.float32(0.1).reshape(()), "z": np.zeros((), np.int8)}
    qlinear = helper.make_node("QLinearConv", ["x", "s", "z", "w", "s", "wz", "s", "z"], ["y"])
    cases["qlinear"] = [qlinear], {"w": q, **scalars, "wz": np.zeros(24, np.int8)}, count_zero_blocks(q)
    return cases


ORIGINS = float_cases() | quantized_cases()


@pytest.mark.parametrize("case", ORIGINS)
def test_weights_of_other_exporters_are_read(case: str, tmp_path: Path) -> None:
    nodes, arrays, zero = ORIGINS[case]
    path = write_model(graph(nodes, arrays), tmp_path / "foreign.onnx")
    result = sp.verify(path, block=BLOCK)
    assert (result.zero, len(result.layers)) == (zero, 1)
    assert 0 < zero < result.blocks
    assert sp.report(path, BLOCK).blocks.removed == zero
    assert sp.verify(path).block == BLOCK  # found without block=
    assert f"sparse in blocks of {BLOCK}" in str(sp.verify(path))
    packed = tmp_path / "packed"
    sp.pack(path, packed, BLOCK)
    assert sp.verify(packed).zero == zero


def test_sparse_initializers_are_read(tmp_path: Path) -> None:
    weight = random_sparse((24, 10, 3, 3), BLOCK)
    node = helper.make_node("Conv", ["x", "w"], ["y"])
    dense = sp.verify(write_model(graph([node], {"w": weight}), tmp_path / "dense.onnx"), BLOCK)
    for by_axis in (False, True):
        model = graph([node], {})
        model.graph.sparse_initializer.append(sparse_tensor(weight, by_axis))
        assert sp.verify(write_model(model, tmp_path / "sparse.onnx"), BLOCK).layers == dense.layers
    for dims, place in (([24, 10, 3, 2], 1440), ([2**40, 2**20], 0), ([24, -1], 0), ([2, 2], -1)):
        model = graph([node], {})
        values, places = numpy_helper.from_array(np.ones(1, np.float32), "w"), numpy_helper.from_array(np.array([place]), "places")
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, dims))
        with pytest.raises(sp.SmartpruneError, match=r"bad\.onnx: w "):
            sp.verify(write_model(model, tmp_path / "bad.onnx"), BLOCK)


def test_weights_in_branches_are_read(tmp_path: Path) -> None:
    """Branches may have different weights of the same name, and may share a weight from outside."""
    arrays = [random_sparse((24, 10, 3, 3), BLOCK) for _ in range(3)]
    branches = []
    for i in range(2):
        nodes = [helper.make_node("Conv", ["x", "w"], [f"a{i}"]), helper.make_node("Conv", ["x", "shared"], [f"b{i}"])]
        out = [helper.make_tensor_value_info(f"b{i}", TensorProto.FLOAT, None)]
        branches.append(helper.make_graph(nodes, f"branch{i}", [], out, [numpy_helper.from_array(arrays[i], "w")]))
    node = helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])
    path = write_model(graph([node], {"shared": arrays[2]}), tmp_path / "branches.onnx")
    result = sp.verify(path, BLOCK)
    assert [layer.weight for layer in result.layers] == ["w", "shared", "w#2"]
    tensors = {str(i): torch.from_numpy(array) for i, array in enumerate(arrays)}
    assert result.zero == sp.verify(tensors, BLOCK).zero

    model = nn.Module()
    model.w, model.shared = (nn.Parameter(torch.from_numpy(array)) for array in (arrays[0], arrays[2]))
    with pytest.raises(sp.SmartpruneError, match="its branches hold several weights called w; read it"):
        read_source(path, model)
    branches[1].initializer[0].CopyFrom(numpy_helper.from_array(arrays[0], "w"))
    node = helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])
    assert read_source(write_model(graph([node], {"shared": arrays[2]}), path), model).model is model


def test_duplicate_names_and_indices_are_refused() -> None:
    """Readers differ in which duplicate they use. A generated name must not hide a weight that already has it."""
    use, zero, one = helper.make_node("MatMul", ["x", "w"], ["y"]), np.zeros((4, 4), np.float32), np.eye(4, dtype=np.float32)
    twice = graph([use], {"w": zero})
    twice.graph.initializer.append(numpy_helper.from_array(one, "w"))
    both = graph([use], {"w": one})
    both.graph.sparse_initializer.append(sparse_tensor(one, by_axis=True))
    for model in (twice, both):
        with pytest.raises(sp.SmartpruneError, match="two tensors of a graph have one name"):
            onnxfile.parse_onnx(model.SerializeToString(), "twice")
    values = numpy_helper.from_array(np.array([1, 0], np.float32), "w")
    for shape, places in (([4, 4], np.array([5, 5])), ([4, 4], np.array([[1, 1], [1, 1]])), ([], np.zeros((2, 0), np.int64))):
        model = graph([use], {})
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, numpy_helper.from_array(places, "places"), shape))
        with pytest.raises(sp.SmartpruneError, match="w has two numbers for one place"):
            onnxfile.parse_onnx(model.SerializeToString(), "twice")
    branches = [helper.make_graph([use], "branch", [], [], [numpy_helper.from_array(one, "w")]) for _ in range(2)]
    node = helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])
    hidden = graph([helper.make_node("MatMul", ["x", "w#2"], ["y"]), node], {"w#2": zero})
    weights = onnxfile.parse_onnx(hidden.SerializeToString(), "hidden").weights
    assert {name: int(weight.tensor.sum()) for name, weight in weights.items()} == {"w#2": 0, "w": 4, "w#3": 4}


def test_sparse_tensors_are_decoded_once_and_limited_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse tensor can claim any size. Each one is decoded once, and their total size is limited."""
    monkeypatch.setattr(files, "FREE_BYTES", 2 * 4 << 20)
    monkeypatch.setattr(files, "MAX_GROWTH", 1)
    one = sparse_tensor(np.eye(1 << 10, dtype=np.float32), by_axis=False)
    for constant in (False, True):
        nodes = [helper.make_node("Constant", [], ["w"], sparse_value=one)] if constant else []
        use = helper.make_node("MatMul", ["x", "w"], ["y"])
        branches = [helper.make_graph([use], "branch", [], []) for _ in range(4)]
        nodes += [use, use, use, *(helper.make_node("If", ["c"], ["y"], then_branch=branch) for branch in branches)]
        model = graph(nodes, {})
        model.graph.sparse_initializer.extend([] if constant else [one])
        assert [*onnxfile.parse_onnx(model.SerializeToString(), "one").weights] == ["w"]

    large = graph([helper.make_node("MatMul", ["x", name], ["y"]) for name in "uvw"], {})
    for name in "uvw":
        one.values.name = name
        large.graph.sparse_initializer.append(one)
    with pytest.raises(sp.SmartpruneError, match=r"large: w has the shape \[1024, 1024\], and the sparse tensors"):
        onnxfile.parse_onnx(large.SerializeToString(), "large")


def test_other_tensors_are_not_weights(tmp_path: Path) -> None:
    arrays = {"w": random_sparse((16, 16), BLOCK), "table": np.zeros((100, 50), np.float32), "axes": np.zeros(2, np.int64)}
    nodes = [helper.make_node("Add", ["x", "table"], ["a"]), helper.make_node("MatMul", ["a", "w"], ["y"])]
    path = write_model(graph(nodes, arrays), tmp_path / "m.onnx")
    assert [layer.name for layer in sp.verify(path, BLOCK).layers] == ["w"]
    assert [(s.name, s.reason) for s in sp.report(path, BLOCK).skipped] == [
        ("table", "not the weight of a convolution or linear layer")
    ]


def test_a_kernel_with_reversed_axes_is_not_a_weight(tmp_path: Path) -> None:
    """A Transpose without ``perm`` reverses all axes, so only with two axes is the result a plain (in, out) matrix."""
    nodes = [helper.make_node("Transpose", ["w"], ["t"]), helper.make_node("Conv", ["x", "t"], ["a"])]
    nodes.append(helper.make_node("Conv", ["a", "plain"], ["y"]))
    arrays = {"w": random_sparse((3, 3, 10, 24), BLOCK), "plain": random_sparse((24, 24, 1, 1), BLOCK)}
    path = write_model(graph(nodes, arrays), tmp_path / "foreign.onnx")
    for rows in (sp.verify(path, BLOCK).layers, sp.report(path, BLOCK).layers):
        assert [row.weight for row in rows] == ["plain"]
    assert [row.name for row in sp.report(path, BLOCK).skipped] == ["w"]


def test_files_of_the_torchscript_exporter_are_read(tmp_path: Path) -> None:
    """The older exporter passes weights through Identity and Transpose nodes."""
    import warnings

    torch.manual_seed(0)
    for name in ("plain_cnn", "transformer_block"):
        model, receipt = model_and_receipt(name)
        path = tmp_path / f"{name}.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False}
            torch.onnx.export(model.eval(), (zoo.SMALL[name]()[1],), path, dynamo=False, **options)
        result = sp.verify(path, receipt=receipt)
        assert result.ok, str(result)
        assert result.mask_hash == receipt.mask_hash


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.onnx"
    weight = numpy_helper.from_array(np.zeros((16, 16), np.float32), "w")
    node = helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)

    def check_refused(message: str, model: Any) -> None:
        with pytest.raises(sp.SmartpruneError, match=message) as caught:
            sp.verify(write_model(model, path), BLOCK)
        assert "bad.onnx" in str(caught.value)

    for dims in ([2**40, 2**40], [-1, 16], [16, 15], [2**31, 2**31], [2**62, 4], [1] * 40):
        tensor = copy.deepcopy(weight)
        del tensor.dims[:]
        tensor.dims.extend(dims)
        model = graph([node], {})
        model.graph.initializer.append(tensor)
        check_refused("w ", model)
    external = copy.deepcopy(weight)
    external.ClearField("raw_data")
    external.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "/etc/passwd"), ("offset", "0"), ("length", "1024")):
        external.external_data.add(key=key, value=value)
    model = graph([node], {})
    model.graph.initializer.append(external)
    check_refused("the data of w is in another file, which is not read", model)
    unknown = copy.deepcopy(weight)
    unknown.data_type = 999
    model = graph([node], {})
    model.graph.initializer.append(unknown)
    check_refused("w cannot be read", model)
    check_refused("no Conv, ConvTranspose, Gemm or MatMul node has a stored weight", graph([], {"w": np.zeros((4, 4), np.float32)}))
    loop = [helper.make_node("Identity", ["a"], ["b"]), helper.make_node("Identity", ["b"], ["a"])]
    check_refused("no Conv", graph([*loop, helper.make_node("MatMul", ["x", "a"], ["y"])], {}))
    groups = graph([helper.make_node("Conv", ["x", "w"], ["y"], group=-3)], {"w": np.zeros((16, 4, 1, 1), np.float32)})
    check_refused("cannot be divided into -3 groups", groups)
    model = graph([helper.make_node("Gemm", ["x", "w"], ["y"])], {"w": np.ones((16, 16), np.float32)})
    helper.set_model_props(model, {"smartprune.receipt": "[" * 5000})
    check_refused("smartprune.receipt: not readable as JSON", model)
    helper.set_model_props(model, {"smartprune.block": "0x0"})
    check_refused("smartprune.block: block", model)
    path.write_bytes(b"")
    with pytest.raises(sp.SmartpruneError, match=r"bad\.onnx"):
        sp.verify(path)


def test_fuzzed_files_are_read_or_refused(exported: Any, tmp_path: Path) -> None:
    rng = random.Random(0)
    path = tmp_path / "fuzz.onnx"
    nodes, arrays, _ = ORIGINS["int8 with zero points"]
    bases = [exported["unet"][3].read_bytes(), graph(nodes, arrays).SerializeToString()]
    refused = 0
    for i in range(2500):
        data = bytearray(bases[i % 2])
        kind = rng.random()
        if kind < 0.2:
            del data[rng.randrange(len(data)) :]
        elif kind < 0.4:
            at = rng.randrange(len(data))
            data[at:at] = rng.randbytes(rng.choice((1, 4, 20)))
        else:
            length = min(len(data), 3000) if kind < 0.9 else len(data)
            for _ in range(rng.choice((1, 1, 2, 8))):
                data[rng.randrange(length) if kind < 0.6 else -1 - rng.randrange(length)] = rng.randrange(256)
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        try:
            printed = str(sp.verify(path, block=BLOCK))
        except sp.SmartpruneError as error:
            if "fuzz.onnx" not in str(error):
                raise
            refused += 1
        else:
            assert printed
    assert 400 < refused < 2500


def test_reading_does_not_run_the_graph(exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a foreign graph was run")

    monkeypatch.setattr(runtime, "InferenceSession", fail)
    monkeypatch.setattr(onnx.checker, "check_model", fail)
    assert read_onnx(exported["unet"][3]).weights.keys() >= {"up1.weight"}
