import doctest
import json
import math
import sys
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from helpers import zoo
from smartprune.core.block import Block
from smartprune.core.budget import blocks, macs, params
from smartprune.errors import SmartpruneError
from smartprune.pruning.plan import plan


@pytest.mark.parametrize(
    "module", ["pruning.plan", "text", "core.block", "core.budget", "fields", "core.occupancy", "artifacts.verify", "reports"]
)
def test_examples_in_docstrings(module: str) -> None:
    __import__(f"smartprune.{module}")
    result = doctest.testmod(sys.modules[f"smartprune.{module}"])
    assert result.attempted > 0
    assert result.failed == 0


# block, blocks, blocks of the smallest layer, kept at 0.93, 0.95 and 0.97, kept under a floor of 0.02
RESNET18 = [
    ("8x8", 174_336, 128, (12_204, 8_717, 5_231), 3_499),
    ("16x8", 87_168, 64, (6_102, 4_359, 2_616), 1_755),
    ("16x16", 43_584, 32, (3_051, 2_180, 1_308), 882),
]


@pytest.mark.parametrize(("block", "n", "smallest", "kept", "least"), RESNET18)
def test_resnet18(block: str, n: int, smallest: int, kept: tuple[int, ...], least: int) -> None:
    model, _ = zoo.resnet18()
    for sparsity, keep in zip((0.93, 0.95, 0.97), kept, strict=True):
        planned = plan(model, block, sparsity, floor=0.02)
        assert (planned.n, planned.keep, planned.limit) == (n, keep, keep)
        assert planned.feasible
        assert planned.min_keep is not None
        assert int(planned.min_keep.sum()) == least
    assert len(planned.layers) == 19
    assert min(layer.n for layer in planned.layers) == smallest
    assert (planned.params, planned.model_params) == (11_157_504, 11_173_962)
    assert planned.padding == 0
    assert plan(model, block, 0.999, floor=0.02).problem == f"floor=0.02 needs {least:,} blocks, the budget keeps " + (
        f"{math.ceil(Fraction(1, 1000) * n):,}"
    )


def test_resnet18_macs() -> None:
    model, x = zoo.resnet18()
    planned = plan(model, sparsity=0.95, example=x)
    model.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x[:1])
    assert planned.model_macs == counter.get_total_flops() // 2 == 555_422_720
    assert planned.macs == 555_422_720 - 64 * 27 * 1024 - 5120
    text = str(planned)
    assert max(map(len, text.splitlines())) <= 100
    assert sum("Conv2d" in line for line in text.splitlines()) == 20
    assert "keep exactly 4,359 of 87,168 blocks" in text


def test_plan_prints_a_table() -> None:
    model, x = zoo.plain_cnn()
    assert (
        str(plan(model, (16, 8), 0.5, floor=0.25, example=x)).partition("\n\nexpected")[0]
        == """\
Blocks of 16x8x1x1

layer  kind    weight     grid     blocks  weights     MACs  padding
3      Conv2d  20x16x3x3  2x2x3x3      36    2,880  184,320   37.50%
6      Conv2d  12x20x1x1  1x3x1x1       3      240   15,360   37.50%

not pruned  kind    weight    reason
0           Conv2d  16x3x3x3  stem: reads the image (3 channels)
10          Linear  10x12     output layer: no other layer reads its result

blocks   39 in 2 layers; 37.50% of their elements are padding
weights  3,120 of 3,782 in the model
MACs     199,680 of 227,448 in the model, for one sample
         counted in convolutions, matrix products, attention and recurrent layers
floor    every layer keeps at least 25% of its blocks: 10 in all
budget   remove 50% of the blocks: keep exactly 20 of 39 blocks"""
    )


def test_long_names_fit_the_table() -> None:
    model = nn.Module()
    with torch.device("meta"):
        model.deep = nn.ModuleDict({"a": nn.Linear(4096, 16384), "z" * 150: nn.Linear(16384, 4096), "last": nn.Linear(4, 4)})
    text = str(plan(model, sparsity=0.5))
    assert max(map(len, text.splitlines())) <= 100
    assert ".." in text


@pytest.mark.parametrize("name", sorted(zoo.SMALL))
def test_json_is_plain_and_matches_the_plan(name: str) -> None:
    model, x = zoo.SMALL[name]()
    planned = plan(model, (4, 4), budget=params(0.7), floor=0.1, include="*", example=x)
    data = planned.to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert (data["n"], data["limit"], data["keep"]) == (planned.n, planned.limit, None)
    rows = data["layers"]
    assert isinstance(rows, list)
    assert sum(row["blocks"] for row in rows) == planned.n
    assert sum(row["macs"] for row in rows) == planned.macs == (planned.model_macs or 0) - zoo.ATTENTION_MACS.get(name, 0)
    assert data["not_counted"] == []
    assert max(map(len, str(planned).splitlines())) <= 100
    assert plan(model, (4, 4)).to_json()["budget"] is None


