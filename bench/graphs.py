"""Captures calls as CUDA graphs, for the benchmarks."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(call: Callable[[], object]) -> Callable[[], object]:
    """A function that replays the call as a CUDA graph. The call runs three times first, as warm-up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
