"""Prints line and branch coverage per package from coverage's JSON report, and the modules below 90 %.

python .ci/coverage.py COVERAGE.json
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

LOW = 90.0
GPU = "needs a GPU; its tests run Triton's interpreter in a process of their own"
RANKS = "runs in the processes of several ranks, which are not measured"
OTHERS = "runs in processes of its own, which are not measured"
HOSTS = "is tested by make hosts"
REASONS = {
    "pruning/multiply_triton.py": GPU,
    "topk/triton.py": GPU,
    "training/cuda_graph.py": "needs a GPU",
    "experiments/bench/adapters.py": OTHERS,
    "experiments/bench/worker.py": OTHERS,
    "training/ranks.py": RANKS,
    "pruning/consensus.py": RANKS,
    "pruning/checks.py": RANKS,
    "core/sharding.py": RANKS,
    "runtime/gpu/network.py": GPU,
    "runtime/gpu/layers.py": GPU,
    "training/trackers.py": HOSTS,
    "integrations/transformers.py": HOSTS,
    "experiments/sweep/ray_jobs.py": HOSTS,
    "cli/streams.py": OTHERS,
    "cli/__init__.py": OTHERS,
    "tasks/coco_eval.py": "has a second evaluator, which is not installed",
    "runtime/forks.py": "runs in processes after a fork, which are not measured",
    "core/macs.py": "counts operations that only GPUs have",
}  # of modules whose lines are below LOW
KEYS = ("covered_lines", "num_statements", "covered_branches", "num_branches")


def percent(covered: int, total: int) -> float:
    return 100.0 * covered / total if total else 100.0


def main(path: Path) -> None:
    files = json.loads(path.read_text())["files"]
    packages: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(KEYS, 0))
    low: list[tuple[float, float, str]] = []
    for name, entry in files.items():
        parts = Path(name).parts
        inside = parts[parts.index("smartprune") + 1 :]
        package = inside[0] if len(inside) > 1 else "base"
        summary = entry["summary"]
        for key in KEYS:
            packages[package][key] += summary[key]
            packages["all"][key] += summary[key]
        lines = percent(summary["covered_lines"], summary["num_statements"])
        branches = percent(summary["covered_branches"], summary["num_branches"])
        if min(lines, branches) < LOW:
            low.append((lines, branches, "/".join(inside)))
    print(f"{'package':<14}{'lines':>9}{'branches':>10}{'statements':>12}")
    for package in sorted(packages, key=lambda name: (name == "all", name)):
        covered_lines, lines, covered_branches, branches = (packages[package][key] for key in KEYS)
        shares = f"{percent(covered_lines, lines):8.1f}%{percent(covered_branches, branches):9.1f}%"
        print(f"{package:<14}{shares}{lines:>12,}")
    print(f"\nmodules below {LOW:g} % of lines or branches:")
    for lines, branches, name in sorted(low):
        print(f"  {name:<40}{lines:6.1f}% {branches:6.1f}%  {REASONS.get(name, '')}".rstrip())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
