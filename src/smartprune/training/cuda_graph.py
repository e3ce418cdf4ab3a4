"""A training step as one CUDA graph: recorded once per stage, then replayed, so that Python does not launch its kernels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..errors import SmartpruneError
from ..pruning.pruner import Pruner
from ..pruning.weights import MaskedWeights

Batches = tuple[tuple[Tensor, ...], ...]  # the batches of one step

WARM = 3  # steps that Python launches first: kernels are compiled and selected, and the optimizer creates its state


class Graph:
    """Calls ``work(batches)`` in the first steps, then records it and replays the recording.

    Every call is one step of the training, the first ones included. Learning rates become tensors on the device, which the
    recording reads. Batches are tuples of tensors of one shape, which are copied to where the recording reads them. A step with
    fewer batches than the recorded one, such as the last of an epoch, is launched from Python.
    """

    def __init__(
        self, work: Callable[[tuple[Any, ...]], None], optimizer: torch.optim.Optimizer, pruner: Pruner | None, required: bool
    ) -> None:
        self.work, self.optimizer, self.pruner, self.required = work, optimizer, pruner, required
        self.calls = self.most = 0  # steps so far, and the most batches one of them had
        self.graph: torch.cuda.CUDAGraph | None = None
        self.failed: str | None = None
        self.inputs: Batches = ()
        self.masked: MaskedWeights | None = None  # from the recorded step
        self.stream = torch.cuda.Stream()  # for the first steps and the recording

    def __call__(self, batches: Batches) -> None:
        if self.graph is None and self.calls >= WARM and self.failed is None and len(batches) == self.most:
            self._record(batches)
        self.calls, self.most = self.calls + 1, max(self.most, len(batches))
        if self.graph is None or len(batches) != len(self.inputs):
            self._launch(batches)
            return
        for recorded, tensor in zip(chain(*self.inputs), chain(*batches), strict=True):
            recorded.copy_(tensor, non_blocking=True)
        self.graph.replay()
        if self.pruner is not None and self.masked is not None:
            self.pruner.restore_forward(self.masked)

    def _launch(self, batches: Batches) -> None:
        """Launches a step from Python, on the stream of the recording, as CUDA requires for the steps before it."""
        self.optimizer.zero_grad()
        if self.failed is not None:
            self.work(batches)
            return
        place_rates(self.optimizer, batches[0][0].device)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.work(batches)
        torch.cuda.current_stream().wait_stream(self.stream)

    def _record(self, batches: Batches) -> None:
        self.inputs = tuple(tuple(part.clone() for part in batch) for batch in batches)
        self.optimizer.zero_grad()  # so that the recording writes gradients instead of adding to them
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self.work(self.inputs)
        except RuntimeError as error:
            self.failed = str(error).strip().splitlines()[0]
            if self.required:
                raise SmartpruneError(
                    f"graph='on': the step cannot be recorded as a CUDA graph ({self.failed}); use --graph off"
                ) from error
            return
        self.graph = graph
        if self.pruner is not None:
            self.masked = self.pruner.take_forward()


def place_rates(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Makes learning rates tensors on the device."""
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], Tensor) or group["lr"].device != device:
            group["lr"] = torch.tensor(float(group["lr"]), device=device)
