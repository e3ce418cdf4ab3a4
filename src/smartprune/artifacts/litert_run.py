"""Runs LiteRT files with ai-edge-litert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import text
from ..errors import SmartpruneError
from .litert_file import need
from .litert_graph import NHWC
from .onnx_inputs import Batch

Ranges = dict[str, tuple[float, float]]


class Runner:
    """A LiteRT file in memory. ``channels_last`` says that images have their channels last on its side, and first on torch's."""

    def __init__(self, data: bytes, channels_last: bool, keep_all: bool = False) -> None:
        module = need("interpreter")
        resolver = module.OpResolverType
        settings: dict[str, Any] = {"num_threads": torch.get_num_threads()}
        if keep_all:  # the default delegate does not keep intermediate results
            settings |= {
                "experimental_preserve_all_tensors": True,
                "experimental_op_resolver_type": resolver.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
            }
        self.channels_last = channels_last
        with _explained("cannot load the file"):
            self.interpreter = module.Interpreter(model_content=data, **settings)
            self.interpreter.allocate_tensors()
        self.inputs = sorted(self.interpreter.get_input_details(), key=lambda entry: entry["name"])
        names = [entry["name"] for entry in self.interpreter.get_output_details()]
        places = sorted(range(len(names)), key=lambda i: (len(names[i]), names[i]))  # output, output2, ..., output10
        self.outputs = [self.interpreter.get_output_details()[i] for i in places]

    def __call__(self, batch: Batch) -> list[Tensor]:
        for entry in self.inputs:
            x = batch[entry["name"]]
            self.interpreter.set_tensor(entry["index"], _turned(x, NHWC if self.channels_last and x.dim() == 4 else None))
        with _explained("cannot run the file"):
            self.interpreter.invoke()
        return [self._read(entry["index"]) for entry in self.outputs]

    def _read(self, index: int) -> Tensor:
        out = torch.from_numpy(np.array(self.interpreter.get_tensor(index)))
        return out.permute(0, 3, 1, 2) if self.channels_last and out.dim() == 4 else out

    def ranges(self, batches: Sequence[Batch]) -> Ranges:
        """The smallest and the largest number of every float tensor over these batches."""
        details = [entry for entry in self.interpreter.get_tensor_details() if entry["dtype"] is np.float32 and entry["name"]]
        out: Ranges = {}
        for batch in batches:
            self(batch)
            for entry in details:
                try:
                    array = self.interpreter.get_tensor(entry["index"])
                except ValueError:  # tensors that kernels use for themselves
                    continue
                if array.size:
                    low, high = out.get(entry["name"], (0.0, 0.0))
                    out[entry["name"]] = (min(low, float(array.min())), max(high, float(array.max())))
        return out


def _turned(x: Tensor, order: tuple[int, ...] | None) -> Any:
    return np.ascontiguousarray((x if order is None else x.permute(order)).numpy())


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise SmartpruneError(
            f"export_litert: LiteRT {what} ({text.escape(str(error).strip()[:300])}); please report this model"
        ) from error


def in_batches(batch: Mapping[str, Tensor], rows: int) -> Iterator[Batch]:
    """The samples of a batch, ``rows`` at a time; those at the end that do not fill a batch are left out."""
    count = min(x.shape[0] for x in batch.values())
    for start in range(0, count - rows + 1, rows):
        yield {name: x[start : start + rows] for name, x in batch.items()}
