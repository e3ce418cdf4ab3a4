"""soft_topk on CUDA: launches one kernel that solves and writes the mask, and one that computes the gradient.

A plan keeps what equal calls share, because on a slow host Python takes longer than the GPU.
"""

import struct
from functools import lru_cache
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from ..core.memory import address_of
from .cpu import TOLERANCES
from .device_errors import check_device, device_flag
from .triton_kernels import backward_kernel, forward_kernel

# (largest N, elements per tile, warps): small problems use all multiprocessors, large ones saturate the memory bus
TILES = [(30_000, 512, 4), (300_000, 1024, 8), (3_000_000, 4096, 8), (1 << 62, 4096, 16)]
INTERPRETED = bool(triton.knobs.runtime.interpret)
# Later calls use the launcher of the compiled kernel directly, in versions whose launcher takes these arguments.
DIRECT = not INTERPRETED and triton.__version__.startswith(("3.6.", "3.7."))


class _Plan:
    """One kernel for one size, dtypes, device and stream: its workspace and grid, and after the first launch its handle."""

    def __init__(self, kernel: Any, x: Tensor, stream: int, shared: bool) -> None:
        n = x.numel()
        self.kernel, self.stream = kernel, stream
        self.block, warps = next((block, warps) for most, block, warps in TILES if n <= most)
        self.options = {} if INTERPRETED else {"num_warps": warps, "launch_cooperative_grid": True}
        self.programs = self.lanes = 1
        if x.is_cuda:
            processors = _processors(x.device.index)
            self.programs, self.lanes = min(processors, -(-n // self.block)), triton.next_power_of_2(processors)
        self.wide = x.dtype == torch.float64
        self.dtype = torch.float64 if self.wide else torch.float32  # of the mask
        self.state = torch.empty(4, dtype=torch.float64, device=x.device)
        flag, self.codes, _ = device_flag(x.device)
        count, parts = _workspace(x.device, stream, self.programs, self.lanes) if shared else _new_workspace(x.device, self.lanes)
        self.tensors = (flag, count, parts, n)
        self.fixed = (flag, count.data_ptr(), parts.data_ptr(), n)
        self.constants: tuple[Any, ...] = ()
        self.handle: tuple[Any, Any, Any] | None = None

    def launch(self, vectors: tuple[Tensor, ...], loose: tuple[Tensor, ...], bits: tuple[int, ...]) -> None:
        """Launches the kernel, compiled for vectors at multiples of 16 bytes, as allocations are, and for loose at any address."""
        pointers = [tensor.data_ptr() for tensor in vectors]
        if 0 in pointers:
            address_of(vectors[pointers.index(0)], "soft_topk")
        odd = 0
        for pointer in pointers:
            odd |= pointer
        if self.handle is not None and not odd & 15 and not (_enter.calls or _leave.calls):
            run, function, packed = self.handle
            pointers += [tensor.data_ptr() for tensor in loose]
            run(
                self.programs, 1, 1, self.stream, function, packed, None, None, None,
                *pointers, *self.fixed, *bits, *self.constants,
            )  # fmt: skip
            return
        compiled = self.kernel[(self.programs,)](*vectors, *loose, *self.tensors, *bits, *self.constants, **self.options)
        if DIRECT and not odd & 15:
            self.handle = (compiled.run, compiled.function, compiled.packed_metadata)


_enter, _leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook  # of profilers
plans: dict[tuple[Any, ...], _Plan] = {}


def forward(
    x: Tensor, k: float | Tensor, tau: float | Tensor, cost: Tensor | None, warm: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    """Mask [N] and the state (pivot, delta, tau, sum(cost)) for backward, on the device.

    Unless keep, the next call overwrites the state.
    """
    index = x.get_device()
    if index >= 0 and index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return forward(x, k, tau, cost, warm, keep)
    k_dtype, k_bits = (k.dtype, _ONE) if isinstance(k, Tensor) else (None, _bits(k))
    tau_dtype, tau_bits = (tau.dtype, _ONE) if isinstance(tau, Tensor) else (None, _bits(tau))
    start = 0 if warm is None else warm.dim()
    stream, capturing = _stream(index)
    key = (x.numel(), x.dtype, k_dtype, tau_dtype, cost is None, start, index, stream)
    plan = None if capturing else plans.get(key)
    if plan is None:
        plan = _Plan(forward_kernel, x, stream, not capturing)
        plan.constants = (
            k_dtype is not None, tau_dtype is not None, cost is not None, start,
            tl.float64 if plan.wide else tl.float32, *TOLERANCES[plan.dtype], plan.block, plan.lanes,
        )  # fmt: skip
        _remember(key, plan, capturing)
    mask = torch.empty_like(x) if x.dtype is plan.dtype else torch.empty_like(x, dtype=plan.dtype)
    state = torch.empty_like(plan.state) if keep else plan.state
    plan.launch(
        (x, x if cost is None else cost, mask, state),
        (k if isinstance(k, Tensor) else x, tau if isinstance(tau, Tensor) else x, state if warm is None else warm),
        (k_bits, tau_bits),
    )
    if INTERPRETED and plan.codes[0]:
        check_device(x.device)
    return mask, state


def backward(x: Tensor, g: Tensor, cost: Tensor | None, state: Tensor) -> Tensor:
    """Gradient [N] in the dtype of the scores."""
    index = x.get_device()
    if index >= 0 and index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return backward(x, g, cost, state)
    stream, capturing = _stream(index)
    key = (x.numel(), x.dtype, cost is None, index, stream)
    plan = None if capturing else plans.get(key)
    if plan is None:
        plan = _Plan(backward_kernel, x, stream, not capturing)
        plan.constants = (cost is not None, tl.float64 if plan.wide else tl.float32, plan.block, plan.lanes)
        _remember(key, plan, capturing)
    out = torch.empty_like(x)
    plan.launch((x, x if cost is None else cost, g, out, state), (), ())
    return out


def _stream(index: int) -> tuple[int, bool]:
    """The current stream, and whether a CUDA graph captures it."""
    if index < 0:
        return 0, False
    return torch._C._cuda_getCurrentRawStream(index), torch._C._cuda_isCurrentStreamCapturing()


def _remember(key: tuple[Any, ...], plan: _Plan, capturing: bool) -> None:
    if not capturing:  # a graph may be replayed on any stream, so it needs a workspace of its own
        if len(plans) >= 256:
            plans.clear()
        plans[key] = plan


def _bits(value: float) -> int:
    # Triton passes Python floats as float32, so the 64 bits are passed as an integer. It passes small integers as int32, so
    # numbers with such bits (0.0 and those below 1e-307) become -0.0.
    bits: int = _DOUBLE.unpack(_FLOAT.pack(value if value > 1e-307 else -0.0))[0]
    return bits


_FLOAT, _DOUBLE = struct.Struct("<d"), struct.Struct("<q")
_ONE = _bits(1.0)
_workspaces: dict[tuple[torch.device, int, int], tuple[Tensor, Tensor]] = {}


def _workspace(device: torch.device, stream: int, programs: int, lanes: int) -> tuple[Tensor, Tensor]:
    """Barrier count and partial sums. Launches with as many programs on the same stream share them, since they run in order."""
    key = (device, stream, programs)
    if key not in _workspaces:
        _workspaces[key] = _new_workspace(device, lanes)
    return _workspaces[key]


def _new_workspace(device: torch.device, lanes: int) -> tuple[Tensor, Tensor]:
    count = torch.zeros(1, dtype=torch.int64, device=device)
    return count, torch.empty(16 * lanes, dtype=torch.float64, device=device)


@lru_cache(maxsize=16)
def _processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
