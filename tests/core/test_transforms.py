"""Layers that transform their weight, and layers that do not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smartprune.core.block import Block
from smartprune.core.layers import every_layer, find_layers
from smartprune.errors import SmartpruneError


class Standardized(nn.Conv2d):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.gain = nn.Parameter(torch.zeros(self.out_channels))

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight - self.weight.mean((1, 2, 3), keepdim=True)) / (self.weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return self._conv_forward(x, self.gain[:, None, None, None] * weight, self.bias)


class Same(nn.Conv2d):
    """Pads its input and scales its weight: zeros survive."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(x, (1, 1, 1, 1))
        return self._conv_forward(x, nn.functional.normalize(self.weight.flatten(1)).view_as(self.weight), self.bias)


class Positive(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.exp(), self.bias)


class Noisy(nn.Linear):
    """Normalizes its input and adds noise: zeros survive."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.layer_norm(x, x.shape[-1:])
        return super().forward(x + torch.randn_like(x))


class Gated(nn.Linear):
    """Has a second weight of the same shape."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.gate = nn.Parameter(torch.randn(size, size))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * nn.functional.linear(x, self.gate).sigmoid()


class Pair(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + y)


def test_layers_that_transform_their_weight_are_never_matched_by_a_pattern() -> None:
    plain = nn.ModuleList([Same(16, 16, 3, dilation=2), Pair(16, 16), Noisy(16, 16), Gated(16)])
    transforming = nn.ModuleList([Standardized(16, 16, 3), Standardized(16, 16, (1, 3), bias=False), Positive(16, 16)])
    model = nn.Sequential(plain, transforming, nn.Linear(16, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    layers, skipped = find_layers(model, Block(4, 4))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [layer.name for layer in layers] == ["0.0", "0.1", "0.2", "0.3"]
    assert ["zeros do not survive" in s.reason for s in skipped if s.kind != "Gated"] == [True, True, True, False]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for include in ("*", nn.Conv2d, nn.Module, ["1.[012]", "?.?"]):
        chosen = [layer.name for layer in find_layers(model, Block(4, 4), include=include)[0]]  # type: ignore[arg-type]
        assert [name for name in chosen if name != "2"] == ["0.0", "0.1", "0.2", "0.3"]
    for include in ("1.0", ["2", "1.0"]):
        with pytest.raises(SmartpruneError, match=r"^include: 1\.0 cannot be pruned: transforms its weight .*leave it out"):
            find_layers(model, Block(4, 4), include=include)
    assert [layer.name for layer in every_layer(model, Block(4, 4))[0]] == ["0.0", "0.1", "0.2", "0.3", "1.0", "1.1", "1.2", "2"]


class Caching(nn.Linear):
    """Transforms its weight once and caches the result."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "weight" not in self.cache:
            self.cache["weight"] = self.weight.detach() / 2
        return nn.functional.linear(x, self.cache["weight"], self.bias)


def test_the_cache_of_a_layer_is_not_modified() -> None:
    model = nn.Sequential(Caching(16, 16), nn.Linear(16, 4))
    assert [layer.name for layer in find_layers(model, Block(4, 4))[0]] == ["0"]
    assert model[0].cache == {}
