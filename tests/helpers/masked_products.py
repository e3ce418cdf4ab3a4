"""Products of weights and a mask with their gradients: test cases, a slow reference, and the code under test."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from smartprune.core.block import Block
from smartprune.pruning.multiply import BlockMultiplier

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
class Products:
    """Products of weights and mask, and the gradients of both."""

    products: list[Tensor]
    weights: list[Tensor | None] = field(default_factory=list)
    mask: Tensor | None = None


def multiplier(block: tuple[int | None, ...] | str, shapes: Sequence[Shape] = SHAPES) -> BlockMultiplier:
    return BlockMultiplier([Block.of(block).grid(shape, groups, transposed) for shape, groups, transposed in shapes])


def weights_of(
    multiplier: BlockMultiplier, dtype: torch.dtype = torch.float32, channels_last: bool = False, device: str = "cpu"
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    out = [torch.randn(grid.weight_shape, generator=generator).to(device, dtype) for grid in multiplier.grids]
    if channels_last:
        out = [weight.to(memory_format=torch.channels_last) if weight.dim() == 4 else weight for weight in out]
    return out


def mask_of(multiplier: BlockMultiplier, device: str = "cpu") -> Tensor:
    return torch.rand(multiplier.starts[-1], generator=torch.Generator().manual_seed(2)).to(device)


def grads_of(products: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in products]


def expected(multiplier: BlockMultiplier, mask: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor]) -> Products:
    """The reference: Grid.expand and autograd in float64."""
    leaf = mask.double().requires_grad_()
    leaves = [weight.double().requires_grad_() for weight in weights]
    products = [
        weight * grid.expand(multiplier.layer_mask(leaf, i))
        for i, (weight, grid) in enumerate(zip(leaves, multiplier.grids, strict=True))
    ]
    torch.autograd.backward(products, [grad.double() for grad in grads])
    return Products([p.detach() for p in products], [leaf.grad for leaf in leaves], leaf.grad)


def computed(
    multiplier: BlockMultiplier,
    mask: Tensor,
    weights: Sequence[Tensor],
    through: bool = False,
    dtypes: Sequence[torch.dtype | None] | None = None,
    hold: bool = False,
) -> Products:
    """The result of the multiplier under test."""
    leaf = mask.clone().requires_grad_(mask.is_floating_point() and not hold)
    leaves = [weight.clone().requires_grad_() for weight in weights]
    products = multiplier.mask_gradients(leaf, leaves, (), dtypes) if hold else multiplier.multiply(leaf, leaves, through, dtypes)
    torch.autograd.backward(products, grads_of(products))
    return Products([p.detach() for p in products], [leaf.grad for leaf in leaves], leaf.grad)


@st.composite
def random_layers(draw: st.DrawFn) -> tuple[tuple[int | None, ...], list[Shape], bool]:
    """A block, one to three weight shapes with one to five axes, and a flag."""
    shapes: list[Shape] = []
    for _ in range(draw(st.integers(1, 3))):
        axes = draw(st.integers(2, 5))
        groups = draw(st.sampled_from([1, 1, 2]))
        shape = [draw(st.integers(1, most)) for most in (7, 6, 3, 2, 2)[:axes]]
        shape[0] *= groups
        shapes.append((tuple(shape), groups, draw(st.booleans())))
    size = st.one_of(st.none(), st.integers(1, 8))
    return (draw(size), draw(size), draw(st.sampled_from([1, None]))), shapes, draw(st.booleans())
