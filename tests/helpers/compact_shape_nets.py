"""Small networks whose code handles the shapes of tensors, with channels on several axes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.compact_parts import Made, Net, image


def chunks() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        a, b = F.relu(m.first(x)).chunk(2, 1)
        return m.last(torch.cat([m.middle(a), b], 1))

    return Net(forward, first=nn.Conv2d(3, 12, 1), middle=nn.Conv2d(6, 7, 3, padding=1), last=nn.Conv2d(13, 4, 1)), image()


def channel_shuffle() -> Made:
    def shuffle(x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        return x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, -1, h, w)

    return Net(
        lambda m, x: m.last(F.relu(m.middle(shuffle(F.relu(m.first(x)))))),
        first=nn.Conv2d(3, 12, 1),
        middle=nn.Conv2d(12, 12, 1, groups=2),
        last=nn.Conv2d(12, 4, 1),
    ), image()


def pixel_shuffle() -> Made:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.PixelShuffle(2), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)), image(
        side=4
    )


def token_mixer() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.last(F.relu(m.mix(m.first(x).transpose(1, 2)).transpose(1, 2)))

    return Net(forward, first=nn.Linear(12, 10), mix=nn.Linear(7, 7), last=nn.Linear(10, 4)), torch.randn(2, 7, 12)


def slices() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        return m.last(y[:, :6] + y[:, 6:])

    return Net(forward, first=nn.Conv2d(3, 12, 1), last=nn.Conv2d(6, 4, 1)), image()


def stacked_slices() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        parts = [x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]]
        return m.last(F.relu(m.first(torch.cat(parts, 1))))

    return Net(forward, first=nn.Conv2d(12, 12, 3), last=nn.Conv2d(12, 4, 1)), image()


def padded_shortcut() -> Made:
    """The shortcut of a ResNet without parameters: zeros in place of the channels that are missing."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        return m.last(F.relu(F.pad(y[:, :, ::2, ::2], (0, 0, 0, 0, 3, 3)) + m.conv(y)))

    convs = {"first": nn.Conv2d(3, 6, 1), "conv": nn.Conv2d(6, 12, 3, stride=2, padding=1)}
    return Net(forward, **convs, last=nn.Conv2d(12, 4, 1)), image()


def stated_groups() -> Made:
    """A depthwise convolution with a fixed kernel, whose number of groups is written in the code."""
    model = Net(
        lambda m, x: m.last(F.conv2d(F.relu(m.first(x)), m.blur, groups=12)), first=nn.Conv2d(3, 12, 1), last=nn.Conv2d(12, 4, 1)
    )
    model.register_buffer("blur", torch.ones(12, 1, 3, 3) / 9)
    return model, image()


def repeated_by_tensor() -> Made:
    return Net(
        lambda m, x: m.last(torch.repeat_interleave(m.first(x), torch.tensor([1, 2] * 6), 1)),
        first=nn.Conv2d(3, 12, 1),
        last=nn.Conv2d(18, 4, 1),
    ), image()


def flattened() -> Made:
    return Net(
        lambda m, x: m.last(F.relu(m.first(x)).view(x.shape[0], -1)), first=nn.Conv2d(3, 10, 3), last=nn.Linear(360, 5)
    ), image()


class Attention(nn.Module):
    """Attention with three heads of four. ``views`` says what the code states about shapes: heads, widths, or both."""

    def __init__(self, views: str, fused: bool) -> None:
        super().__init__()
        self.first, self.place = nn.Linear(5, 12), nn.Parameter(torch.randn(1, 7, 12))
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))
        self.sizes = {"widths": (-1, 4), "heads": (3, -1), "both": (3, 4)}[views]
        self.fused = fused

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], *self.sizes).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.place
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        plain = None if self.fused else (q @ k.transpose(-1, -2) * 0.5).softmax(-1) @ v
        y = F.scaled_dot_product_attention(q, k, v, scale=0.5) if plain is None else plain
        out: Tensor = self.o(y.transpose(1, 2).reshape(*x.shape[:2], -1))
        return out


def attention(views: str = "widths", fused: bool = True) -> Made:
    return Attention(views, fused), torch.randn(2, 7, 5)


def attention_of_torch() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        return m.last(F.relu(m.attention(y, y, y)[0]))

    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    return Net(forward, first=nn.Linear(12, 12), attention=attention, last=nn.Linear(12, 4)), torch.randn(2, 7, 12)


def shared_head() -> Made:
    """Two layers that the model runs on two levels, as in a detector."""

    def forward(m: Any, x: Tensor) -> Any:
        high = F.relu(m.high(x))
        low = F.relu(m.low(high))
        return [m.box(F.relu(m.head(level))) for level in (high, low)]

    layers = {"high": nn.Conv2d(3, 8, 3), "low": nn.Conv2d(8, 8, 3, stride=2), "head": nn.Conv2d(8, 10, 3, padding=1)}
    return Net(forward, **layers, box=nn.Conv2d(10, 4, 3, padding=1)), image(side=12)


def two_poolings() -> Made:
    """Two layers that the model runs on the mean and on the largest value of each channel."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        gates = [m.up(F.relu(m.down(z))) for z in (y.mean((2, 3)), y.amax((2, 3)))]
        return m.last(y * (gates[0] + gates[1]).sigmoid()[:, :, None, None])

    return Net(forward, first=nn.Conv2d(3, 9, 3), down=nn.Linear(9, 6), up=nn.Linear(6, 9), last=nn.Conv2d(9, 4, 1)), image()


def groups_with_padding() -> Made:
    return nn.Sequential(nn.Conv2d(3, 18, 1), nn.ELU(), nn.Conv2d(18, 9, 3, padding=1, groups=3), nn.Conv2d(9, 4, 1)), image()


def gated_linear_unit() -> Made:
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.GLU(1), nn.Conv2d(8, 12, 1), nn.GLU(1), nn.Conv2d(6, 4, 1)), image()


def stacked_branches() -> Made:
    """Branches that are stacked, weighted by a softmax over them, and added."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = torch.stack([F.relu(m.a(x)), F.relu(m.b(x))])
        z = y.sum(0).mean((2, 3))
        weights = torch.stack([m.c(z), m.d(z)]).softmax(0)
        return m.last((y * weights[..., None, None]).sum(0))

    branches = {"a": nn.Conv2d(3, 12, 3, padding=1), "b": nn.Conv2d(3, 12, 1)}
    return Net(forward, **branches, c=nn.Linear(12, 12), d=nn.Linear(12, 12), last=nn.Conv2d(12, 4, 1)), image()


def encoder_layer() -> Made:
    return nn.TransformerEncoderLayer(12, 3, 20, batch_first=True), torch.randn(2, 7, 12)


def instance_norms() -> Made:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3),
        nn.InstanceNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 8, 3),
        nn.InstanceNorm2d(8, affine=True),
        nn.Conv2d(8, 4, 1),
    ), image()
