"""From which sparsity on are block-sparse layers and networks faster on a GPU than dense ones?

python bench/runtime_gpu.py [--dtype bfloat16] [--seconds 120] [--out FILE.json]

Layers: 3x3 and 1x1 convolutions with random 16x8 blocks removed, compared with cuDNN (channels-last, with its autotuner).
Network: ResNet18 for 32x32 images, with blocks removed by a global threshold on their size, compared with the same folded network
with dense layers. Layers and networks are replayed as CUDA graphs. Results are compared with torch's in the same run.
"""

import argparse
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smartprune import hard_topk
from smartprune.core.block import Block
from smartprune.models import MODELS
from smartprune.runtime.gpu.layers import TILES, Dense, Sparse
from smartprune.runtime.gpu.network import DTYPES, TOLERANCE, on_gpu, seconds_per_call
from smartprune.runtime.lower.steps import IDENTITY, Step
from smartprune.runtime.module import Options

SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.97)
LAYERS = {  # in channels, out channels, kernel, side of the map, batch
    "64 3x3 @32": (64, 64, 3, 32, 128),
    "128 3x3 @16": (128, 128, 3, 16, 128),
    "256 3x3 @8": (256, 256, 3, 8, 128),
    "512 3x3 @4": (512, 512, 3, 4, 128),
    "256 3x3 @14": (256, 256, 3, 14, 64),
    "512 3x3 @7": (512, 512, 3, 7, 64),
    "256>1024 1x1 @14": (256, 1024, 1, 14, 64),
}


def rows_of(name: str, batch: int, dtype: str, sparsity: float, dense: float, seconds: float, **more: Any) -> list[dict[str, Any]]:
    """Time and speed-up over the dense layer, as two rows of a record."""
    return [
        {
            "model": "layers and resnet18", "data": "random images", "block": "16x8", "sparsity": sparsity,
            "protocol": dtype, "method": f"{name}, batch {batch}", "metric": metric, "values": [value], "mean": value, "std": None,
            "n": 1, **more,
        }
        for metric, value in (("microseconds", seconds * 1e6), ("speed-up", dense / seconds))
    ]  # fmt: skip


def prune_randomly(weight: Tensor, sparsity: float) -> Tensor:
    out, channels, kh, kw = weight.shape
    count = (out // 16) * (channels // 8) * kh * kw
    mask = torch.zeros(count, device=weight.device)
    mask[torch.randperm(count, device=weight.device)[: math.ceil(round((1 - sparsity) * count, 6))]] = 1
    shaped = mask.view(out // 16, channels // 8, kh, kw).repeat_interleave(16, 0).repeat_interleave(8, 1)
    return weight * shaped.to(weight.dtype)


def time_layers(dtype_name: str, deadline: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    dtype = DTYPES[dtype_name]
    for name, (channels, out, kernel, side, batch) in LAYERS.items():
        torch.manual_seed(0)
        x = torch.randn(batch, channels, side, side, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
        weight = torch.randn(out, channels, kernel, kernel, device="cuda") / math.sqrt(channels * kernel**2)
        pad, dense = kernel // 2, 0.0
        window = {"kh": kernel, "kw": kernel, "sh": 1, "sw": 1, "ph": pad, "pw": pad, "dh": 1, "dw": 1}
        for sparsity in SPARSITIES:
            if time.monotonic() > deadline:
                print("out of time")
                return rows
            kept = prune_randomly(weight, sparsity)
            bias = torch.zeros(out)
            step = Step("conv", None, [], weight=kept.cpu().numpy(), bias=bias.numpy(), activation=IDENTITY, window=window)  # type: ignore[arg-type]
            shape = (batch, out, side, side)
            if not dense:
                dense = seconds_per_call(Dense(step, shape, dtype).cuda(), [x], 20, 5)
                rows += rows_of(name, batch, dtype_name, 0.0, dense, dense)
            layer = Sparse(step, shape, dtype).cuda()
            expected = F.conv2d(x.float(), kept, None, 1, pad)
            best, tile = math.inf, layer.tile
            for candidate in TILES:
                if candidate.rows > layer.kept.rows:
                    continue
                layer.tile = candidate
                taken = seconds_per_call(layer, [x], 20, 5)
                if taken < best:
                    best, tile = taken, candidate
            layer.tile = tile
            error = float((layer(x).float() - expected).abs().max() / expected.abs().max())
            assert error < TOLERANCE[dtype], error
            work = 2 * batch * out * channels * kernel**2 * side**2 * (1 - sparsity) / best / 1e12
            rows += rows_of(name, batch, dtype_name, sparsity, dense, best, tflops=work, tile=str(tile), error=error)
            print(
                f"{name:18} batch {batch:4} {sparsity:.2f}  {best * 1e6:7.1f} us  {dense / best:5.2f}x  {work:5.1f} TFLOP/s  {tile}"
            )
    return rows


def prune_by_size(model: nn.Module, sparsity: float) -> None:
    """Removes the blocks with the smallest mean magnitude of the whole network, relative to the mean of their layer."""
    block = Block.of("16x8")
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.in_channels > 3]
    grids = [block.grid(tuple(m.weight.shape)) for m in layers]
    sizes = [grid.mean(m.weight.detach().abs()) for grid, m in zip(grids, layers, strict=True)]
    flat = torch.cat([size / size.mean() for size in sizes])
    mask = hard_topk(flat, math.ceil((1 - sparsity) * flat.numel()))
    for grid, layer, piece in zip(grids, layers, mask.split([grid.n for grid in grids]), strict=True):
        layer.weight.data *= grid.expand(piece.float())


def time_network(dtype: str, deadline: float, batches: tuple[int, ...] = (64, 128)) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch in batches:
        x, dense = torch.randn(batch, 3, 32, 32, device="cuda"), 0.0
        for sparsity in (0.8, 0.9, 0.95, 0.97):
            if time.monotonic() > deadline:
                print("out of time")
                return rows
            torch.manual_seed(0)
            model = MODELS["resnet18"]().eval()
            if not dense:
                dense = seconds_per_call(on_gpu(model, [(x,)], Options(dtype, 1, False)), [x], 5, 5)
                rows += rows_of("resnet18", batch, dtype, 0.0, dense, dense)
            prune_by_size(model, sparsity)
            fast = on_gpu(model, [(x,)], Options(dtype, 1, False))
            taken = seconds_per_call(fast, [x], 5, 5)
            sparse = sum(isinstance(m, Sparse) for m in fast.modules())
            rows += rows_of("resnet18", batch, dtype, sparsity, dense, taken, sparse_layers=sparse)
            print(
                f"resnet18           batch {batch:4} {sparsity:.2f}  {taken * 1e6:7.1f} us  {dense / taken:5.2f}x  {sparse} sparse"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no new measurement after this")
    parser.add_argument("--layers-only", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    deadline = time.monotonic() + args.seconds
    with torch.no_grad():
        rows = time_layers(args.dtype, deadline)
        if not args.layers_only:
            rows += time_network(args.dtype, deadline)
    record = {
        "question": "block-sparse layers on a GPU over cuDNN's dense ones",
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
