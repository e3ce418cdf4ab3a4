"""Small networks with every kind of connection between channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import compact_shape_nets as shapes
from helpers.compact_parts import Made, Net, image


def chain() -> Made:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 10, 3, stride=2, bias=False),
        nn.BatchNorm2d(10),
        nn.SiLU(),
        nn.Conv2d(10, 8, 1, bias=False),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ), image()


def residual() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        return m.last(F.relu(y + m.norm2(m.conv2(F.relu(m.norm1(m.conv1(y)))))))

    return Net(
        forward,
        first=nn.Conv2d(3, 12, 3, padding=1),
        conv1=nn.Conv2d(12, 12, 3, padding=1, bias=False),
        norm1=nn.BatchNorm2d(12),
        conv2=nn.Conv2d(12, 12, 3, padding=1, bias=False),
        norm2=nn.BatchNorm2d(12),
        last=nn.Conv2d(12, 4, 1),
    ), image()


def concat() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.last(torch.cat([F.relu(m.a(x)), F.max_pool2d(m.b(x), 3, 1, 1), torch.sigmoid(m.c(x))], 1))

    convs = {"a": nn.Conv2d(3, 6, 1), "b": nn.Conv2d(3, 7, 3, padding=1), "c": nn.Conv2d(3, 5, 3, padding=1)}
    return Net(forward, **convs, last=nn.Conv2d(18, 4, 3)), image()


def depthwise() -> Made:
    return nn.Sequential(
        nn.Conv2d(3, 12, 1),
        nn.BatchNorm2d(12),
        nn.ReLU6(),
        nn.Conv2d(12, 12, 3, padding=1, groups=12),
        nn.BatchNorm2d(12),
        nn.ReLU6(),
        nn.Conv2d(12, 6, 1),
        nn.Conv2d(6, 12, 3, groups=6),
        nn.ReLU(),
        nn.Conv2d(12, 4, 1),
    ), image()


def grouped() -> Made:
    return nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, groups=4),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 1, groups=2),
        nn.ReLU(),
        nn.Conv2d(16, 4, 1),
    ), image(4)


def squeeze_and_excitation() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.norm(m.first(x)))
        return m.last(y * torch.sigmoid(m.up(F.relu(m.down(y.mean((2, 3), keepdim=True))))))

    return Net(
        forward,
        first=nn.Conv2d(3, 12, 3),
        norm=nn.BatchNorm2d(12),
        down=nn.Conv2d(12, 6, 1),
        up=nn.Conv2d(6, 12, 1),
        last=nn.Conv2d(12, 4, 3, padding=1),
    ), image()


def transposed() -> Made:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 10, 2, 2),
        nn.ReLU(),
        nn.ConvTranspose2d(10, 10, 3, groups=10),
        nn.ConvTranspose2d(10, 8, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 8, 3, groups=2, bias=False),
        nn.ConvTranspose2d(8, 2, 3, bias=False),
    ), image(side=5)


def one_axis() -> Made:
    return nn.Sequential(
        nn.Conv1d(3, 10, 3, padding=1),
        nn.BatchNorm1d(10),
        nn.PReLU(10),
        nn.AvgPool1d(2),
        nn.Conv1d(10, 8, 3, bias=False),
        nn.ELU(),
        nn.Flatten(),
        nn.Linear(48, 6),
        nn.BatchNorm1d(6),
        nn.Tanh(),
        nn.Linear(6, 3),
    ), torch.randn(2, 3, 16)


def three_axes() -> Made:
    return nn.Sequential(
        nn.Conv3d(2, 9, 3, padding=1),
        nn.BatchNorm3d(9),
        nn.Hardswish(),
        nn.MaxPool3d(2),
        nn.Conv3d(9, 6, (1, 2, 2)),
        nn.ReLU(),
        nn.ConvTranspose3d(6, 3, 2),
    ), torch.randn(2, 2, 5, 6, 6)


def shared_module() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.last(F.relu(m.shared(F.relu(m.a(x)))) + m.shared(F.relu(m.b(x))))

    return Net(
        forward, a=nn.Conv2d(3, 8, 1), b=nn.Conv2d(3, 8, 1), shared=nn.Conv2d(8, 8, 3, padding=1), last=nn.Conv2d(8, 3, 1)
    ), image()


def recurrent_use() -> Made:
    return Net(lambda m, x: m.last(F.relu(m.c(F.relu(m.c(x))))), c=nn.Conv2d(8, 8, 3, padding=1), last=nn.Conv2d(8, 3, 1)), image(8)


class TiedWeights(nn.Module):
    """An embedding whose weight is also that of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(11, 12), nn.Linear(12, 12), nn.Linear(12, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.mix(self.embed(x))) + 1)
        return out


def tied_weights() -> Made:
    return TiedWeights(), torch.randint(0, 11, (2, 5))


def several_outputs() -> Made:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.first(x)
        return {"map": m.a(y), "list": [m.b(F.relu(y)).mean((2, 3)), m.c(y).amax((2, 3))]}

    return Net(forward, first=nn.Conv2d(3, 10, 3), a=nn.Conv2d(10, 4, 1), b=nn.Conv2d(10, 6, 3), c=nn.Conv2d(10, 2, 1)), image()


def mlp_block() -> Made:
    return Net(
        lambda m, x: x + m.down(F.gelu(m.up(m.norm(x)))), norm=nn.LayerNorm(6), up=nn.Linear(6, 14), down=nn.Linear(14, 6)
    ), torch.randn(2, 7, 6)


