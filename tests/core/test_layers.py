import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from helpers import reference, zoo
from smartprune.core.block import Block
from smartprune.core.layers import Layer, Skipped, find_layers
from smartprune.errors import SmartpruneError

BLOCK = Block(4, 4)


def names(layers: tuple[Layer, ...] | tuple[Skipped, ...]) -> list[str]:
    return [layer.name for layer in layers]


def reasons(model: nn.Module, **options: object) -> dict[str, str]:
    return {s.name: s.reason for s in find_layers(model, BLOCK, **options)[1]}  # type: ignore[arg-type]


def test_stem_and_classifier_are_skipped() -> None:
    model, _ = zoo.plain_cnn()
    layers, skipped = find_layers(model, BLOCK)
    assert names(layers) == ["3", "6"]
    assert [(s.name, s.kind, s.shape, s.reason) for s in skipped] == [
        ("0", "Conv2d", (16, 3, 3, 3), "stem: reads the image (3 channels)"),
        ("10", "Linear", (10, 12), "last layer, assumed to be the classifier"),
    ]
    assert [(layer.start, layer.stop, layer.n) for layer in layers] == [(0, 180, 180), (180, 195, 15)]
    assert [layer.weight for layer in layers] == ["3.weight", "6.weight"]


def test_first_convolution_with_many_channels_is_not_the_stem() -> None:
    model = nn.Sequential(nn.Conv2d(5, 8, 3), nn.Conv2d(8, 8, 3))
    assert names(find_layers(model, BLOCK)[0]) == ["0"]


def test_grouped_and_depthwise_convolutions_are_skipped_unless_included() -> None:
    model, _ = zoo.mobilenet_block()
    assert reasons(model) == {
        "stem": "stem: reads the image (3 channels)",
        "depthwise.0": "depthwise convolution",
        "grouped": "grouped convolution (2 groups)",
        "head": "last layer, assumed to be the classifier",
    }
    layers, _ = find_layers(model, BLOCK, include=["grouped", "depthwise.*"])
    by_name = {layer.name: layer for layer in layers}
    assert by_name["grouped"].grid.shape == (2 * 2, 3, 3, 3)  # 6 output channels in each of 2 groups, 12 inputs
    assert by_name["depthwise.0"].grid.shape == (24, 1, 3, 3)  # a block never crosses a group
    for layer, groups in ((by_name["grouped"], 2), (by_name["depthwise.0"], 24)):
        index = reference.block_index(layer.grid.weight_shape, (4, 4), groups)
        assert layer.grid.sizes().tolist() == reference.block_counts(index)


def test_transposed_convolutions_swap_axes() -> None:
    model, _ = zoo.unet()
    by_name = {layer.name: layer for layer in find_layers(model, Block(16, 8))[0]}
    assert by_name["up1"].transposed
    assert not by_name["deep.0"].transposed
    assert by_name["up1"].grid.weight_shape == (32, 18, 2, 2)  # stored as inputs, outputs
    assert by_name["up1"].grid.shape == (4, 2, 2, 2)  # 8 inputs and 16 outputs per block
    grouped = nn.ConvTranspose2d(12, 10, 3, groups=2)
    layer = find_layers(grouped, Block(4, 5), include="*")[0][0]
    assert layer.grid.weight_shape == (12, 5, 3, 3)
    assert layer.grid.shape == (4, 2, 3, 3)  # 6 inputs in each group make 2 blocks, 5 outputs make 2
    index = reference.block_index((12, 5, 3, 3), (4, 5), 2, True)
    assert layer.grid.sizes().tolist() == reference.block_counts(index)


def test_attention_is_divided_into_query_key_and_value() -> None:
    model, _ = zoo.transformer_block()
    layers, _ = find_layers(model, Block(16, 8))
    assert names(layers) == ["attention.in_proj_weight", "attention.out_proj", "mlp.0", "mlp.2"]
    first = layers[0]
    assert (first.kind, first.weight) == ("MultiheadAttention", "attention.in_proj_weight")
    assert first.grid.shape == (3, 2)  # no block crosses from query to key or value
    assert find_layers(model, Block(24, 8))[0][0].grid.shape == (3, 2)
    assert layers[1].weight == "attention.out_proj.weight"


