"""The engines that can be timed, and which of them are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib.metadata import packages_distributions, version

import torch

TORCH = ("torch", "torch channels-last")
DENSE = (*TORCH, "onnxruntime", "openvino")
DENSE_INT8 = ("onnxruntime int8", "openvino int8")
OURS, OURS_INT8 = "smartprune", "smartprune int8"
CPU = (*DENSE, *DENSE_INT8, OURS, OURS_INT8)
GPU = ("torch cuda bf16", "smartprune cuda bf16")
KINDS = ((*DENSE, OURS), (*DENSE_INT8, OURS_INT8), GPU)  # engines that are compared with each other
ONNX_FILES = {"float.onnx": DENSE[2:], "int8.onnx": DENSE_INT8}  # the engines that read each file


def is_ours(engine: str) -> bool:
    """Whether an engine is the runtime of smartprune."""
    return engine.startswith("smartprune")


def is_int8(engine: str) -> bool:
    return engine.endswith("int8")


def available_engines() -> tuple[list[str], dict[str, str]]:
    """The engines that can run on this machine, and the reason for each of the others."""
    left_out = {}
    missing = [package for package in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(package) is None]
    if missing:
        readers = [name for names in ONNX_FILES.values() for name in names]
        left_out = dict.fromkeys(readers, f"{', '.join(missing)} not installed")
    if importlib.util.find_spec("openvino") is None:
        left_out |= dict.fromkeys(("openvino", "openvino int8"), "not installed")
    if not torch.cuda.is_available():
        left_out["GPU"] = "torch finds no CUDA device"
    return [name for name in (*CPU, *(() if "GPU" in left_out else GPU)) if name not in left_out], left_out


def list_reasons(left_out: Mapping[str, str]) -> str:
    """Engines grouped by reason. Where an engine and its int8 form share a reason, only the engine is named."""
    groups: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        group = groups.setdefault(reason, [])
        if name.removesuffix(" int8") not in group:
            group.append(name)
    return "; ".join(f"{', '.join(group)}: {reason}" for reason, group in groups.items())


def package_versions() -> dict[str, str]:
    """Versions of the engines' packages, and the name of the GPU."""
    versions = {"torch": str(torch.__version__)}
    packages = packages_distributions()
    versions |= {name: version(packages[name][0]) for name in ("onnxruntime", "openvino") if name in packages}
    if torch.cuda.is_available():
        versions["gpu"] = torch.cuda.get_device_name()
    return versions
