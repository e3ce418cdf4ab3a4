"""Small made-up data folders in each form that CIFAR-10 comes in."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
TRAIN, TEST = 400, 40  # pictures; train is five files of 80


def made_up(count: int, seed: int) -> tuple[Bytes, Bytes]:
    """Pictures [n, 32, 32, 3] in which 8x8 squares have one colour, which depends on the label, and labels [n]."""
    draw = np.random.default_rng(seed)
    labels = (np.arange(count) % 10).astype(np.uint8)
    squares = draw.integers(0, 60, (count, 4, 4, 3)) + 18 * labels[:, None, None, None]
    return squares.astype(np.uint8).repeat(8, axis=1).repeat(8, axis=2), labels


def parts() -> dict[str, tuple[Bytes, Bytes]]:
    return {"train": made_up(TRAIN, 1), "test": made_up(TEST, 2)}


def batches() -> dict[str, tuple[Bytes, Bytes]]:
    """By the official file names."""
    (train, labels), test = parts()["train"], parts()["test"]
    size = TRAIN // 5
    out = {f"data_batch_{i + 1}": (train[i * size :][:size], labels[i * size :][:size]) for i in range(5)}
    return {**out, "test_batch": test}


def planes(pictures: Bytes) -> Bytes:
    return pictures.transpose(0, 3, 1, 2).reshape(len(pictures), -1)


def write_python(folder: Path, protocol: int = 2) -> Path:
    for name, (pictures, labels) in batches().items():
        batch = {b"data": planes(pictures), b"labels": labels.tolist(), b"batch_label": b"one"}
        (folder / name).write_bytes(pickle.dumps(batch, protocol))
    return folder


def write_binary(folder: Path) -> Path:
    for name, (pictures, labels) in batches().items():
        records = np.concatenate([labels[:, None], planes(pictures)], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def write_mosaic(folder: Path) -> Path:
    from PIL import Image

    for name, (pictures, labels) in batches().items():
        rows = len(pictures) // 10
        mosaic = pictures.reshape(rows, 10, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(rows * 32, 320, 3)
        if name == "test_batch":
            Image.fromarray(mosaic).save(folder / "test.webp", lossless=True)
            np.save(folder / "test_labels.npy", labels)
        else:
            path = folder / f"train_{int(name[-1]) - 1}.jpg"
            Image.fromarray(mosaic).save(path, quality=95, subsampling=0)
    np.save(folder / "train_labels.npy", parts()["train"][1])
    return folder


WRITERS = {"python": write_python, "binary": write_binary, "mosaic": write_mosaic}
