"""The block vector: all blocks of a model as one flat vector. Methods compute on it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import SmartpruneError
from .layers import Layer
from .sharding import full_tensor

SMALLEST_SHARE = 1e-12


class Blocks:
    """All blocks of a model as one flat vector of ``n`` entries.

    - ``cost`` [n] and ``limit`` are the budget: ``sum(cost * mask) <= limit``.
    - ``layer`` [n] is the index of the layer of each block.
    - ``sizes`` [n] is the number of elements of each block, without padding.
    - ``counts`` [number of layers] is the number of blocks of each layer.
    - ``weights`` are the parameters of the model, in the order of ``layers``.

    The vectors are on the device of the weights.
    """

    def __init__(
        self, model: nn.Module, layers: tuple[Layer, ...], cost: Tensor | None, limit: int, min_keep: Tensor | None
    ) -> None:
        self.model = model
        self.layers = layers
        self.n = layers[-1].stop if layers else 0
        self.total = self.n if cost is None else int(cost.sum())  # cost of all blocks
        self._cost = cost
        self._soft_cost = None if cost is None else cost.to(torch.float32)
        self.limit = limit
        self.min_keep = min_keep  # [number of layers], or None without a floor
        self._owners = [(model.get_submodule(layer.sites[0][0]), layer.sites[0][1]) for layer in layers]
        self.sizes = torch.cat([layer.grid.sizes().to(torch.int32) for layer in layers])  # half the memory of int64
        self.to(self.device)

    def to(self, device: torch.device) -> None:
        """Moves the tensors that methods read in every step, because copies from host memory would synchronize the device."""
        self.sizes = self.sizes.to(device)
        self.counts = torch.tensor([layer.n for layer in self.layers], device=device)
        self._layer: Tensor | None = None

    @property
    def layer(self) -> Tensor:
        """The index of the layer of each block, [n]. It is made at the first use, since not every search needs its memory."""
        if self._layer is None:
            with torch.inference_mode(False):
                self._layer = torch.repeat_interleave(self.counts, output_size=self.n)
        return self._layer

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights as stored, unmasked."""
        return [self.layer_weight(index) for index in range(len(self._owners))]

    def layer_weight(self, index: int) -> nn.Parameter:
        """The weight of layer ``index`` as stored, unmasked."""
        owner, name = self._owners[index]
        weight = owner._parameters.get(name)
        if weight is None:
            raise SmartpruneError(
                f"layer {self.layers[index].name} has no parameter {name!r} any more: it was removed or replaced after attach "
                "(for example by weight_norm, a parametrization or torch.nn.utils.prune); do that before you attach"
            )
        return weight

    @property
    def device(self) -> torch.device:
        return self.layer_weight(0).device

    @property
    def cost(self) -> Tensor | None:
        """Integer cost of every block, or None if every block costs one."""
        if self._cost is not None and self._cost.device != self.device:
            self._cost = _copy_to(self._cost, self.device)
        return self._cost

    @property
    def soft_cost(self) -> Tensor | None:
        """The cost in float32, for the soft top-k."""
        if self._soft_cost is not None and self._soft_cost.device != self.device:
            self._soft_cost = _copy_to(self._soft_cost, self.device)
        return self._soft_cost

    def sum(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Sum of ``function(weight)`` over every block, [n]. The function gets float32 weights."""
        with torch.no_grad():
            pairs = zip(self.layers, self.weights, strict=True)
            parts = [layer.grid.sum(function(full_tensor(w.detach()).float())) for layer, w in pairs]
            return torch.cat([part.to(self.device) for part in parts])

    def mean(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Mean of ``function(weight)`` over the elements of every block, [n]. The function gets float32 weights."""
        return self.sum(function) / self.sizes.to(self.device)

    def norms(self) -> Tensor:
        """L2 norm of every block, float32 [n]. Squares are added in float64, where they cannot overflow."""
        return self.sum(_squared).sqrt().float()

    def share(self) -> Tensor:
        """Logarithm of the mean square of every block, over the sum of those in its layer that are not smaller, float32 [n].

        This is LAMP (Lee et al. 2021) on blocks. The largest block of every layer has the value 0, and the scale of a layer
        does not matter: a batch norm after the layer would hide it from the loss. All blocks of a layer of zeros have the
        lowest value.
        """
        squares = self.mean(_squared)
        layer = self.layer.to(squares.device)
        largest = squares.new_zeros(len(self.layers)).scatter_reduce_(0, layer, squares, "amax")
        squares = squares / torch.where(largest > 0, largest, 1.0)[layer]  # the running sum covers all layers: scale them alike
        order = squares.argsort(descending=True, stable=True)
        order = order[layer[order].argsort(stable=True)]  # by layer, and in each from large to small
        # integer sums do not depend on the order of a parallel scan, as floating-point sums do; no sum reaches 2 ** 62
        unit = 2.0 ** (62 - self.n.bit_length())
        running = (squares[order] * unit).round().long().cumsum(0)
        counts = self.counts.to(squares.device)
        first = counts.cumsum(0) - counts
        before = torch.where(first > 0, running[first - 1], 0)
        larger = torch.empty_like(squares)
        larger[order] = (running - before[layer[order]]).double() / unit
        return torch.where(squares == 0, 0.0, squares / larger).clamp(min=SMALLEST_SHARE).log().float()

    def squares(self) -> Tensor:
        """Sum of squared weights of every block, float32 [n], differentiable."""
        pairs = zip(self.layers, self.weights, strict=True)
        return torch.cat([layer.grid.sum(weight.float().square()) for layer, weight in pairs])

    def per_layer(self, values: Tensor) -> Tensor:
        """Sum of the values of each layer's blocks, [number of layers]."""
        index = self.layer.to(values.device)
        return values.new_zeros(len(self.layers)).index_add_(0, index, values)


def _squared(weight: Tensor) -> Tensor:
    return weight.double().square()


def _copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on another device. It is not an inference tensor, so a later backward pass can use it."""
    with torch.inference_mode(False):
        return tensor.to(device)
