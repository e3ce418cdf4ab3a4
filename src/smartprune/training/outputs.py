"""The files that a finished run writes besides its model: a packed file and, where possible, ONNX."""

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

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def missing_packages() -> list[str]:
    """The packages that ONNX export needs and that are not installed."""
    return [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]


def check_packages(config: Config) -> None:
    """Raises before the run if a package that it needs at its end is missing."""
    if config.onnx == "on" and missing_packages():
        raise SmartpruneError(
            f"onnx='on' needs {', '.join(missing_packages())}; run: pip install {' '.join(missing_packages())}, "
            "or use --onnx auto or off"
        )


def write_outputs(folder: Path, config: Config, task: Task, receipt: Receipt) -> dict[str, str]:
    """Writes the files from the stored weights and returns a description of each.

    If a network cannot be exported to ONNX, the run does not fail: the description says why.
    """
    packed = pack(folder, folder / run_files.PACKED)
    descriptions = {"packed": f"{run_files.PACKED}, {packed.size:,} bytes: {100 * packed.share:.1f} % of the dense file"}
    if config.onnx == "off" or (config.onnx == "auto" and missing_packages()):
        return descriptions
    with torch.random.fork_rng(devices=[]):
        model = task.model(config.model)
    load_weights(model, folder / run_files.MODEL)
    try:
        exported = export_onnx(model.eval(), folder / run_files.ONNX, task.example(), receipt=receipt)
        descriptions["onnx"] = (
            f"{run_files.ONNX}, {exported.size:,} bytes, compared with the model: largest difference {exported.difference:.1e}"
        )
    except SmartpruneError as error:
        descriptions["onnx"] = f"not written: {error}"
    return descriptions
