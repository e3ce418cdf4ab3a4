"""LiteRT files in tests: running them, and what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import smartprune as sp


def run_litert(path: Path, *inputs: Tensor) -> list[Tensor]:
    """The outputs of a file, in the order of its signature."""
    from ai_edge_litert.interpreter import Interpreter

    runner = Interpreter(model_path=str(path), num_threads=1).get_signature_runner()
    names = sorted(runner.get_input_details())
    outputs = runner(**{name: x.numpy() for name, x in zip(names, inputs, strict=True)})
    return [torch.from_numpy(np.array(outputs[name])) for name in sorted(outputs, key=lambda name: (len(name), name))]


def operations(path: Path) -> Counter[str]:
    """How often each operation is in a file."""
    from ai_edge_litert import schema_py_generated as schema

    names = {value: name for name, value in vars(schema.BuiltinOperator).items() if not name.startswith("_")}
    model = schema.ModelT.InitFromPackedBuf(path.read_bytes(), 0)
    return Counter(names[model.operatorCodes[operator.opcodeIndex].builtinCode] for operator in model.subgraphs[0].operators)


def check_module(module: nn.Module, x: Tensor, path: Path, names: Sequence[str] = (), **settings: Any) -> Any:
    """Exports a module, and compares the file with it on another input than the export does."""
    torch.manual_seed(1)
    randomize_statistics(module)
    module.eval()
    exported = sp.export_litert(module, path, x, **settings)
    other = torch.randn_like(x)
    with torch.no_grad():
        expected = module(other)
    wanted = torch.utils._pytree.tree_leaves(expected)
    outputs = run_litert(path, other)
    assert len(outputs) == len(wanted)
    for i, (a, b) in enumerate(zip(outputs, wanted, strict=True)):
        where = names[i] if names else f"output {i}"
        assert a.shape == b.shape, where
        assert (a - b).abs().max() <= 2e-5 * b.abs().max(), where
    return exported


def randomize_statistics(module: nn.Module) -> None:
    """Statistics and factors of normalization that a mistake would show in."""
    for layer in module.modules():
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            layer.running_mean.normal_(0, 0.3)
            layer.running_var.uniform_(0.5, 2)
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, 0, 0.3)
