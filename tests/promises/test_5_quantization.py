"""Promise 5: zeros stay zero through quantization-aware training of torch.ao, and are zero in the int8 weights of the result."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smartprune as sp

quantization = pytest.importorskip("torch.ao.quantization", reason="PyTorch without eager quantization")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of PyTorch
ENGINE = next((name for name in ("fbgemm", "x86", "qnnpack") if name in torch.backends.quantized.supported_engines), None)


@pytest.fixture(autouse=True)
def engine() -> Any:
    if ENGINE is None:
        pytest.skip("PyTorch has no engine for int8 here")
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = ENGINE
    yield
    torch.backends.quantized.engine = before


def pruned() -> tuple[nn.Sequential, Tensor]:
    """A baked model whose zeros are no longer held, like one that was loaded from a file."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 20, 3), nn.ReLU(), nn.Flatten(), nn.Linear(320, 10)
    )
    pruner = sp.attach(model, sp.Magnitude(), block=(4, 4), sparsity=0.5, steps=1, include="*")
    pruner.freeze()
    sp.bake(model, hold=False)
    return model, torch.randn(16, 3, 8, 8)


def train(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    for _ in range(5):
        nn.functional.cross_entropy(model(x), torch.arange(16) % 10).backward()
        optimizer.step()
        optimizer.zero_grad()


def check(converted: nn.Module, prepared: nn.Module, model: nn.Module, x: Tensor, names: dict[str, str]) -> None:
    """The int8 weights are zero where the pruned model is, and the outputs are those of the prepared model."""
    zeros = 0
    for name, original in names.items():
        integers = converted.get_submodule(name).weight().int_repr()
        zero = model.get_submodule(original).weight == 0
        zeros += int(zero.sum())
        assert (integers[zero] == 0).all()
        assert (integers[~zero] != 0).float().mean() > 0.9
    assert zeros > 1000
    with torch.no_grad():
        outputs, expected = converted(x), prepared.eval()(x)
    assert (outputs - expected).square().mean().sqrt() <= 0.05 * expected.square().mean().sqrt()


def test_eager_mode() -> None:
    model, x = pruned()
    prepared = nn.Sequential(quantization.QuantStub(), *copy.deepcopy(model).train(), quantization.DeQuantStub())
    prepared = quantization.fuse_modules_qat(prepared, [["1", "2", "3"], ["4", "5"]])
    prepared.qconfig = quantization.get_default_qat_qconfig(ENGINE)
    prepared = quantization.prepare_qat(prepared)
    sp.hold(prepared)
    train(prepared, x)
    converted = quantization.convert(prepared.eval())
    check(converted, prepared, model, x, {"1": "0", "4": "3", "7": "6"})


def test_fx_mode() -> None:
    fx = pytest.importorskip("torch.ao.quantization.quantize_fx", reason="PyTorch without FX quantization")
    model, x = pruned()
    mapping = quantization.get_default_qat_qconfig_mapping(ENGINE)
    prepared = fx.prepare_qat_fx(copy.deepcopy(model).train(), mapping, (x,))
    sp.hold(prepared)
    train(prepared, x)
    converted = fx.convert_fx(copy.deepcopy(prepared).eval())
    check(converted, prepared, model, x, {"0": "0", "3": "3", "6": "6"})


def test_without_hold_zeros_do_not_survive() -> None:
    """So the tests above can fail."""
    fx = pytest.importorskip("torch.ao.quantization.quantize_fx", reason="PyTorch without FX quantization")
    model, x = pruned()
    prepared = fx.prepare_qat_fx(copy.deepcopy(model).train(), quantization.get_default_qat_qconfig_mapping(ENGINE), (x,))
    train(prepared, x)
    converted = fx.convert_fx(prepared.eval())
    assert (converted.get_submodule("6").weight().int_repr()[model[6].weight == 0] != 0).any()
