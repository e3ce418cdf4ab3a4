"""Augmentation of training images with boxes: mosaic, scale, shift, flip and color jitter.

All random numbers of an epoch are drawn on the CPU, so they are the same on every device and for every batch size. Images
and boxes are transformed on the device, one batch at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from .detection_files import GRAY
from .task import generator

TILES = 4  # images of a mosaic: top left, top right, bottom left, bottom right
MIN_SIDE = 2.0  # pixels; a clipped box with a shorter side is dropped
MIN_AREA = 0.1  # a clipped box with a smaller share of its area is dropped


@dataclass(frozen=True)
class AugmentSettings:
    """Ranges of the random numbers; see the settings of ``Detection``."""

    mosaic: float
    scale: float
    shift: float
    flip: bool
    hue: float = 0.0
    saturation: float = 0.0
    brightness: float = 0.0

    @property
    def tiles(self) -> int:
        return TILES if self.mosaic else 1


@dataclass(frozen=True)
class Draws:
    """The random numbers of n training images. Lengths are shares of the input side."""

    order: Tensor  # [n, tiles] indices of the images; the first column is a permutation
    single: Tensor  # [n] whether only the first image is shown
    middle: Tensor  # [n, 2] where the four images meet, relative to the middle of the mosaic
    scale: Tensor  # [n, 1]
    shift: Tensor  # [n, 2]
    flip: Tensor  # [n] -1 for flipped images, else 1
    color: Tensor  # [n, 3] rotation of the hue in radians, factors of saturation and brightness

    def to(self, device: torch.device) -> Draws:
        return Draws(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def __getitem__(self, part: slice) -> Draws:
        return Draws(**{f.name: getattr(self, f.name)[part] for f in fields(self)})


def draw(settings: AugmentSettings, count: int, seed: int, epoch: int) -> Draws:
    rng = generator(seed, epoch)

    def uniform(columns: int) -> Tensor:
        return 2 * torch.rand(count, columns, generator=rng) - 1

    order = torch.randperm(count, generator=rng)[:, None]
    others = torch.randint(0, count, (count, TILES - 1), generator=rng)[:, : settings.tiles - 1]
    single = torch.rand(count, generator=rng) >= settings.mosaic
    middle, scale, shift = uniform(2) / 2, 1 + settings.scale * uniform(1), settings.shift * uniform(2)
    flip = 1 - 2 * torch.randint(0, 2, (count,), generator=rng) * settings.flip
    jitter = uniform(3) * torch.tensor([2 * math.pi * settings.hue, settings.saturation, settings.brightness])
    color = jitter + torch.tensor([0.0, 1.0, 1.0])
    return Draws(torch.cat([order, others], 1), single, middle, scale, shift, flip.float(), color)


def augment_images(squares: Tensor, frames: Tensor, draws: Draws) -> Tensor:
    """Images [batch, 3, size, size] in [0, 1] from letterboxed images, given as bytes [batch, tiles, size, size, 3].

    ``frames`` [batch, tiles, 4] are the corners of the image in every square; the rest is gray padding.
    """
    tiles, size = squares.shape[1:3]
    offset, meet = _mosaic_layout(frames, draws, size)
    axis = torch.arange(size, device=squares.device) + 0.5 - size / 2  # pixel centers, relative to the middle of the output
    across = (axis * draws.flip[:, None] - draws.shift[:, :1] * size) / draws.scale  # [batch, size] in the mosaic
    down = (axis - draws.shift[:, 1:] * size) / draws.scale
    tile = (down > meet[:, 1:])[:, :, None] * 2 + (across > meet[:, :1])[:, None, :] * 1  # [batch, size, size]
    of_tile = torch.cat([offset, frames], -1).gather(1, tile.flatten(1)[..., None].expand(-1, -1, 6)).unflatten(1, (size, size))
    point = torch.stack([across[:, None, :].expand_as(tile), down[:, :, None].expand_as(tile)], -1) + of_tile[..., :2]
    low, high = of_tile[..., 2:4], of_tile[..., 4:6]
    inside = ((point >= low) & (point <= high)).all(-1)
    point = point.maximum(low + 0.5).minimum(high - 0.5)  # do not interpolate with the padding or the next tile
    x, y = point[..., 0] / size, (point[..., 1] / size + tile) / tiles  # the tiles are stacked vertically
    grid = 2 * torch.stack([x, y], -1) - 1
    pixels = squares.flatten(1, 2).permute(0, 3, 1, 2).float()
    out = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)
    out = jitter_colors(torch.where(inside[:, None], out, GRAY) / 255, draws.color)
    return out.contiguous(memory_format=torch.channels_last)


def augment_boxes(labels: Tensor, frames: Tensor, draws: Draws, size: int) -> Tensor:
    """The boxes of the augmented images: ``labels`` [batch, tiles, n, 5] to [batch, tiles * n, 5].

    A label is a class, or -1 for none, and corners. Boxes that are mostly clipped are dropped.
    """
    offset, _ = _mosaic_layout(frames, draws, size)
    boxes = labels[..., 1:].unflatten(-1, (2, 2)) - offset[:, :, None, None]  # [batch, tiles, n, corner, x or y]
    boxes = boxes * draws.scale[:, None, None, None] + (draws.shift * size)[:, None, None, None]
    x, y = (boxes[..., 0] * draws.flip[:, None, None, None]).sort(-1).values, boxes[..., 1]
    boxes = torch.stack([x, y], -1) + size / 2
    clipped = boxes.clamp(0, size)
    sides, before = clipped[..., 1, :] - clipped[..., 0, :], boxes[..., 1, :] - boxes[..., 0, :]
    kept = (labels[..., 0] >= 0) & (sides > MIN_SIDE).all(-1) & (sides.prod(-1) > MIN_AREA * before.prod(-1))
    kept[:, 1:] &= ~draws.single[:, None, None]
    out = torch.cat([labels[..., :1], clipped.flatten(-2)], -1)
    return torch.where(kept[..., None], out, -1.0).flatten(1, 2)


def _mosaic_layout(frames: Tensor, draws: Draws, size: int) -> tuple[Tensor, Tensor]:
    """The offset from mosaic coordinates to each square [batch, tiles, 2], and the point where the tiles meet [batch, 2].

    Mosaic coordinates are relative to its middle. Each image touches the meeting point with the corner that faces it.
    """
    middle, tiles = draws.middle * size, frames.shape[1]
    left, top, right, bottom = frames.unbind(-1)
    if tiles == 1:
        x, y = right, bottom
    else:
        x = torch.stack([right[:, 0], left[:, 1], right[:, 2], left[:, 3]], 1)
        y = torch.stack([bottom[:, 0], bottom[:, 1], top[:, 2], top[:, 3]], 1)
    single = draws.single[:, None]
    offset = torch.where(single[..., None], size / 2, torch.stack([x, y], -1) - middle[:, None])
    return offset, torch.where(single, math.inf, middle)


def jitter_colors(images: Tensor, color: Tensor) -> Tensor:
    """Rotates the hue of images [batch, 3, h, w] in [0, 1] about the gray axis, and multiplies saturation and brightness.

    Saturation and brightness are those of HSV.
    """
    angle, saturation, brightness = (value[:, None, None] for value in color.unbind(1))
    cos, sin = angle.cos(), angle.sin() / math.sqrt(3)
    mean = torch.ones(3, 3, device=images.device) / 3
    cycle = torch.eye(3, device=images.device).roll(1, 0)
    matrix = mean + cos * (torch.eye(3, device=images.device) - mean) + sin * (cycle - cycle.T)
    out = torch.einsum("bij,bjhw->bihw", matrix, images).clamp(0, 1)
    value = out.amax(1, keepdim=True)
    out = value - (value - out) * saturation[..., None]
    return (out.clamp(min=0) * brightness[..., None]).clamp(max=1)
