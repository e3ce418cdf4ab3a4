"""ONNX: exported files match their models, and files of any origin are read."""

from __future__ import annotations

import base64
import copy
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import smartprune as sp
from helpers import zoo
from helpers.pruned_models import model_and_receipt
from helpers.training_jobs import run_cli
from smartprune.artifacts import onnx_read as onnxfile
from smartprune.artifacts.onnx_read import read_onnx
from smartprune.artifacts.source import read_source
from smartprune.cli import main
from smartprune.core.block import Block
from smartprune.pruning.receipt import make_receipt

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def run_onnx(path: Path, x: Tensor) -> Tensor:
    session = runtime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onnx")


@pytest.fixture(scope="module")
def exported(folder: Path) -> dict[str, tuple[nn.Module, sp.Receipt, Any, Path]]:
    """Three models, exported once: batch normalization, groups, transposed convolutions, matrices."""
    exports = {}
    for name in ("mobilenet_block", "transformer_block", "unet"):
        torch.manual_seed(0)
        model, receipt = model_and_receipt(name)
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):  # as if trained
                    for tensor in (module.weight, module.bias, module.running_mean):
                        tensor.normal_()
                    module.running_var.uniform_(0.5, 2)
        path = folder / f"{name}.onnx"
        model.train()
        exports[name] = (model, receipt, sp.export_onnx(model, path, zoo.SMALL[name]()[1], receipt=receipt), path)
    return exports


# --- exported files


@pytest.mark.parametrize("name", ["mobilenet_block", "transformer_block", "unet"])
def test_exported_outputs_and_zeros_match_the_model(name: str, exported: Any) -> None:
    model, receipt, export, path = exported[name]
    assert model.training  # export restores the mode
    graph = onnx.load(path)
    onnx.checker.check_model(graph, full_check=True)
    assert not any(node.op_type == "BatchNormalization" for node in graph.graph.node)
    assert export.batchnorms == 0
    plain = copy.deepcopy(model).eval()
    for batch in (1, 2, 7):
        x = torch.randn(batch, 3, 8, 8)
        with torch.no_grad():
            expected = plain(x)
        assert (run_onnx(path, x) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert 0 <= export.difference <= 1e-5 * export.scale
    result = sp.verify(path)
    assert result.ok, str(result)
    assert result.mask_hash == receipt.mask_hash
    assert result.zero == receipt.blocks.removed
    assert export.blocks.removed == sp.verify(model, block=(4, 4)).zero
    assert json.loads(json.dumps(export.to_json()))["blocks"]["removed"] == export.blocks.removed
    assert "every zero block of the model is zero in the file" in str(export)


def test_layers_that_store_inputs_first_are_checked_against_receipt_and_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), zoo.Conv1D(12, 12), nn.ReLU(), zoo.Conv1D(8, 12), nn.Linear(8, 4))
    plan = sp.plan(model, (4, 3), include="*")
    mask = torch.arange(plan.n) % 3 != 0
    with torch.no_grad():
        for layer in plan.layers:
            model.get_parameter(layer.weight).mul_(layer.grid.expand(mask[layer.start : layer.stop].float()))
    receipt = make_receipt(plan, dict(model.named_parameters()), mask, "magnitude")
    x = torch.randn(2, 6)
    export = sp.export_onnx(model, tmp_path / "plain.onnx", x, (4, 3))
    sp.export_onnx(model, tmp_path / "pruned.onnx", x, receipt=receipt)
    assert export.blocks == receipt.blocks
    for path in (tmp_path / "plain.onnx", tmp_path / "pruned.onnx"):
        assert sp.verify(path, receipt=receipt).mask_hash == receipt.mask_hash
        with_model = sp.verify(path, (4, 3), model=model)
        assert (with_model.ok, with_model.zero) == (True, receipt.blocks.removed)
    assert sp.verify(tmp_path / "pruned.onnx").mask_hash == receipt.mask_hash
    without_model = sp.verify(tmp_path / "plain.onnx", (4, 3))  # as (out, in), so blocks of 4 outputs and 3 inputs all the same
    assert (without_model.zero, without_model.assumed) == (receipt.blocks.removed, ())


