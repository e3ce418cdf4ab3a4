"""Exact-budget block pruning for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .artifacts.bsr import bsr
    from .artifacts.compact import compact, compaction
    from .artifacts.litert import export_litert
    from .artifacts.maskfile import load_mask, save_mask
    from .artifacts.onnx_export import export_onnx
    from .artifacts.pack import pack, unpack
    from .artifacts.receipt import Receipt
    from .artifacts.verify import verify
    from .core.block import Block
    from .core.budget import Budget, blocks, macs, params
    from .errors import SmartpruneError
    from .hardware.costs import costs
    from .hardware.cycles import cycles
    from .hardware.npu import NPU
    from .methods import METHODS, Acdc, Awg, Gradual, Magnitude, Method, Pas, Pdp, Smart
    from .pruning.attach import attach
    from .pruning.bake import bake
    from .pruning.hold import hold
    from .pruning.lookup import find_pruner
    from .pruning.oneshot.prune import prune, saliencies
    from .pruning.plan import Plan, plan
    from .pruning.pruner import Pruner
    from .pruning.recalibrate import recalibrate
    from .reports import report
    from .runtime import accelerate
    from .runtime.c_source.export import export_c
    from .runtime.latency import latency
    from .topk import hard_topk, soft_topk

__version__ = "0.2.0"

__all__ = [
    "METHODS",
    "NPU",
    "Acdc",
    "Awg",
    "Block",
    "Budget",
    "Gradual",
    "Magnitude",
    "Method",
    "Pas",
    "Pdp",
    "Plan",
    "Pruner",
    "Receipt",
    "Smart",
    "SmartpruneError",
    "accelerate",
    "attach",
    "bake",
    "blocks",
    "bsr",
    "compact",
    "compaction",
    "costs",
    "cycles",
    "export_c",
    "export_litert",
    "export_onnx",
    "find_pruner",
    "hard_topk",
    "hold",
    "latency",
    "load_mask",
    "macs",
    "pack",
    "params",
    "plan",
    "prune",
    "recalibrate",
    "report",
    "saliencies",
    "save_mask",
    "soft_topk",
    "unpack",
    "verify",
]

# The module of each public name. They are imported on first use, so that the command line starts without loading torch.
_MODULES = {
    "artifacts.bsr": ["bsr"],
    "artifacts.litert": ["export_litert"],
    "artifacts.maskfile": ["load_mask", "save_mask"],
    "artifacts.compact": ["compact", "compaction"],
    "artifacts.onnx_export": ["export_onnx"],
    "artifacts.pack": ["pack", "unpack"],
    "artifacts.receipt": ["Receipt"],
    "artifacts.verify": ["verify"],
    "core.block": ["Block"],
    "core.budget": ["Budget", "blocks", "macs", "params"],
    "errors": ["SmartpruneError"],
    "hardware.costs": ["costs"],
    "hardware.cycles": ["cycles"],
    "hardware.npu": ["NPU"],
    "methods": ["METHODS", "Acdc", "Awg", "Gradual", "Magnitude", "Method", "Pas", "Pdp", "Smart"],
    "pruning.attach": ["attach"],
    "pruning.bake": ["bake"],
    "pruning.hold": ["hold"],
    "pruning.lookup": ["find_pruner"],
    "pruning.oneshot.prune": ["prune", "saliencies"],
    "pruning.plan": ["Plan", "plan"],
    "pruning.pruner": ["Pruner"],
    "pruning.recalibrate": ["recalibrate"],
    "reports": ["report"],
    "runtime": ["accelerate"],
    "runtime.c_source.export": ["export_c"],
    "runtime.latency": ["latency"],
    "topk": ["hard_topk", "soft_topk"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