def test_padding_counts_the_slots_of_full_blocks() -> None:
    model = nn.Sequential(nn.Linear(3, 20), nn.Linear(20, 16), nn.Linear(16, 2))
    planned = plan(model, (16, 8), 0.5)
    assert planned.layer_padding(planned.layers[0]) == 1 - Fraction(60, 2 * 16 * 8)  # 3 inputs fill 3 of 8 slots
    assert planned.layer_padding(planned.layers[1]) == 1 - Fraction(20 * 16, 3 * 16 * 8)
    assert planned.padding == 1 - Fraction(60 + 320, 5 * 16 * 8)
    whole = plan(model, (1, None), 0.5)
    assert whole.padding == 0
    deconv = plan(nn.Sequential(nn.ConvTranspose2d(6, 20, 1), nn.Conv2d(20, 2, 1)), (16, 8), 0.5)
    assert deconv.padding == 1 - Fraction(120, 2 * 16 * 8)


def test_an_infeasible_floor_is_reported_and_require_raises() -> None:
    model, x = zoo.plain_cnn()
    planned = plan(model, (4, 4), 0.97, floor=0.05)
    assert not planned.feasible
    assert planned.problem == "floor=0.05 needs 10 blocks, the budget keeps 6"
    assert "problem  floor=0.05 needs 10 blocks" in str(planned)
    with pytest.raises(SmartpruneError, match=r"needs 10 blocks, the budget keeps 6; lower floor, or remove less: at most 0.9487"):
        planned.require()
    assert plan(model, (4, 4), 0.9487, floor=0.05).require().keep == 11
    by_macs = plan(model, (4, 4), budget=macs(0.97, x), floor=0.05)
    assert by_macs.problem == "floor=0.05 needs 10,240 MACs, the budget keeps 5,990"
    with pytest.raises(SmartpruneError, match="of the MACs can be removed"):
        by_macs.require()
    assert plan(model, (4, 4), floor=0.05).feasible


