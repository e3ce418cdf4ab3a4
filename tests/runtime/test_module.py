"""The accelerated model as an object: copies, pickles, threads, shapes and misuse."""

from __future__ import annotations

import copy
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import smartprune as sp
from helpers.pruned_models import assert_equal_to_rounding, randomly_pruned
from helpers.zoo import plain_cnn
from smartprune.models import resnet
from smartprune.runtime.module import Accelerated


@pytest.fixture
def model() -> nn.Module:
    return randomly_pruned(resnet.resnet8(in_channels=3), 0.7)


def test_the_model_does_not_change(model: nn.Module) -> None:
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(1, 3, 8, 8)
    fast = sp.accelerate(model)
    first = fast(x)
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    for p in model.parameters():
        p.data.zero_()
    assert torch.equal(fast(x), first)  # later changes of the model have no effect
    assert not fast.training
    assert not fast.train().training
    assert not fast(x.requires_grad_()).requires_grad


def test_new_shapes_make_new_plans(model: nn.Module) -> None:
    fast = sp.accelerate(model, example=torch.randn(2, 3, 8, 8))
    assert isinstance(fast, Accelerated)
    with torch.no_grad():
        for shape in ((1, 3, 8, 8), (2, 3, 8, 8), (1, 3, 12, 20), (5, 3, 9, 7), (1, 3, 8, 8)):
            x = torch.randn(shape)
            assert_equal_to_rounding(fast(x), model(x))
    assert len(fast._plans) == 4


def test_reused_memory_does_not_change_results(model: nn.Module) -> None:
    """Margins stay zero, and no numbers of an earlier input remain."""
    fast = sp.accelerate(model)
    x = torch.randn(1, 3, 16, 16)
    first = fast(x)
    fast(torch.full_like(x, 1e6))
    assert torch.equal(fast(x), first)


def test_copies_and_pickles_give_equal_results(model: nn.Module) -> None:
    x = torch.randn(1, 3, 8, 8)
    for dtype in ("float32", "int8"):
        fast = sp.accelerate(model, dtype=dtype, example=x)
        for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            assert torch.equal(other(x), fast(x))
    outer = nn.ModuleDict({"body": sp.accelerate(model)})
    assert torch.equal(copy.deepcopy(outer)["body"](x), outer["body"](x))


