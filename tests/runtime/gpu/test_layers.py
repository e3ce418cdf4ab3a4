"""GPU layers, on the GPU and in the interpreter of Triton (in a child process)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.pruned_weights import randomly_pruned_weight
from helpers.triton_interpreter import INTERPRETED, loaded_loop_bounds, needs_interpreter, needs_triton, run_interpreted  # noqa: F401 (a fixture)
from helpers.triton_interpreter import on_gpu as on_gpu_machine
from smartprune.runtime.gpu.layers import TILES, Dense, KeptBlocks, Sparse, Tile
from smartprune.runtime.lower.steps import IDENTITY, Activation, Step


@needs_triton
def test_layers_in_the_interpreter() -> None:
    run_interpreted(__file__)


def step(weight: Tensor, bias: Tensor, addition: str, activation: Activation, **window: int) -> Step:
    kh, kw = weight.shape[2:]
    window = {"kh": kh, "kw": kw, "sh": 1, "sw": 1, "ph": 0, "pw": 0, "dh": 1, "dw": 1} | window
    return Step("conv", None, [], weight=weight.numpy(), bias=bias.numpy(), activation=activation, addition=addition, window=window)  # type: ignore[arg-type]


def test_the_table_holds_every_kept_block_once() -> None:
    torch.manual_seed(0)
    weight = randomly_pruned_weight(torch.randn(40, 20, 3, 2), 0.3)
    weight[16:32] = 0  # a row without blocks still has a step
    kept = KeptBlocks(weight)
    for size in (1, 2, 4):
        for group in (1, 2, 3):
            begins, finished, place, column, values = kept.table(size, group)
            again = torch.zeros(48, 24, 3, 2)
            row = 0
            for s in range(len(finished)):
                for k in range(s * size, s * size + size):
                    if place[k] >= 0:
                        y, z = int(place[k]) // 2, int(place[k]) % 2
                        again[row * 16 : row * 16 + 16, column[k] * 8 : column[k] * 8 + 8, y, z] += values[k].T
                    else:
                        assert not values[k].any()
                if finished[s] >= 0:
                    assert finished[s] == row
                    assert row % group != group - 1 or s + 1 in begins.tolist()
                    row += 1
            assert row == kept.rows
            assert torch.equal(again[:40, :20], weight)
            assert len(place) == (int(begins[-1]) + 2) * size == len(values)


def test_inputs_of_all_widths_share_the_weights() -> None:
    torch.manual_seed(0)
    weight, bias = randomly_pruned_weight(torch.randn(40, 20, 3, 2), 0.3), torch.zeros(40)
    layer, fresh = (Sparse(step(weight, bias, "none", IDENTITY, ph=1), (1, 20, 8, 8), torch.float32) for _ in range(2))
    tables = [layer._table(width, torch.device("cpu")) for width in (8, 9, 10)]
    assert len({table[0].data_ptr() for table in tables}) == 1
    assert len({table[3].data_ptr() for table in tables}) == 3
    for ours, theirs in zip(tables[-1], fresh._table(10, torch.device("cpu")), strict=True):
        assert torch.equal(ours, theirs)


def test_threads_can_add_new_widths_at_the_same_time() -> None:
    layer = Sparse(step(torch.ones(16, 8, 1, 1), torch.zeros(16), "none", IDENTITY), (1, 8, 8, 8), torch.float32)

    class Meanwhile:
        """A tile. While it is compared, another thread adds a table."""

        __hash__ = object.__hash__

        def __eq__(self, other: object) -> bool:
            layer.tables[9, self] = ()
            return False

    layer.tables = {(width, Meanwhile()): () for width in (7, 8)}
    assert len(layer._table(8, torch.device("cpu"))) == 5


CASES = [  # out, in, kernel, stride, padding, dilation, height, width
    (32, 16, (3, 3), 1, 1, 1, 9, 7),
    (20, 24, (3, 3), 2, 1, 1, 8, 8),
    (16, 20, (1, 1), 1, 0, 1, 5, 5),
    (40, 16, (5, 5), 2, 2, 2, 13, 12),
    (33, 9, (3, 1), 1, 0, 1, 6, 6),
    (16, 3, (7, 7), 3, 3, 1, 11, 10),
]


ENDS = [
    ("none", IDENTITY),
    ("before", Activation("clamp", 0.0)),
    ("after", Activation("silu")),
    ("before", Activation("clamp", 0.0, 6.0)),
    ("after", Activation("gelu")),
    ("none", Activation("leaky", slope=0.1)),
]


@needs_interpreter
@pytest.mark.parametrize(("case", "addition", "activation"), [(case, *end) for case, end in zip(CASES, ENDS, strict=True)])
def test_sparse_layers_agree_with_torch(
    case: tuple[int, int, tuple[int, int], int, int, int, int, int], addition: str, activation: Activation
) -> None:
    out, channels, kernel, stride, padding, dilation, height, width = case
    torch.manual_seed(out)
    weight, bias = randomly_pruned_weight(torch.randn(out, channels, *kernel), 0.4), torch.randn(out)
    weight[16:32] = 0
    x = torch.randn(3, channels, height, width)
    plain = F.conv2d(x, weight, bias, stride, padding, dilation)
    other = torch.randn_like(plain)
    window = {"sh": stride, "sw": stride, "ph": padding, "pw": padding, "dh": dilation, "dw": dilation}
    made = step(weight, bias, addition, activation, **window)
    named = {"silu": F.silu, "gelu": F.gelu, "leaky": lambda v: F.leaky_relu(v, 0.1)}
    act = named.get(activation.name, lambda v: v.clamp(activation.low, activation.high))
    expected = {"none": lambda: act(plain), "before": lambda: act(plain + other), "after": lambda: act(plain) + other}[addition]()
    given = (x,) if addition == "none" else (x, other)
    assert torch.allclose(Dense(made, plain.shape, torch.float32)(*given), expected, atol=1e-4)
    for tile in (Tile(16, 2, 1, 1), Tile(32, 4, 1, 2)):
        layer = Sparse(made, plain.shape, torch.float32, tile)
        assert torch.allclose(layer(*given), expected, atol=1e-4)


@needs_interpreter
def test_linear_on_rows_and_half_precision() -> None:
    torch.manual_seed(1)
    weight, bias, x = randomly_pruned_weight(torch.randn(24, 40, 1, 1), 0.5), torch.randn(24), torch.randn(2, 5, 40)
    made = step(weight, bias, "none", IDENTITY)
    made.rows = True
    expected = F.linear(x, weight[:, :, 0, 0], bias)
    assert torch.allclose(Sparse(made, (2, 5, 24), torch.float32, Tile(16, 2, 1, 1))(x), expected, atol=1e-4)
    half = Sparse(made, (2, 5, 24), torch.float16, Tile(16, 2, 1, 1))(x.half())
    assert half.dtype == torch.float16
    assert torch.allclose(half.float(), expected, atol=0.05)


@pytest.mark.gpu
@on_gpu_machine
@pytest.mark.parametrize("case", CASES)
def test_gpu_every_tile(case: tuple[int, int, tuple[int, int], int, int, int, int, int]) -> None:
    out, channels, kernel, stride, padding, dilation, height, width = case
    torch.manual_seed(out)
    weight, bias, x = (
        randomly_pruned_weight(torch.randn(out, channels, *kernel), 0.4),
        torch.randn(out),
        torch.randn(70, channels, height, width),
    )
    plain = F.conv2d(x, weight, bias, stride, padding, dilation)
    window = {"sh": stride, "sw": stride, "ph": padding, "pw": padding, "dh": dilation, "dw": dilation}
    made = step(weight, bias, "none", Activation("clamp", 0.0), **window)
    for tile in TILES:
        layer = Sparse(made, plain.shape, torch.bfloat16, tile).cuda()
        got = layer(x.cuda().bfloat16()).float().cpu()
        assert float((got - plain.relu()).abs().max()) < 0.03 * float(plain.max())
