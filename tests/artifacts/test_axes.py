"""Axes that stored weights do not define are assumed, and a model, a bias or a receipt says what they are."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from helpers import zoo
from helpers.pruned_models import model_and_receipt
from smartprune.artifacts.verify import verify
from smartprune.errors import SmartpruneError
from smartprune.reports import report


def ambiguous_model() -> tuple[nn.Module, tuple[int, int]]:
    """Layers whose zero blocks depend on axes that files do not define. Each layer keeps one of four blocks."""
    model = nn.Sequential(nn.ConvTranspose2d(32, 16, 1), nn.Conv2d(16, 16, 1, groups=4), nn.Flatten(), nn.Linear(32, 16))
    with torch.no_grad():
        for i in (0, 1, 3):
            model[i].weight.zero_()
        model[0].weight[:8, :16] = 1
        model[1].weight[:4] = 1
        model[3].weight[:16, :8] = 1
    return model, (16, 8)


def test_axes_are_assumed_only_if_they_are_unknown(tmp_path: Path) -> None:
    model, block = ambiguous_model()
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    torch.save({"model": model.state_dict()}, tmp_path / "m.pt")
    expected = [(layer.blocks, layer.zero) for layer in verify(model, block).layers]
    assert expected == [(4, 3)] * 3
    assert verify(model, block).assumed == ()
    for stored in (model.state_dict(), tmp_path / "m.safetensors", tmp_path / "m.pt"):
        without_model = verify(stored, block)
        assert without_model.assumed == ("0.weight", "1.weight")
        assert [(layer.blocks, layer.zero) for layer in without_model.layers] == [(4, 2), (1, 0), (4, 3)]
        assert without_model.to_json()["axes_assumed"] == ["0.weight", "1.weight"]
        printed = " ".join(str(without_model).split())
        assert "the axes of 2 weights are assumed to be (out, in, ...), without groups" in " ".join(printed.split())
        assert "0.weight, 1.weight. To be sure, give the model, by model= or --model NAME" in printed
        assert max(map(len, str(without_model).splitlines()[1:])) <= 80
        with_model = verify(stored, block, model=model)
        assert [(layer.blocks, layer.zero) for layer in with_model.layers] == expected
        assert with_model.assumed == ()
        assert "assumed to be" not in str(with_model)
        assert verify(stored).assumed == ("0.weight", "1.weight")  # also when common shapes are tried
        assert verify(stored, model=model).assumed == ()
    assert verify(model.state_dict(), (1, 1)).assumed == ()  # the axes do not matter for single weights
    assert verify({"fc.weight": torch.zeros(8, 8)}, (4, 4)).assumed == ()
    assert verify({"a.in_proj_weight": torch.zeros(24, 8)}, (16, 8)).assumed == ("a.in_proj_weight",)  # three stacked matrices


def test_a_bias_says_which_axis_of_a_matrix_holds_the_outputs(tmp_path: Path) -> None:
    model = nn.ModuleDict({"up": zoo.Conv1D(10, 6), "proj": zoo.Conv1D(6, 6), "linear": nn.Linear(6, 10)})
    with torch.no_grad():
        for name in ("up", "proj"):
            model[name].weight[:4, :3] = 0  # 4 inputs and 3 outputs
        model["linear"].weight[:3, :4] = 0
    torch.save(model.state_dict(), tmp_path / "model.pt")
    from_model, from_file = verify(model, (3, 4)), verify(tmp_path / "model.pt", (3, 4))
    assert [(layer.name, layer.blocks, layer.zero) for layer in from_model.layers] == [
        ("up", 2 * 4, 1),
        ("proj", 2 * 2, 1),
        ("linear", 4 * 2, 1),
    ]
    assert from_file.layers[0] == from_model.layers[0]
    assert from_file.layers[2] == from_model.layers[2]
    assert from_file.assumed == ("proj.weight",)  # the bias of a square matrix says nothing
    assert verify(tmp_path / "model.pt", (3, 4), model=model).layers == from_model.layers
    linear = {"fc.weight": torch.zeros(8, 8), "fc.bias": torch.zeros(8)}
    assert verify(linear, (4, 4)).assumed == ()  # no other layer of the file stores inputs first


def test_reports_name_assumed_axes() -> None:
    model, block = ambiguous_model()
    without_model, with_model = report(model.state_dict(), block), report(model.state_dict(), block, model=model)
    assert without_model.assumed == ("0.weight", "1.weight")
    assert without_model.to_json()["axes_assumed"] == ["0.weight", "1.weight"]
    assert "the axes of 2 weights are assumed to be (out, in, ...)" in " ".join(str(without_model).split())
    assert with_model.assumed == ()
    assert [row.blocks for row in with_model.layers] == [row.blocks for row in report(model, block).layers]
    assert report(model=model, block=block).blocks == with_model.blocks


def test_the_model_can_be_a_keyword_argument() -> None:
    model, block = ambiguous_model()
    assert verify(model=model, block=block) == verify(model, block)
    assert verify(model=model.state_dict(), block=block).zero == verify(model.state_dict(), block).zero
    with pytest.raises(SmartpruneError, match=r"verify: give a torch\.nn\.Module, a state dict, or the path"):
        verify(block=block)
    with pytest.raises(SmartpruneError, match=r"verify: model= is a dict; give the torch\.nn\.Module"):
        verify(model.state_dict(), block, model={})


def test_a_model_of_other_weights_is_refused() -> None:
    model, block = ambiguous_model()
    state = model.state_dict()
    with pytest.raises(SmartpruneError, match=r"does not belong to the model: 0\.weight is 8x8 in the model and 32x16x1x1 here"):
        verify(state, block, model=nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(SmartpruneError, match=r"4\.weight \(4x4\) is not in the model"):
        verify({**state, "4.weight": torch.zeros(4, 4)}, block, model=model)
    del state["3.weight"]
    with pytest.raises(SmartpruneError, match=r"3\.weight is 16x32 in the model and missing here"):
        verify(state, block, model=model)
    with pytest.raises(SmartpruneError, match=r"0\.weight has no shape yet"):
        verify(state, block, model=nn.Sequential(nn.LazyLinear(8)))


def test_a_model_on_the_meta_device_defines_axes() -> None:
    model, block = ambiguous_model()
    wrapped = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    assert verify(wrapped, block, model=model.to("meta")).zero == 9


def test_a_receipt_with_other_axes_is_a_problem() -> None:
    model, receipt = model_and_receipt("unet")
    assert verify(model.state_dict(), receipt=receipt, model=model).ok
    row = next(row for row in receipt.layers if row.transposed)
    other = dataclasses.replace(row, transposed=False)
    layers = tuple(other if each is row else each for each in receipt.layers)
    result = verify(model.state_dict(), receipt=dataclasses.replace(receipt, layers=layers), model=model)
    assert any("transposed=False, the model groups=1, transposed=True" in problem for problem in result.problems)