def test_attention_with_separate_weights_has_one_layer_for_each() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(10, 2, kdim=6, vdim=7), nn.Linear(8, 2)])
    layers, _ = find_layers(model, BLOCK)
    assert names(layers) == ["0.q_proj_weight", "0.k_proj_weight", "0.v_proj_weight", "0.out_proj"]
    assert [layer.weight for layer in layers[:3]] == names(layers)[:3]
    for layer, width in zip(layers, (10, 6, 7, 10), strict=True):
        assert (layer.kind, layer.transposed) == (user_kind(layer), False)
        index = reference.block_index((10, width), (4, 4))
        assert layer.grid.shape == reference.grid_shape((10, width), (4, 4), 1, False)
        assert layer.grid.sizes().tolist() == reference.block_counts(index)


def user_kind(layer: Layer) -> str:
    return "NonDynamicallyQuantizableLinear" if layer.name.endswith("out_proj") else "MultiheadAttention"


def test_conv1d_of_transformers_is_a_linear_layer_with_swapped_axes() -> None:
    model = nn.Sequential(zoo.Conv1D(18, 10), zoo.Conv1D(2, 18))
    (layer,), skipped = find_layers(model, Block(4, 3))
    assert (layer.name, layer.kind, layer.transposed) == ("0", "Conv1D", True)
    assert layer.grid.weight_shape == (10, 18)  # inputs, outputs
    assert layer.grid.shape == (4, 5)  # 3 inputs and 4 outputs per block
    assert layer.grid.sizes().tolist() == reference.block_counts(reference.block_index((10, 18), (4, 3), 1, True))
    assert reasons(model) == {"1": "last layer, assumed to be the classifier"}
    assert [s.shape for s in skipped] == [(18, 2)]


def test_another_class_called_conv1d_is_not_a_layer() -> None:
    class Conv1D(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(shape))

    class Child(nn.Conv1d):
        pass

    Child.__name__ = "Conv1D"
    stacked, square = Conv1D(2, 4, 4), Conv1D(4, 4)
    stacked.nf = 4  # type: ignore[assignment]
    skip_reasons = reasons(nn.ModuleList([stacked, square, nn.Linear(4, 2)]), include="*")
    assert set(skip_reasons) == {"0", "1"}
    (layer,) = find_layers(nn.ModuleList([Child(8, 8, 3)]), BLOCK, include="*")[0]
    assert not layer.transposed


@pytest.mark.parametrize(("cell", "gates"), [(nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1)])
def test_blocks_of_recurrent_cells_do_not_cross_gates(cell: type[nn.RNNCellBase], gates: int) -> None:
    model = nn.ModuleList([cell(10, 6), nn.Linear(6, 2)])
    layers, _ = find_layers(model, BLOCK)
    assert names(layers) == ["0.weight_ih", "0.weight_hh"]
    for layer, inputs in zip(layers, (10, 6), strict=True):
        index = reference.block_index((gates * 6, inputs), (4, 4), gates)
        assert layer.grid.shape == reference.grid_shape((gates * 6, inputs), (4, 4), gates, False)
        assert layer.grid.sizes().tolist() == reference.block_counts(index)


def test_recurrent_layers_and_experts_are_skipped_with_what_to_use_instead() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.zeros(4, 8, 8))

    model = nn.ModuleDict(
        {
            "lstm": nn.LSTM(8, 8),
            "gru": nn.GRU(8, 8, bidirectional=True),
            "experts": Experts(),
            "biased": nn.MultiheadAttention(8, 2, add_bias_kv=True),
            "last": nn.Linear(8, 8),
        }
    )
    skip_reasons = reasons(model, include="*")
    assert skip_reasons["lstm.weight_hh_l0"] == (
        "LSTM passes its weights to torch as a list, so they cannot be masked: use LSTMCell to prune them"
    )
    assert skip_reasons["gru.weight_ih_l0_reverse"].endswith("use GRUCell to prune them")
    assert skip_reasons["experts.up"] == "stack of 4 experts: use one nn.Linear for each expert to prune them"
    assert skip_reasons["biased.bias_k"] == "bias_k is a bias of attention, not a weight"


def test_tied_weights_are_one_layer() -> None:
    model, _ = zoo.tied()
    layers, _ = find_layers(model, BLOCK)
    assert names(layers) == ["first", "a"]
    assert layers[1].sites == (("a", "weight"), ("b", "weight"))
    assert names(find_layers(model, BLOCK, skip="b")[0]) == ["first"]  # any of its names matches


