"""Reads images from a folder or a tar file, decodes them to bytes, and crops them on the device. Errors name the file."""

from __future__ import annotations

import io
import os
import posixpath
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SmartpruneError
from ..files import file_size, growth_limit, open_regular
from .tar import Member, TarError, tar_members

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet statistics of red, green and blue in [0, 1]
MAX_LINKS = 8  # length of a chain of links in a tar file
MAX_PATHS = 64  # by which links may lead to one folder
MAX_BYTES = 1 << 28  # of a picture
WORKERS = min(8, os.cpu_count() or 1)  # decoding threads


class ImageFiles:
    """The files of a folder or an uncompressed tar file, by names such as ``train/cat/1.jpg``. Tar files are not unpacked."""

    def __init__(self, path: Path, folders: tuple[str, ...]) -> None:
        """``folders`` are the expected folders. They lie at the top, or in the only folder at the top."""
        self.path, self.is_tar = path, path.is_file()
        files = _tar_members(path) if self.is_tar else _walk(path)
        tops = {name.split("/")[0] for name in files}
        if len(tops) == 1 and tops.isdisjoint(folders):
            files = {name.partition("/")[2]: value for name, value in files.items()}
        self.files = {name: files[name] for name in sorted(files)}

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def names(self, folder: str) -> list[str]:
        return [name for name in self.files if name.startswith(f"{folder}/")]

    def where(self, name: str) -> str:
        """The path of a file for error messages."""
        return f"{self.path}: {name}" if self.is_tar else str(self.path / name)

    def read(self, name: str, max_bytes: int = MAX_BYTES) -> bytes:
        path, start, size = self.files[name]
        try:
            with open_regular(path) as file:
                size = file_size(file) if size < 0 else size
                file.seek(start)
                content = file.read(size) if size <= max_bytes else b""
        except OSError as error:
            raise SmartpruneError(f"{self.where(name)} cannot be read ({error.strerror or error})") from None
        if size > max_bytes:
            raise SmartpruneError(f"{self.where(name)} has {size:,} bytes; it may have at most {max_bytes:,}; replace or delete it")
        return content

    def image(self, name: str, min_side: int = 0) -> Any:
        """The Pillow image. A JPEG may be decoded at a smaller size, but no side gets shorter than ``min_side``."""
        try:
            from PIL import Image  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise SmartpruneError("reading images needs Pillow, which is not installed; run: pip install pillow") from None
        content = self.read(name)
        try:
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            if min_side:
                image.draft("RGB", (min_side, min_side))
            check_pixels(image, len(content))
            image.load()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            reason = str(error).split(" <")[0]
            raise SmartpruneError(
                f"{self.where(name)} cannot be read as an image ({reason}); download it again or delete it"
            ) from None
        return image

    def rgb(self, name: str, min_side: int = 0) -> Any:
        """The image with 8 bits per color. Images with 16 bits keep the upper 8, because Pillow would clip them to white."""
        image = self.image(name, min_side)
        if image.mode.startswith("I"):
            from PIL import Image

            values = np.asarray(image)
            if values.min() < 0 or values.max() > 65535:
                raise SmartpruneError(f"{self.where(name)} has values outside 0 to 65535; store the image with 8 or 16 bits")
            image = Image.fromarray((values >> 8).astype(np.uint8))
        return image.convert("RGB")


def check_pixels(image: Any, size: int) -> None:
    """Raises ValueError if a picture has far more pixels than its file of ``size`` bytes explains."""
    width, height = image.size
    if 3 * width * height > growth_limit(size):
        raise ValueError(f"{width}x{height} pixels in {size:,} bytes; it may be damaged or hostile")


FileSlice = tuple[str, int, int]  # path, first byte, number of bytes (-1: all)


def _tar_members(path: Path) -> dict[str, FileSlice]:
    try:
        with open_regular(path) as tar:
            members = {posixpath.normpath(name): member for name, member in tar_members(tar).items()}
    except (TarError, OSError) as error:
        raise SmartpruneError(f"{path} cannot be read as a plain tar file ({error}); decompress it first") from None
    out: dict[str, FileSlice] = {}
    for name, member in [*members.items(), *_below_linked_folders(members, path)]:
        if member.kind == "folder" or _hidden(name):
            continue
        file = member if member.kind == "file" else _resolve(name, members)
        if file is not None:
            out[name] = (str(path), file.start, file.size)
        elif name.lower().endswith(SUFFIXES):
            raise SmartpruneError(f"{path}: {name} is a link to a file outside of it; create the file with tar --dereference")
    return out


def _below_linked_folders(members: Mapping[str, Member], path: Path) -> Iterator[tuple[str, Member]]:
    """The files in folders that are links, by their names below the link."""
    ordered, left = sorted(members), MAX_PATHS * len(members)
    for name, member in members.items():
        if member.kind == "symbolic link" and not name.lower().endswith(SUFFIXES) and _resolve(name, members) is None:
            folder = f"{_link_target(name, member)}/"
            for at in range(bisect_left(ordered, folder), len(ordered)):
                inner, left = ordered[at], left - 1
                if left < 0:
                    raise SmartpruneError(f"{path} has far too many links to folders; create it with tar --dereference")
                if not inner.startswith(folder):
                    break
                file = _resolve(inner, members)
                if file is not None:
                    yield f"{name}/{inner.removeprefix(folder)}", file


def _link_target(name: str, member: Member) -> str:
    start = posixpath.dirname(name) if member.kind == "symbolic link" else ""
    return posixpath.normpath(posixpath.join(start, member.link))


