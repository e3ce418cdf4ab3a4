"""Is a 3x3 max pooling with stride 1 cheaper as a pooling of rows and one of columns?

python bench/pool.py [--device cpu] [--batch 128] [--rounds 20] [--out FILE.json]

The poolings of GoogLeNet, forward and backward, with the activations of ReLU in channels-last layout. Both forms give equal
values and equal gradients, ties included, which is checked first: both send the gradient to the first largest value of a window,
row by row. CPU times are processor times. On a GPU they are those of CUDA events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

SHAPES = ((192, 32), (256, 32), (480, 16), (512, 16), (528, 16), (832, 8))  # channels and size of the inputs


def whole() -> nn.Module:
    return nn.MaxPool2d(3, 1, padding=1)


def separate() -> nn.Module:
    return nn.Sequential(nn.MaxPool2d((1, 3), 1, padding=(0, 1)), nn.MaxPool2d((3, 1), 1, padding=(1, 0)))


FORMS = {"3x3": whole, "1x3, then 3x1": separate}


def make_input(channels: int, size: int, batch: int, device: str) -> tuple[Tensor, Tensor]:
    """Activations, of which half are zero and many others equal, and the gradients of the output."""
    x = torch.randn(batch, channels, size, size).mul(8).round().div(8).relu()
    x, gradient = (t.to(device).to(memory_format=torch.channels_last) for t in (x, torch.randn_like(x)))
    return x.requires_grad_(), gradient


def check_equal(x: Tensor, gradient: Tensor) -> None:
    results = []
    for form in FORMS.values():
        y = form()(x)
        results.append((y, *torch.autograd.grad(y, x, gradient)))
    (y, first), (other, second) = results
    assert torch.equal(y, other)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)  # gradients are added in another order


def seconds(form: nn.Module, x: Tensor, gradient: Tensor) -> float:
    if x.is_cuda:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.autograd.grad(form(x), x, gradient)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1000
    began = time.process_time()
    torch.autograd.grad(form(x), x, gradient)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for channels, size in SHAPES:
        x, gradient = make_input(channels, size, args.batch, args.device)
        check_equal(x, gradient)
        ratios = []
        for _ in range(args.rounds + 3):
            whole_time, separate_time = (seconds(form(), x, gradient) for form in FORMS.values())
            ratios.append(separate_time / whole_time)
        ratio = statistics.median(ratios[3:])
        print(f"{channels} channels at {size}x{size}: {ratio:.2f} times the time of 3x3", flush=True)
        common = {"model": f"{channels} channels at {size}x{size}", "data": "noise", "block": "-", "sparsity": None}
        row = {"method": "1x3, then 3x1", "metric": "ratio", "to": "3x3", "values": [ratio], "mean": ratio, "std": None, "n": 1}
        rows.append({**common, "protocol": f"batch {args.batch}, forward and backward", **row, "repeats": args.rounds})
    if args.out:
        args.out.write_text(json.dumps({"rows": rows, "torch": torch.__version__, "device": args.device}, indent=1) + "\n")


if __name__ == "__main__":
    main()
