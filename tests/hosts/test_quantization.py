"""Quantization-aware training of torchao (PT2E): zeros survive training, conversion, and saving the exported program."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import smartprune as sp

pytest.importorskip("torchao", reason="torchao is not installed; run make hosts")


def test_zeros_survive_pt2e() -> None:
    from torchao.quantization.pt2e import allow_exported_model_train_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 20, 3), nn.ReLU(), nn.Flatten(), nn.Linear(320, 10)
    )
    pruner = sp.attach(model, sp.Magnitude(), block=(4, 4), sparsity=0.5, steps=1, include="*")
    pruner.freeze()
    receipt = sp.bake(model, hold=False)
    x, targets = torch.randn(16, 3, 8, 8), torch.arange(16) % 10

    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(copy.deepcopy(model).train(), (x,), dynamic_shapes=({0: batch},))
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config(is_qat=True))
    prepared = prepare_qat_pt2e(program.module(), quantizer)
    sp.hold(prepared)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    for _ in range(5):
        nn.functional.cross_entropy(prepared(x), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: tensor for name, tensor in prepared.named_parameters() if tensor.dim() > 1}
    assert sp.verify({name: weights[name].detach() for name in weights}, receipt=receipt).ok
    assert not torch.equal(weights["3.weight"], model[3].weight)

    allow_exported_model_train_eval(prepared)
    prepared.eval()
    with torch.no_grad():
        expected = prepared(x)
        converted = convert_pt2e(prepared)
        output = converted(x)
        buffer = io.BytesIO()
        torch.export.save(torch.export.export(converted, (x,)), buffer)
        buffer.seek(0)
        loaded = torch.export.load(buffer).module()
        assert torch.equal(loaded(x), output)
    assert rms(output - expected) <= 0.05 * rms(expected)
    integers = [tensor for _, tensor in (*converted.named_parameters(), *converted.named_buffers()) if tensor.dtype == torch.int8]
    assert len(integers) == 3
    assert sum(int((layer.weight == 0).sum()) for layer in (model[0], model[3], model[6])) > 1000
    for layer in (model[0], model[3], model[6]):
        (stored,) = (tensor for tensor in integers if tensor.shape == layer.weight.shape)
        assert (stored[layer.weight == 0] == 0).all()
        assert (stored[layer.weight != 0] != 0).float().mean() > 0.9


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
