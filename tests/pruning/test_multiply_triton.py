"""The fused multiply: in the interpreter of Triton where there is no GPU (in a child process), else on the GPU."""

import pytest
import torch
from torch import Tensor, nn

import smartprune
from helpers import masked_products, zoo
from helpers.masked_products import assert_agree, assert_same, both
from helpers.triton_interpreter import INTERPRETED, loaded_loop_bounds, needs_interpreter, needs_triton, on_gpu, run_interpreted  # noqa: F401 (a fixture)
from smartprune.errors import SmartpruneError
from smartprune.pruning import multiply as module
from smartprune.pruning import multiply_tables, zeros
from smartprune.pruning.multiply import BlockMultiplier
from smartprune.pruning.telemetry import Telemetry

SMALL: list[masked_products.Shape] = [
    ((9, 10, 3, 3), 1, False),
    ((5, 13), 1, False),
    ((8, 4, 3), 2, False),
    ((8, 3, 2, 1), 2, True),
    ((6, 16, 1, 1), 1, False),
]


@needs_triton
def test_kernels_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tiles so small that small layers run the loops of large ones."""
    monkeypatch.setattr(multiply_tables, "TILE", 64)
    monkeypatch.setattr(multiply_tables, "ROWS", 4)
    monkeypatch.setattr(multiply_tables, "SUMMED", 16)


KINDS: list[dict[str, object]] = [
    {},
    {"dtypes": [torch.bfloat16] * 5},
    {"dtypes": [torch.float16, None] * 2 + [torch.float16], "through": True},
    {"through": True},
    {"hold": True},
    {"hold": True, "dtypes": [torch.float16] * 4 + [None]},
]


@needs_interpreter
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("block", [(16, 8), (4, 4)], ids=str)
def test_agrees_with_torch(block: tuple[int, ...], channels_last: bool, kind: int) -> None:
    multiplier = masked_products.multiplier(block, SMALL)
    weights = masked_products.weights_of(multiplier, channels_last=channels_last)
    mask = masked_products.mask_of(multiplier)
    if KINDS[kind].get("hold"):
        mask = mask > 0.5
        multiplier.multiply_(mask.float(), weights)
    assert_agree(*both(multiplier, mask, weights, **KINDS[kind]))


@needs_interpreter
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("block", ["channel", (None, 1), (3, 2, None), (None, None, None), (5, 4)], ids=str)
def test_any_block(block: tuple[int | None, ...] | str) -> None:
    multiplier = masked_products.multiplier(block, SMALL)
    for dtype in (torch.float32, torch.bfloat16):
        assert_agree(*both(multiplier, masked_products.mask_of(multiplier), masked_products.weights_of(multiplier, dtype)))


@needs_interpreter
def test_large_tiles() -> None:
    multiplier = masked_products.multiplier((16, 8), [((33, 64, 3, 3), 1, False), ((20, 24), 1, False)])
    assert_agree(*both(multiplier, masked_products.mask_of(multiplier), masked_products.weights_of(multiplier)))
    assert_agree(*both(multiplier, masked_products.mask_of(multiplier), masked_products.weights_of(multiplier, channels_last=True)))


@needs_interpreter
@pytest.mark.usefixtures("small_tiles")
def test_many_layers_of_different_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    from smartprune.pruning import multiply_triton

    monkeypatch.setattr(multiply_triton, "MOST", 2)
    multiplier = masked_products.multiplier((4, 4), SMALL)
    weights = masked_products.weights_of(multiplier)
    weights[1], weights[3] = weights[1].half(), weights[3].half()
    assert_agree(*both(multiplier, masked_products.mask_of(multiplier), weights))
    (runs,) = [runs for runs in multiplier.kernel_cache.values() if runs is not None]
    assert [run.layers for run in runs] == [[0, 2], [4], [1, 3]]


@needs_interpreter
def test_unsupported_weights_fall_back_to_torch() -> None:
    multiplier = masked_products.multiplier((4, 4), SMALL[1:2])
    for weight in (torch.randn(5, 13, dtype=torch.float64), torch.randn(13, 5).t()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "BACKEND", "triton")
            made = masked_products.computed(multiplier, masked_products.mask_of(multiplier), [weight])
            expected = masked_products.expected(
                multiplier, masked_products.mask_of(multiplier), [weight], masked_products.grads_of([weight])
            )
        torch.testing.assert_close(made.products[0].double(), expected.products[0], rtol=1e-6, atol=1e-6)
    assert list(multiplier.kernel_cache.values()) == [None, None]


@needs_interpreter
def test_missing_strided_and_unaligned_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKEND", "triton")
    multiplier = masked_products.multiplier((4, 4), SMALL)
    mask = masked_products.mask_of(multiplier).requires_grad_()
    leaves = [weight.requires_grad_() for weight in masked_products.weights_of(multiplier)]
    leaves[1] = torch.randn(66)[1:].reshape(5, 13).requires_grad_()
    leaves[2].requires_grad_(False)
    out = multiplier.multiply(mask, leaves)
    assert all(product.data_ptr() % 16 == 0 for product in out)
    grads = masked_products.grads_of(out)
    grads[0] = grads[0].to(memory_format=torch.channels_last)
    grads[4] = torch.ones(()).expand(out[4].shape)
    for number in (0, 1):  # the second pass lacks two gradients
        used = [0, 1, 2, 3, 4] if number == 0 else [0, 2, 4]
        mask.grad = None
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward([out[i] for i in used], [grads[i] for i in used])
        given = [grads[i] if i in used else torch.zeros_like(grads[i]) for i in range(5)]
        expected = masked_products.expected(multiplier, mask.detach(), [leaf.detach() for leaf in leaves], given)
        torch.testing.assert_close(mask.grad.double(), expected.mask, rtol=1e-5, atol=1e-5)
        for i, leaf in enumerate(leaves):
            if i == 2 or i not in used:
                assert leaf.grad is None
            else:
                torch.testing.assert_close(leaf.grad.double(), expected.weights[i], rtol=1e-6, atol=0)


@needs_interpreter
def test_an_in_place_change_before_backward_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKEND", "triton")
    multiplier = masked_products.multiplier((4, 4), SMALL)
    leaves = [weight.requires_grad_() for weight in masked_products.weights_of(multiplier)]
    out = multiplier.multiply(masked_products.mask_of(multiplier).requires_grad_(), leaves)
    multiplier.multiply_(masked_products.mask_of(multiplier), leaves[3:4], [3])
    with pytest.raises(SmartpruneError, match="weight 3 of the pruned layers was changed in place"):
        torch.autograd.backward(out, [torch.ones_like(p) for p in out])


@needs_interpreter
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("hard", [False, True])
def test_multiply_in_place(hard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    multiplier = masked_products.multiplier((4, 4), SMALL)
    mask = masked_products.mask_of(multiplier)
    mask = mask > 0.5 if hard else mask
    for layers in (None, [4, 1]):
        some = [
            w for i, w in enumerate(masked_products.weights_of(multiplier, channels_last=True)) if layers is None or i in layers
        ]
        some = some if layers is None else some[::-1]
        expected = [weight.clone() for weight in some]
        multiplier.multiply_(mask, expected, layers)
        monkeypatch.setattr(module, "BACKEND", "triton")
        versions = [weight._version for weight in some]
        multiplier.multiply_(mask, some, layers)
        monkeypatch.setattr(module, "BACKEND", "torch")
        for a, b, version in zip(expected, some, versions, strict=True):
            assert torch.equal(a, b)
            assert b._version > version


@needs_interpreter
def test_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 3000
    measured = []
    for backend in ("torch", "triton"):
        monkeypatch.setattr(module, "BACKEND", backend)
        telemetry = Telemetry([0, 1000, n], 300.0)
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            telemetry.measure(torch.rand(n, generator=generator) ** 4)
            measured.append(telemetry.read())
            assert telemetry.side is not None
            assert telemetry.side.dtype == torch.bool
    for expected, got in zip(measured[:2], measured[2:], strict=True):
        assert got == {**expected, "gap": pytest.approx(expected["gap"], rel=1e-5)}


def search(backend: str, device: str = "cpu") -> tuple[Tensor, list[Tensor]]:
    """The mask and the weights after a short search and fine-tuning."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BACKEND", backend)
        torch.manual_seed(0)
        model, x = zoo.plain_cnn()
        model, x = model.to(device), x.to(device)
        pruner = smartprune.attach(model, smartprune.Smart(), block=(4, 4), sparsity=0.6, steps=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        for _ in range(7):
            nn.functional.cross_entropy(model(x), torch.tensor([1, 2, 3, 4], device=device)).backward()
            optimizer.step()
            pruner.step()
            optimizer.zero_grad()
            if pruner.phase == "frozen":
                for i, weight in enumerate(pruner.blocks.weights):
                    kept = pruner.search.multiplier.grids[i].expand(pruner.search.multiplier.layer_mask(pruner.mask.float(), i))
                    assert not (weight.detach() * (1 - kept)).any()
                    assert zeros.hold_of(weight) is not None
        assert int(pruner.mask.sum()) == pruner.plan.keep
        return pruner.mask, [weight.detach().clone() for weight in pruner.blocks.weights]


@needs_interpreter
def test_a_whole_search() -> None:
    (mask, weights), (other, others) = search("torch"), search("triton")
    assert torch.equal(mask, other)
    for a, b in zip(weights, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# On the GPU


def on_device(shapes: list[masked_products.Shape]) -> tuple[BlockMultiplier, list[Tensor], Tensor]:
    multiplier = masked_products.multiplier((16, 8), shapes)
    return (
        multiplier,
        masked_products.weights_of(multiplier, channels_last=True, device="cuda"),
        masked_products.mask_of(multiplier, "cuda"),
    )


LARGE: list[masked_products.Shape] = [
    ((64, 3, 7, 7), 1, False),
    ((512, 512, 3, 3), 1, False),
    ((128, 64, 1, 1), 1, False),
    ((250, 90, 3, 3), 1, False),
    ((1000, 512), 1, False),
]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("block", [(16, 8), "channel", (None, 1), (5, 4), (16, 8, None)], ids=str)
def test_gpu_agrees_with_torch(block: tuple[int | None, ...] | str, channels_last: bool, kind: int) -> None:
    multiplier = masked_products.multiplier(block, LARGE)
    weights = masked_products.weights_of(multiplier, channels_last=channels_last, device="cuda")
    mask = masked_products.mask_of(multiplier, "cuda")
    if KINDS[kind].get("hold"):
        mask = mask > 0.5
        multiplier.multiply_(mask.float(), weights)
    expected, made = both(multiplier, mask, weights, **KINDS[kind])
    sums, others, expected.mask, made.mask = expected.mask, made.mask, None, None
    assert_agree(expected, made)
    if sums is not None:
        torch.testing.assert_close(others, sums, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@on_gpu
def test_gpu_half_precision_unaligned_and_repeated() -> None:
    multiplier, weights, mask = on_device(LARGE)
    weights = [torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(weight.shape) for weight in weights]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expected, made = both(multiplier, mask, [weight.to(dtype) for weight in weights])
        expected.mask, sums = None, made.mask
        again = both(multiplier, mask, [weight.to(dtype) for weight in weights])[1].mask
        made.mask = None
        assert_agree(expected, made)
        assert sums is not None
        assert torch.equal(sums, again)  # no atomics: the same every time
    odd = [weight.detach().requires_grad_() for weight in weights]
    assert any(weight.data_ptr() % 16 for weight in odd)
    out = multiplier.multiply(mask, odd)
    for i, (product, weight) in enumerate(zip(out, odd, strict=True)):
        assert torch.equal(product, weight * multiplier.grids[i].expand(multiplier.layer_mask(mask, i)))


@pytest.mark.gpu
@on_gpu
def test_gpu_multiply_in_place_and_telemetry() -> None:
    multiplier, weights, mask = on_device(LARGE)
    expected = [weight * multiplier.grids[i].expand(multiplier.layer_mask(mask, i)) for i, weight in enumerate(weights)]
    multiplier.multiply_(mask, weights)
    for a, b in zip(expected, weights, strict=True):
        assert torch.equal(a, b)
    ours, theirs = Telemetry(multiplier.starts, 100.0), Telemetry(multiplier.starts, 100.0)
    for power in (1, 3):
        ours.measure(mask**power)
        theirs.measure((mask**power).cpu())
    assert ours.read() == {**theirs.read(), "gap": pytest.approx(theirs.read()["gap"], rel=1e-5)}


@pytest.mark.gpu
@on_gpu
def test_gpu_graph_capture() -> None:
    multiplier, weights, mask = on_device(LARGE)
    leaves = [weight.requires_grad_() for weight in weights]
    mask.requires_grad_()
    dtypes = [torch.bfloat16] * len(leaves)
    factor = [torch.randn_like(weight, dtype=torch.bfloat16) for weight in leaves]

    def step() -> list[Tensor]:
        out = multiplier.multiply(mask, leaves, False, dtypes)
        return list(torch.autograd.grad([(o * f).float().sum() for o, f in zip(out, factor, strict=True)], [mask, *leaves]))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for number in range(3):
        with torch.no_grad():
            for value in [mask, *leaves, *factor]:
                value.mul_(0.9 + 0.1 * number)
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("frozen", [False, True])
def test_gpu_autocast_casts_in_the_multiplication(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, grads = [], []
    for backend in ("torch", "triton"):
        monkeypatch.setattr(module, "BACKEND", backend)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(512, 10))
        model = model.cuda().to(memory_format=torch.channels_last)
        x = torch.randn(8, 16, 8, 8, device="cuda").to(memory_format=torch.channels_last)
        pruner = smartprune.attach(model, smartprune.Smart(), block=(16, 8), sparsity=0.5, steps=10, include="*")
        if frozen:
            pruner.freeze(force=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().mean()
            seen = model[0].weight
        assert seen.dtype == torch.bfloat16
        assert seen.is_contiguous(memory_format=torch.channels_last)
        loss.backward()
        assert model[0].weight.dtype == torch.float32  # outside autocast: as stored
        losses.append(float(loss.detach()))
        grads.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3)


@pytest.mark.gpu
@on_gpu
def test_gpu_whole_search() -> None:
    (mask, weights), (other, others) = search("torch", "cuda"), search("triton", "cuda")
    assert torch.equal(mask, other)
    for a, b in zip(weights, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@needs_interpreter
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("seen", [False, True])
def test_a_freed_weight_is_an_error(seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKEND", "triton")
    multiplier = masked_products.multiplier((16, 8), SMALL)
    weights = masked_products.weights_of(multiplier)
    mask = masked_products.mask_of(multiplier)
    if seen:
        multiplier.multiply(mask, weights)
        multiplier.multiply_(mask, weights)
    weights[1].untyped_storage().resize_(0)
    for multiply in (multiplier.multiply, multiplier.multiply_):
        with pytest.raises(SmartpruneError, match=r"a pruned weight: a tensor of shape .* has only 0 bytes of memory left"):
            multiply(mask, weights)


@needs_interpreter
@pytest.mark.usefixtures("small_tiles")
def test_gradients_of_zeros_may_have_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKEND", "triton")
    multiplier = masked_products.multiplier((16, 8), SMALL)
    weights = masked_products.weights_of(multiplier)
    mask = masked_products.mask_of(multiplier).requires_grad_()
    products = multiplier.multiply(mask, [weight.requires_grad_() for weight in weights])
    grads = [torch.ones_like(products[0]), *[torch._efficientzerotensor(tuple(product.shape)) for product in products[1:]]]
    made = torch.autograd.grad(products, [mask, *weights], grads)
    expected = torch.autograd.grad(
        multiplier.multiply(mask, weights), [mask, *weights], [grads[0], *map(torch.zeros_like, products[1:])]
    )
    for a, b in zip(made, expected, strict=True):
        assert_same(a, b)
