import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from helpers import masked_products, reference
from helpers.masked_products import random_layers
from smartprune.core.block import Block
from smartprune.errors import SmartpruneError
from smartprune.pruning import multiply as multiply_module
from smartprune.pruning.multiply import CHUNK, BlockMultiplier, Rows


def close(a: Tensor | None, b: Tensor | None, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    assert a is not None
    assert b is not None
    torch.testing.assert_close(a.double(), b.double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("block", masked_products.BLOCKS, ids=str)
def test_products_and_gradients(block: tuple[int | None, ...] | str, dtype: torch.dtype, channels_last: bool) -> None:
    multiplier = masked_products.multiplier(block)
    weights = masked_products.weights_of(multiplier, dtype, channels_last)
    mask = masked_products.mask_of(multiplier)
    made = masked_products.computed(multiplier, mask, weights)
    expected = masked_products.expected(multiplier, mask, weights, masked_products.grads_of(weights))
    rtol = 2**-8 if dtype == torch.bfloat16 else 1e-6  # rounded once
    for weight, product, grad, p, g in zip(weights, made.products, made.weights, expected.products, expected.weights, strict=True):
        close(product, p, rtol, 0)
        close(grad, g, rtol, 0)
        assert product.dtype == weight.dtype
        assert product.stride() == weight.stride()
    close(made.mask, expected.mask)


@given(random_layers())
@settings(max_examples=100, deadline=None)
def test_agrees_with_slow_loops(case: tuple[tuple[int | None, ...], list[masked_products.Shape], bool]) -> None:
    block, shapes, channels_last = case
    multiplier = masked_products.multiplier(block, shapes)
    weights = masked_products.weights_of(multiplier, torch.float64, channels_last)
    mask = masked_products.mask_of(multiplier)
    made = masked_products.computed(multiplier, mask, weights)
    grads = masked_products.grads_of(weights)
    assert made.mask is not None
    for i, (shape, groups, transposed) in enumerate(shapes):
        index = reference.block_index(shape, block, groups, transposed)
        spread = reference.expand(multiplier.layer_mask(mask, i).tolist(), index)
        values, slopes = weights[i].flatten().tolist(), grads[i].flatten().tolist()
        close(made.products[i].flatten(), torch.tensor([w * m for w, m in zip(values, spread, strict=True)]))
        grad = made.weights[i]
        assert grad is not None
        close(grad.flatten(), torch.tensor([g * m for g, m in zip(slopes, spread, strict=True)]))
        sums = reference.block_sums([g * w for g, w in zip(slopes, values, strict=True)], index)
        close(multiplier.layer_mask(made.mask, i), torch.tensor(sums))


def test_straight_through_does_not_mask_the_gradient_of_weights() -> None:
    multiplier = masked_products.multiplier((4, 4))
    weights, mask = masked_products.weights_of(multiplier), masked_products.mask_of(multiplier)
    made = masked_products.computed(multiplier, mask, weights, through=True)
    expected = masked_products.expected(multiplier, mask, weights, masked_products.grads_of(weights))
    for grad, given_ in zip(made.weights, masked_products.grads_of(weights), strict=True):
        assert grad is not None
        assert torch.equal(grad, given_)
    close(made.mask, expected.mask)


@pytest.mark.parametrize("hold", [False, True])
def test_dtypes_round_the_product_once(hold: bool) -> None:
    multiplier = masked_products.multiplier((4, 4))
    dtypes = [torch.bfloat16, None, torch.float16, torch.bfloat16, None, torch.float16]
    weights, mask = masked_products.weights_of(multiplier), masked_products.mask_of(multiplier)
    if hold:
        mask = (mask > 0.5).float()
        multiplier.multiply_(mask, weights)
    plain = masked_products.computed(multiplier, mask, weights, hold=hold)
    made = masked_products.computed(multiplier, mask, weights, dtypes=dtypes, hold=hold)
    for product, p, dtype in zip(made.products, plain.products, dtypes, strict=True):
        assert torch.equal(product, p.to(dtype or torch.float32))
    grads = [grad.float() for grad in masked_products.grads_of(made.products)]
    expected = masked_products.expected(multiplier, mask, weights, grads)
    for grad, g in zip(made.weights, expected.weights, strict=True):
        assert grad is not None
        assert grad.dtype == torch.float32
        close(grad, g, 1e-6, 0)


def test_mask_gradients_returns_weights_unchanged() -> None:
    multiplier = masked_products.multiplier((4, 4))
    hard = masked_products.mask_of(multiplier) > 0.5
    weights = masked_products.weights_of(multiplier)
    multiplier.multiply_(hard.float(), weights)
    leaves = [weight.requires_grad_() for weight in weights]
    idle = torch.ones(3, requires_grad=True)
    out = multiplier.mask_gradients(hard, leaves, [idle])
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(out, leaves, strict=True))
    torch.autograd.backward(out, masked_products.grads_of(out))
    for i, (leaf, grad) in enumerate(zip(leaves, masked_products.grads_of(out), strict=True)):
        assert torch.equal(leaf.grad, grad * multiplier.grids[i].expand(multiplier.layer_mask(hard, i).float()))
    assert idle.grad is not None
    assert idle.grad.tolist() == [0, 0, 0]


def test_several_backward_passes() -> None:
    multiplier = masked_products.multiplier((4, 4))
    mask = masked_products.mask_of(multiplier).requires_grad_()
    leaves = [weight.requires_grad_() for weight in masked_products.weights_of(multiplier)]
    out = multiplier.multiply(mask, leaves)
    out[0].sum().backward()  # no retain_graph: nothing is freed, as reentrant checkpointing needs it
    assert leaves[1].grad is None
    torch.autograd.backward(out, [torch.ones_like(p) for p in out])
    expected = masked_products.expected(multiplier, mask.detach(), [x.detach() for x in leaves], [torch.ones_like(p) for p in out])
    assert mask.grad is not None
    assert expected.mask is not None
    once = multiplier.grids[0].sum(leaves[0].detach().double())
    close(mask.grad, expected.mask + torch.cat([once, torch.zeros(multiplier.starts[-1] - multiplier.starts[1])]))
    close(leaves[0].grad, 2 * expected.weights[0])
    close(leaves[1].grad, expected.weights[1])


def test_weights_without_requires_grad_get_no_gradient() -> None:
    multiplier = masked_products.multiplier((4, 4))
    mask = masked_products.mask_of(multiplier).requires_grad_()
    weights = masked_products.weights_of(multiplier)
    weights[2].requires_grad_()
    out = multiplier.multiply(mask, weights)
    torch.autograd.backward(out, masked_products.grads_of(out))
    expected = masked_products.expected(multiplier, mask.detach(), [w.detach() for w in weights], masked_products.grads_of(out))
    assert [weight.grad is not None for weight in weights] == [i == 2 for i in range(len(weights))]
    close(mask.grad, expected.mask)


def test_an_in_place_change_before_backward_raises() -> None:
    multiplier = masked_products.multiplier((4, 4))
    leaves = [weight.requires_grad_() for weight in masked_products.weights_of(multiplier)]
    out = multiplier.multiply(masked_products.mask_of(multiplier).requires_grad_(), leaves)
    with torch.no_grad():
        leaves[3].add_(1)
    with pytest.raises(SmartpruneError, match=r"weight 3 of the pruned layers was changed in place .*before optimizer"):
        torch.autograd.backward(out, [torch.ones_like(p) for p in out])


@pytest.mark.parametrize("layers", [None, [4, 1]])
@pytest.mark.parametrize("channels_last", [False, True])
def test_multiply_in_place(layers: list[int] | None, channels_last: bool) -> None:
    multiplier = masked_products.multiplier((4, 4))
    mask = masked_products.mask_of(multiplier)
    every = masked_products.weights_of(multiplier, channels_last=channels_last)
    numbers = range(len(every)) if layers is None else layers
    weights = [every[i] for i in numbers]
    wanted = [multiplier.grids[i].expand(multiplier.layer_mask(mask, i)) * every[i] for i in numbers]
    versions = [weight._version for weight in weights]
    multiplier.multiply_(mask, weights, layers)
    for weight, expected, version in zip(weights, wanted, versions, strict=True):
        assert torch.equal(weight, expected)
        assert weight._version > version


def test_multiply_in_place_on_a_slice() -> None:
    multiplier = masked_products.multiplier((4, 4), [((9, 6), 1, False)])
    weight = torch.randn(9, 12)[:, ::2]
    mask = masked_products.mask_of(multiplier)
    expected = weight * multiplier.grids[0].expand(mask)
    multiplier.multiply_(mask, [weight])
    assert torch.equal(weight, expected)


def test_transposed_storage() -> None:
    multiplier = masked_products.multiplier((4, 4), [((9, 6), 1, False)])
    weight = torch.randn(6, 9).t()
    mask = masked_products.mask_of(multiplier)
    made = masked_products.computed(multiplier, mask, [weight])
    expected = masked_products.expected(multiplier, mask, [weight], masked_products.grads_of([weight]))
    close(made.products[0], expected.products[0])
    close(made.weights[0], expected.weights[0])
    close(made.mask, expected.mask)


def test_chunks_cover_every_layer_once() -> None:
    side = math.isqrt(CHUNK // 2)
    multiplier = BlockMultiplier([Block(16, 8).grid((side, side)) for _ in range(7)])
    assert [i for first, last in multiplier.chunks for i in range(first, last)] == list(range(7))
    assert len(multiplier.chunks) > 1


def test_memory_order() -> None:
    weight = torch.empty(4, 3, 2, 2)
    assert Rows.order_of(weight) == (0, 1, 2, 3)
    assert Rows.order_of(weight.to(memory_format=torch.channels_last)) == (0, 2, 3, 1)
    assert Rows.order_of(torch.empty(3, 4).t()) == (0, 1)


def test_copies_and_pickles() -> None:
    multiplier = masked_products.multiplier((4, 4))
    multiplier.kernel_cache["key"] = torch.zeros(1)
    for other in (copy.deepcopy(multiplier), pickle.loads(pickle.dumps(multiplier))):
        assert other.kernel_cache == {}
        assert other.starts == multiplier.starts


def test_an_unknown_backend_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiply_module, "BACKEND", "cuda")
    multiplier = masked_products.multiplier((4, 4))
    with pytest.raises(SmartpruneError, match="SMARTPRUNE_MASKING='cuda' is unknown; use auto, torch or triton"):
        multiplier.multiply(masked_products.mask_of(multiplier), masked_products.weights_of(multiplier))
