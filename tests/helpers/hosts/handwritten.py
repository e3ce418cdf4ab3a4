"""Models as users write them, with layers that the packages do not use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Tagger(nn.Module):
    """A label for every word, from a recurrent layer in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.recurrent = nn.LSTM(32, 48, num_layers=2, bidirectional=True, batch_first=True)
        self.project = nn.Linear(96, 64)
        self.classify = nn.Linear(64, 12)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embed(words))
        return self.classify(torch.relu(self.project(hidden)))


class Volumes(nn.Module):
    """A network of 3-D convolutions with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(1, 16, 3, padding=1, bias=False), nn.BatchNorm3d(16), nn.ReLU())
        self.down = nn.Sequential(nn.Conv3d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm3d(32), nn.ReLU())
        self.block = nn.Sequential(
            nn.Conv3d(32, 32, 3, padding=1, bias=False), nn.BatchNorm3d(32), nn.ReLU(), nn.Conv3d(32, 32, 3, padding=1)
        )
        self.classify = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.stem(x))
        return self.classify(torch.relu(x + self.block(x)).mean((2, 3, 4)))


class Translator(nn.Module):
    """An encoder and a decoder of torch, with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.transformer = nn.Transformer(32, 4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=64, batch_first=True)
        self.classify = nn.Linear(32, 100)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.transformer(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
        return self.classify(hidden)


class Captioner(nn.Module):
    """A recurrent cell that attends to an image, whose features have another width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 8, stride=8)
        self.start = nn.Parameter(torch.zeros(1, 32))
        self.attend = nn.MultiheadAttention(32, 2, kdim=24, vdim=24, batch_first=True)
        self.remember = nn.GRUCell(32, 32)
        self.refine = nn.LSTMCell(32, 36)
        self.classify = nn.Linear(36, 50)

    def forward(self, image: Tensor) -> Tensor:
        features = self.stem(image).flatten(2).transpose(1, 2)
        hidden = self.start.expand(image.shape[0], -1)
        state = None
        words = []
        for _ in range(3):
            seen, _ = self.attend(hidden[:, None], features, features, need_weights=False)
            hidden = self.remember(seen[:, 0], hidden)
            state = self.refine(hidden, state)
            words.append(self.classify(state[0]))
        return torch.stack(words, 1)


def tagger() -> tuple[nn.Module, Any]:
    return Tagger(), torch.randint(0, 100, (2, 12))


def volumes() -> tuple[nn.Module, Any]:
    return Volumes(), torch.randn(2, 1, 12, 12, 12)


def translator() -> tuple[nn.Module, Any]:
    return Translator(), (torch.randint(0, 100, (2, 9)), torch.randint(0, 100, (2, 7)))


def captioner() -> tuple[nn.Module, Any]:
    return Captioner(), torch.randn(2, 3, 32, 32)


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "lstm_tagger": tagger,
    "conv3d_net": volumes,
    "nn_transformer": translator,
    "cells_and_attention": captioner,
}
