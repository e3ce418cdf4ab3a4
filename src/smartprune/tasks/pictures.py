"""Pictures from a folder or straight from a tar, decoded to bytes, and cut out on the device. Errors name the file."""

from __future__ import annotations

import io
import os
import posixpath
import tarfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SmartpruneError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of red, green, blue in 0 ... 1: those of ImageNet
LINKS = 8  # one after the other, at most
WORKERS = min(8, os.cpu_count() or 1)  # threads that decode


class Files:
    """What lies in a folder or in a tar, by names such as ``train/cat/1.jpg``; a tar is read where it is."""

    def __init__(self, place: Path, within: tuple[str, ...]) -> None:
        """``within``: the folders of interest, at the top or in the only folder there is at the top."""
        self.place, self.packed = place, place.is_file()
        found = _members(place) if self.packed else _walk(place)
        tops = {name.split("/")[0] for name in found}
        if len(tops) == 1 and tops.isdisjoint(within):
            found = {name.partition("/")[2]: value for name, value in found.items()}
        self.found = {name: found[name] for name in sorted(found)}

    def names(self, folder: str) -> list[str]:
        return [name for name in self.found if name.startswith(f"{folder}/")]

    def where(self, name: str) -> str:
        return f"{self.place}: {name}" if self.packed else str(self.place / name)

    def read(self, name: str) -> bytes:
        path, start, size = self.found[name]
        try:
            with open(path, "rb") as file:
                file.seek(start)
                return file.read(size)
        except OSError as error:
            raise SmartpruneError(f"{self.where(name)} cannot be read ({error.strerror or error})") from None

    def picture(self, name: str, least: int = 0) -> Any:
        """The Pillow image; a JPEG may be decoded smaller, to no less than ``least`` pixels a side."""
        try:
            from PIL import Image  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise SmartpruneError("pictures are read with Pillow, which is not installed; run: pip install pillow") from None
        content = self.read(name)
        try:
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            if least:
                image.draft("RGB", (least, least))
            image.load()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            said = str(error).split(" <")[0]
            raise SmartpruneError(f"{self.where(name)} cannot be read as a picture ({said}); fetch it again or delete it") from None
        return image

    def colours(self, name: str, least: int = 0) -> Any:
        """The picture in 8 bits of red, green and blue; of 16 bits the upper eight, where Pillow would make most of them white."""
        image = self.picture(name, least)
        if image.mode.startswith("I"):
            from PIL import Image

            wide = np.asarray(image, dtype=np.int64)
            if wide.min() < 0 or wide.max() > 65535:
                raise SmartpruneError(f"{self.where(name)} has numbers outside 0 to 65535; store it in 8 or 16 bits")
            image = Image.fromarray((wide >> 8).astype(np.uint8))
        return image.convert("RGB")


Place = tuple[str, int, int]  # of a file: path, first byte, number of bytes (-1: all)


def _members(path: Path) -> dict[str, Place]:
    try:
        with tarfile.open(path, "r:") as tar:
            members = {posixpath.normpath(member.name): member for member in tar}
    except (tarfile.TarError, OSError, EOFError) as error:
        raise SmartpruneError(f"{path} cannot be read as a plain tar ({error}); a compressed one must be unpacked first") from None
    out: dict[str, Place] = {}
    for name, member in [*members.items(), *_below_links(members)]:
        if member.isdir() or _hidden(name):
            continue
        file = member if member.isfile() else _linked(name, members)
        if file is not None:
            out[name] = (str(path), file.offset_data, file.size)
        elif name.lower().endswith(SUFFIXES):
            raise SmartpruneError(f"{path}: {name} leads to no file in it; pack the files themselves: tar --dereference")
    return out


def _below_links(members: dict[str, tarfile.TarInfo]) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """The files in folders that links lead to, by the names they have there."""
    for name, member in members.items():
        if member.issym() and not name.lower().endswith(SUFFIXES) and _linked(name, members) is None:
            folder = _goal(name, member)
            for inner in members:
                file = _linked(inner, members) if inner.startswith(f"{folder}/") else None
                if file is not None:
                    yield name + inner.removeprefix(folder), file


def _goal(name: str, member: tarfile.TarInfo) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(name) if member.issym() else "", member.linkname))


def _linked(name: str, members: dict[str, tarfile.TarInfo]) -> tarfile.TarInfo | None:
    """The file that a member is, or that it leads to by links within the tar."""
    for _ in range(LINKS):
        member = members.get(name)
        if member is None or member.isfile():
            return member
        if not (member.islnk() or member.issym()):
            return None
        name = _goal(name, member)
    return None