def other_norms() -> Made:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3),
        nn.GroupNorm(3, 12),
        nn.ReLU(),
        nn.Conv2d(12, 8, 3),
        nn.InstanceNorm2d(8, affine=True),
        nn.ReLU(),
        nn.Conv2d(8, 3, 1),
    ), image()


def paddings() -> Made:
    return nn.Sequential(
        nn.Conv2d(3, 10, 3),
        nn.ZeroPad2d(1),
        nn.Conv2d(10, 9, 3),
        nn.ReflectionPad2d(1),
        nn.Conv2d(9, 8, 3, padding=1, padding_mode="circular"),
        nn.ReplicationPad2d(1),
        nn.Conv2d(8, 4, 3),
    ), image()


def upsampling() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        a = F.relu(m.a(x))
        return m.last(torch.cat([F.interpolate(F.relu(m.b(a)), scale_factor=2, mode="bilinear"), a], 1))

    return Net(
        forward,
        a=nn.Conv2d(3, 8, 3, padding=1),
        b=nn.Conv2d(8, 8, 3, stride=2, padding=1),
        last=nn.Conv2d(16, 4, 3, padding=1),
    ), image()


def functional_weight() -> Made:
    return Net(
        lambda m, x: m.last(F.linear(m.first(x).mean((2, 3)), m.weight)),
        first=nn.Conv2d(3, 9, 3),
        weight=nn.Parameter(torch.randn(10, 9)),
        last=nn.Linear(10, 4),
    ), image()


def standardized_weight() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        weight = m.first.weight - m.first.weight.mean((1, 2, 3), keepdim=True)
        return m.last(F.relu(F.conv2d(x, weight, m.first.bias)))

    return Net(forward, first=nn.Conv2d(3, 8, 3), last=nn.Conv2d(8, 4, 1)), image()


def layer_scale() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        return m.last(y + m.scale.view(1, -1, 1, 1) * m.middle(y))

    return Net(
        forward,
        first=nn.Conv2d(3, 8, 1),
        scale=nn.Parameter(torch.ones(8)),
        middle=nn.Conv2d(8, 8, 3, padding=1),
        last=nn.Conv2d(8, 3, 1),
    ), image()


def spatial_gate() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.first(x))
        return m.last(y * torch.sigmoid(m.gate(y)))

    return Net(forward, first=nn.Conv2d(3, 8, 3), gate=nn.Conv2d(8, 1, 3, padding=1), last=nn.Conv2d(8, 4, 1)), image()


def in_place() -> Made:
    return Net(
        lambda m, x: m.last(m.a(x).add_(m.b(x)).relu_().mul_(2)),
        a=nn.Conv2d(3, 12, 1),
        b=nn.Conv2d(3, 12, 1),
        last=nn.Conv2d(12, 4, 1),
    ), image()


def gated_pooling() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        return m.last((y * m.gate(y.mean((2, 3))).sigmoid()[:, :, None, None]).amax((2, 3)))

    return Net(forward, first=nn.Conv2d(3, 12, 3), gate=nn.Linear(12, 12), last=nn.Linear(12, 4)), image()


def statistics_of_the_batch() -> Made:
    return nn.Sequential(
        nn.Conv2d(3, 12, 1, bias=False),
        nn.BatchNorm2d(12, track_running_stats=False),
        nn.ReLU(),
        nn.Conv2d(12, 6, 1, bias=False),
        nn.BatchNorm2d(6, affine=False),
        nn.Conv2d(6, 4, 1),
    ), image()


def pools() -> Made:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3),
        nn.Softplus(),
        nn.AvgPool2d(3, 1, 1),
        nn.Conv2d(12, 10, 3),
        nn.Sigmoid(),
        nn.AvgPool2d(2, ceil_mode=True, padding=1, count_include_pad=False),
        nn.Conv2d(10, 8, 1),
        nn.Hardsigmoid(),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.LPPool2d(2, 2),
        nn.Conv2d(8, 4, 1),
    ), image(side=12)


def several_inputs() -> Made:
    return Net(
        lambda m, x, y: m.last(F.relu(m.a(x) * 2 - m.b(y) / 3)), a=nn.Linear(4, 9), b=nn.Linear(6, 9), last=nn.Linear(9, 2)
    ), (torch.randn(3, 4), torch.randn(3, 6))


NETS: dict[str, Callable[[], Made]] = {
    function.__name__: function
    for function in (
        chain,
        residual,
        concat,
        depthwise,
        grouped,
        squeeze_and_excitation,
        transposed,
        one_axis,
        three_axes,
        shapes.flattened,
        shared_module,
        recurrent_use,
        tied_weights,
        several_outputs,
        shapes.chunks,
        shapes.channel_shuffle,
        shapes.pixel_shuffle,
        mlp_block,
        other_norms,
        shapes.token_mixer,
        paddings,
        upsampling,
        functional_weight,
        standardized_weight,
        layer_scale,
        spatial_gate,
        shapes.slices,
        in_place,
        gated_pooling,
        shapes.attention_of_torch,
        several_inputs,
        shapes.stacked_slices,
        shapes.shared_head,
        shapes.two_poolings,
        shapes.groups_with_padding,
        shapes.gated_linear_unit,
        shapes.stacked_branches,
        shapes.encoder_layer,
        shapes.instance_norms,
        shapes.padded_shortcut,
        shapes.stated_groups,
        shapes.repeated_by_tensor,
        statistics_of_the_batch,
        pools,
    )
}
