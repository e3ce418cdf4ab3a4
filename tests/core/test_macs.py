"""MACs of everything that a model runs, compared with numbers worked out by hand and with the FLOP counter of torch."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import smartprune as sp
from helpers import zoo
from helpers.usage import count_macs
from smartprune.core.usage import measure

ROWS = 4 * 5  # of the example: 4 samples of 5 rows
X = torch.randn(4, 5, 8)


def flops_of_torch(model: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # it does not count the CPU kernel of attention
        model.eval()(x)
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    ("model", "per_row"),
    [
        (nn.LSTM(8, 6, 2, bidirectional=True, batch_first=True), 4 * 6 * ((8 + 6) + (12 + 6)) * 2),
        (nn.LSTM(8, 6, proj_size=3, batch_first=True), 4 * 6 * (8 + 3) + 6 * 3),
        (nn.GRU(8, 6, bias=False, batch_first=True), 3 * 6 * (8 + 6)),
        (nn.RNN(8, 6, batch_first=True), 6 * (8 + 6)),
    ],
    ids=["lstm", "projected lstm", "gru", "rnn"],
)
@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch sets every flag of oneDNN
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_recurrent_layers(model: nn.Module, per_row: int, onednn: bool) -> None:
    with torch.backends.mkldnn.flags(enabled=onednn):  # one fused kernel, or a product for every step
        assert count_macs(model, X) == 5 * per_row


def test_recurrent_layers_on_packed_sequences_count_real_rows() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(8, 6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.gru(nn.utils.rnn.pack_padded_sequence(x, [5, 4, 3, 2], batch_first=True))[1]  # type: ignore[no-any-return]

    assert count_macs(Packed(), X) == math.ceil((5 + 4 + 3 + 2) * 3 * 6 * (8 + 6) / 4)


def test_recurrent_cells() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            state = None
            for row in x.unbind(1):
                state = self.cell(row, state)
            return state[0]  # type: ignore[index]

    assert count_macs(Steps(), X) == 5 * 4 * 6 * (8 + 6)


def test_samples_lie_along_the_second_axis_where_a_layer_reads_time_first() -> None:
    assert count_macs(nn.LSTM(8, 6), X) == 4 * 4 * 6 * (8 + 6)  # 5 samples of 4 steps
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    assert count_macs(layer, X) == 4 * (4 * 8 * 8 + 2 * 8 * 16) + 2 * 4 * 4 * 8
    embedded = nn.Sequential(nn.Embedding(10, 8), nn.LSTM(8, 6))
    assert count_macs(embedded, torch.zeros(7, 3, dtype=torch.long)) == 7 * 4 * 6 * (8 + 6)
    columns = nn.Sequential(nn.Conv2d(3, 8, (4, 1)), nn.Flatten(2), Axes(), nn.LSTM(8, 6))  # text recognition: width is time
    assert count_macs(columns, torch.randn(2, 3, 4, 9)) == 9 * (8 * 3 * 4 + 4 * 6 * (8 + 6))


class Axes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(2, 0, 1)


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_that_torch_would_run_in_one_kernel(batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = X if batch_first else X.transpose(0, 1)
    per_sample = 5 * (4 * 8 * 8 + 2 * 8 * 16) + 2 * 5 * 5 * 8
    assert count_macs(model, x) == 2 * per_sample
    with torch.inference_mode():
        assert count_macs(model, x) == 2 * per_sample


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention_functions(backend: SDPBackend) -> None:
    class Grouped(nn.Module):
        """Two query heads share one head of keys and values; values are wider than keys."""

        def forward(self, x: Tensor) -> Tensor:
            query = x.unflatten(-1, (2, 4)).transpose(1, 2)
            key = x[:, None, :3, :4]
            return F.scaled_dot_product_attention(query, key, key, enable_gqa=True)

    with sdpa_kernel(backend):
        assert count_macs(Grouped(), X) == 2 * 5 * 3 * (4 + 4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="this torch has no flex_attention")

    class Flex(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return flex.flex_attention(x[:, None], x[:, None], x[:, None])  # type: ignore[no-any-return]

    assert count_macs(Flex(), X) == 2 * 5 * 5 * 8


class Products(nn.Module):
    """Products of activations, and layers that are functions on parameters of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.kernel = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(4, 3, 3))
        self.up = nn.Parameter(torch.randn(4, 2, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.linear(x, self.matrix)
        z = F.conv_transpose1d(F.conv1d(y.mT, self.kernel, groups=2), self.up, stride=2)
        scores = torch.baddbmm(torch.zeros(4, 5, 5), x, x.mT)
        return (
            torch.einsum("bij,bkj->bik", x, y[..., [0, 1, 2, 3, 4, 5, 0, 1]]),
            z,
            scores @ x,
            x @ self.matrix[0],
            torch.addmm(y[0], x[0], self.matrix.T),
        )


def test_functions_on_parameters_and_products_of_activations() -> None:
    model = Products()
    expected = [
        ROWS * 6 * 8,  # linear
        4 * 4 * 3 * (3 * 3),  # 3 output positions, 4 channels
        4 * 3 * (4 * 2 * 3),  # 3 input positions
        4 * 5 * 5 * 8,  # baddbmm
        4 * 5 * 5 * 8,  # einsum
        4 * 5 * 5 * 8,  # scores @ x
        ROWS * 8,  # a vector
        5 * 6 * 8,  # addmm
    ]
    assert count_macs(model, X) == sum(expected) // 4
    assert count_macs(model, X) == (flops_of_torch(model, X) // 2 + ROWS * 8) // 4  # torch does not count products with a vector


def test_stacked_experts() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(3, 16, 8))

        def forward(self, x: Tensor) -> Tensor:
            rows = x.flatten(0, 1)
            chosen = torch.arange(len(rows)) % 3
            out = rows.new_zeros(len(rows), 16)
            for i in range(3):
                out[chosen == i] = F.linear(rows[chosen == i], self.up[i])
            return out

    assert count_macs(Experts(), X) == 5 * 16 * 8


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped matrix product")
def test_grouped_product_of_experts() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(3, 16, 24, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return torch._grouped_mm(x, self.up, offs=torch.tensor([5, 20, 32], dtype=torch.int32))

    assert count_macs(Grouped(), torch.randn(32, 16, dtype=torch.bfloat16)) == 16 * 24


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_counted() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval())
    assert count_macs(model, X) == 5 * (8 * 8 + 8 * 4)


def test_models_that_run_in_inference_mode_are_counted() -> None:
    class Inference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.up = nn.Linear(8, 6), nn.Parameter(torch.randn(4, 6))

        @torch.inference_mode()
        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            return F.linear(y, self.up) @ y[:, :4]

    assert count_macs(Inference(), X) == 5 * 8 * 6 + 5 * 6 * 4 + 5 * 4 * 6


class LowRank(nn.Linear):
    """Computes more than its weight says."""

    def __init__(self) -> None:
        super().__init__(8, 6)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Parameter(torch.randn(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(self.down(x), self.up)


def test_layers_inside_of_layers_are_counted_once() -> None:
    model = nn.Sequential(LowRank(), nn.Linear(6, 4))
    assert count_macs(model, X) == 5 * (8 * 6 + 8 * 2 + 2 * 6 + 6 * 4)
    assert count_macs(model, X) == flops_of_torch(model, X) // 2 // 4


def test_a_parametrization_counts_as_part_of_the_layer() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    nn.utils.parametrizations.spectral_norm(model[0])
    vectors = 6 * 8 + 6  # one product of the weight with a vector, and one of two vectors, whatever the batch size
    assert count_macs(model, X) == 5 * (8 * 6 + 6 * 4) + math.ceil(vectors / 4)


def test_counts_of_an_attached_model_are_those_of_the_model() -> None:
    for name in ("cross_attention", "transformer_block", "unet"):
        model, x = zoo.SMALL[name]()
        expected = measure(model, x)
        sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=2)
        assert (measure(model, x).macs, measure(model, x).not_counted) == (expected.macs, ())


def test_operators_without_known_macs_are_named() -> None:
    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pairs = nn.Bilinear(8, 8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.pairs(x, x), torch.fft.fft(x), torch.cdist(x, x), doubled(x)

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Others())
    assert measure(model, X).not_counted == ("aten::_cdist_forward", "aten::_fft_r2c", "aten::_trilinear", "tests::doubled")
    plan = sp.plan(model, (4, 4), 0.5, example=X)
    assert plan.not_counted == measure(model, X).not_counted
    assert "not counted in aten::_cdist_forward, aten::_fft_r2c, aten::_trilinear, tests::doubled" in str(plan)
    assert plan.to_json()["not_counted"] == list(plan.not_counted)


@torch.library.custom_op("tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x
