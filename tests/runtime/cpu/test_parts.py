"""Parts of a batch: results do not depend on them, and weights that are read for few pixels keep a batch whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import smartprune as sp
from helpers.pruned_models import randomly_pruned
from smartprune.models import MODELS
from smartprune.runtime.cpu.parts import Parts
from smartprune.runtime.cpu.program import Program
from smartprune.runtime.module import Accelerated


def accelerated(model: nn.Module, *x: Tensor, threads: int = 1, dtype: str = "float32") -> tuple[Accelerated, Program]:
    example = [x if len(x) > 1 else x[0]]
    backend = "native" if dtype == "float32" else "auto"  # never torch, whatever is faster
    fast = sp.accelerate(model, example=example, dtype=dtype, threads=threads, backend=backend)
    assert isinstance(fast, Accelerated)
    (program,) = fast.plan(*x).programs
    return fast, program


def fields(program: Program) -> tuple[int, int, int, int]:
    """The parts, the images of a part, the arenas, and the parts that run together."""
    found = program._parts.fields
    return found.parts, found.images, found.arenas, found.together


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(("batch", "threads"), [(5, 1), (5, 2), (6, 3), (3, 5), (2, 7)])
@torch.no_grad()
def test_images_do_not_depend_on_the_batch_and_the_threads(batch: int, threads: int, dtype: str) -> None:
    torch.manual_seed(batch)
    model = randomly_pruned(MODELS["resnet8"](), 0.8, (8, 4))
    x = torch.randn(batch, 1, 32, 32)
    fast, program = accelerated(model, x, threads=threads, dtype=dtype)
    parts, images, arenas, together = fields(program)
    assert (parts, images) == (batch, 1)
    assert (arenas, together) == (
        (threads, batch // threads * threads) if batch >= threads > 1 else (3, 3) if batch == 3 else (1, 0)
    )
    alone, _ = accelerated(model, x, dtype=dtype)
    for strides in (torch.contiguous_format, torch.channels_last):
        assert torch.equal(fast(x.contiguous(memory_format=strides)), torch.cat([alone(image[None]) for image in x]))


class Two(nn.Module):
    """Two inputs and two outputs of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 24, 3, padding=1), nn.Conv2d(5, 24, 5, 2, padding=2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = torch.relu(self.a(x)), self.b(y)
        return x + y, y.mean((2, 3))


@pytest.mark.parametrize("threads", [1, 2])
@torch.no_grad()
def test_all_inputs_and_outputs_are_divided(threads: int) -> None:
    model, x, y = Two().eval(), torch.randn(4, 3, 9, 12), torch.randn(4, 5, 18, 24)
    fast, program = accelerated(model, x, y, threads=threads)
    assert fields(program)[:2] == (4, 1)
    for got, expected in zip(fast(x, y), model(x, y), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_an_input_that_all_images_share_keeps_the_batch_whole() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 16, 3)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return torch.relu(self.conv(x)) * scale

    model, x, scale = Scaled().eval(), torch.randn(4, 3, 9, 9), torch.rand(1, 16, 1, 1)
    fast, program = accelerated(model, x, scale)
    assert fields(program)[0] == 1
    torch.testing.assert_close(fast(x, scale), model(x, scale), rtol=1e-4, atol=1e-5)


def test_weights_that_are_read_for_few_pixels_keep_the_batch_whole() -> None:
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).eval()
    _, program = accelerated(layers, torch.randn(32, 64))
    assert fields(program)[0] == 1
    _, program = accelerated(nn.Conv2d(512, 512, 3, padding=1).eval(), torch.randn(8, 512, 4, 4))
    assert fields(program)[0] == 1
    _, program = accelerated(nn.Conv2d(64, 64, 3, padding=1).eval(), torch.randn(8, 64, 32, 32))
    assert fields(program)[:2] == (8, 1)
    _, program = accelerated(nn.Conv2d(64, 64, 1).eval(), torch.randn(64, 64, 2, 2))
    assert fields(program)[:2] == (8, 8)


@torch.no_grad()
def test_the_timer_adds_the_parts_and_does_not_change_results() -> None:
    model, x = nn.Conv2d(32, 32, 3, padding=1).eval(), torch.randn(6, 32, 16, 16)
    fast, program = accelerated(model, x, threads=2)
    assert fields(program)[0] == 6
    expected = fast(x)
    calls: list[int] = []
    run = program._run_operations
    program._run_operations = lambda *arguments: (calls.append(1), run(*arguments))  # type: ignore[assignment]
    with program.timer() as times:
        assert torch.equal(fast(x), expected)
    assert len(calls) == 6 * len(times)
    assert min(times) > 0


def test_every_arena_has_its_own_memory() -> None:
    fast, program = accelerated(nn.Conv2d(8, 8, 3, padding=1).eval(), torch.randn(4, 8, 8, 8), threads=4)
    parts: Parts = program._parts
    count = parts.fields.count
    places = {parts._operations[i].y.data for i in range(1, 4 * count, count)}
    assert len(places) == 4
    assert fast is not None
