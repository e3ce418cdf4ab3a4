"""compact: the model that it returns, its report, its checks, and the forms that the result can take."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smartprune as sp
from helpers.compact_nets import residual
from helpers.compact_parts import Net, empty_channels
from helpers.onnx_files import run_onnx
from helpers.pruned_models import model_and_receipt
from smartprune import SmartpruneError
from smartprune.models import MODELS


def small_net() -> tuple[nn.Module, Tensor]:
    """Channels 0 to 4 of the first layer are constant, and nothing reads channel 5."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5)
    ).eval()
    with torch.no_grad():
        model[0].weight[:5] = 0
        model[1].bias.normal_()
        model[3].weight[:, 5] = 0
    return model, torch.randn(2, 3, 8, 8)


def test_two_layers_equal_numpy() -> None:
    """Which units go, and what the others compute, written out in numpy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 4)).eval()
    with torch.no_grad():
        model[0].weight[[1, 4]] = 0
        model[2].weight[:, [2, 4]] = 0
    small = sp.compact(model, torch.randn(3, 5))
    w1, b1, w2, b2 = (p.detach().double().numpy() for p in model.parameters())
    kept = [0, 3, 5, 6, 7, 8]
    constant = np.maximum(b1[1], 0)
    expected = [w1[kept], b1[kept], w2[:, kept], b2 + w2[:, 1] * constant]
    for parameter, array in zip(small.parameters(), expected, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), array, rtol=1e-6, atol=1e-7)


def test_result_is_an_ordinary_model_and_the_original_does_not_change() -> None:
    model, x = small_net()
    model.train()
    model[0].weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    small = sp.compact(model, x)
    assert type(small) is nn.Sequential
    assert not small.training
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert list(small.state_dict()) == list(before)
    assert (small[0].out_channels, small[1].num_features, small[3].in_channels) == (6, 6, 6)
    assert [p.requires_grad for p in small.parameters()] == [p.requires_grad for p in model.parameters()]
    assert not set(map(id, small.parameters())) & set(map(id, model.parameters()))
    model.eval()
    for batch in (x, torch.randn(7, 3, 8, 8)):
        torch.testing.assert_close(small(batch), model(batch), rtol=1e-5, atol=1e-5)
    again = copy.deepcopy(small)
    stored = io.BytesIO()
    torch.save(small, stored)
    assert b"smartprune" not in stored.getvalue()
    torch.testing.assert_close(again(x), small(x))


def test_report_counts_what_is_left() -> None:
    model, x = small_net()
    small = sp.compact(model, x)
    report = sp.compaction(small)
    assert report.parameters == (sum(p.numel() for p in model.parameters()), sum(p.numel() for p in small.parameters()))
    per_output = [(3 * 9 * 36, 12 * 9 * 16), (3 * 9 * 36, 6 * 9 * 16)]  # MACs per output channel of the two convolutions
    assert report.macs == (12 * per_output[0][0] + 8 * per_output[0][1] + 640, 6 * per_output[1][0] + 8 * per_output[1][1] + 640)
    assert [(layer.before, layer.after) for layer in report.layers] == [
        ((12, 3, 3, 3), (6, 3, 3, 3)),
        ((8, 12, 3, 3), (8, 6, 3, 3)),
        ((5, 128), (5, 128)),
    ]
    before, after = report.parameters
    assert repr(report) == f"<Compaction of {report.model}: 2 of 3 layers are smaller, {after:,} of {before:,} parameters>"
    text = str(report)
    assert "2 of 3 layers are smaller" in text
    assert "6x3x3x3" in text
    assert json.loads(json.dumps(report.to_json()))["layers"][0]["after"] == [6, 3, 3, 3]
    with pytest.raises(SmartpruneError, match="not a copy"):
        sp.compaction(copy.deepcopy(small))


def test_reasons_name_the_layer_that_needs_a_channel() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.Conv2d(8, 2, 1))
    with torch.no_grad():
        model[0].weight[:2] = 0
    report = sp.compaction(sp.compact(model, torch.randn(1, 3, 4, 4)))
    assert (report.layers[0].empty, report.layers[0].reason) == (2, "1 normalizes over all of them")
    assert "an equal copy, because no empty channel can be removed" in str(report)
    assert not report.changed


def test_reasons_name_every_layer_that_keeps_empty_channels() -> None:
    """Also layers whose weight other code reads, and channels that stay because others with them are in use."""
    torch.manual_seed(0)
    model = Net(
        lambda m, x: m.head(m.norm(m.first(x) + m.second(x)) + m.attention(m.first(x), m.first(x), m.first(x))[0]),
        first=nn.Linear(8, 8),
        second=nn.Linear(8, 8),
        norm=nn.Linear(8, 8),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
        head=nn.Linear(8, 3),
        unused=nn.Linear(8, 8),
    )
    nn.utils.parametrizations.weight_norm(model.norm)
    with torch.no_grad():
        for layer in (model.second, model.attention.out_proj, model.unused):
            layer.weight[:2] = 0
        model.norm.parametrizations.weight.original0[:2] = 0
    report = sp.compaction(sp.compact(model, torch.randn(2, 5, 8)))
    assert {layer.weight: (layer.empty, layer.reason) for layer in report.layers if layer.empty} == {
        "second.weight": (2, "norm computes its weight"),
        "attention.out_proj.weight": (2, "attention is an attention of torch, whose widths are fixed"),
        "norm.weight": (2, "the weight is computed from other parameters"),
        "unused.weight": (2, "the model does not use this layer for the example"),
    }
    plain = Net(
        lambda m, x: m.last(F.relu(m.a(x) + m.b(x))),
        a=nn.Conv2d(3, 8, 1),
        b=nn.Conv2d(3, 8, 1),
        last=nn.Conv2d(8, 2, 1),
    )
    with torch.no_grad():
        plain.b.weight[:2] = 0
    layers = sp.compaction(sp.compact(plain, torch.randn(1, 3, 4, 4))).layers
    assert (layers[1].empty, layers[1].reason) == (2, "tied to channels of a that are in use")


def test_the_report_counts_one_channel_in_the_singular() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(1, 4), nn.Conv2d(4, 2, 1))
    with torch.no_grad():
        model[0].weight[1] = 0
    text = str(sp.compaction(sp.compact(model, torch.randn(1, 3, 4, 4))))
    assert "note       0: 1 empty channel stays: 1 normalizes over all of them" in text


def test_a_model_without_empty_channels_gives_an_equal_copy() -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(2, 4)
    small = sp.compact(model, x)
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), model.parameters(), strict=True))
    assert "an equal copy, because no channel is constant or unread" in str(sp.compaction(small))


def test_code_that_states_a_shape_keeps_it() -> None:
    """The rest of the model is compacted, and the report names the line."""
    torch.manual_seed(0)
    model = Net(
        lambda m, x: m.last(F.relu(m.b(F.relu(m.a(x)))).view(-1, 6 * 36)),
        a=nn.Conv2d(3, 8, 1),
        b=nn.Conv2d(8, 6, 3),
        last=nn.Linear(216, 2),
    )
    with torch.no_grad():
        model.a.weight[:3] = 0
        model.b.weight[:2] = 0
    x = torch.randn(2, 3, 8, 8)
    small = sp.compact(model, x)
    assert [tuple(p.shape) for p in small.parameters() if p.dim() > 1] == [(5, 3, 1, 1), (6, 5, 3, 3), (2, 216)]
    assert "in forward" in sp.compaction(small).stated[0]
    torch.testing.assert_close(small(x), model.eval()(x), rtol=1e-5, atol=1e-5)


def halves(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    middle = y.shape[1] // 2
    return m.last(F.relu(m.after(torch.cat([F.relu(y[:, :middle]), y[:, middle:]], 1))))


@pytest.mark.parametrize(
    "function",
    [
        halves,
        lambda m, x: m.last(F.relu(m.after(m.first(x) * m.first(x).shape[1] ** -0.5))),
        lambda m, x: m.last(F.relu(m.after(m.first(x).roll(3, 1)))),
    ],
    ids=["halves", "scale", "roll"],
)
def test_channels_stay_where_the_result_depends_on_their_number(function: Any) -> None:
    """The graph has the number, but the code computes it again: found by running the model. Other layers get smaller."""
    torch.manual_seed(0)
    model = Net(function, first=nn.Conv2d(3, 12, 1), after=nn.Conv2d(12, 8, 1), last=nn.Conv2d(8, 4, 1)).eval()
    with torch.no_grad():
        model.first.weight[[1, 9, 10]] = 0
        model.after.weight[[0, 5]] = 0
    x = torch.randn(2, 3, 6, 6)
    small = sp.compact(model, x)
    assert [tuple(p.shape) for p in small.parameters() if p.dim() > 1] == [(12, 3, 1, 1), (6, 12, 1, 1), (4, 6, 1, 1)]
    torch.testing.assert_close(small(x), model(x), rtol=1e-5, atol=1e-5)
    first = sp.compaction(small).layers[0]
    assert (first.empty, first.reason) == (3, "the code of the model depends on their number")


def test_the_result_can_be_trained_pruned_and_compacted_again() -> None:
    model, x = small_net()
    small = sp.compact(model, x).train()
    optimizer = torch.optim.SGD(small.parameters(), lr=0.05)
    pruner = sp.attach(small, sp.Magnitude(), block="channel", sparsity=0.5, steps=2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = small(x).square().mean()
        loss.backward()
        optimizer.step()
        pruner.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    receipt = sp.bake(small)
    small.eval()
    smaller = sp.compact(small, x)
    assert smaller[3].out_channels == receipt.layers[0].blocks.kept < small[3].out_channels
    torch.testing.assert_close(smaller(x), small(x), rtol=1e-5, atol=1e-5)


def test_rounding_of_a_deep_model_is_not_an_error() -> None:
    """The model agrees in double precision. Its float32 outputs are the rounding of a difference of large numbers."""
    torch.manual_seed(0)
    model = Net(
        lambda m, x: m.last(F.relu(m.first(x)) + 1e6) - 1e6 * m.last.weight.sum(1), first=nn.Linear(8, 32), last=nn.Linear(32, 4)
    ).eval()
    with torch.no_grad():
        model.first.weight[::2] = 0
    x = torch.randn(3, 8)
    assert sp.compaction(sp.compact(model, x)).inputs == 3


def test_a_layer_without_bias_gets_one_only_if_nothing_else_can_hold_the_constant() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1, bias=False)
    ).eval()
    with torch.no_grad():
        model[0].weight[:3] = 0
        model[0].bias[:3] = 1
        model[2].weight[:2] = 0
        model[3].bias[:2] = 1
    small = sp.compact(model, torch.randn(1, 3, 6, 6))
    assert sp.compaction(small).added == ("4.bias",)
    assert set(small.state_dict()) == {*model.state_dict(), "4.bias"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_stay(dtype: torch.dtype) -> None:
    model, x = small_net()
    model, x = model.to(dtype), x.to(dtype)
    small = sp.compact(model, x)
    assert {p.dtype for p in small.parameters()} == {dtype}
    assert small[0].out_channels == 6


def test_baked_model_of_channel_blocks() -> None:
    """After bake, removed channel blocks of a layer are removed channels."""
    torch.manual_seed(0)
    model, x = small_net()
    pruner = sp.attach(model, sp.Magnitude(), block="channel", sparsity=0.5, steps=1)
    with pytest.raises(SmartpruneError, match=r"still being pruned; call smartprune\.bake"):
        sp.compact(model, x)
    pruner.freeze()
    receipt = sp.bake(model)
    small = sp.compact(model, x)
    for row in receipt.layers:
        assert small.get_submodule(row.name).weight.shape[0] == max(1, row.blocks.kept)


def test_errors_name_what_is_wrong() -> None:
    model, x = small_net()
    wrong: list[tuple[Any, Any, str]] = [
        ("resnet18", x, "model is a str; give a torch.nn.Module"),
        (model, "x", "example is a str; give a tensor"),
        (model, torch.randn(2, 4, 8, 8), "the model does not run on it"),
        (model, (x, x), "the model does not run on it"),
        (model, x.to("meta"), "the example is on the meta device and has no values"),
        (Net(lambda m, x: SimpleNamespace(y=m.a(x)), a=nn.Linear(3, 3)), torch.ones(2, 3), "; let it return tensors, or tuples"),
        (Net(lambda m, x: x if x.sum() > 0 else m.a(x), a=nn.Linear(3, 3)), torch.ones(2, 3), "torch.export cannot record"),
    ]
    for given, example, message in wrong:
        with pytest.raises(SmartpruneError, match=message):
            sp.compact(given, example)
    for multiple in (0, 8.0, "8"):
        with pytest.raises(SmartpruneError, match="is not a positive integer; give 8 or 16"):
            sp.compact(model, x, multiple=multiple)  # type: ignore[arg-type]
    masked = nn.Sequential(nn.Linear(4, 4))
    torch.nn.utils.prune.random_unstructured(masked[0], "weight", 0.5)
    with pytest.raises(SmartpruneError, match=r"is masked by torch\.nn\.utils\.prune"):
        sp.compact(masked, torch.randn(1, 4))
    with pytest.raises(SmartpruneError, match="this int has no report"):
        sp.compaction(3)  # type: ignore[arg-type]


def test_result_runs_in_onnxruntime_and_as_a_program(tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    torch.manual_seed(0)
    model, x = residual()
    small = sp.compact(empty_channels(model, 1), x)
    assert sp.compaction(small).changed
    sp.export_onnx(small, tmp_path / "small.onnx", x, block=(1, 1))
    other = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(run_onnx(tmp_path / "small.onnx", other), model(other).detach(), rtol=1e-4, atol=1e-5)
    program = torch.export.export(small, (x,), strict=False).module()
    torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)


def test_int8_and_packed_forms_of_the_result(tmp_path: Path) -> None:
    """Other forms accept the result like any model."""
    torch.manual_seed(0)
    model, _ = model_and_receipt("plain_cnn", (4, 4), 0.75)
    with torch.no_grad():
        model[3].weight[4:12] = 0
    x = torch.randn(4, 3, 8, 8)
    small = sp.compact(model, x)
    assert small[3].out_channels < 20
    fast = sp.accelerate(small, example=x, backend="reference")
    torch.testing.assert_close(fast(x), model.eval()(x), rtol=1e-4, atol=1e-5)
    sp.pack(small, tmp_path / "small.packed.safetensors", (4, 4))
    state = sp.unpack(tmp_path / "small.packed.safetensors")
    assert all(torch.equal(state[name], tensor) for name, tensor in small.state_dict().items() if tensor.is_floating_point())


NETWORKS = [name for name in MODELS if name != "resnet8"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_the_paper(name: str) -> None:
    """With random empty channels. Outputs are compared on other pictures, and with a second batch size."""
    torch.manual_seed(0)
    model = empty_channels(MODELS[name](), seed=0)
    side = 64 if name in ("yolov5m", "bisenetv2", "resnet50") else 32
    small = sp.compact(model, torch.randn(2, 3, side, side))
    report = sp.compaction(small)
    assert report.parameters[1] < 0.75 * report.parameters[0]
    assert report.macs is not None
    assert report.macs[1] < 0.75 * report.macs[0]
    x = torch.randn(3, 3, side, side)
    with torch.no_grad():
        pairs = zip(torch.utils._pytree.tree_leaves(small(x)), torch.utils._pytree.tree_leaves(model(x)), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
