"""Small models for tests. Each function returns a model and an example input."""

import torch
from torch import Tensor, nn


def plain_cnn() -> tuple[nn.Module, Tensor]:
    """A stem, ragged layers (20 and 12 channels), a classifier."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 20, 3, padding=1, bias=False),
        nn.BatchNorm2d(20),
        nn.ReLU(),
        nn.Conv2d(20, 12, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 10),
    ), torch.randn(4, 3, 8, 8)


class _Inverted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.expand = nn.Sequential(nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU6())
        self.depthwise = nn.Sequential(nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.BatchNorm2d(24), nn.ReLU6())
        self.grouped = nn.Conv2d(24, 12, 3, padding=1, groups=2)
        self.project = nn.Conv2d(12, 8, 1)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.project(self.grouped(self.depthwise(self.expand(x))))
        return self.head((x + y).mean((2, 3)))


def mobilenet_block() -> tuple[nn.Module, Tensor]:
    return _Inverted(), torch.randn(4, 3, 8, 8)


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 4, stride=4)
        self.norm1 = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 36), nn.GELU(), nn.Linear(36, 16))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.mlp(self.norm2(x))
        return self.head(x.mean(1))


def transformer_block() -> tuple[nn.Module, Tensor]:
    return _Transformer(), torch.randn(4, 3, 8, 8)


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(8, 18, 3, stride=2, padding=1), nn.BatchNorm2d(18), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(18, 32, 3, stride=2, padding=1), nn.ReLU())
        self.up1 = nn.ConvTranspose2d(32, 18, 2, stride=2)
        self.up2 = nn.ConvTranspose2d(36, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.enter(x)
        b = self.down(a)
        c = self.deep(b)
        y = self.up1(c)
        y = self.up2(torch.cat([b, y], 1))
        return self.out(torch.cat([a, y], 1)).mean((2, 3))


def unet() -> tuple[nn.Module, Tensor]:
    return _UNet(), torch.randn(4, 3, 8, 8)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 20)
        self.a = nn.Linear(20, 20)
        self.b = nn.Linear(20, 20)
        self.b.weight = self.a.weight
        self.head = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.a(x))
        return self.head(torch.relu(self.b(x)))


def tied() -> tuple[nn.Module, Tensor]:
    return _Tied(), torch.randn(4, 24)


def conv1d_net() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(
        nn.Conv1d(2, 12, 3),
        nn.ReLU(),
        nn.Conv1d(12, 18, 5),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(18, 10),
    ), torch.randn(4, 2, 32)


def conv3d_net() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(
        nn.Conv3d(1, 8, 3),
        nn.ReLU(),
        nn.Conv3d(8, 12, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(12, 10),
    ), torch.randn(2, 1, 8, 8, 8)


class Conv1D(nn.Module):
    """The layer of that name in transformers: linear, with a weight of shape (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.2)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class _CrossAttention(nn.Module):
    """Attention with separate weights for query, key and value, and layers with weights of shape (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 4, stride=4)
        self.keys, self.values = Conv1D(12, 16), Conv1D(18, 16)
        self.attention = nn.MultiheadAttention(16, 2, kdim=12, vdim=18, batch_first=True)
        self.mlp = nn.Sequential(Conv1D(36, 16), nn.GELU(), Conv1D(16, 36))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2).contiguous()
        x = x + self.attention(x, self.keys(x), self.values(x), need_weights=False)[0]
        return self.head((x + self.mlp(x)).mean(1))


def cross_attention() -> tuple[nn.Module, Tensor]:
    return _CrossAttention(), torch.randn(4, 3, 8, 8)


def resnet18() -> tuple[nn.Module, Tensor]:
    from smartprune.models import MODELS

    return MODELS["resnet18"](num_classes=10), torch.randn(2, 3, 32, 32)


_MODELS = (plain_cnn, mobilenet_block, transformer_block, unet, tied, conv1d_net, conv3d_net, cross_attention)
ATTENTION_MACS = {"transformer_block": 2 * 4 * 4 * 16, "cross_attention": 2 * 4 * 4 * 16}  # 4 tokens, each with each, twice
SMALL = {f.__name__: f for f in _MODELS}
PROMISED = {**SMALL, "resnet18": resnet18}
