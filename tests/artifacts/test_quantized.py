"""Models that other packages have quantized: their zeros are counted, and what cannot be done says what to do."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smartprune as sp
from smartprune.artifacts.quantized import hides_layers, is_quantized, packed_weights, simulates_quantization

BLOCK, X = (4, 4), torch.ones(2, 3, 8, 8)


def pruned() -> tuple[nn.Sequential, sp.Receipt]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 4)
    )
    pruner = sp.attach(model, "magnitude", block=BLOCK, sparsity=0.5, steps=1)
    pruner.freeze()
    return model, sp.bake(model)


def prepared(model: nn.Sequential) -> nn.Module:
    """Ready for quantization-aware training, by the eager form of torch.ao."""
    import torch.ao.quantization as ao

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.qconfig = ao.get_default_qat_qconfig("x86")
        out: nn.Module = ao.prepare_qat(model.train())
        out(X)
        return out


def converted(model: nn.Sequential) -> nn.Module:
    import torch.ao.quantization as ao

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out: nn.Module = ao.convert(prepared(model).eval())
        return out


def exported(model: nn.Sequential) -> nn.Module:
    """The form that PT2E works on: a graph whose modules hold the parameters under their names, but have no types."""
    out: nn.Module = torch.export.export(model, (X,)).module()
    return out


class Scaled(Tensor):
    """Like the classes of torchao: it stores int8 numbers, and cannot be compared with zero."""

    stored: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Scaled:
        out: Any = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)  # type: ignore[attr-defined]
        out.stored = (values / values.abs().max() * 127).round().to(torch.int8)
        return out  # type: ignore[no-any-return]

    def dequantize(self) -> Tensor:  # type: ignore[override]
        return self.stored.float() / 127

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::detach":
            return args[0]
        raise NotImplementedError(str(func))


def wrapped(model: nn.Sequential) -> nn.Module:
    for module in model:
        if hasattr(module, "weight"):
            module._parameters["weight"] = nn.Parameter(Scaled(module.weight.detach()), requires_grad=False)
    return model


FORMS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "prepared": prepared,
    "converted": converted,
    "exported": exported,
    "wrapped": wrapped,
}


@pytest.mark.parametrize("form", FORMS)
def test_verify_and_report_count_the_zeros_of_the_receipt(form: str) -> None:
    model, receipt = pruned()
    other = FORMS[form](model)
    assert sp.verify(other, receipt=receipt).ok
    report = sp.report(other, BLOCK, receipt=receipt)
    assert f"{receipt.blocks.removed} of {receipt.blocks.total} blocks of the pruned layers removed" in str(report)


@pytest.mark.parametrize("form", FORMS)
def test_verify_finds_zeros_that_are_gone(form: str) -> None:
    model, receipt = pruned()
    dense = copy.deepcopy(model)
    for name in ("2.weight", "5.weight"):
        nn.init.ones_(dense.get_parameter(name))
    assert not sp.verify(FORMS[form](dense), receipt=receipt).ok


@pytest.mark.parametrize("form", ["converted", "wrapped"])
def test_pack_and_export_say_what_to_do_with_a_quantized_model(form: str, tmp_path: Path) -> None:
    model, receipt = pruned()
    other = FORMS[form](model)
    assert is_quantized(other)
    assert not is_quantized(pruned()[0])
    with pytest.raises(sp.SmartpruneError, match=r"^pack: the model is quantized.*pack the float model before"):
        sp.pack(other, tmp_path / "file", receipt=receipt)
    with pytest.raises(sp.SmartpruneError, match=r"^export_onnx: the model is quantized.*export the float model"):
        sp.export_onnx(other, tmp_path / "file.onnx", X, receipt=receipt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["prepared", "exported"])
def test_other_forms_can_be_packed_and_unpacked(form: str, tmp_path: Path) -> None:
    model, receipt = pruned()
    other = FORMS[form](model)
    sp.pack(other, tmp_path / "file", receipt=receipt)
    fresh = FORMS[form](pruned()[0])
    sp.unpack(tmp_path / "file", fresh)
    for name, tensor in other.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name


def test_converted_weights_have_their_names_from_before() -> None:
    model, _ = pruned()
    weights = {name: tensor for name, tensor in model.state_dict().items() if name.endswith("weight")}
    packed = packed_weights(converted(copy.deepcopy(model)))
    assert packed.keys() == weights.keys()
    for name, tensor in packed.items():
        assert float((tensor.dequantize() - weights[name]).abs().max()) < 0.02 * float(weights[name].abs().max())


def test_forms_are_recognized() -> None:
    assert [name for name, form in FORMS.items() if hides_layers(form(pruned()[0]))] == ["converted", "exported"]
    assert [name for name, form in FORMS.items() if simulates_quantization(form(pruned()[0]))] == ["prepared"]