def _walk(folder: Path) -> dict[str, Place]:
    out: dict[str, Place] = {}
    for base, _, files in os.walk(folder, followlinks=True):
        top = Path(base).relative_to(folder).as_posix()
        for file in files:
            name = file if top == "." else f"{top}/{file}"
            if not _hidden(name):
                out[name] = (os.path.join(base, file), 0, -1)
    return out


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def find(task: str, given: str, known: str, within: tuple[str, ...]) -> Files:
    """The data of a task: a folder that holds one of ``within``, a tar, or one of these, named ``known``, in a folder."""
    folder = given or os.environ.get("SMARTPRUNE_DATA", "")
    if not folder:
        raise SmartpruneError(
            f"{task}: no data folder was given; say where the data lies with --data DIR, or set the environment "
            "variable SMARTPRUNE_DATA"
        )
    base = Path(folder).expanduser()
    tars = [base] if base.is_file() else [base / f"{known}.tar", base / known / f"{known}.tar"] if known else []
    for place in (base, *([base / known] if known else ())):
        if any((place / name).is_dir() for name in within):
            return opened(place, within)
    for place in tars:
        if place.is_file():
            return opened(place, within)
    if not base.is_dir():
        raise SmartpruneError(f"{base} is neither a folder nor a tar")
    below = f", nor is there {known}.tar" if known else ""
    raise SmartpruneError(f"{base} holds no data for {task}: none of the folders {', '.join(within)} is there{below}")


@lru_cache(maxsize=4)
def opened(place: Path, within: tuple[str, ...]) -> Files:
    return Files(place, within)


class Shelf:
    """Pictures as bytes [height, width, channels], by number: all in the device's memory, or decoded when they are taken."""

    def __init__(self, load: Callable[[int], Tensor], kept: Tensor | None, device: torch.device) -> None:
        self.load, self.kept, self.device = load, None if kept is None else kept.to(device), device

    def stream(self, order: Tensor, parts: Iterable[slice]) -> Iterator[Tensor]:
        """For every batch the pictures ``order[part]``; what is not in memory is decoded one batch ahead."""
        if self.kept is not None:
            order = order.to(self.device)
            for part in parts:
                yield self.kept[order[part]]
            return
        with ThreadPoolExecutor(WORKERS) as pool:
            waiting: list[Future[Tensor]] | None = None
            for part in parts:
                coming = [pool.submit(self.load, index) for index in order[part].tolist()]
                if waiting is not None:
                    yield self._gathered(waiting)
                waiting = coming
            if waiting is not None:
                yield self._gathered(waiting)

    def _gathered(self, futures: list[Future[Tensor]]) -> Tensor:
        return sent(torch.stack([future.result() for future in futures]), self.device)


def sent(pictures: Tensor, device: torch.device) -> Tensor:
    """To a GPU from pinned memory: else the copy would wait for the step before it, and the GPU for the launches of the next."""
    return pictures.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else pictures.to(device)


def decoded(load: Callable[[int], Tensor], count: int) -> Tensor:
    """All of them, [count, height, width, channels] in bytes. The first error is that of the first picture in order."""
    first = load(0)
    out = first.new_empty(count, *first.shape)
    out[0] = first
    with ThreadPoolExecutor(WORKERS) as pool:
        for index, picture in enumerate(pool.map(load, range(1, count)), start=1):
            out[index] = picture
    return out


def normalised(pictures: Tensor) -> Tensor:
    """Bytes [n, height, width, 3] to numbers [n, 3, height, width] in channels_last."""
    mean, scale = _constants(pictures.device)
    return pictures.float().sub_(mean).mul_(scale).permute(0, 3, 1, 2)


@lru_cache(maxsize=2)
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(MEAN, device=device) * 255, 1 / (torch.tensor(STD, device=device) * 255)


def slices(size: int, first: int, steps: int, every: int = 1) -> list[slice]:
    """Of every so many-th batch from number ``first`` on; the last may reach beyond the end."""
    return [slice(step * size, (step + 1) * size) for step in range(first, steps, every)]


def cut(pictures: Tensor, reach: Tensor, centre: Tensor, size: tuple[int, int], mode: str = "bilinear") -> Tensor:
    """From every picture [n, c, h, w] its own rectangle, brought to ``size``; beyond the picture there are zeros.

    ``reach`` [n, 2] is half of its width and height and ``centre`` [n, 2] its middle (x, y), in units in which the
    picture spans -1 ... 1; a negative width mirrors.
    """
    count, channels = pictures.shape[:2]
    theta = torch.zeros(count, 2, 3, device=pictures.device)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = reach[:, 0], reach[:, 1], centre
    grid = F.affine_grid(theta, [count, channels, *size], align_corners=False)
    return F.grid_sample(pictures, grid, mode=mode, padding_mode="zeros", align_corners=False)
