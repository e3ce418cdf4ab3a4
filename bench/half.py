"""How many products may float16 sums hold? The error of networks in float16 for ARM, run in an emulator.

python bench/half.py [--out records/half-sums]

The kernels add some products in float16, and these sums in float32. Each number of products is compared with float64 in torch, and
so are kernels that convert float16 numbers and add in float32: their error is that of storing numbers as float16. Needs
aarch64-linux-gnu-gcc and qemu-aarch64.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smartprune.experiments.compare.record import save_record
from smartprune.models import MODELS
from smartprune.runtime.cpu import half, instruction_sets

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.exported_c import CROSS, FLAGS, ON_ARM, Written, relative_errors
from helpers.pruned_models import randomly_pruned

PRODUCTS = (16, 32, 64, 128, 1 << 15)  # the last: a whole sum
CHOSEN = instruction_sets.HALF_SUM
SPARSITY = 0.9
NOTE = (
    "The root mean square error of the outputs, relative, against float64 in torch. There is one random network, mask and input, "
    "so differences of a third are noise. Weights are random, with random statistics of batch norms. The layer is dense and adds "
    "4,608 products of positive numbers and weights."
)


def layer() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Conv2d(512, 64, 3, padding=1)).eval(), torch.randn(1, 512, 8, 8).relu()


def network(name: str) -> tuple[nn.Module, Tensor]:
    return randomly_pruned(MODELS[name](), SPARSITY), torch.randn(1, 3, 32, 32)


def error(model: nn.Module, x: Tensor, target: str, products: int) -> float:
    """The error of a network whose float16 sums hold this many products."""
    instruction_sets.HALF_SUM = products
    half.WEIGHT_EXPONENT = -1 - (min(products, 8192) - 1).bit_length()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        written = Written(model, [x], Path(folder), target, fp16=True)
        (output,) = written.run(CROSS, ("-O1", *FLAGS[1:], "-static"), ON_ARM)
        return relative_errors([output.double()], [copy.deepcopy(model).double()(x.double())])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the record")
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for name, make in (("3x3 512-64 @8", layer), ("mobilenetv2", network), ("resnet18", network)):
        torch.manual_seed(0)
        model, x = make() if make is layer else network(name)
        cases = [("float32 sums", "neon", CHOSEN)]
        cases += [(f"{n} products" if n < PRODUCTS[-1] else "float16 sums", "neon_fp16", n) for n in PRODUCTS]
        for method, target, products in cases:
            value = error(model, x, target, products)
            found.append(
                {
                    **{"model": name, "data": "random", "method": method, "block": "16x8"},
                    **{"sparsity": 0.0 if make is layer else SPARSITY, "protocol": "emulated", "metric": "error"},
                    **{"values": [value], "mean": value, "std": None, "n": 1, "unit": "ratio"},
                }
            )
            print(f"{name:16s} {method:16s} {value:.1e}", flush=True)
    if args.out is not None:
        versions = [[CROSS, "--version"], [ON_ARM[0], "--version"]]
        machine = [subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[0] for words in versions]
        command = f"python bench/half.py --out {args.out}"
        save_record(args.out, {"rows": found}, {"products": PRODUCTS, "chosen": CHOSEN}, NOTE, [command], machine)


if __name__ == "__main__":
    main()
