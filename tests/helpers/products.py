"""Masked products and their gradients: cases, and what any way of computing them must give."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smartprune.core.block import Block
from smartprune.pruning.multiply import Masking

Shape = tuple[tuple[int, ...], int, bool]  # a weight's shape, its groups, whether it is transposed

SHAPES: list[Shape] = [
    ((20, 10, 3, 3), 1, False),
    ((7, 13), 1, False),
    ((16, 4, 3), 2, False),
    ((6, 5, 2, 3, 2), 1, False),
    ((8, 6, 3, 3), 2, True),
    ((24, 16, 1, 1), 1, False),
]
BLOCKS: list[tuple[int | None, ...] | str] = [
    (16, 8),
    (4, 4),
    (1, 1),
    "channel",
    (None, 1),
    (3, 2, None),
    (None, None, None),
]


@dataclass
class Made:
    """Products of weights and mask, and the gradients that some gradients of the products lead to."""

    products: list[Tensor]
    weights: list[Tensor | None] = field(default_factory=list)
    mask: Tensor | None = None


def masking(block: tuple[int | None, ...] | str, shapes: Sequence[Shape] = SHAPES) -> Masking:
    return Masking([Block.of(block).grid(shape, groups, transposed) for shape, groups, transposed in shapes])


def weights_of(
    masking: Masking, dtype: torch.dtype = torch.float32, channels_last: bool = False, device: str = "cpu"
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    out = [torch.randn(grid.weight_shape, generator=generator).to(device, dtype) for grid in masking.grids]
    if channels_last:
        out = [weight.to(memory_format=torch.channels_last) if weight.dim() == 4 else weight for weight in out]
    return out


def mask_of(masking: Masking, device: str = "cpu") -> Tensor:
    return torch.rand(masking.starts[-1], generator=torch.Generator().manual_seed(2)).to(device)


def grads_of(products: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in products]


def expected(masking: Masking, mask: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor]) -> Made:
    """Through Grid.expand and autograd, in float64."""
    leaf = mask.double().requires_grad_()
    leaves = [weight.double().requires_grad_() for weight in weights]
    products = [
        weight * grid.expand(masking.piece(leaf, i)) for i, (weight, grid) in enumerate(zip(leaves, masking.grids, strict=True))
    ]
    torch.autograd.backward(products, [grad.double() for grad in grads])
    return Made([p.detach() for p in products], [leaf.grad for leaf in leaves], leaf.grad)


def made(
    masking: Masking,
    mask: Tensor,
    weights: Sequence[Tensor],
    through: bool = False,
    dtypes: Sequence[torch.dtype | None] | None = None,
    hold: bool = False,
) -> Made:
    """Through the masking itself."""
    leaf = mask.clone().requires_grad_(mask.is_floating_point() and not hold)
    leaves = [weight.clone().requires_grad_() for weight in weights]
    products = masking.hold(leaf, leaves, (), dtypes) if hold else masking.apply(leaf, leaves, through, dtypes)
    torch.autograd.backward(products, grads_of(products))
    return Made([p.detach() for p in products], [leaf.grad for leaf in leaves], leaf.grad)
