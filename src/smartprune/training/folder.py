"""The run folder: files that are whole or absent at every moment, whenever the process is killed."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import shlex
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ..artifacts.safetensors_file import check_header
from ..core.sharding import full_tensor
from ..errors import SmartpruneError
from ..files import check_name, write_atomic
from ..run_files import CHECKPOINT, CONFIG, METRICS
from . import ranks
from .config import Config

UNREADABLE = (zipfile.BadZipFile, zlib.error)  # what a damaged checkpoint raises, beside built-in errors


def create_folder(config: Config) -> Path:
    """Makes the run folder with its ``config.json``; both appear together, unless an empty folder is there already: it may be the
    one we are in, or one that is mounted, and stays."""
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
        raise SmartpruneError(f"{out}: the run folder cannot be made ({error.strerror or error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps a second process out of the folder. The system drops the lock when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # a system without it
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
    """Removes temporary files that a killed process left behind."""
    for path in folder.glob(".*.part"):
        path.unlink(missing_ok=True)


def save_checkpoint(folder: Path, state: Mapping[str, Any]) -> None:
    buffer, checked = io.BytesIO(), torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)  # what a checkpoint is read by, whatever else this process saves without
    try:
        torch.save(dict(state), buffer)
    finally:
        torch.serialization.set_crc32_options(checked)
    write_atomic(folder / CHECKPOINT, buffer.getvalue())


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The checkpoint as tensors and plain values, or None if there is none yet. Never runs code from the file."""
    path = folder / CHECKPOINT
    anew = "delete it to start the run from its beginning"
    try:
        if not path.exists():
            return None
        with zipfile.ZipFile(path) as archive:  # torch writes checksums and does not look at them
            if (entry := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"{entry} is not as it was written")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch would have the reader run what is in it
        raise SmartpruneError(
            f"{path} is damaged, or holds more than plain tensors, and code in files is never run; {anew}"
        ) from None
    except (*UNREADABLE, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system, which says nothing about what is in it
            raise SmartpruneError(
                f"{path} cannot be read ({error.strerror or error}); it may well be whole: make it readable, then resume again"
            ) from None
        raise SmartpruneError(f"{path} is damaged ({first_line(error)}); {anew}") from None
    if not isinstance(state, dict) or state.get("version") != 1:
        raise SmartpruneError(f"{path} is not a checkpoint that this version writes; {anew}")
    return state


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def append_row(folder: Path, row: Mapping[str, object]) -> None:
    path = folder / METRICS
    try:
        with path.open("a") as file:
            file.write(json.dumps(_finite(row), allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())  # a checkpoint counts the rows, so that it must not outlive one
    except OSError as error:
        raise SmartpruneError(f"{path}: cannot be written ({error.strerror or error})") from error


def trim_metrics(folder: Path, done: Callable[[str, int], bool]) -> int:
    """Drops the rows that were written after the checkpoint, for the resumed run writes them again, and what is no row. ``done``
    says whether the checkpoint has that step of that stage behind it. Returns how many rows are left."""
    path = folder / METRICS
    try:
        data = path.read_bytes() if path.exists() else None
    except OSError as error:
        raise SmartpruneError(f"{path} cannot be read ({error.strerror or error}); make it readable, then resume again") from None
    rows = [line for line in (data or b"").splitlines(keepends=True) if (place := _place(line)) and done(*place)]
    if data != b"".join(rows):
        write_atomic(path, b"".join(rows))
    return len(rows)


def _place(line: bytes) -> tuple[str, int] | None:
    """Stage and step of a row; None where a line is none, or only a part of one."""
    try:
        row = json.loads(line)
        stage, step = row["stage"], row["step"]
    except (ValueError, RecursionError, TypeError, LookupError):
        return None
    return (stage, step) if isinstance(stage, str) and type(step) is int and line.endswith(b"\n") else None


def write_json(path: Path, value: object) -> None:
    write_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def save_weights(model: nn.Module, path: Path) -> None:
    """Whole tensors, written by the first rank; all ranks must call it."""
    state = {name: full_tensor(value.detach()).cpu() for name, value in model.state_dict().items()}
    ranks.first(lambda: write_atomic(path, save({name: value.contiguous().clone() for name, value in state.items()})))


def load_weights(model: nn.Module, path: Path) -> None:
    """Loads a ``.safetensors`` file that must fit the model exactly."""
    try:
        with path.open("rb"):  # which says why not, as safetensors does not
            tensors = load_file(path)
    except (OSError, SafetensorError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SmartpruneError(f"{path} cannot be read as a .safetensors file ({reason})") from None
    check_header(path)
    wanted = model.state_dict()
    missing, extra = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or extra:
        parts = [f"lacks {_listed(missing)}"] * bool(missing) + [f"also has {_listed(extra)}"] * bool(extra)
        raise SmartpruneError(f"{path} does not fit the model: it {' and '.join(parts)}; give the one it was made with")
    for name, value in wanted.items():
        if value.shape != tensors[name].shape:
            given, own = tuple(tensors[name].shape), tuple(value.shape)
            raise SmartpruneError(f"{path} does not fit the model: {name} is {given} there and {own} in the model")
        if value.is_floating_point() and not bool(tensors[name].isfinite().all()):
            raise SmartpruneError(f"{path}: {name} holds NaN or infinity; give a model that was trained to its end")
    wanted.update(tensors)  # which keeps the versions that torch notes beside the tensors, and some modules ask for
    model.load_state_dict(wanted)


def to_cpu(value: Any) -> Any:
    """Nested dictionaries and lists with every tensor whole and on the CPU."""
    if isinstance(value, Tensor):
        return full_tensor(value.detach()).cpu()
    if isinstance(value, Mapping):
        return {key: to_cpu(item) for key, item in value.items()}
    return [to_cpu(item) for item in value] if isinstance(value, (list, tuple)) else value


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON cannot write."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
