"""Channels through every kind of layer: outputs stay equal, and exactly the channels that can go are removed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import smartprune as sp
from helpers.compact_nets import NETS
from helpers.compact_parts import Net, empty_channels
from smartprune.artifacts.compact_apply import apply
from smartprune.artifacts.compact_choose import choose
from smartprune.artifacts.compact_graph import Graph, call_arguments, export
from smartprune.artifacts.compact_layers import RULES
from smartprune.artifacts.compact_rules import record

PATTERNS = 4
SHRINKS = set(NETS) - {  # their channels may all stay
    "attention_of_torch",
    "recurrent_use",
    "repeated_by_tensor",
    "slices",
    "standardized_weight",
    "stated_groups",
}


def compacted(recorded: Graph, model: nn.Module, multiple: int = 1) -> nn.Module:
    """The compact form of a model whose graph was recorded before, with other weights."""
    graph = Graph(model, recorded.nodes, recorded.names, recorded.constants)
    record(graph, RULES)
    small = copy.deepcopy(model)
    choice = choose(graph, {}, multiple=multiple)
    apply(graph, choice, small)
    for reader in graph.readers:
        gone = choice.of(graph.weights[reader.weight][reader.out_axis])
        assert not gone.any() or int((~gone).sum()) % multiple == 0
    return small


def call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    with torch.no_grad():
        return [x for x in tree_leaves(model(*args, **kwargs)) if isinstance(x, Tensor)]


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def double(value: Any) -> Any:
    return tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, value)


@pytest.mark.parametrize("name", NETS)
def test_outputs_are_equal_for_random_empty_channels(name: str) -> None:
    """In double precision, for several patterns, on other inputs than those of the graph."""
    torch.manual_seed(0)
    model, example = NETS[name]()
    model = model.double().eval()
    args, kwargs = double(call_arguments(example))
    recorded = export(model, args, kwargs)
    smaller = 0
    for seed in range(PATTERNS):
        pruned = empty_channels(copy.deepcopy(model), seed)
        small = compacted(recorded, pruned, multiple=(1, 1, 2, 3)[seed])
        assert small.state_dict().keys() >= pruned.state_dict().keys()
        smaller += count(small) < count(pruned)
        other = tree_map(lambda x: torch.randn_like(x) if isinstance(x, Tensor) and x.is_floating_point() else x, (args, kwargs))
        for batch in ((args, kwargs), other):
            for a, b in zip(call(small, *batch), call(pruned, *batch), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert smaller or name not in SHRINKS


@pytest.mark.parametrize("name", ["chain", "residual", "depthwise", "one_axis", "attention_of_torch"])
def test_a_model_without_empty_channels_does_not_change(name: str) -> None:
    torch.manual_seed(0)
    model, example = NETS[name]()
    model = model.double().eval()
    args, kwargs = double(call_arguments(example))
    small = compacted(export(model, args, kwargs), model)
    assert all(torch.equal(a, b) for a, b in zip(small.state_dict().values(), model.state_dict().values(), strict=True))


def shapes(model: nn.Module, x: Tensor) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights after compaction, whose outputs must be equal."""
    model = model.double().eval()
    args, kwargs = call_arguments(x.double())
    small = compacted(export(model, args, kwargs), model)
    for a, b in zip(call(small, args, kwargs), call(model, args, kwargs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    return {name.removesuffix(".weight"): tuple(p.shape) for name, p in small.named_parameters() if p.dim() > 1}


def zero(weight: Any, axis: int, positions: list[int]) -> None:
    with torch.no_grad():
        weight.index_fill_(axis, torch.tensor(positions), 0)


def test_both_ends_of_a_channel_count() -> None:
    """Two outputs of the first layer are zero, and the second layer does not read two others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 3))
    zero(model[0].weight, 0, [1, 2])
    zero(model[2].weight, 1, [2, 5, 8])
    assert shapes(model, torch.randn(2, 4)) == {"0": (5, 4), "2": (3, 5)}


@pytest.mark.parametrize(("multiple", "left"), [(1, 5), (2, 6), (4, 8), (6, 6), (8, 8), (16, 12)])
def test_layers_keep_a_multiple_of_channels(multiple: int, left: int) -> None:
    """Both layers of a sum keep as many, and a layer that has fewer channels than that keeps all."""
    torch.manual_seed(0)
    model = Net(
        lambda m, x: m.last(torch.relu(m.a(x)) + m.b(x)),
        a=nn.Conv2d(3, 12, 3),
        b=nn.Conv2d(3, 12, 3),
        last=nn.Conv2d(12, 5, 1),
    )
    for layer in (model.a, model.b):
        zero(layer.weight, 0, [0, 1, 3, 6, 7, 9, 11])
    graph = export(model.double().eval(), (x := torch.randn(2, 3, 8, 8).double(),), {})
    small = compacted(graph, model, multiple)
    assert [layer.weight.shape[0] for layer in (small.a, small.b, small.last)] == [left, left, 5]  # type: ignore[union-attr, index]
    torch.testing.assert_close(small(x), model(x), rtol=1e-9, atol=1e-9)


def test_empty_channels_spread_through_the_graph() -> None:
    """The last layer reads one channel, which reads one channel: the rest of both layers is unread."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(6, 6, 1) for _ in range(4)))
    zero(model[3].weight, 1, [1, 2, 3, 4, 5])
    zero(model[2].weight, 1, [0, 2, 3, 4, 5])
    zero(model[1].weight, 1, [0, 1])
    assert shapes(model, torch.randn(2, 6, 3, 3)) == {
        "0": (4, 6, 1, 1),
        "1": (1, 4, 1, 1),
        "2": (1, 1, 1, 1),
        "3": (6, 1, 1, 1),
    }


def test_a_constant_at_the_border_of_a_padded_convolution_keeps_one_channel() -> None:
    """Five channels are constant, four of them not zero. The largest one carries all four."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    zero(model[0].weight, 0, [0, 1, 2, 3, 4])
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([0.5, -1.0, 2.0, 1.0, 0.1, 1.0, 1.0, 1.0]))
    assert shapes(model, torch.randn(2, 3, 8, 8)) == {"0": (4, 3, 3, 3), "2": (4, 4, 3, 3)}


def test_without_padding_the_constant_moves_into_the_bias() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    zero(model[0].weight, 0, [0, 1, 2, 3, 4])
    assert shapes(model, torch.randn(2, 3, 8, 8)) == {"0": (3, 3, 3, 3), "2": (4, 3, 3, 3)}


@pytest.mark.parametrize(("first", "second", "left"), [([1, 2, 5], [0, 1, 2], 8), ([3, 4], [5, 6], 10)])
def test_a_residual_addition_loses_what_both_summands_lose(first: list[int], second: list[int], left: int) -> None:
    torch.manual_seed(0)
    model = Net(
        lambda m, x: m.last((m.a(x) + m.b(x)).relu()),
        a=nn.Conv2d(3, 10, 1),
        b=nn.Conv2d(3, 10, 3, padding=1),
        last=nn.Conv2d(10, 2, 1),
    )
    zero(model.a.weight, 0, first)
    zero(model.b.weight, 0, second)
    assert shapes(model, torch.randn(2, 3, 6, 6))["last"] == (2, left, 1, 1)


def test_chunks_stay_equally_wide() -> None:
    """Three channels of one half and one of the other are unread: each half loses one."""
    torch.manual_seed(0)
    model, x = NETS["chunks"]()
    zero(model.middle.weight, 1, [0, 1, 2])
    zero(model.last.weight, 1, [7])
    assert shapes(model, x)["first"] == (10, 3, 1, 1)


def test_groups_stay_equally_wide_or_go_as_a_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 12, 1), nn.Conv2d(12, 12, 1, groups=3), nn.Conv2d(12, 2, 1))
    zero(model[1].weight, 0, [0, 1, 2, 3])  # the first group
    zero(model[2].weight, 1, [4, 5, 8])
    assert shapes(model, torch.randn(2, 3, 4, 4)) == {"0": (8, 3, 1, 1), "1": (6, 4, 1, 1), "2": (2, 6, 1, 1)}


def test_a_flattened_channel_loses_all_of_its_features() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(6 * 16, 5))
    zero(model[0].weight, 0, [4])
    zero(model[3].weight, 1, list(range(16)))
    zero(model[3].weight, 1, [17, 20])  # a part of a channel
    assert shapes(model, torch.randn(2, 3, 6, 6)) == {"0": (4, 3, 3, 3), "3": (5, 64)}


def test_an_empty_scale_of_a_normalization_empties_the_layer_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 7, 1), nn.BatchNorm2d(7), nn.Conv2d(7, 2, 1))
    with torch.no_grad():
        model[2].weight[:4] = 0
    zero(model[1].weight[4:], 1, [0, 1])
    assert shapes(model, torch.randn(2, 3, 4, 4)) == {"0": (4, 3, 1, 1), "1": (3, 4, 1, 1), "3": (2, 3, 1, 1)}


def test_nothing_is_removed_before_a_layer_that_reads_all_channels() -> None:
    torch.manual_seed(0)
    for norm in (nn.GroupNorm(2, 8), nn.GroupNorm(1, 8)):
        model = nn.Sequential(nn.Conv2d(3, 8, 1), norm, nn.Conv2d(8, 2, 1))
        zero(model[0].weight, 0, [0, 1])
        assert shapes(model, torch.randn(2, 3, 4, 4))["0"] == (8, 3, 1, 1)


def test_a_layer_keeps_one_channel() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))
    zero(model[0].weight, 0, list(range(9)))
    assert shapes(model, torch.randn(2, 4)) == {"0": (1, 4), "2": (3, 1)}


def test_a_constant_that_a_shared_layer_reads_each_time_goes_into_its_bias() -> None:
    """The hidden layer runs twice; its empty outputs are the same constants both times. The last bias takes them over once."""
    torch.manual_seed(0)
    model, x = NETS["two_poolings"]()
    with torch.no_grad():
        model.down.bias.copy_(torch.tensor([0.5, -1.0, 2.0, 1.0, 0.3, 0.2]))
    zero(model.down.weight, 0, [0, 1, 2, 3])
    assert shapes(model, x)["down"] == (2, 9)


def test_an_empty_layer_that_runs_twice_keeps_its_constants() -> None:
    torch.manual_seed(0)
    model, x = NETS["two_poolings"]()
    zero(model.down.weight, 0, list(range(6)))
    assert shapes(model, x)["up"] == (9, 1)


def test_a_shared_head_with_padding_keeps_one_constant_channel() -> None:
    torch.manual_seed(0)
    model, x = NETS["shared_head"]()
    with torch.no_grad():
        model.head.bias.uniform_(0.5, 1.5)
    zero(model.head.weight, 0, [0, 1, 2, 3, 4, 5])
    assert shapes(model, x)["box"] == (4, 5, 3, 3)


def test_a_shared_layer_keeps_channels_that_are_another_constant_each_time() -> None:
    """Channels 0 to 3 are constant on both levels: two with one value, which the largest of them carries, and two with two."""
    torch.manual_seed(0)
    model, x = NETS["shared_head"]()
    with torch.no_grad():
        model.high.bias[:4] = torch.tensor([0.5, 1.0, 0.2, 0.3])
        model.low.bias[:4] = torch.tensor([0.5, 1.0, 0.4, -1.0])
    for layer in (model.high, model.low):
        zero(layer.weight, 0, [0, 1, 2, 3])
    assert shapes(model, x)["head"] == (10, 7, 3, 3)


def test_each_group_keeps_one_constant_channel() -> None:
    """Three of the six channels of every group are constant, and the padding makes them differ at the border."""
    torch.manual_seed(0)
    model, x = NETS["groups_with_padding"]()
    zero(model[0].weight, 0, [0, 1, 2, 6, 8, 10, 15, 16, 17])
    assert shapes(model, x)["2"] == (9, 4, 3, 3)


def test_the_zeros_of_a_padded_shortcut_let_other_channels_go() -> None:
    """Channels 3 to 8 of the sum are those of the first layer. Two of them are empty in both summands."""
    torch.manual_seed(0)
    model, x = NETS["padded_shortcut"]()
    zero(model.first.weight, 0, [1, 4, 5])
    zero(model.first.bias, 0, [1, 4, 5])
    zero(model.conv.weight, 0, [0, 3, 4, 7, 11])
    assert shapes(model, x) == {"first": (4, 3, 1, 1), "conv": (10, 4, 3, 3), "last": (4, 10, 1, 1)}


def test_stacked_branches_lose_what_all_of_them_lose() -> None:
    torch.manual_seed(0)
    model, x = NETS["stacked_branches"]()
    zero(model.a.weight, 0, [0, 1, 2, 3])
    zero(model.b.weight, 0, [2, 3, 4])
    for layer in (model.c, model.d):
        zero(layer.weight, 0, [2, 3])
    zero(model.last.weight, 1, [3])
    assert shapes(model, x)["last"] == (4, 11, 1, 1)


def test_the_feedforward_layers_of_an_encoder_of_torch_shrink() -> None:
    torch.manual_seed(0)
    model, x = NETS["encoder_layer"]()
    zero(model.linear1.weight, 0, list(range(8)))
    result = shapes(model, x)
    assert (result["linear1"], result["linear2"]) == ((12, 12), (12, 12))


def test_normalizations_without_parameters_have_the_new_number_of_channels() -> None:
    """Torch warns about another number, and warnings are errors here."""
    torch.manual_seed(0)
    model, x = NETS["instance_norms"]()
    zero(model[0].weight, 0, [0, 1, 2])
    graph = export(model.double().eval(), (x.double(),), {})
    small = compacted(graph, model)
    assert (small[1].num_features, small[4].num_features) == (9, 8)  # type: ignore[index, union-attr]
    torch.testing.assert_close(small(x.double()), model(x.double()), rtol=1e-9, atol=1e-9)


class PartlyRead(nn.Module):
    """Runs one convolution twice. Only half of its second result is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 3, padding=1)
        self.whole, self.part = nn.Conv2d(6, 2, 1), nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x).sigmoid()
        return self.whole(self.shared(y)), self.part(self.shared(y)[:, :3])


def test_calls_of_a_layer_that_merge_different_constants_all_count() -> None:
    torch.manual_seed(0)
    model, x = PartlyRead().eval(), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        model.first.weight[:4] = 0  # four constants, two of which matter to the first call alone
        model.shared.weight[:3, 1::2] = 0
        small = sp.compact(model, x)
        assert small.first.weight.shape[0] == 6  # type: ignore[union-attr]
        for a, b in zip(small(x), model(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
