"""Draws the weights of one layer of a run before and after pruning: python examples/picture.py RUN OUT.png [LAYER]

Rows are input channels and columns are output channels, at the center of the kernel. Removed blocks are gray.
"""

import struct
import sys
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from smartprune import Receipt

CELL, GAP, MARGIN = 6, 1, 24
BACKGROUND, REMOVED, POSITIVE, NEGATIVE = (255, 255, 255), (232, 232, 236), (196, 60, 50), (45, 90, 190)


def panel(weight: np.ndarray, block: tuple[int, int], scale: float) -> np.ndarray:
    """Pixels of the weights [in, out], with thin lines between blocks."""
    rows, columns = weight.shape
    height, width = (size * CELL + (size - 1) // side * GAP for size, side in zip(weight.shape, block, strict=True))
    image = np.full((height, width, 3), BACKGROUND, dtype=np.float64)
    for i in range(rows):
        for j in range(columns):
            y, x = i * CELL + i // block[0] * GAP, j * CELL + j // block[1] * GAP
            box = weight[i // block[0] * block[0] :, j // block[1] * block[1] :][: block[0], : block[1]]
            strength = min(abs(weight[i, j]) / scale, 1.0) ** 0.6
            color = np.array(POSITIVE if weight[i, j] > 0 else NEGATIVE) * strength + 255 * (1 - strength)
            image[y : y + CELL, x : x + CELL] = color if box.any() else REMOVED
    return image


def write_png(path: Path, image: np.ndarray) -> None:
    pixels = image.round().clip(0, 255).astype(np.uint8)
    height, width, _ = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + parts)


def main(run: str, out: str, layer: str = "") -> None:
    folder = Path(run)
    receipt = Receipt.load(folder / "receipt.json").to_json()
    size = [int(part) for part in receipt["block"].split("x")]
    rows = receipt["layers"]
    weights = {row["name"]: row["weight"] for row in rows if len(row["shape"]) == 4}
    layer = layer or list(weights)[len(weights) // 2]
    if layer not in weights:
        sys.exit(f"no layer {layer!r} in {run}; choose from {', '.join(weights)}")
    kernels = []
    for name in ("dense.safetensors", "model.safetensors"):
        tensor = load_file(folder / name)[weights[layer]]
        kernels.append(tensor[:, :, tensor.shape[2] // 2, tensor.shape[3] // 2].T)
    scale = float(np.quantile(np.abs(np.stack(kernels)), 0.995))
    before, after = (panel(kernel, (size[1], size[0]), scale) for kernel in kernels)
    space = np.full((before.shape[0], MARGIN, 3), BACKGROUND, dtype=np.float64)
    write_png(Path(out), np.concatenate([before, space, after], axis=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