def test_tied_weights_with_different_axes_are_skipped() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.inner = nn.Linear(8, 8)
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.embed.weight

    assert reasons(Words(), include="*")["embed"] == "embedding, tied to the output layer head"
    a, b = nn.Conv2d(8, 8, 1), nn.ConvTranspose2d(8, 8, 1)
    b.weight = a.weight
    skip_reasons = reasons(nn.Sequential(a, b, nn.Conv2d(8, 2, 1)))
    assert skip_reasons["0"] == "tied to 1 (ConvTranspose2d), which reads its axes differently"


def test_one_module_used_twice_is_one_layer() -> None:
    shared = nn.Linear(8, 8)
    assert names(find_layers(nn.Sequential(shared, shared, nn.Linear(8, 2)), BLOCK)[0]) == ["0"]


def test_lazy_layers_are_skipped() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about lazy modules
        lazy, linear = nn.LazyConv2d(8, 3), nn.LazyLinear(8)
    _, skipped = find_layers(nn.Sequential(lazy, nn.Conv2d(8, 8, 3), linear, nn.Linear(8, 2)), BLOCK)
    by_name = {s.name: s for s in skipped}
    assert by_name["0"].reason == by_name["2"].reason == "lazy layer without a shape yet: run one forward pass first"
    assert by_name["0"].shape == ()
    assert reasons(linear)["weight"] == "lazy layer without a shape yet: run one forward pass first"


def test_parametrized_and_hooked_layers_are_skipped() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    parametrizations.spectral_norm(model[0])
    prune.l1_unstructured(model[1], "weight", amount=2)
    layers, skipped = find_layers(model, BLOCK)
    assert names(layers) == ["2"]
    skip_reasons = {s.name: s.reason for s in skipped}
    assert skip_reasons["0.parametrizations.weight.original"] == "already parametrized: remove the parametrization first"
    assert skip_reasons["1.weight_orig"] == "weight_orig is not the layer's weight (the weight may be computed from it)"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_models_are_skipped() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    layers, skipped = find_layers(model, BLOCK)
    assert layers == ()
    assert {s.reason for s in skipped} == {"scripted module: prune the model before scripting it"}


def test_unsupported_weights_are_skipped() -> None:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(10, 4),
            "bilinear": nn.Bilinear(4, 4, 4),
            "empty": nn.Linear(4, 4),
            "last": nn.Linear(4, 4),
        }
    )
    model["empty"].weight = nn.Parameter(torch.zeros(0, 4))
    assert reasons(model, include="*") == {
        "embed": "Embedding is neither a convolution nor a linear layer",
        "bilinear": "Bilinear is neither a convolution nor a linear layer",
        "empty": "no weights",
    }


@pytest.mark.parametrize(("name", "counts"), [("conv1d_net", [3 * 5 * 5]), ("conv3d_net", [3 * 2 * 27])])
def test_1d_and_3d_convolutions(name: str, counts: list[int]) -> None:
    model, _ = zoo.SMALL[name]()
    layers, _ = find_layers(model, BLOCK)
    assert [layer.n for layer in layers] == counts


def test_include_and_skip_take_names_globs_and_types() -> None:
    model, _ = zoo.plain_cnn()
    everything = ["0", "3", "6", "10"]
    assert names(find_layers(model, BLOCK, include="*")[0]) == everything
    assert names(find_layers(model, BLOCK, include=nn.Linear)[0]) == ["3", "6", "10"]
    assert names(find_layers(model, BLOCK, include=["0", nn.Linear])[0]) == everything
    assert names(find_layers(model, BLOCK, skip=[nn.Conv2d], include="10")[0]) == ["10"]
    assert names(find_layers(model, BLOCK, include="*", skip="[36]")[0]) == ["0", "10"]
    assert reasons(model, include="*", skip="3") == {"3": "named in skip"}  # skip takes precedence
    nested, _ = zoo.mobilenet_block()
    assert "grouped" in names(find_layers(nested, BLOCK, include="group*")[0])


class Head(nn.Module):
    smartprune_skip = ("boxes", "gone.*")  # names within this module; one of them matches nothing

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Conv2d(8, 8, 1)
        self.boxes = nn.Conv2d(8, 4, 1)
        self.classes = nn.Conv2d(8, 4, 1)