def test_cheapest_blocks_decide_whether_a_floor_fits() -> None:
    """Nine weights: a full block of 4, edges of 2 and a corner of 1."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    assert plan(model, (2, 2), budget=params(0.6), floor=0.5).feasible  # 3 kept, the corner and an edge make 3
    assert plan(model, (2, 2), budget=params(0.7), floor=0.5).problem == "floor=0.5 needs 3 weights, the budget keeps 2"


def test_a_budget_that_keeps_nothing_is_a_problem() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    planned = plan(model, (4, 4), budget=params(0.9))
    assert planned.problem == "the budget keeps 6 of 64 weights, less than the smallest block (16)"
    with pytest.raises(SmartpruneError, match="remove less"):
        planned.require()


def test_units_of_every_budget() -> None:
    model, x = zoo.plain_cnn()
    by_weights = plan(model, (4, 4), budget=params(0.9))
    assert (by_weights.unit, by_weights.total, by_weights.limit, by_weights.keep) == ("weights", 3120, 312, None)
    assert by_weights.macs is None
    by_macs = plan(model, (4, 4), budget=macs(0.5, x))
    assert (by_macs.unit, by_macs.total, by_macs.limit) == ("MACs", 199_680, 99_840)
    assert by_macs.macs == 199_680  # its example serves the plan as well
    assert "keep at most 99,840 of 199,680 MACs" in str(by_macs)
    shown = plan(model, (4, 4))
    assert (shown.limit, shown.keep, shown.unit) == (None, None, "blocks")
    assert str(shown).endswith("budget   none given")


def test_plan_gives_the_blocks_of_a_model() -> None:
    model, _ = zoo.plain_cnn()
    planned = plan(model, (4, 4), budget=params(0.9), floor=0.1)
    made = planned.blocks(model)
    assert (made.n, made.limit, made.total) == (planned.n, 312, 3120)
    assert made.min_keep is planned.min_keep
    with pytest.raises(SmartpruneError, match="it has no budget"):
        plan(model, (4, 4)).blocks(model)
    model[3] = nn.Conv2d(16, 24, 3)
    with pytest.raises(SmartpruneError, match=r"3.weight is 20x16x3x3 in the plan, and in the model it is 24x16x3x3"):
        planned.blocks(model)
    model[3] = nn.Identity()
    with pytest.raises(SmartpruneError, match="the model has no such weight; plan the model that you prune"):
        planned.blocks(model)


def test_planning_does_not_change_the_model() -> None:
    model, x = zoo.transformer_block()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plan(model, (4, 4), 0.5, example=x)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_wrong_arguments() -> None:
    model, x = zoo.plain_cnn()
    with pytest.raises(SmartpruneError, match=r"sparsity=0.5 and budget=blocks 0.5 are both given; give one"):
        plan(model, sparsity=0.5, budget=blocks(0.5))
    with pytest.raises(SmartpruneError, match=r"budget=0.9 is a float; write sparsity=0.9"):
        plan(model, budget=0.9)  # type: ignore[arg-type]
    with pytest.raises(SmartpruneError, match=r"sparsity=95 is outside \[0, 1\).*write sparsity=0.95"):
        plan(model, sparsity=95)
    with pytest.raises(SmartpruneError, match=r"floor=1.5 is outside \[0, 1\)"):
        plan(model, sparsity=0.5, floor=1.5)
    with pytest.raises(SmartpruneError, match=r"model is a OrderedDict; give a torch\.nn\.Module"):
        plan(model.state_dict(), sparsity=0.5)  # type: ignore[arg-type]
    with pytest.raises(SmartpruneError, match="the model does not run on it"):
        plan(model, sparsity=0.5, example=x[:, :1])


def test_nothing_to_prune_names_the_reasons() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8, 2))
    with pytest.raises(SmartpruneError) as caught:
        plan(model, sparsity=0.5)
    assert str(caught.value) == (
        "plan: nothing to prune in this Sequential (0: stem: reads the image (3 channels); 1: depthwise convolution; "
        "3: last layer, assumed to be the classifier); include= adds layers"
    )
    deep = nn.Sequential(nn.Conv2d(3, 8, 3), *(nn.Conv2d(8, 8, 3, groups=8) for _ in range(50)), nn.Linear(8, 2))
    with pytest.raises(SmartpruneError, match="; 1, 2, 3 and 47 more: depthwise convolution; 51: last layer"):
        plan(deep, sparsity=0.5)
    with pytest.raises(SmartpruneError, match="it has no weights with two axes or more"):
        plan(nn.BatchNorm2d(3), sparsity=0.5)


def test_default_block() -> None:
    assert plan(zoo.plain_cnn()[0]).block == Block(16, 8)


def test_the_suggested_share_of_a_model_is_feasible() -> None:
    """Blocks of 6x6 and 6x4: 36 and 24 MACs of the layers that are pruned, of 60 in all and 84 in the model."""
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(4, 6)), torch.zeros(1, 6)
    for share, floor, most in ((0.99, None, 36 / 84), (0.7, None, 36 / 84), (0.7, 0.4, 0.0), (0.45, None, 36 / 84)):
        with pytest.raises(SmartpruneError, match="at most") as caught:
            plan(model, (6, 6), budget=macs(share, x, of="model"), floor=floor, include=["0", "1"], skip="2").require()
        suggested = float(str(caught.value).partition("at most ")[2].split()[0])
        assert suggested == math.floor(10_000 * most) / 10_000
        plan(model, (6, 6), budget=macs(suggested, x, of="model"), floor=floor, include=["0", "1"], skip="2").require()


def test_repr_of_a_plan_is_one_line() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    assert repr(plan(model, block=(4, 4))) == "<Plan: 8 blocks of 4x4x1x1 in 2 layers>"
    planned = plan(model, block=(8, 8), sparsity=0.5, skip="2")
    assert repr(planned) == "<Plan: 1 block of 8x8x1x1 in 1 layer, remove 50% of the blocks>"
    infeasible = plan(model, block=(4, 4), sparsity=0.9, floor=0.5)
    assert repr(infeasible) == "<Plan: 8 blocks of 4x4x1x1 in 2 layers, remove 90% of the blocks; it cannot be met>"


def test_a_model_with_lazy_layers_is_planned() -> None:
    model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4))
    planned = plan(model, block=(4, 4), sparsity=0.5)
    assert (planned.n, planned.keep, planned.expected) == (16, 8, None)
    assert "lazy layer without a shape yet: run one forward pass first" in str(planned)


def test_packed_weights_of_a_tiny_model_are_larger() -> None:
    planned = plan(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), block=(4, 4), sparsity=0.5)
    assert planned.expected is not None
    size = planned.expected.bytes
    assert size is not None
    assert size.kept > size.total
    assert f"{size.kept / size.total:.1f}x larger" in str(planned)
