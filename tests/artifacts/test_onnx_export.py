"""ONNX: exported files match their models, and files of any origin are read."""

from __future__ import annotations

import copy
import json
import math
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
from helpers.onnx_files import run_onnx
from helpers.pruned_models import model_and_receipt
from smartprune.pruning.receipt import make_receipt

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")

from onnx import numpy_helper  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


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


def test_mask_file_matches_the_initializers(exported: Any) -> None:
    """Compares the documented reader with a loop over the values in the ONNX file."""
    scope: dict[str, Any] = {}
    exec(next(text for text in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "def read_mask(" in text), scope)
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
    fields = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PAGE.split("# The mask of an ONNX file")[1].split("An entry:")[1], re.M)
    assert sorted(re.findall(r"\w+", " ".join(fields))) == sorted(transposed)


def _entry(exported: Any, name: str, weight: str) -> dict[str, Any]:
    weights = json.loads(Path(exported[name][2].mask_path).read_text())["weights"]
    return next(entry for entry in weights if entry["name"] == weight)


def test_int8_keeps_zero_blocks_and_accuracy(exported: Any, tmp_path: Path) -> None:
    model, receipt, _, _ = exported["unet"]
    path = tmp_path / "int8.onnx"
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


def test_wrong_arguments_raise(tmp_path: Path) -> None:
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
    with pytest.raises(sp.SmartpruneError, match=r"onnx is needed .* pip install onnx onnxscript onnxruntime"):
        sp.verify(exported["unet"][3])
    with pytest.raises(sp.SmartpruneError, match="pip install onnx onnxscript onnxruntime"):
        sp.export_onnx(model_and_receipt()[0], tmp_path / "x.onnx", torch.randn(2, 3, 8, 8), (4, 4))


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


# --- unusual models


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