def _resolve(name: str, members: Mapping[str, Member]) -> Member | None:
    """The member itself, or the file in the tar that it links to."""
    for _ in range(MAX_LINKS):
        member = members.get(name)
        if member is None or member.kind == "file":
            return member
        if member.kind not in ("hard link", "symbolic link"):
            return None
        name = _link_target(name, member)
    return None


def _walk(folder: Path) -> dict[str, FileSlice]:
    """The files below a folder. Links are followed; a circle of links raises."""
    out: dict[str, FileSlice] = {}
    paths: dict[tuple[int, int], list[str]] = {}  # to each folder
    for base, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not _hidden(name)]
        status = os.stat(base)
        known = paths.setdefault((status.st_dev, status.st_ino), [])
        if len(known) >= MAX_PATHS or any(base.startswith(f"{above}{os.sep}") for above in known):
            raise SmartpruneError(
                f"{base} is a folder that links lead to again and again; remove the links, or give another folder"
            )
        known.append(base)
        top = Path(base).relative_to(folder).as_posix()
        for file in files:
            name = file if top == "." else f"{top}/{file}"
            if not _hidden(name):
                out[name] = (os.path.join(base, file), 0, -1)
    return out


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def data_folder(task: str, folder: str) -> Path:
    """The setting ``folder`` of a task, or else the environment variable SMARTPRUNE_DATA."""
    path = folder or os.environ.get("SMARTPRUNE_DATA", "")
    if not path:
        raise SmartpruneError(f"{task}: no data folder is given; pass --data DIR or set the environment variable SMARTPRUNE_DATA")
    return Path(path).expanduser()


def find_images(task: str, folder: str, name: str, folders: tuple[str, ...]) -> ImageFiles:
    """The data of a task: a folder that holds one of ``folders``, a tar file, or one of these called ``name`` in a folder."""
    base = data_folder(task, folder)
    tars = [base] if base.is_file() else [base / f"{name}.tar", base / name / f"{name}.tar"] if name else []
    for path in (base, *([base / name] if name else ())):
        if any((path / top).is_dir() for top in folders):
            return open_images(path, folders)
    for path in tars:
        if path.is_file():
            return open_images(path, folders)
    if not base.is_dir():
        raise SmartpruneError(f"{task}: {base} is not a folder or tar file")
    expected = f"the folder {folders[0]}" if len(folders) == 1 else f"one of the folders {', '.join(folders)}"
    tar = f", or {name}.tar" if name else ""
    raise SmartpruneError(f"{task}: {base} holds no data for this task; it should hold {expected}{tar}")


@lru_cache(maxsize=4)
def open_images(path: Path, folders: tuple[str, ...]) -> ImageFiles:
    return ImageFiles(path, folders)


class ImageStore:
    """Images as bytes [height, width, channels] by index. They are in the memory of the device, or decoded when needed."""

    def __init__(self, load: Callable[[int], Tensor], cached: Tensor | None, device: torch.device) -> None:
        self.load, self.cached, self.device = load, None if cached is None else cached.to(device), device

    def stream(self, order: Tensor, parts: Iterable[slice]) -> Iterator[Tensor]:
        """The images ``order[part]`` of every batch. Images that are not cached are decoded one batch ahead."""
        if self.cached is not None:
            order = order.to(self.device)
            for part in parts:
                yield self.cached[order[part]]
            return
        with ThreadPoolExecutor(WORKERS) as pool:
            pending: list[Future[Tensor]] | None = None
            for part in parts:
                submitted = [pool.submit(self.load, index) for index in order[part].tolist()]
                if pending is not None:
                    yield self._collect(pending)
                pending = submitted
            if pending is not None:
                yield self._collect(pending)

    def _collect(self, futures: list[Future[Tensor]]) -> Tensor:
        return to_device(torch.stack([future.result() for future in futures]), self.device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies to a GPU go through pinned memory, so the host does not wait for the previous step."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def decode_all(load: Callable[[int], Tensor], count: int) -> Tensor:
    """All images as bytes [count, height, width, channels]. If several fail, the error of the first one in order is raised."""
    first = load(0)
    out = first.new_empty(count, *first.shape)
    out[0] = first
    with ThreadPoolExecutor(WORKERS) as pool:
        for index, image in enumerate(pool.map(load, range(1, count)), start=1):
            out[index] = image
    return out


def normalize(images: Tensor) -> Tensor:
    """Bytes [n, height, width, 3] to floats [n, 3, height, width] in channels_last."""
    mean, scale = _mean_and_scale(images.device)
    return images.float().sub_(mean).mul_(scale).permute(0, 3, 1, 2)


@lru_cache(maxsize=2)
def _mean_and_scale(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(MEAN, device=device) * 255, 1 / (torch.tensor(STD, device=device) * 255)


def batch_slices(size: int, first: int, steps: int, every: int = 1) -> list[slice]:
    """Slices of every n-th batch from number ``first`` on. The last one may reach beyond the end."""
    return [slice(step * size, (step + 1) * size) for step in range(first, steps, every)]


def crop_and_resize(images: Tensor, extent: Tensor, center: Tensor, size: tuple[int, int], mode: str = "bilinear") -> Tensor:
    """One rectangle of every image [n, c, h, w], resized to ``size``. Outside of the image, the result is zero.

    ``extent`` [n, 2] is half the width and height, and ``center`` [n, 2] the middle (x, y) of the rectangle. In these
    units the image spans [-1, 1]. A negative width flips the image.
    """
    count, channels = images.shape[:2]
    theta = torch.zeros(count, 2, 3, device=images.device)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = extent[:, 0], extent[:, 1], center
    grid = F.affine_grid(theta, [count, channels, *size], align_corners=False)
    return F.grid_sample(images, grid, mode=mode, padding_mode="zeros", align_corners=False)
