"""The block vector: all blocks of a model as one flat vector, which is what a method sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SmartpruneError
from .layers import Layer
from .sharding import full_tensor

SMALLEST_SHARE = 1e-12


class Blocks:
    """All blocks of a model as one flat vector of ``n`` entries: what a method sees.

    ``cost`` [n] and ``limit`` are the budget (``sum(cost * mask) <= limit``), ``layer`` [n] the number of each block's
    layer, ``sizes`` [n] its real elements, ``counts`` [number of layers] the blocks of each layer; all are where the weights
    are. ``weights`` are the model's own parameters, in the order of ``layers``.
    """

    def __init__(
        self, model: nn.Module, layers: tuple[Layer, ...], cost: Tensor | None, limit: int, min_keep: Tensor | None
    ) -> None:
        self.model = model
        self.layers = layers
        self.n = layers[-1].stop if layers else 0
        self.total = self.n if cost is None else int(cost.sum())  # what all blocks together cost
        self._cost = cost
        self._soft_cost = None if cost is None else cost.to(torch.float32)
        self.limit = limit
        self.min_keep = min_keep  # [number of layers], or None without a floor
        self._owners = [(model.get_submodule(layer.sites[0][0]), layer.sites[0][1]) for layer in layers]
        self.sizes = torch.cat([layer.grid.sizes() for layer in layers])
        self.layer = torch.repeat_interleave(torch.tensor([layer.n for layer in layers], device="cpu"))
        self.to(self.device)

    def to(self, device: torch.device) -> None:
        """Takes along what methods read: a copy from the host's memory at every step would be waited for."""
        self.sizes, self.layer = self.sizes.to(device), self.layer.to(device)
        self.counts = torch.tensor([layer.n for layer in self.layers], device=device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "counts" not in state:  # saved before there were any
            self.to(self.layer.device)

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights as stored, unmasked."""
        return [self.weight_of_layer(index) for index in range(len(self._owners))]

    def weight_of_layer(self, index: int) -> nn.Parameter:
        """The weight of layer ``index`` as stored."""
        owner, name = self._owners[index]
        weight = owner._parameters.get(name)
        if weight is None:
            raise SmartpruneError(
                f"layer {self.layers[index].name} has no parameter {name!r} any more: it was taken away or replaced (by "
                "weight_norm, a parametrization or torch.nn.utils.prune, say) after attach; do that before you attach"
            )
        return weight

    @property
    def device(self) -> torch.device:
        return self.weight_of_layer(0).device

    @property
    def cost(self) -> Tensor | None:
        """Cost of every block in integers, on the weights' device; None where every block costs one."""
        if self._cost is not None and self._cost.device != self.device:
            self._cost = _moved(self._cost, self.device)
        return self._cost

    @property
    def soft_cost(self) -> Tensor | None:
        """The same in float32, for the soft top-k."""
        if self._soft_cost is not None and self._soft_cost.device != self.device:
            self._soft_cost = _moved(self._soft_cost, self.device)
        return self._soft_cost

    def sum(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Sum of ``function(weight)``, of a float32 weight, over every block, [n] on the weights' device."""
        with torch.no_grad():
            pairs = zip(self.layers, self.weights, strict=True)
            parts = [layer.grid.sum(function(full_tensor(w.detach()).float())) for layer, w in pairs]
            return torch.cat([part.to(self.device) for part in parts])

    def mean(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Mean of ``function(weight)``, of a float32 weight, over every block's real elements, [n]."""
        return self.sum(function) / self.sizes.to(self.device)

    def norms(self) -> Tensor:
        """L2 norm of every block, float32 [n]; squares are added in float64, which has room for those of every float32."""
        return self.sum(_squared).sqrt().float()

    def share(self) -> Tensor:
        """Logarithm of every block's share of its layer: its mean square over the sum of those that are not smaller, float32 [n].

        The largest block of any layer has 0, so that among all layers no layer's best is far down; and the scale of a layer,
        which a batch norm behind it hides from the loss, has no say (LAMP, Lee et al. 2021, on blocks). A layer of zeros
        has the lowest value there is.
        """
        squares = self.mean(_squared)
        layer = self.layer.to(squares.device)
        largest = squares.new_zeros(len(self.layers)).scatter_reduce_(0, layer, squares, "amax")
        squares = squares / torch.where(largest > 0, largest, 1.0)[layer]  # sums run over all layers: none may drown another
        order = squares.argsort(descending=True, stable=True)
        order = order[layer[order].argsort(stable=True)]  # by layer, and within it from the largest
        # integers add to the same bits in any order, as a parallel running sum of floats does not; no sum reaches 2 ** 62
        unit = 2.0 ** (62 - self.n.bit_length())
        running = (squares[order] * unit).round().long().cumsum(0)
        counts = self.counts.to(squares.device)
        first = counts.cumsum(0) - counts
        before = torch.where(first > 0, running[first - 1], 0)
        larger = torch.empty_like(squares)
        larger[order] = (running - before[layer[order]]).double() / unit
        return torch.where(squares == 0, 0.0, squares / larger).clamp(min=SMALLEST_SHARE).log().float()

    def squares(self) -> Tensor:
        """Sum of squared weights of every block, float32 [n]; gradients reach the weights."""
        pairs = zip(self.layers, self.weights, strict=True)
        return torch.cat([layer.grid.sum(weight.float().square()) for layer, weight in pairs])

    def per_layer(self, values: Tensor) -> Tensor:
        """Sum of a value per block over each layer, [number of layers]."""
        index = self.layer.to(values.device)
        return values.new_zeros(len(self.layers)).index_add_(0, index, values)


def _squared(weight: Tensor) -> Tensor:
    return weight.double().square()


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On another device, to stay: what is made in inference mode is of no use to a backward pass later."""
    with torch.inference_mode(False):
        return tensor.to(device)
