"""How training pictures with boxes are changed: four put together, scaled, moved, mirrored, other colours.

All numbers are drawn on the CPU for a whole epoch, so that they are the same on every device and for every batch of it;
pictures and boxes are then moved on the device, a whole batch at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from .detection_files import GREY
from .task import generator

TILES = 4  # pictures of a mosaic: top left, top right, bottom left, bottom right
SMALLEST = 2.0  # pixels a side; what is left of a box must be larger ...
LEFT_OVER = 0.1  # ... and at least this share of it


@dataclass(frozen=True)
class Moves:
    """Limits of what is drawn; see the settings of ``Detection``."""

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
class Drawn:
    """What was drawn for n training pictures; lengths are shares of the side that the network sees."""

    order: Tensor  # [n, tiles] numbers of the pictures; the first is a permutation
    alone: Tensor  # [n] whether only the first is shown
    middle: Tensor  # [n, 2] where the four meet, from the middle of the mosaic
    scale: Tensor  # [n, 1]
    shift: Tensor  # [n, 2]
    mirror: Tensor  # [n] -1 for those that are mirrored, else 1
    colour: Tensor  # [n, 3] turn of the hue in radians, factors of saturation and brightness

    def to(self, device: torch.device) -> Drawn:
        return Drawn(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def __getitem__(self, part: slice) -> Drawn:
        return Drawn(**{f.name: getattr(self, f.name)[part] for f in fields(self)})


def draw(moves: Moves, count: int, seed: int, epoch: int) -> Drawn:
    source = generator(seed, epoch)

    def uniform(columns: int) -> Tensor:
        return 2 * torch.rand(count, columns, generator=source) - 1

    order = torch.randperm(count, generator=source)[:, None]
    others = torch.randint(0, count, (count, TILES - 1), generator=source)[:, : moves.tiles - 1]
    alone = torch.rand(count, generator=source) >= moves.mosaic
    middle, scale, shift = uniform(2) / 2, 1 + moves.scale * uniform(1), moves.shift * uniform(2)
    mirror = 1 - 2 * torch.randint(0, 2, (count,), generator=source) * moves.flip
    change = uniform(3) * torch.tensor([2 * math.pi * moves.hue, moves.saturation, moves.brightness])
    colour = change + torch.tensor([0.0, 1.0, 1.0])
    return Drawn(torch.cat([order, others], 1), alone, middle, scale, shift, mirror.float(), colour)


def painted(taken: Tensor, frames: Tensor, drawn: Drawn) -> Tensor:
    """Pictures [batch, 3, size, size] in 0 ... 1, made of squares of bytes [batch, tiles, size, size, 3].

    ``frames`` [batch, tiles, 4] are the corners of what is not grey border in every square.
    """
    tiles, size = taken.shape[1:3]
    place, meet = _places(frames, drawn, size)
    axis = torch.arange(size, device=taken.device) + 0.5 - size / 2  # middles of pixels, from the middle of the picture
    across = (axis * drawn.mirror[:, None] - drawn.shift[:, :1] * size) / drawn.scale  # [batch, size] in the mosaic
    down = (axis - drawn.shift[:, 1:] * size) / drawn.scale
    tile = (down > meet[:, 1:])[:, :, None] * 2 + (across > meet[:, :1])[:, None, :] * 1  # [batch, size, size]
    own = torch.cat([place, frames], -1).gather(1, tile.flatten(1)[..., None].expand(-1, -1, 6)).unflatten(1, (size, size))
    at = torch.stack([across[:, None, :].expand_as(tile), down[:, :, None].expand_as(tile)], -1) + own[..., :2]
    low, high = own[..., 2:4], own[..., 4:6]
    within = ((at >= low) & (at <= high)).all(-1)
    at = at.maximum(low + 0.5).minimum(high - 0.5)  # so that neither border nor the next tile is mixed in
    x, y = at[..., 0] / size, (at[..., 1] / size + tile) / tiles  # the tiles lie one below the other
    grid = 2 * torch.stack([x, y], -1) - 1
    pixels = taken.flatten(1, 2).permute(0, 3, 1, 2).float()
    out = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)
    out = coloured(torch.where(within[:, None], out, GREY) / 255, drawn.colour)
    return out.contiguous(memory_format=torch.channels_last)


def placed(labels: Tensor, frames: Tensor, drawn: Drawn, size: int) -> Tensor:
    """Where the boxes of the squares come to lie: ``labels`` [batch, tiles, n, 5] of class and corners, class -1 for none,
    to the same [batch, tiles * n, 5]. What is cut off too far goes."""
    place, _ = _places(frames, drawn, size)
    boxes = labels[..., 1:].unflatten(-1, (2, 2)) - place[:, :, None, None]  # [batch, tiles, n, corner, x or y]
    boxes = boxes * drawn.scale[:, None, None, None] + (drawn.shift * size)[:, None, None, None]
    x, y = (boxes[..., 0] * drawn.mirror[:, None, None, None]).sort(-1).values, boxes[..., 1]
    boxes = torch.stack([x, y], -1) + size / 2
    cut = boxes.clamp(0, size)
    sides, before = cut[..., 1, :] - cut[..., 0, :], boxes[..., 1, :] - boxes[..., 0, :]
    kept = (labels[..., 0] >= 0) & (sides > SMALLEST).all(-1) & (sides.prod(-1) > LEFT_OVER * before.prod(-1))
    kept[:, 1:] &= ~drawn.alone[:, None, None]
    out = torch.cat([labels[..., :1], cut.flatten(-2)], -1)
    return torch.where(kept[..., None], out, -1.0).flatten(1, 2)


def _places(frames: Tensor, drawn: Drawn, size: int) -> tuple[Tensor, Tensor]:
    """What is added to a point of the mosaic, seen from its middle, to find it in a square [batch, tiles, 2]; and where the
    tiles meet [batch, 2]. Every picture touches that point with the corner that is turned to it.
    """
    middle, tiles = drawn.middle * size, frames.shape[1]
    left, top, right, bottom = frames.unbind(-1)
    if tiles == 1:
        x, y = right, bottom
    else:
        x = torch.stack([right[:, 0], left[:, 1], right[:, 2], left[:, 3]], 1)
        y = torch.stack([bottom[:, 0], bottom[:, 1], top[:, 2], top[:, 3]], 1)
    alone = drawn.alone[:, None]
    place = torch.where(alone[..., None], size / 2, torch.stack([x, y], -1) - middle[:, None])
    return place, torch.where(alone, math.inf, middle)


def coloured(pictures: Tensor, colour: Tensor) -> Tensor:
    """Pictures [batch, 3, h, w] in 0 ... 1 with the hue turned (about the grey axis), and saturation and brightness, which
    are those of HSV, multiplied."""
    turn, saturation, brightness = (value[:, None, None] for value in colour.unbind(1))
    cos, sin = turn.cos(), turn.sin() / math.sqrt(3)
    even = torch.ones(3, 3, device=pictures.device) / 3
    cycle = torch.eye(3, device=pictures.device).roll(1, 0)
    matrix = even + cos * (torch.eye(3, device=pictures.device) - even) + sin * (cycle - cycle.T)
    out = torch.einsum("bij,bjhw->bihw", matrix, pictures).clamp(0, 1)
    value = out.amax(1, keepdim=True)
    out = value - (value - out) * saturation[..., None]
    return (out.clamp(min=0) * brightness[..., None]).clamp(max=1)
