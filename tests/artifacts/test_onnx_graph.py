"""The graph of an export: folding, merged weights, quantization, and models that cannot be exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smartprune as sp
from helpers import zoo
from helpers.onnx_files import run_onnx
from helpers.pruned_models import model_and_receipt
from smartprune.pruning.receipt import make_receipt

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")


def test_exported_file_has_no_local_paths(exported: Any) -> None:
    for _, _, _, path in exported.values():
        data = path.read_bytes()
        assert b"/zoo.py" not in data
        assert b"stack_trace" not in data
        assert str(Path.cwd()).encode() not in data


def test_the_same_model_gives_the_same_file(exported: Any, tmp_path: Path) -> None:
    model, receipt, first, path = exported["mobilenet_block"]
    torch.manual_seed(0)
    second = sp.export_onnx(model, tmp_path / "second.onnx", zoo.mobilenet_block()[1], receipt=receipt)
    assert (tmp_path / "second.onnx").read_bytes() == path.read_bytes()
    assert Path(second.mask_path).read_bytes() == Path(first.mask_path).read_bytes()


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
