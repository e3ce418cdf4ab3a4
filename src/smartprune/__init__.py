"""Exact-budget block pruning for PyTorch."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .block import Block
    from .budget import blocks, cycles, macs, params
    from .errors import SmartpruneError
    from .methods import METHODS, Acdc, Awg, Gradual, Magnitude, Pas, Pdp, Smart
    from .npu import NPU
    from .onnx import export_onnx
    from .pack import pack, unpack
    from .plan import Plan, plan
    from .pruner import Pruner, attach, bake
    from .receipt import Receipt
    from .report import report
    from .runtime import accelerate
    from .topk import hard_topk, soft_topk
    from .verify import verify

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "NPU",
    "Acdc",
    "Awg",
    "Block",
    "Gradual",
    "Magnitude",
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
    "cycles",
    "export_onnx",
    "hard_topk",
    "macs",
    "pack",
    "params",
    "plan",
    "report",
    "soft_topk",
    "unpack",
    "verify",
]

# Names are fetched when first used, so that the command line answers before torch is loaded.
_HOMES = {
    "block": ["Block"],
    "budget": ["blocks", "cycles", "macs", "params"],
    "errors": ["SmartpruneError"],
    "methods": ["METHODS", "Acdc", "Awg", "Gradual", "Magnitude", "Pas", "Pdp", "Smart"],
    "npu": ["NPU"],
    "onnx": ["export_onnx"],
    "pack": ["pack", "unpack"],
    "plan": ["Plan", "plan"],
    "pruner": ["Pruner", "attach", "bake"],
    "receipt": ["Receipt"],
    "report": ["report"],
    "runtime": ["accelerate"],
    "topk": ["hard_topk", "soft_topk"],
    "verify": ["verify"],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


class _Package(ModuleType):
    """This package. A function named as its module (plan, report, verify) wins over the module, which the import
    system would put in its place."""

    def __getattr__(self, name: str) -> Any:
        if name in _HOME:
            return getattr(importlib.import_module(f"{self.__name__}.{_HOME[name]}"), name)
        path = f"{self.__name__}.{name}"
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path:
                raise
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in _HOME):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
