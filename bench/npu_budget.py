"""How exactly is a cycles budget met, given that latency is not a sum over blocks?

python bench/npu_budget.py [--out FILE.json]

ResNet18 for 32x32 images with 16x8 blocks in random order, which favors no layer and no lane. Learned masks are distributed
differently. "chosen" is the final mask of a pruner, which is selected by the latency itself. "summed" is the mask during a
search, which adds up a cost per block.
"""

import argparse
import copy
import json
import math
import platform
import statistics
from itertools import product
from pathlib import Path

import torch

import smartprune as sp
from smartprune.models import MODELS

MACHINES = {
    "one lane, nothing waited for": sp.NPU(weight_bandwidth=math.inf, activation_bandwidth=math.inf),
    "one lane, 16 + 16 B/cycle": sp.NPU(),
    "four lanes": sp.NPU(lanes=4),
    "four systolic lanes (server)": sp.NPU.server(),
}
SHARES, SEEDS = (0.5, 0.9), (0, 1, 2)


def removed(npu: sp.NPU, share: float, exact: bool, seed: int) -> float:
    """The share of the latency of the pruned layers that is removed."""
    torch.manual_seed(seed)
    model, x = MODELS["resnet18"](), torch.zeros(1, 3, 32, 32)
    plan = sp.plan(model, (16, 8), budget=sp.cycles(share, x, npu))
    rank = torch.rand(plan.n)
    mask = plan.latency.best(rank) if exact and plan.latency else sp.hard_topk(rank, plan.limit or 0, plan.cost)
    assert mask is not None
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
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    rows = []
    for (name, npu), exact, share in product(MACHINES.items(), (True, False), SHARES):
        name = f"{name}: {'chosen' if exact else 'summed'}"
        values = [removed(npu, share, exact, seed) for seed in SEEDS]
        print(f"{name:<40} requested {share:g}, removed {', '.join(f'{value:.4f}' for value in values)}")
        common = {"model": "resnet18", "data": "32x32", "method": name, "block": "16x8", "sparsity": "-", "unit": "share"}
        figures = {"mean": statistics.fmean(values), "std": statistics.stdev(values), "n": len(values)}
        rows.append({**common, "protocol": f"asked {share:g}", "metric": "time removed", "values": values, **figures})
    if args.out:
        versions = {"device": platform.machine(), "torch": torch.__version__, "python": platform.python_version()}
        args.out.write_text(json.dumps({"rows": rows, "seeds": list(SEEDS), **versions}, indent=1) + "\n")


if __name__ == "__main__":
    main()