def test_exported_file_has_no_local_paths(exported: Any) -> None:
    for _, _, _, path in exported.values():
        data = path.read_bytes()
        assert b"/zoo.py" not in data
        assert b"stack_trace" not in data
        assert str(Path.cwd()).encode() not in data


def test_mask_file_matches_the_initializers(exported: Any) -> None:
    """Compares the documented reader with a loop over the values in the ONNX file."""
    scope: dict[str, Any] = {}
    exec(next(text for text in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "def read_mask" in text), scope)
    for name, (_, _, export, path) in exported.items():
        arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
        mask = scope["read_mask"](export.mask_path)
        entries = {entry["name"]: entry for entry in json.loads(Path(export.mask_path).read_text())["weights"]}
        assert len(mask) == 6, name
        for weight, present in mask.items():
            array, entry = arrays[weight], entries[weight]
            assert list(array.shape) == entry["shape"]
            assert entry["present"] == present.sum()
            channels = array.shape[0] // entry["groups"]
            blocks_per_group = math.ceil(channels / 4)
            expected = np.zeros(present.shape, dtype=bool)
            for index, value in np.ndenumerate(array):
                group, inner = divmod(index[0], channels)
                expected[(group * blocks_per_group + inner // 4, index[1] // 4, *index[2:])] |= value != 0
            assert np.array_equal(present, expected), (name, weight)
    transposed, matrix, grouped = (
        _entry(exported, *where)
        for where in (("unet", "up1.weight"), ("transformer_block", "mlp.0.weight"), ("mobilenet_block", "grouped.weight"))
    )
    assert (transposed["node"], transposed["transposed"]) == ("ConvTranspose", True)
    assert (matrix["node"], matrix["transposed"], matrix["shape"]) == ("MatMul", True, [16, 36])
    assert (grouped["node"], grouped["transposed"], grouped["groups"]) == ("Conv", False, 2)
    fields = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PAGE.split("# The mask file")[1].split("An entry:")[1], re.M)
    assert sorted(re.findall(r"\w+", " ".join(fields))) == sorted(transposed)


def _entry(exported: Any, name: str, weight: str) -> dict[str, Any]:
    weights = json.loads(Path(exported[name][2].mask_path).read_text())["weights"]
    return next(entry for entry in weights if entry["name"] == weight)


def test_int8_keeps_zero_blocks_and_accuracy(exported: Any, folder: Path) -> None:
    model, receipt, _, _ = exported["unet"]
    path = folder / "int8.onnx"
    torch.manual_seed(1)
    batches = [torch.randn(8, 3, 8, 8) for _ in range(4)]
    export = sp.export_onnx(model, path, batches[0], receipt=receipt, int8=True, calibration=batches)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    for row in receipt.layers:
        weight = stored[f"{row.weight}_quantized"]
        assert weight.dtype == np.int8
        assert not stored[f"{row.weight}_zero_point"].any()
        removed = ~row.cut(receipt.block).expand(row.mask()).numpy()
        assert removed.any()
        assert not weight[removed].any()
    result = sp.verify(path)
    assert result.ok, str(result)
    assert result.zero >= receipt.blocks.removed
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(batches[0])
    error = float((run_onnx(path, batches[0]) - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    assert 0 < error < 0.1
    assert export.int8_error is not None
    assert abs(error - export.int8_error) < 0.03
    assert "int8     outputs differ from float by" in str(export)
    assert path.stat().st_size < 0.7 * exported["unet"][3].stat().st_size


class ExportsDifferently(nn.Module):
    """Computes something else while it is exported."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return self.conv(x) * 1.01
        return self.conv(x)


def test_wrong_arguments_raise(folder: Path, tmp_path: Path) -> None:
    model, receipt = model_and_receipt()
    x, path = torch.randn(2, 3, 8, 8), tmp_path / "no.onnx"
    with pytest.raises(sp.SmartpruneError, match="give block="):
        sp.export_onnx(model, path, x)
    with pytest.raises(sp.SmartpruneError, match=r"model is a str; give a torch\.nn\.Module"):
        sp.export_onnx("model.safetensors", path, x, (4, 4))  # type: ignore[arg-type]
    with pytest.raises(sp.SmartpruneError, match=r"receipt is a str; give a Receipt, such as Receipt\.load"):
        sp.export_onnx(model, path, x, receipt="receipt.json")  # type: ignore[arg-type]
    with pytest.raises(sp.SmartpruneError, match="int8 needs calibration="):
        sp.export_onnx(model, path, x, (4, 4), int8=True)
    with pytest.raises(sp.SmartpruneError, match="calibration= is for int8"):
        sp.export_onnx(model, path, x, (4, 4), calibration=[x])
    for wrong in (x[:, :, 1:], x.double(), x.long()):
        with pytest.raises(sp.SmartpruneError, match=r"holds samples of 3x[78]x8 \w+, and the example's are 3x8x8 float32"):
            sp.export_onnx(model, path, x, (4, 4), int8=True, calibration=[x, wrong])
    with pytest.raises(sp.SmartpruneError, match="calibration= holds NaN or infinity"):
        sp.export_onnx(model, path, x, (4, 4), int8=True, calibration=[x, x * torch.nan])
    with pytest.raises(sp.SmartpruneError, match="an example is a tensor with a batch axis"):
        sp.export_onnx(model, path, torch.tensor(1.0), (4, 4))
    with pytest.raises(sp.SmartpruneError, match=r"the model failed on inputs of 2x4x8x8"):
        sp.export_onnx(model, path, torch.randn(2, 4, 8, 8), (4, 4))
    with pytest.raises(sp.SmartpruneError, match="no weight that can be cut"):
        sp.export_onnx(nn.BatchNorm2d(3), path, x, (4, 4))
    with pytest.raises(sp.SmartpruneError, match="differ from the model's by"):
        sp.export_onnx(ExportsDifferently(), path, x, (4, 4))
    with pytest.raises(sp.SmartpruneError, match=r"no must end in \.onnx"):
        sp.export_onnx(model, tmp_path / "no", x, (4, 4))
    with pytest.raises(sp.SmartpruneError, match=r"does not compute in bfloat16.*model\.float"):
        sp.export_onnx(copy.deepcopy(model).bfloat16(), path, x, (4, 4))
    with pytest.raises(sp.SmartpruneError, match=r"does not match its receipt: 3\.weight"):
        sp.export_onnx(zoo.plain_cnn()[0], path, x, receipt=receipt)
    masked, _ = zoo.plain_cnn()
    sp.attach(masked, sp.Smart(), block=(4, 4), sparsity=0.5, steps=3)
    with pytest.raises(sp.SmartpruneError, match=r"still being pruned; call smartprune\.bake"):
        sp.export_onnx(masked, path, x, (4, 4))
    assert list(tmp_path.iterdir()) == []  # nothing was written


def test_missing_packages_are_named(exported: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(sp.SmartpruneError, match=r"onnx is needed .* pip install 'smartprune\[onnx\]'"):
        sp.verify(exported["unet"][3])
    with pytest.raises(sp.SmartpruneError, match=r"smartprune\[onnx\]"):
        sp.export_onnx(model_and_receipt()[0], tmp_path / "x.onnx", torch.randn(2, 3, 8, 8), (4, 4))


def test_the_same_model_gives_the_same_file(exported: Any, tmp_path: Path) -> None:
    model, receipt, first, path = exported["mobilenet_block"]
    torch.manual_seed(0)
    second = sp.export_onnx(model, tmp_path / "second.onnx", zoo.mobilenet_block()[1], receipt=receipt)
    assert (tmp_path / "second.onnx").read_bytes() == path.read_bytes()
    assert Path(second.mask_path).read_bytes() == Path(first.mask_path).read_bytes()


class TwoInputsAndOutputs(nn.Module):
    """Two inputs, one of them integers, two outputs, and a fixed batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16)
        self.inner = nn.Linear(16, 24, bias=False)
        self.outer = nn.Linear(24, 8)

    def forward(self, x: Tensor, kind: Tensor) -> dict[str, Tensor]:
        y = torch.relu(self.inner(x.reshape(2, 3, 16) + self.table(kind)))
        return {"a": self.outer(y), "b": y.mean(-1)}


def test_several_inputs_and_outputs_and_a_fixed_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TwoInputsAndOutputs()
    with torch.no_grad():
        model.inner.weight[:8] = 0
    inputs = (torch.randn(2, 3, 16), torch.randint(0, 10, (2, 3)))
    with pytest.raises(sp.SmartpruneError, match="give dynamic_batch=False"):
        sp.export_onnx(model, tmp_path / "m.onnx", inputs, (8, 8))
    export = sp.export_onnx(model, tmp_path / "m.onnx", inputs, (8, 8), dynamic_batch=False)
    assert (export.blocks.removed, export.blocks.total) == (2, 2 * 3 + 3 * 1)
    graph = onnx.load(tmp_path / "m.onnx").graph
    assert [entry.name for entry in graph.input] == ["x", "kind"]
    assert [entry.name for entry in graph.output] == ["output", "output2"]
    result = sp.verify(tmp_path / "m.onnx")
    assert result.block == Block(8, 8)  # stored in the file
    assert [(layer.name, layer.zero) for layer in result.layers] == [("inner", 2), ("outer", 0)]  # not the embedding


class AuxiliaryHead(nn.Module):
    """Has a second head that is used only in training, like many segmentation networks."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.auxiliary = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 1), nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = torch.relu(self.body(x))
        return (self.head(y), self.auxiliary(y)) if self.training else self.head(y)


def test_unused_weights_are_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AuxiliaryHead()
    plan = sp.plan(model, (4, 4), 0.5, include="*")
    mask = (torch.arange(plan.n) % 2).bool()
    with torch.no_grad():
        for layer in plan.layers:
            model.get_parameter(layer.weight).mul_(layer.grid.expand(mask[layer.start : layer.stop].float()))
    receipt = make_receipt(plan, model.state_dict(), mask, "test")
    export = sp.export_onnx(model, tmp_path / "m.onnx", torch.randn(2, 3, 8, 8), receipt=receipt)
    assert export.missing == ("auxiliary.weight",)
    assert "1 weight (auxiliary.weight) is used by no node and not in the file" in str(export)
    assert "the receipt in the file also lists 1 weight (auxiliary.weight) that no node uses" in str(export)
    result = sp.verify(tmp_path / "m.onnx")
    assert result.ok
    assert result.receipt is not None
    assert (result.absent, result.mask_hash) == (("auxiliary.weight",), None)
    assert "1 weight of the receipt is not in the graph, because no node uses it: auxiliary.weight" in str(result)
    assert [layer.name for layer in result.layers] == ["body", "head"]
    other = sp.export_onnx(model, tmp_path / "other.onnx", torch.randn(2, 3, 8, 8), (4, 4))
    assert other.missing == ("auxiliary.weight",)
    assert not sp.verify(tmp_path / "other.onnx", receipt=receipt).ok  # this file does not say what it leaves out


class Words(nn.Module):
    """Takes keyword arguments, like the models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.outer = nn.Embedding(10, 16), nn.Linear(16, 24), nn.Linear(24, 8)

    def forward(
        self,
        ids: Tensor | None = None,
        mask: Tensor | None = None,
        scale: float = 1.0,
        mode: str = "sum",
        embedded: Tensor | None = None,
    ) -> Tensor:
        y = self.table(ids) if embedded is None else embedded
        y = self.outer(torch.relu(self.inner(y * scale)))
        y = y if mask is None else y * mask[..., None]
        return y.sum(1) if mode == "sum" else y.mean(1)


def test_an_example_may_hold_keyword_arguments(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Words()
    with torch.no_grad():
        model.inner.weight[:8] = 0
    ids, mask = torch.randint(0, 10, (2, 5)), torch.ones(2, 5)
    example = {"mask": mask, "scale": 3.0, "ids": ids, "mode": "mean", "embedded": None}
    export = sp.export_onnx(model, tmp_path / "m.onnx", example, (8, 8))
    assert (export.blocks.removed, export.blocks.total) == (2, 3 * 2 + 3)
    session = runtime.InferenceSession((tmp_path / "m.onnx").read_bytes(), providers=["CPUExecutionProvider"])
    assert [(entry.name, entry.shape[1:]) for entry in session.get_inputs()] == [("mask", [5]), ("ids", [5])]
    more = torch.randint(0, 10, (3, 5))
    (output,) = session.run(None, {"ids": more.numpy(), "mask": np.ones((3, 5), np.float32)})
    with torch.no_grad():
        expected = model(more, torch.ones(3, 5), scale=3.0, mode="mean")
    assert np.allclose(output, expected.numpy(), atol=1e-5)
    floats = {"embedded": torch.randn(4, 5, 16), "mask": torch.ones(4, 5)}
    int8 = sp.export_onnx(model, tmp_path / "int8.onnx", floats, (8, 8), int8=True, calibration=[dict(reversed(floats.items()))])
    assert int8.int8_error is not None
    with pytest.raises(sp.SmartpruneError, match="calibration= holds the inputs ids, and the example has embedded, mask"):
        sp.export_onnx(model, tmp_path / "b.onnx", floats, (8, 8), int8=True, calibration=[{"ids": ids}])
    with pytest.raises(sp.SmartpruneError, match="in the example 'scale' is a list; a dictionary holds the keyword arguments"):
        sp.export_onnx(model, tmp_path / "b.onnx", {"ids": ids, "scale": [3.0]}, (8, 8))


def test_inputs_of_a_variadic_model_are_numbered(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.inner = nn.Linear(4, 4)

        def forward(self, *images: Tensor) -> Tensor:
            return self.inner(images[0] + images[1] * self.weight)  # type: ignore[no-any-return]

    class OfWeight(Sum):
        def forward(self, weight: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(weight, other)

    inputs = (torch.randn(2, 4), torch.randn(2, 4))
    for model, names in ((Sum(), ["images_0", "images_1"]), (OfWeight(), ["weight_input", "other"])):
        sp.export_onnx(model, tmp_path / "m.onnx", inputs, (2, 2))
        assert [entry.name for entry in onnx.load(tmp_path / "m.onnx").graph.input] == names


def test_layers_of_constants_are_named_and_the_receipt_is_kept(tmp_path: Path) -> None:
    class PositionBias(nn.Module):
        """The exporter computes the bias once, because it does not depend on the input."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("positions", torch.randn(5, 8))
            self.bias, self.inner = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.bias(self.positions)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = PositionBias()
    sp.attach(model, sp.Magnitude(), block=(4, 4), sparsity=0.5, steps=1, include="*").step()
    receipt = sp.bake(model)
    export = sp.export_onnx(model, tmp_path / "m.onnx", torch.randn(2, 5, 8), receipt=receipt)
    assert export.missing == export.unlisted == ("bias.weight",)
    result = sp.verify(tmp_path / "m.onnx")
    assert (result.ok, result.absent) == (True, ("bias.weight",))
    assert result.receipt == receipt
    assert sp.report(tmp_path / "m.onnx").receipt == receipt


class Standardized(nn.Conv2d):
    """Transforms its weight before use, so zeros do not survive."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


def test_zeros_of_transformed_weights_are_not_counted(tmp_path: Path) -> None:
    model = nn.Sequential(Standardized(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(32, 4))
    with torch.no_grad():
        model[0].weight[:4] = 0
        model[2].weight[:4, :4] = 0
    path = tmp_path / "a.onnx"
    export = sp.export_onnx(model, path, torch.randn(2, 8, 2, 2), (4, 4), fold=False)
    result = sp.verify(path, (4, 4))
    assert export.blocks.removed == 1 == result.zero
    assert (export.blocks.total, export.layers) == (12, 2) == (result.blocks, len(result.layers))
    assert export.remade == ("0.weight",)
    assert export.missing == ()
    assert "1 weight (0.weight) is changed before use; those zeros are not counted" in str(export)


@pytest.mark.parametrize("fold", [True, False])
def test_folding_removes_batch_norms(fold: bool, tmp_path: Path) -> None:
    """A normalization factor of zero makes kept blocks zero when it is folded. That is reported and is not a problem."""
    torch.manual_seed(0)
    model, receipt = model_and_receipt()
    with torch.no_grad():
        model[4].weight[:4] = 0  # the factors of the four channels of the first row of blocks
    export = sp.export_onnx(model, tmp_path / "m.onnx", zoo.plain_cnn()[1], receipt=receipt, fold=fold)
    rows = receipt.layers[0].mask().reshape(receipt.layers[0].grid)
    assert export.vanished == (int(rows[0].sum()) if fold else 0)
    assert (export.batchnorms > 0) == (not fold) == ("batch normalizations are left in the graph" in str(export))
    assert ("became zero by folding" in str(export)) == fold
    result = sp.verify(tmp_path / "m.onnx")
    assert result.ok, str(result)
    assert (result.mask_hash == receipt.mask_hash) == (not fold)


# --- files of other origins


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
    monkeypatch.setattr(onnxfile, "MAX_BYTES", 2 * 4 << 20)
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


# --- untrusted files


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


# --- the command line


def test_export_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model, receipt = model_and_receipt("conv1d_net")
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    receipt.save(tmp_path / "receipt.json")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    (tmp_path / "mine.py").write_text("from helpers import zoo\n\n\ndef build():\n    return zoo.conv1d_net()[0]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ("export", "mine:build", "--weights", "w.safetensors", "--input", "2x32")
    assert run_cli(*command, "--out", "m.onnx") == 2
    assert "add --block" in capsys.readouterr().err
    assert run_cli("export", "mine:build", "--block", "4x4", "--out", "m.onnx") == 2
    assert "add --input" in capsys.readouterr().err
    assert run_cli(*command, "--block", "4x4") == 2
    assert run_cli(*command, "--block", "4y4", "--out", "m.onnx") == 2
    assert run_cli(*command, "--block", "4x4", "--out", "m.onnx", "--int8") == 2
    assert "add --calibration" in capsys.readouterr().err
    assert run_cli("export", tmp_path) == 2
    assert "has no config.json" in capsys.readouterr().err
    np.save(tmp_path / "x.npy", torch.randn(40, 2, 32).numpy())
    flags = ("--receipt", "receipt.json", "--out", "m.onnx", "--int8", "--calibration", "x.npy", "--json")
    capsys.readouterr()
    assert run_cli(*command, *flags) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["size"] == (tmp_path / "m.onnx").stat().st_size
    assert data["int8_error"] < 0.1
    assert run_cli("verify", "m.onnx") == 0
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in model.state_dict().items()}}, "wrapped.pt")
    assert run_cli(*command[:2], "--weights", "wrapped.pt", *command[4:], "--receipt", "receipt.json", "--out", "n.onnx") == 0
    capsys.readouterr()
    assert run_cli("export", "--help") == 0
    assert "example:\n  smartprune export" in capsys.readouterr().out


def test_export_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    from helpers.training_jobs import SMALL_FLAGS

    out = tmp_path / "run"
    assert run_cli("train", *SMALL_FLAGS, "--out", out) == 0
    capsys.readouterr()
    assert run_cli("export", out, "--int8") == 0
    assert "every zero block of the model is zero in the file" in capsys.readouterr().out
    assert run_cli("verify", out / "model.onnx") == 0
    entry = json.loads((out / "model.mask.json").read_text())["weights"][0]
    assert len(base64.b64decode(entry["bits"])) == -(-math.prod(entry["grid"]) // 8)


# --- unusual models


def zero_most(*layers: nn.Module) -> nn.Sequential:
    """A network in which all convolutions and linear layers except the last one are zero."""
    model = nn.Sequential(*layers).eval()
    with torch.no_grad():
        for layer in [layer for layer in model if isinstance(layer, (nn.Linear, nn.Conv2d))][:-1]:
            layer.weight.zero_()
    return model


MERGED = {
    "linear": (lambda: zero_most(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4)), (16,)),
    "batch of rows": (lambda: zero_most(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 16), nn.Linear(16, 4)), (3, 8)),
    "conv": (lambda: zero_most(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)), (8, 4, 4)),
    "folded": (
        lambda: zero_most(
            nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8),
            nn.Conv2d(8, 4, 1),
        ),
        (8, 4, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(MERGED))
@pytest.mark.parametrize("int8", [False, True])
def test_merged_equal_weights_are_stored_separately(case: str, int8: bool, tmp_path: Path) -> None:
    """The exporter merges small equal tensors, such as those of two layers without kept blocks."""
    make, shape = MERGED[case]
    torch.manual_seed(0)
    model, x = make(), torch.randn(2, *shape)
    counted = sp.verify(model, (4, 4))
    plan = sp.plan(model, (4, 4), counted.zero / counted.blocks, include="*")
    weights = dict(model.named_parameters())
    mask = torch.cat([layer.grid.sum(weights[layer.weight].detach() != 0).bool() for layer in plan.layers])
    receipt = make_receipt(plan, weights, mask, "magnitude")
    calibration = [torch.randn(4, *shape) for _ in range(2)] if int8 else None
    export = sp.export_onnx(model, tmp_path / "m.onnx", x, (4, 4), receipt=receipt, int8=int8, calibration=calibration)
    assert export.missing == ()
    assert export.layers == len(plan.layers)
    assert "note" not in str(export)
    result = sp.verify(tmp_path / "m.onnx")
    assert result.receipt is not None
    assert [layer.weight for layer in result.layers] == [layer.weight for layer in plan.layers]
    assert [layer.zero for layer in result.layers] == [layer.zero for layer in sp.verify(model, (4, 4)).layers]
    if not int8:
        with torch.no_grad():
            assert (run_onnx(tmp_path / "m.onnx", x) - model(x)).abs().max() < 1e-5


def test_an_unused_weight_that_equals_a_used_one_stays_missing(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.twice, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            for layer in (self.unused, self.twice):
                nn.init.zeros_(layer.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.twice(self.twice(x).relu()))

    export = sp.export_onnx(Net().eval(), tmp_path / "m.onnx", torch.randn(2, 8), (4, 4))
    assert export.missing == ("unused.weight",)
    assert "1 weight (unused.weight) is used by no node and not in the file" in str(export)


def test_integer_and_boolean_outputs_are_compared(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = self.a(x)
            return y, y > 0, y.argmax(1)

    torch.manual_seed(0)
    export = sp.export_onnx(Net().eval(), tmp_path / "m.onnx", torch.randn(2, 8), (4, 4))
    assert export.difference < 1e-5


def test_a_model_that_cannot_be_exported_says_why(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return y if y.sum() > 0 else -y

    with pytest.raises(sp.SmartpruneError, match=r"torch could not export the model \(\w+: .*data-dependent") as caught:
        sp.export_onnx(Net().eval(), tmp_path / "m.onnx", torch.randn(2, 8), (4, 4))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo imports torch.jit
def test_wrapped_models_are_exported_and_models_that_cannot_be_copied_raise(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()).eval(), torch.randn(2, 8, 6, 6)
    model[0].weight.data[:, :4] = 0
    sp.export_onnx(model, tmp_path / "m.onnx", x, (4, 4))
    for i, wrapped in enumerate((torch.compile(model, backend="eager"), nn.DataParallel(model))):
        export = sp.export_onnx(wrapped, tmp_path / f"{i}.onnx", x, (4, 4))  # type: ignore[arg-type]
        assert export.blocks.removed == 18
        assert (tmp_path / f"{i}.onnx").read_bytes() == (tmp_path / "m.onnx").read_bytes()
    for wrong in (nn.LazyConv2d(8, 3), nn.Conv2d(8, 8, 3, device="meta"), torch.jit.script(model)):
        with pytest.raises(sp.SmartpruneError, match="export_onnx: the model cannot be copied"):
            sp.export_onnx(wrong, tmp_path / "bad.onnx", x, (4, 4))


def test_float64_errors_say_what_to_do(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3)).double().eval(), torch.randn(2, 8, 6, 6)
    for example in (x.double(), x):  # an operation that onnxruntime lacks, and an input of another dtype
        with pytest.raises(sp.SmartpruneError, match=r"float64.*give model\.float\(\), and a float32 example"):
            sp.export_onnx(model, tmp_path / "m.onnx", example, (4, 4))
    linear = nn.Sequential(nn.Linear(8, 8)).double().eval()
    assert sp.export_onnx(linear, tmp_path / "m.onnx", torch.randn(2, 8).double(), (4, 4)).difference < 1e-12


def test_no_file_is_replaced_unless_all_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")
    (tmp_path / "m.mask.json").mkdir()
    with pytest.raises(sp.SmartpruneError, match=r"m\.mask\.json: cannot be written \(it is a folder"):
        sp.export_onnx(nn.Sequential(nn.Linear(8, 8)), path, torch.randn(2, 8), (4, 4))
    assert path.read_bytes() == b"old"
    masked = nn.Sequential(nn.Linear(8, 8))
    prune.l1_unstructured(masked[0], "weight", 0.5)
    with pytest.raises(sp.SmartpruneError, match=r"0\.weight is masked by torch\.nn\.utils\.prune.*remove"):
        sp.export_onnx(masked, tmp_path / "n.onnx", torch.randn(2, 8), (4, 4))


def test_export_command_does_not_overwrite_its_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    receipt = tmp_path / "m.mask.json"
    receipt.write_text("{}")
    common = ["export", "resnet18", "--input", "3x32x32", "--block", "16x8"]
    for arguments, message in (
        (["--out", str(tmp_path / "m.onnx"), "--receipt", str(receipt)], "the mask file of --out .* is the receipt itself"),
        (["--out", str(tmp_path / "no" / "m.onnx")], "--out .*the folder .* does not exist"),
        (["--out", str(tmp_path / "m.bin")], r"--out .* must end in \.onnx"),
    ):
        with pytest.raises(SystemExit) as stop:
            main([*common, *arguments])
        assert stop.value.code == 2
        assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["m.mask.json"]


def test_weights_of_the_receipt_that_no_node_uses_are_reported(tmp_path: Path) -> None:
    class Auxiliary(nn.Module):
        """Has a second head that is used only in training."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.head, self.last = nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 1)

        def forward(self, x: Tensor) -> Any:
            y = self.a(x)
            return (self.last(y), self.head(y)) if self.training else self.last(y)

    model = Auxiliary()
    sp.attach(model, sp.Magnitude(), block=(4, 4), sparsity=0.5, steps=1, include="*").step()
    receipt = sp.bake(model)
    export = sp.export_onnx(model.eval(), tmp_path / "model.onnx", torch.randn(1, 8, 6, 6), receipt=receipt)
    assert export.unlisted == ("head.weight",)
    assert export.to_json()["unlisted"] == ["head.weight"]
    verification = sp.verify(tmp_path / "model.onnx")
    assert verification.receipt is not None
    assert verification.to_json()["absent"] == ["head.weight"]


def test_int8_keeps_grouped_transposed_convolutions_in_float(tmp_path: Path) -> None:
    """onnxruntime fails on these nodes because it has the scales of only one group, so they stay in float."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ConvTranspose2d(16, 12, 3, stride=2, groups=2)).eval()
    x = torch.randn(1, 3, 8, 8)
    export = sp.export_onnx(model, tmp_path / "t.onnx", x, (4, 4), int8=True, calibration=[torch.randn(8, 3, 8, 8)])
    assert len(export.unquantized) == 1
    assert f"1 node ({export.unquantized[0]}) computes in float" in str(export)
    expected = model(x).detach()
    assert float((run_onnx(tmp_path / "t.onnx", x) - expected).norm() / expected.norm()) < 0.1
