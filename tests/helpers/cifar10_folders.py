"""Writes small data folders in each of the formats of CIFAR-10."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ByteArray = NDArray[np.uint8]
TRAIN, TEST = 400, 40  # images; the training set is five files of 80


def random_images(count: int, seed: int) -> tuple[ByteArray, ByteArray]:
    """Images [n, 32, 32, 3] of 8x8 squares whose colour depends on the label, and labels [n]."""
    rng = np.random.default_rng(seed)
    labels = (np.arange(count) % 10).astype(np.uint8)
    squares = rng.integers(0, 60, (count, 4, 4, 3)) + 18 * labels[:, None, None, None]
    return squares.astype(np.uint8).repeat(8, axis=1).repeat(8, axis=2), labels


def splits() -> dict[str, tuple[ByteArray, ByteArray]]:
    return {"train": random_images(TRAIN, 1), "test": random_images(TEST, 2)}


def batches() -> dict[str, tuple[ByteArray, ByteArray]]:
    """Images and labels by official file name."""
    (train, labels), test = splits()["train"], splits()["test"]
    size = TRAIN // 5
    out = {f"data_batch_{i + 1}": (train[i * size :][:size], labels[i * size :][:size]) for i in range(5)}
    return {**out, "test_batch": test}


def channels_first(images: ByteArray) -> ByteArray:
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def write_python(folder: Path, protocol: int = 2) -> Path:
    for name, (images, labels) in batches().items():
        batch = {b"data": channels_first(images), b"labels": labels.tolist(), b"batch_label": b"one"}
        (folder / name).write_bytes(pickle.dumps(batch, protocol))
    return folder


def write_binary(folder: Path) -> Path:
    for name, (images, labels) in batches().items():
        records = np.concatenate([labels[:, None], channels_first(images)], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def write_mosaic(folder: Path) -> Path:
    from PIL import Image

    for name, (images, labels) in batches().items():
        rows = len(images) // 10
        mosaic = images.reshape(rows, 10, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(rows * 32, 320, 3)
        if name == "test_batch":
            Image.fromarray(mosaic).save(folder / "test.webp", lossless=True)
            np.save(folder / "test_labels.npy", labels)
        else:
            path = folder / f"train_{int(name[-1]) - 1}.jpg"
            Image.fromarray(mosaic).save(path, quality=95, subsampling=0)
    np.save(folder / "train_labels.npy", splits()["train"][1])
    return folder


WRITERS = {"python": write_python, "binary": write_binary, "mosaic": write_mosaic}
