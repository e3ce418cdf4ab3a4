"""The run folder. Its files are complete or absent at every moment, even if the process is killed."""

from __future__ import annotations

import io
import json
import math
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ..artifacts.safetensors_file import check_header
from ..artifacts.torch_file import NotPlainError, read_torch_file
from ..core.sharding import full_tensor
from ..errors import SmartpruneError
from ..files import check_name, open_regular, read_limited, write_atomic
from ..reports.runlog import MAX_METRICS_BYTES
from ..run_files import CHECKPOINT, CONFIG, METRICS
from . import ranks
from .config import Config

FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def create_folder(config: Config) -> Path:
    """Creates the run folder with its ``config.json``.

    A new folder appears together with the file. An existing empty folder is used as it is, because it may be the working
    directory or a mount point.
    """
    out = Path(config.out)
    check_name(out)
    if out.exists() and not out.is_dir():
        raise SmartpruneError(f"{out} is a file; give a folder for the run")
    if out.exists() and any(out.iterdir()):
        if (out / CONFIG).exists():
            raise SmartpruneError(
                f"{out} already holds a run; continue it with: smartprune train --resume --out {shlex.quote(str(out))}, "
                "or choose another folder"
            )
        raise SmartpruneError(f"{out} is not empty and holds no run; choose another folder")
    if out.exists():
        write_json(out / CONFIG, asdict(config))
        return out
    temporary = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        temporary.mkdir(parents=True)
        write_json(temporary / CONFIG, asdict(config))
        os.rename(temporary, out)
    except OSError as error:
        raise SmartpruneError(f"{out}: the run folder cannot be created ({error.strerror or error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from training in the folder. The system releases the lock when this process ends in any way."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SmartpruneError(f"another process is training in {folder}; wait for it or stop it first") from None
        yield
    finally:
        os.close(handle)


def remove_temporary_files(folder: Path) -> None:
    """Removes temporary files of a killed process."""
    for path in folder.glob(".*.part"):
        path.unlink(missing_ok=True)


def write_checkpoint(folder: Path, state: Mapping[str, Any]) -> None:
    buffer, crc32 = io.BytesIO(), torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)  # reading checks the checksums, so they must be there
    try:
        torch.save(dict(state), buffer)
    finally:
        torch.serialization.set_crc32_options(crc32)
    write_atomic(folder / CHECKPOINT, buffer.getvalue())


def read_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The checkpoint as tensors and plain values, or None if there is none yet. Never runs code from the file."""
    path = folder / CHECKPOINT
    restart = "delete it to restart the run"
    try:
        if not path.exists():
            return None
        state = read_torch_file(path, checksums=True)
    except NotPlainError:
        raise SmartpruneError(
            f"{path} is damaged or holds more than plain tensors, and code in files is never run; {restart}"
        ) from None
    except OSError as error:  # from the system: the file itself may be intact
        raise SmartpruneError(
            f"{path} cannot be read ({error.strerror or error}); the file may be intact: make it readable, then resume again"
        ) from None
    except SmartpruneError as error:
        raise SmartpruneError(f"{path} is damaged ({first_line(error)}); {restart}") from None
    if not isinstance(state, dict) or state.get("version") != 1:
        raise SmartpruneError(f"{path} is not a checkpoint of this version; {restart}")
    return state


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def append_row(folder: Path, row: Mapping[str, object]) -> None:
    path = folder / METRICS
    try:
        with path.open("a") as file:
            file.write(json.dumps(_finite(row), allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())  # a checkpoint counts the rows, so no row may be lost after it
    except OSError as error:
        raise SmartpruneError(f"{path}: cannot be written ({error.strerror or error})") from error


def trim_metrics(folder: Path, done: Callable[[str, int], bool]) -> int:
    """Removes rows that a resumed run writes again, and damaged rows. Returns how many rows are left.

    ``done(stage, step)`` says whether the checkpoint was written after that step.
    """
    path = folder / METRICS
    data = read_limited(path, MAX_METRICS_BYTES) if os.path.lexists(path) else None
    rows = [line for line in (data or b"").splitlines(keepends=True) if (position := _position(line)) and done(*position)]
    if data != b"".join(rows):
        write_atomic(path, b"".join(rows))
    return len(rows)


def _position(line: bytes) -> tuple[str, int] | None:
    """Stage and step of a row of metrics; None for an incomplete or invalid line."""
    try:
        row = json.loads(line)
        stage, step = row["stage"], row["step"]
    except (ValueError, RecursionError, TypeError, LookupError):
        return None
    return (stage, step) if isinstance(stage, str) and type(step) is int and line.endswith(b"\n") else None


def write_json(path: Path, value: object) -> None:
    write_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def save_weights(model: nn.Module, path: Path) -> None:
    """Rank 0 writes the whole tensors. All ranks must call it."""
    state = {name: full_tensor(value.detach()).cpu() for name, value in model.state_dict().items()}
    ranks.on_first(lambda: write_atomic(path, save({name: value.contiguous().clone() for name, value in state.items()})))


def load_weights(model: nn.Module, path: Path) -> None:
    """Loads a ``.safetensors`` file whose tensors must match the model exactly."""
    try:
        with open_regular(path):  # gives a reason if it fails; safetensors does not
            tensors = load_file(path)
    except Exception as error:  # safetensors raises many types
        reason = getattr(error, "strerror", None) or error
        raise SmartpruneError(f"{path} cannot be read as a .safetensors file ({reason})") from None
    check_header(path)
    state = model.state_dict()
    missing, extra = sorted(set(state) - set(tensors)), sorted(set(tensors) - set(state))
    if missing or extra:
        parts = [f"it lacks {_listed(missing)}"] * bool(missing) + [f"it also has {_listed(extra)}"] * bool(extra)
        raise SmartpruneError(f"{path} does not fit the model: {' and '.join(parts)}; give the model it was saved from")
    for name, value in state.items():
        if value.shape != tensors[name].shape:
            raise SmartpruneError(
                f"{path} does not fit the model: {name} has shape {tuple(tensors[name].shape)} in the file and "
                f"{tuple(value.shape)} in the model"
            )
        stored = tensors[name].dtype
        if stored != value.dtype and not {stored, value.dtype} <= FLOATS:  # a conversion would lose signs, parts or digits
            raise SmartpruneError(f"{path} does not fit the model: {name} is {stored} in the file and {value.dtype} in the model")
        if value.is_floating_point() and not bool(tensors[name].isfinite().all()):
            raise SmartpruneError(f"{path}: {name} holds NaN or infinity; give a model whose training succeeded")
    state.update(tensors)  # keeps the version numbers that torch stores with the tensors and some modules need
    model.load_state_dict(state)


def to_cpu(value: Any) -> Any:
    """Nested dictionaries and lists with every tensor whole and on the CPU."""
    if isinstance(value, Tensor):
        return full_tensor(value.detach()).cpu()
    if isinstance(value, Mapping):
        return {key: to_cpu(item) for key, item in value.items()}
    return [to_cpu(item) for item in value] if isinstance(value, (list, tuple)) else value


def _finite(value: Any) -> Any:
    """The value with None for NaN and infinity, which JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