@pytest.mark.parametrize("threads", [1, 3])
def test_calls_from_many_threads_take_turns(model: nn.Module, threads: int) -> None:
    fast = sp.accelerate(model, threads=threads)
    inputs = [torch.randn(1, 3, 8, 8 + i % 3) for i in range(24)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for ours, theirs in zip(pool.map(fast, inputs), expected, strict=True):
            assert_equal_to_rounding(ours, theirs)


def test_models_that_share_threads_take_turns() -> None:
    models = [randomly_pruned(resnet.resnet8(in_channels=3, width=w), 0.5) for w in (16, 24)]
    fast = [sp.accelerate(model, threads=2) for model in models]
    x = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        expected = [model(x) for model in models]
    with ThreadPoolExecutor(4) as pool:
        for number, ours in enumerate(pool.map(lambda i: fast[i % 2](x), range(40))):
            assert_equal_to_rounding(ours, expected[number % 2])


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs fork and /proc")
def test_a_forked_process_starts_its_own_threads(model: nn.Module) -> None:
    fast = sp.accelerate(model, threads=3)
    x = torch.randn(4, 3, 32, 32)
    expected = fast(x)
    child = os.fork()
    if child == 0:  # exceptions must not leave this branch
        try:
            before = len(os.listdir("/proc/self/task"))
            is_equal = torch.equal(fast(x), expected)
            os._exit(0 if is_equal and (before, len(os.listdir("/proc/self/task"))) == (1, 3) else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_half_precision_runs_in_float32_and_other_devices_raise(model: nn.Module) -> None:
    x = torch.randn(1, 3, 8, 8)
    fast = sp.accelerate(copy.deepcopy(model).bfloat16())
    assert fast(x.bfloat16()).dtype == torch.float32
    with pytest.raises(sp.SmartpruneError, match="runs on the CPU"):
        fast(x.to("meta"))


def test_a_model_with_state_is_an_error() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 1)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.conv(x) * self.calls

    with pytest.raises(sp.SmartpruneError, match="from the model's own"):
        sp.accelerate(Stateful(), example=torch.randn(1, 3, 4, 4))


def test_misuse_is_an_error() -> None:
    model, x = plain_cnn()
    for kwargs, words in (
        ({"dtype": "float64"}, "dtype='float64' is not one of float32, float16, int8"),
        ({"device": "tpu"}, "device='tpu' is not one of cpu, cuda"),
        ({"backend": "fast"}, "backend='fast'"),
        ({"threads": 0}, "threads=0 is not a number from 1"),
        ({"threads": True}, "threads=True"),
        ({"block": (16, 8)}, "no 16x8x1x1 block of this model is empty"),
        ({"block": (0, 8)}, "positive int"),
        ({"backend": "reference", "dtype": "int8", "example": x}, "supports only float32"),
    ):
        with pytest.raises(sp.SmartpruneError, match=words):
            sp.accelerate(model, **kwargs)  # type: ignore[arg-type]
    with pytest.raises(sp.SmartpruneError, match="pass a torch module"):
        sp.accelerate("model.safetensors")  # type: ignore[arg-type]
    with pytest.raises(sp.SmartpruneError, match="no 16x8x1x1 block"):
        sp.accelerate(nn.ReLU(), (16, 8))
    fast = sp.accelerate(model)
    with pytest.raises(sp.SmartpruneError, match="input 'input' is missing"):
        fast()
    with pytest.raises(sp.SmartpruneError, match="takes 1 inputs, and got 2"):
        fast(x, x)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_a_model_that_cannot_be_copied_is_an_error() -> None:
    model, _ = plain_cnn()
    for bad in (torch.jit.script(model), nn.Linear(4, 4, device="meta"), nn.LazyLinear(4)):
        with pytest.raises(sp.SmartpruneError, match="accelerate: the model cannot be copied"):
            sp.accelerate(bad)


def test_a_masked_model_is_an_error() -> None:
    model, _ = plain_cnn()
    sp.attach(model, sp.Magnitude(), block=(4, 4), sparsity=0.5, steps=2)
    with pytest.raises(sp.SmartpruneError, match="bake"):
        sp.accelerate(model)


@torch.no_grad()
def test_weights_that_hooks_compute() -> None:
    """Masks of torch.nn.utils.prune are applied once, so their zeros are skipped. Weight norm is computed in every call."""
    x = torch.randn(1, 8, 6, 6)
    masked = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1))
    for _ in range(2):  # the second call combines masks
        prune.ln_structured(masked[0], "weight", 0.25, n=2, dim=0)
    prune.random_unstructured(masked[2], "bias", 0.5)
    with torch.enable_grad():
        theirs = masked(x)  # leaves a weight with a grad_fn, which torch cannot copy
        assert_equal_to_rounding(sp.accelerate(masked, (1, None, None, None), threads=1)(x), theirs)
    fast = sp.accelerate(masked, threads=1)
    assert_equal_to_rounding(fast(x), theirs)
    assert isinstance(fast, Accelerated)
    assert len(fast.plan(x).programs) == len(fast.plan(x).parts) == 1
    assert prune.is_pruned(masked)
    with pytest.warns(FutureWarning, match="weight_norm"), torch.enable_grad():
        normed = nn.Sequential(nn.utils.weight_norm(nn.Conv2d(8, 8, 3)))
    assert_equal_to_rounding(sp.accelerate(normed, threads=1)(x), normed(x))


@torch.no_grad()
@pytest.mark.parametrize("both", [True, False])
def test_tied_weights_with_separate_masks(both: bool) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(4, 16)
    model[2].weight = model[0].weight
    for layer in (model[0], model[2])[: 1 + both]:
        prune.random_unstructured(layer, "weight", 0.5)
    before = copy.deepcopy(model.state_dict())
    assert_equal_to_rounding(sp.accelerate(model, threads=1)(x), model(x))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo imports torch.jit
@torch.no_grad()
def test_wrappers_are_removed(model: nn.Module) -> None:
    """torch.compile and DataParallel do not matter for the accelerated model."""
    x = torch.randn(1, 3, 8, 8)
    for wrapped in (
        torch.compile(model, backend="eager"),
        nn.DataParallel(model),
        nn.DataParallel(torch.compile(model, backend="eager")),
    ):
        fast = sp.accelerate(wrapped, (16, 8), threads=1)  # type: ignore[arg-type]
        assert isinstance(fast, Accelerated)
        assert_equal_to_rounding(fast(x), model(x))


def test_a_block_with_empty_ones_is_accepted() -> None:
    model, x = plain_cnn()
    assert_equal_to_rounding(sp.accelerate(randomly_pruned(model, 0.5), "16x8")(x), model(x))