def test_smartprune_skip_of_a_submodule() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ModuleDict({"head": Head()}), nn.Conv2d(8, 8, 1), nn.Linear(8, 2))
    layers, skipped = find_layers(model, BLOCK)
    assert names(layers) == ["0", "1.head.hidden", "1.head.classes", "2"]
    assert [(s.name, s.reason) for s in skipped] == [
        ("1.head.boxes", "listed in smartprune_skip"),
        ("3", "last layer, assumed to be the classifier"),
    ]
    assert "1.head.boxes" in names(find_layers(model, BLOCK, include="1.head.*")[0])  # include takes precedence
    assert reasons(model, include="*", skip="*boxes") == {"1.head.boxes": "named in skip"}
    assert names(find_layers(Head(), BLOCK)[0]) == ["hidden"]  # here, classes is the last layer


def test_smartprune_skip_takes_types_names_and_tied_weights() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model.smartprune_skip = [nn.Conv2d]  # type: ignore[assignment]
    assert names(find_layers(model, BLOCK)[0]) == ["1", "2"]
    model.smartprune_skip = "2"  # type: ignore[assignment]
    assert names(find_layers(model, BLOCK)[0]) == ["0", "1"]
    model[1].weight = model[2].weight
    assert names(find_layers(model, BLOCK)[0]) == ["0"]
    model.smartprune_skip = (3,)  # type: ignore[assignment]
    with pytest.raises(SmartpruneError, match=r"^smartprune_skip: 3 is neither a layer name \(globs allowed\) nor a module type"):
        find_layers(model, BLOCK)


@pytest.mark.parametrize("option", ["include", "skip"])
def test_patterns_without_match_raise(option: str) -> None:
    model, _ = zoo.plain_cnn()
    with pytest.raises(SmartpruneError, match=r"'head\.\*' matches no layer of the model; it has: 0, 3, 6, 10"):
        find_layers(model, BLOCK, **{option: "head.*"})  # type: ignore[arg-type]
    with pytest.raises(SmartpruneError, match="ConvTranspose2d matches no layer"):
        find_layers(model, BLOCK, **{option: [nn.ConvTranspose2d]})  # type: ignore[arg-type]
    with pytest.raises(SmartpruneError, match=f"{option}: 3 is neither a layer name"):
        find_layers(model, BLOCK, **{option: [3]})  # type: ignore[arg-type, list-item]


@pytest.mark.parametrize("name", sorted(zoo.SMALL))
def test_grids_of_all_models_equal_slow_loops(name: str) -> None:
    model, _ = zoo.SMALL[name]()
    for block in (BLOCK, Block(16, 8), Block.of("channel"), Block(3, 5, 2)):
        layers, skipped = find_layers(model, block, include="*")
        assert all("has kernel sizes" in s.reason and len(s.shape) == 2 for s in skipped)
        assert len(skipped) == 0 or block == Block(3, 5, 2)
        assert [layer.start for layer in layers] == [sum(x.n for x in layers[:i]) for i in range(len(layers))]
        for layer in layers:
            weight = model.get_parameter(layer.weight)
            parts = 3 if layer.weight.endswith("in_proj_weight") else getattr(model.get_submodule(layer.sites[0][0]), "groups", 1)
            index = reference.block_index(weight.shape, block.sizes, parts, layer.transposed)
            assert layer.grid.sizes().tolist() == reference.block_counts(index)


def test_parameters_that_share_memory_are_skipped() -> None:
    """Zeros of one would appear in the other, and the blocks of both would be counted."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model[2].weight.data = model[0].weight.data
    expected = "shares memory with {}.weight, but is another parameter: assign one parameter to both"
    for include in ((), "*"):
        found = reasons(model, include=include)
        assert (found["0"], found["2"]) == (expected.format(2), expected.format(0))
    buffer = torch.randn(2, 8, 8)
    for layer, values in zip((model[0], model[2]), buffer, strict=True):  # parts of one buffer do not overlap
        layer.weight.data = values
    assert names(find_layers(model, BLOCK)[0]) == ["0", "1", "2"]
    model[1].weight = nn.Parameter(torch.randn(1, 8).expand(8, 8))
    assert reasons(model)["1"] == "several of its numbers share one place in memory: clone it"
