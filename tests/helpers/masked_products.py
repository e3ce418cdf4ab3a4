"""Products of weights and a mask with their gradients: test cases, a slow reference, and the code under test."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from helpers.triton_interpreter import INTERPRETED
from smartprune.core.block import Block
from smartprune.pruning import multiply

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


def multiplier(block: tuple[int | None, ...] | str, shapes: Sequence[Shape] = SHAPES) -> multiply.BlockMultiplier:
    return multiply.BlockMultiplier([Block.of(block).grid(shape, groups, transposed) for shape, groups, transposed in shapes])


def weights_of(
    multiplier: multiply.BlockMultiplier, dtype: torch.dtype = torch.float32, channels_last: bool = False, device: str = "cpu"
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    out = [torch.randn(grid.weight_shape, generator=generator).to(device, dtype) for grid in multiplier.grids]
    if channels_last:
        out = [weight.to(memory_format=torch.channels_last) if weight.dim() == 4 else weight for weight in out]
    return out


def mask_of(multiplier: multiply.BlockMultiplier, device: str = "cpu") -> Tensor:
    return torch.rand(multiplier.starts[-1], generator=torch.Generator().manual_seed(2)).to(device)


def grads_of(products: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in products]


def expected(multiplier: multiply.BlockMultiplier, mask: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor]) -> Products:
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
    multiplier: multiply.BlockMultiplier,
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


def both(multiplier: multiply.BlockMultiplier, mask: Tensor, weights: list[Tensor], **options: object) -> tuple[Products, Products]:
    """The results of torch and of the fused kernels."""
    out = []
    for backend in ("torch", "triton"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(multiply, "BACKEND", backend)
            out.append(computed(multiplier, mask, weights, **options))  # type: ignore[arg-type]
    assert any(runs is not None for runs in multiplier.kernel_cache.values())
    return out[0], out[1]


def assert_same(a: Tensor | None, b: Tensor | None) -> None:
    """Equal bits, dtypes and memory layouts."""
    assert a is not None
    assert b is not None
    assert a.dtype == b.dtype
    assert all(x == y for x, y, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size > 1)
    if INTERPRETED and a.dtype == torch.bfloat16:  # the interpreter cuts bits off where a GPU rounds to nearest
        torch.testing.assert_close(a, b, rtol=2**-7, atol=0)
    else:
        assert torch.equal(a, b)


def assert_agree(expected: Products, made: Products) -> None:
    """The products and the gradients of weights are equal, those of the mask to rounding."""
    for a, b in zip(expected.products, made.products, strict=True):
        assert_same(a, b)
    for g, h in zip(expected.weights, made.weights, strict=True):
        assert_same(g, h)
    assert (expected.mask is None) == (made.mask is None)
    if expected.mask is not None:
        torch.testing.assert_close(expected.mask, made.mask, rtol=1e-4, atol=1e-4)


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
