"""What a finished run hands over besides its model: a packed file, and ONNX where that can be written."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from .. import run_files
from ..artifacts.onnx_export import export_onnx
from ..artifacts.pack import pack
from ..artifacts.receipt import Receipt
from ..errors import SmartpruneError
from ..tasks import Task
from .config import Config
from .folder import load_weights

NEEDED = ("onnx", "onnxscript", "onnxruntime")


def missing() -> list[str]:
    """Packages that ONNX needs and that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def require(config: Config) -> None:
    """Raises now what would come up at the end of the run."""
    if config.onnx == "on" and missing():
        raise SmartpruneError(
            f"onnx='on' needs {', '.join(missing())}; install it with: pip install 'smartprune[onnx]', or use --onnx auto or off"
        )


def deliver(folder: Path, config: Config, task: Task, receipt: Receipt) -> dict[str, str]:
    """Writes the files from the stored weights, and says what each of them is. A network that ONNX cannot hold is no reason
    to lose a run: the reason stands in the file's place."""
    packed = pack(folder, folder / run_files.PACKED)
    out = {"packed": f"{run_files.PACKED}, {packed.size:,} bytes: {100 * packed.share:.1f} % of the dense file"}
    if config.onnx == "off" or (config.onnx == "auto" and missing()):
        return out
    with torch.random.fork_rng(devices=[]):
        model = task.model(config.model)
    load_weights(model, folder / run_files.MODEL)
    try:
        found = export_onnx(model.eval(), folder / run_files.ONNX, task.example(), receipt=receipt)
        out["onnx"] = f"{run_files.ONNX}, {found.size:,} bytes, opened and compared: differs by {found.difference:.1e} at most"
    except SmartpruneError as error:
        out["onnx"] = f"not written: {error}"
    return out
