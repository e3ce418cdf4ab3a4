"""Uses and MACs, compared with the FLOP counter of torch and with numbers worked out by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import zoo
from helpers.usage import count_macs, count_uses
from smartprune import Magnitude, attach
from smartprune.core.block import Block
from smartprune.core.budget import block_macs
from smartprune.core.layers import Layer, find_layers
from smartprune.core.usage import measure
from smartprune.errors import SmartpruneError


@pytest.mark.parametrize("name", sorted(zoo.SMALL))
def test_macs_equal_the_flop_counter_of_torch(name: str) -> None:
    model, x = zoo.SMALL[name]()
    model.eval()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # it does not count the CPU kernel of attention
        model(x)
    assert count_macs(model, x) == counter.get_total_flops() // 2 // x.shape[0]


def _layer_macs(layers: tuple[Layer, ...], uses: dict[str, tuple[int, ...]]) -> int:
    return sum(int(block_macs(layer, uses[layer.name]).sum()) for layer in layers)


def test_uses_of_every_kind_of_layer() -> None:
    model, x = zoo.unet()
    layers, _ = find_layers(model, Block(4, 4), include="*")
    uses = count_uses(model, layers, x)
    assert uses == {"enter.0": (64,), "down.0": (16,), "deep.0": (4,), "up1": (4,), "up2": (16,), "out": (64,)}
    model, x = zoo.transformer_block()
    layers, _ = find_layers(model, Block(4, 4), include="*")
    uses = count_uses(model, layers, x)
    assert uses["attention.in_proj_weight"] == (4, 4, 4)
    assert uses["attention.out_proj"] == uses["mlp.0"] == (4,)
    assert _layer_macs(layers, uses) + zoo.ATTENTION_MACS["transformer_block"] == count_macs(model, x)
    model, x = zoo.cross_attention()
    layers, _ = find_layers(model, Block(4, 4), include="*")
    uses = count_uses(model, layers, x)
    assert {name for name, counts in uses.items() if counts == (4,)} == set(uses) - {"head"}
    assert uses["head"] == (1,)
    assert _layer_macs(layers, uses) + zoo.ATTENTION_MACS["cross_attention"] == count_macs(model, x)
    model, x = zoo.tied()
    layers, _ = find_layers(model, Block(4, 4), include="*")
    assert count_uses(model, layers, x)["a"] == (2,)  # once for each of its two users


def test_counting_does_not_change_the_model() -> None:
    model, x = zoo.plain_cnn()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    count_macs(model, x)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_macs_do_not_depend_on_the_batch_size() -> None:
    model, x = zoo.mobilenet_block()
    assert count_macs(model, x) == count_macs(model, x[:1]) == count_macs(model, (x,)) == count_macs(model, {"x": x})


def test_macs_of_a_parametrized_model_are_counted() -> None:
    model, x = zoo.plain_cnn()
    expected = count_macs(model, x)
    torch.nn.utils.parametrizations.weight_norm(model[3])
    assert count_macs(model, x) == expected


class Functional(nn.Module):
    """Uses the weights of its layers in functions, and calls one of the layers as well."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up = nn.Linear(8, 24, bias=False), nn.ConvTranspose1d(24, 16, 2, stride=2)
        self.both, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, weight=self.qkv.weight)
        x = nn.functional.conv_transpose1d(x.mT, self.up.weight, self.up.bias, 2).mT
        return self.head(self.both(nn.functional.linear(x, self.both.weight)))  # type: ignore[no-any-return]


def test_weights_used_outside_of_their_layer_are_counted() -> None:
    model, x = Functional().eval(), torch.randn(2, 5, 8)
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert count_macs(model, x) == counter.get_total_flops() // 2 // 2
    layers, _ = find_layers(model, Block(4, 4), include="*")
    uses = {"qkv": (5,), "up": (5,), "both": (20,), "head": (10,)}
    assert count_uses(model, layers, x) == uses
    attach(model, Magnitude(), block=(4, 4), sparsity=0.5, steps=1)
    assert count_uses(model, layers, x) == uses


def test_macs_of_a_compiled_model_are_those_of_the_eager_model() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(2, 5, 8)
    assert count_macs(model, x) == 5 * (8 * 8 + 8 * 4) == count_macs(torch.compile(model, backend="eager"), x)  # type: ignore[arg-type]
    model[0].compile(backend="eager")
    assert count_macs(model, x) == 5 * (8 * 8 + 8 * 4)


class AttentionPooling(nn.Module):
    """Passes the weights of four linear layers to the attention function of torch, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        weights = {f"{name}_proj_weight": getattr(self, name).weight for name in "qkv"}
        bias = torch.cat([self.q.bias, self.k.bias, self.v.bias])
        more = {"use_separate_proj_weight": True, "need_weights": False, "training": False, **weights}
        last = (self.out.weight, self.out.bias)
        return nn.functional.multi_head_attention_forward(x[:1], x, x, 8, 2, None, bias, None, None, False, 0.0, *last, **more)[0]


def test_attention_with_weights_of_linear_layers_is_counted() -> None:
    model, x = AttentionPooling(), torch.randn(2, 5, 8)
    layers, _ = find_layers(model, Block(4, 4), include="*")
    uses = {"q": (1,), "k": (5,), "v": (5,), "out": (1,)}
    assert count_uses(model, layers, x) == uses
    attach(model, Magnitude(), block=(4, 4), sparsity=0.5, steps=1)
    assert count_uses(model, layers, x) == uses


def test_an_example_without_samples_raises() -> None:
    """All MACs would be zero."""
    for example in (torch.randn(0, 8), (torch.randn(0, 8),), {"input": torch.randn(0, 8)}):
        with pytest.raises(SmartpruneError, match="its first tensor is 0x8 and holds no sample"):
            measure(nn.Sequential(nn.Linear(8, 4))[0], example)
