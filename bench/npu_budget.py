"""How much more time than asked for does a budget in cycles remove, since latency is not a sum over blocks?

python bench/npu_budget.py [--out FILE.json]

ResNet18 for 32x32 images, 16x8 blocks; masks are the best blocks by random scores that the budget pays for, so that no
layer and no lane is favoured. A learned mask spreads differently.
"""

import argparse
import copy
import json
import math
import platform
import statistics
from pathlib import Path

import torch

import smartprune as sp
from smartprune.models import MODELS

MACHINES = {
    "one lane, nothing waited for": (sp.NPU(weight_bandwidth=math.inf, activation_bandwidth=math.inf), False),
    "one lane, 16 + 16 B/cycle": (sp.NPU(), False),
    "four lanes": (sp.NPU(lanes=4), False),
    "four lanes, taken as even": (sp.NPU(lanes=4), True),
}
SHARES, SEEDS = (0.5, 0.9), (0, 1, 2)


def removed(npu: sp.NPU, share: float, even: bool, seed: int) -> float:
    """The share of the pruned layers' time that is gone."""
    torch.manual_seed(seed)
    model, x = MODELS["resnet18"](), torch.zeros(1, 3, 32, 32)
    plan = sp.plan(model, (16, 8), budget=sp.cycles(share, x, npu, even=even))
    mask = sp.hard_topk(torch.rand(plan.n), plan.limit or 0, plan.cost)
    pruned = copy.deepcopy(model)
    weights = dict(pruned.named_parameters())
    with torch.no_grad():
        for layer in plan.layers:
            weights[layer.weight].mul_(layer.grid.expand(mask[layer.start : layer.stop].float()))
    names = {layer.name for layer in plan.layers}
    rows = [row for row in npu.estimate(pruned, x, plan.block).layers if row.name in names]
    return 1 - sum(row.pruned.latency for row in rows) / sum(row.dense.latency for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    rows = []
    for name, (npu, even) in MACHINES.items():
        for share in SHARES:
            values = [removed(npu, share, even, seed) for seed in SEEDS]
            print(f"{name:<30} asked {share:g}, removed {', '.join(f'{value:.4f}' for value in values)}")
            common = {"model": "resnet18", "data": "32x32", "method": name, "block": "16x8", "sparsity": "-", "unit": "share"}
            figures = {"mean": statistics.fmean(values), "std": statistics.stdev(values), "n": len(values)}
            rows.append({**common, "protocol": f"asked {share:g}", "metric": "time removed", "values": values, **figures})
    if args.out:
        versions = {"device": platform.machine(), "torch": torch.__version__, "python": platform.python_version()}
        args.out.write_text(json.dumps({"rows": rows, "seeds": list(SEEDS), **versions}, indent=1) + "\n")


if __name__ == "__main__":
    main()
