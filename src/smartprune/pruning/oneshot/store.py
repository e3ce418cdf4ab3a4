"""Intermediate results in a folder, so that an interrupted call continues where it was."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from ...core.sharding import full_tensor
from ...errors import SmartpruneError
from ...files import open_regular, read_limited, write_atomic

Tensors = dict[str, Tensor]
KEY, MAX_KEY = "key", 1000  # bytes
DIGEST = "sha256"  # the tensor that holds the hash of the others


class Store:
    """Named results in a folder. Those of another model, other data or other settings are refused."""

    def __init__(self, folder: str | os.PathLike[str] | None, key: str) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            stored = read_limited(self.folder / KEY, MAX_KEY).decode() if (self.folder / KEY).exists() else None
        except (OSError, ValueError, SmartpruneError) as error:
            raise SmartpruneError(f"prune: folder {self.folder} cannot be used ({error}); give another folder") from None
        if stored is None and any(self.folder.iterdir()):
            raise SmartpruneError(f"prune: folder {self.folder} is not empty and holds no interrupted call; give another folder")
        if stored is not None and stored != key:
            raise SmartpruneError(
                f"prune: folder {self.folder} holds an interrupted call with another model, other data or other settings; repeat "
                "that call, or give another folder"
            )
        write_atomic(self.folder / KEY, key.encode())

    def get(self, name: str, compute: Callable[[], Tensors]) -> Tensors:
        """The result of that name: stored, or else computed and stored."""
        if self.folder is None:
            return compute()
        path = self.folder / f"{name}.safetensors"
        if path.exists():
            try:
                with open_regular(path) as file:
                    tensors = load(file.read())
                if not torch.equal(tensors.pop(DIGEST), _digest(tensors)):
                    raise ValueError("it is damaged")
                return tensors
            except Exception as error:  # safetensors raises many types
                raise SmartpruneError(f"prune: {path} cannot be read ({error}); delete it, and call prune again") from None
        tensors = compute()
        stored = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        write_atomic(path, save({**stored, DIGEST: _digest(stored)}))
        return tensors

    def has(self, name: str) -> bool:
        return self.folder is not None and (self.folder / f"{name}.safetensors").exists()

    def clear(self) -> None:
        """Deletes the results of a finished call."""
        if self.folder is None:
            return
        for path in (*self.folder.glob("*.safetensors"), self.folder / KEY):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # it may hold other files
            self.folder.rmdir()


def _digest(tensors: Tensors) -> Tensor:
    return torch.tensor(list(bytes.fromhex(key_of({}, sorted(tensors.items())))), dtype=torch.uint8)


def key_of(facts: Mapping[str, object], tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of settings and of all numbers that a result depends on."""
    digest = hashlib.sha256(repr(sorted(facts.items())).encode())
    for name, tensor in tensors:
        value = full_tensor(tensor.detach()).cpu().to_dense().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()
