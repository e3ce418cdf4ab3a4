"""One pass over the model refits all layers: every batch runs in a thread of its own and waits before each layer.

When all batches wait before a layer, its inputs are read, its weight is changed, and they continue with the new weight. One thread
runs at a time, so the results equal one pass per layer, bit for bit.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ...core.example import uncompiled
from ...core.layers import Layer
from ...core.trace import tensors_in
from ...errors import SmartpruneError
from .moments import Rows, Stop, picked_rows, require_finite
from .uses import Use, UseReader, run_with, without_fused_attention

MOST_THREADS = 128


def twin(model: nn.Module, buffers: bool = True) -> nn.Module:
    """A copy of the modules with the same parameters, and with the same buffers or copies of them."""
    shared = [*model.parameters(), *(model.buffers() if buffers else ())]
    try:
        return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    except Exception as error:  # what a module raises that cannot be copied
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SmartpruneError(
            f"prune: the model cannot be copied ({reason}); a model must support copy.deepcopy, so remove what does not, such as "
            "tensors with a gradient history in attributes"
        ) from error


class Pass:
    """One forward pass in a thread, which waits before every layer.

    Attributes:
        uses: The inputs of the layer that the pass waits for.
        done: Whether the pass has ended.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], batch: Any) -> None:
        self.model, self.layers, self.batch = twin(model), layers, batch
        self.uses: Sequence[Use] = ()
        self.done = self.closed = False
        self.error: BaseException | None = None
        self.go, self.waits = threading.Semaphore(0), threading.Semaphore(0)
        self.thread: threading.Thread | None = None

    def advance(self) -> None:
        """Runs to the next layer, or to the end."""
        self.uses = ()
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, daemon=True)
            self.thread.start()
        else:
            self.go.release()
        self.waits.acquire()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Ends the thread."""
        self.closed = True
        if self.thread is not None:
            self.go.release()
            self.thread.join()

    def _run(self) -> None:
        try:
            with torch.inference_mode(False):
                run_with(self.model, self.batch, UseReader(self.model, self.layers, _result, before=self._wait))
        except BaseException as error:  # raised again where the pass is advanced
            self.error = None if self.closed else error
        self.uses, self.done = (), True
        self.waits.release()

    def _wait(self, uses: Sequence[Use]) -> None:
        self.uses = uses
        self.waits.release()
        self.go.acquire()
        if self.closed:
            raise Stop("")


def _result(use: Use, out: Tensor | None) -> Tensor | None:
    return out


class Lockstep:
    """The passes of all batches over several models, whose layer inputs are read in a fixed order of the layers."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        layers: Sequence[Layer],
        order: Sequence[int],
        batches: Sequence[Any],
        shares: Sequence[float],
    ) -> None:
        self.models, self.layers, self.batches, self.shares = models, layers, batches, shares
        self.position = {index: place for place, index in enumerate(order)}
        self.passes: list[list[Pass]] = []
        self.contexts = (without_fused_attention(), uncompiled())

    def __enter__(self) -> Lockstep:
        for context in self.contexts:
            context.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for row in self.passes:
            for each in row:
                each.close()
        for context in reversed(self.contexts):
            context.__exit__(kind, error, trace)

    def rows(self, index: int) -> Iterator[list[Rows]]:
        """What each model's layer multiplies in each batch. Layers must be requested in their order."""
        if not self.passes:
            self.passes = [[Pass(model, self.layers, batch) for model in self.models] for batch in self.batches]
        for number, (row, share) in enumerate(zip(self.passes, self.shares, strict=True)):
            yield [self._rows(each, index, number, share) for each in row]

    def _rows(self, each: Pass, index: int, number: int, share: float) -> Rows:
        while not each.done and (not each.uses or self.position[each.uses[0].layer] < self.position[index]):
            each.advance()
        found: Rows = []
        for use in each.uses:
            if use.layer == index:
                require_finite(self.layers[index], use)
                found.append((use, picked_rows(self.layers[index], use, number, share / len(each.uses), len(found))))
        return found


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided  # not sparse


def held_bytes(model: nn.Module, layers: Sequence[Layer], sample: Any) -> int:
    """How much memory the activations of one sample take while a pass waits before a layer, at most."""
    live: dict[int, list[int]] = {}  # address of a storage -> its size, number of tensors
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers()) if _has_storage(tensor)}
    most = 0

    def drop(address: int) -> None:
        live[address][1] -= 1
        if not live[address][1]:
            del live[address]

    def note(value: Any) -> None:
        for tensor in filter(_has_storage, tensors_in(value)) if isinstance(value, (Tensor, tuple, list, dict)) else ():
            address = tensor.untyped_storage().data_ptr()
            if address and address not in own:
                live.setdefault(address, [tensor.untyped_storage().nbytes(), 0])[1] += 1
                weakref.finalize(tensor, drop, address)

    def on_use(use: Use, out: Tensor | None) -> Tensor | None:
        note(out)
        return out

    def before(uses: Sequence[Use]) -> None:
        nonlocal most
        most = max(most, sum(size for size, _ in live.values()))

    def other(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        note(out)

    run_with(model, sample, UseReader(model, layers, on_use, other, before))
    return most + sum(tensor.nbytes for tensor in tensors_in(sample))
