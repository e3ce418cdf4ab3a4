"""Do killed ranks change a result? Run: python bench/kills.py --kills 20 --out records/rank-kills

Two ranks train under ``torchrun --max-restarts``, and one of them gets SIGKILL at random moments: while the ranks start, load,
train, or write a checkpoint. Two jobs are tested: ``smartprune train`` under DDP, and a loop that uses FSDP2 and
torch.distributed.checkpoint (tests/helpers/distributed_checkpoints.py). Each is compared with the same job without kills, bit by
bit. Linux only.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from smartprune.artifacts.receipt import Receipt
from smartprune.experiments.compare.record import save_record

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers import distributed_checkpoints as loop  # noqa: E402
from helpers.killed_ranks import Job, modified  # noqa: E402
from helpers.training_jobs import EXACT_FILES, metric_rows  # noqa: E402

FLAGS = [
    "--task-set", "width=4", "--block", "4x2", "--dense-epochs", "25", "--search-epochs", "30", "--finetune-epochs", "20",
    "--batch", "128", "--sparsity", "0.8", "--onnx", "off", "--checkpoint-seconds", "0",
]  # fmt: skip
STEPS = 200  # of the loop with torch.distributed.checkpoint; the search takes half
PER_RUN = 10  # most kills of one run
LIMIT = 3600.0  # seconds per run
NOTE = (
    "One rank of two gets SIGKILL at random moments of the whole run, and one time in four while the ranks start. A run counts as "
    "equal if its weights, mask, receipt and metrics are those of the undisturbed run, bit by bit. One shared machine, gloo on the "
    "CPU, small networks: shows no GPUs, no NCCL, no several machines and no lost disk."
)


def same_command(whole: Path, killed: Path) -> bool:
    files = all((whole / name).read_bytes() == (killed / name).read_bytes() for name in EXACT_FILES)
    return files and metric_rows(whole) == metric_rows(killed) and Receipt.load(killed / "receipt.json").met


def same_loop(whole: Path, killed: Path) -> bool:
    one = torch.load(whole / "result-0.pt", weights_only=True)
    for rank in (0, 1):
        other = torch.load(killed / f"result-{rank}.pt", weights_only=True)
        equal = all(torch.equal(one["weights"][name], value) for name, value in other["weights"].items())
        if not (equal and torch.equal(one["mask"], other["mask"]) and one["hash"] == other["hash"] and other["met"]):
            return False
    return True


def command_job(out: Path) -> tuple[list[str], Any]:
    return ["-m", "smartprune", "train", "digits", *FLAGS, "--out", str(out)], lambda: modified(out / "checkpoint.pt")


def loop_job(out: Path) -> tuple[list[str], Any]:
    script = ROOT / "tests" / "helpers" / "distributed_checkpoints.py"
    return [str(script), str(out), str(STEPS)], lambda: loop.last_checkpoint(out)


JOBS: dict[str, tuple[Any, ...]] = {
    "smartprune train, DDP": (command_job, same_command, {}, 7 * 75),
    "own loop, FSDP2, torch.distributed.checkpoint": (loop_job, same_loop, loop.NEW_STORE, STEPS),
}


def measure(name: str, kills: int, folder: Path, seed: int) -> dict[str, Any]:
    make, same, variables, checkpoints = JOBS[name]
    words, checkpoint = make(folder / "whole")
    Job(words, checkpoint, folder / "whole.log", variables).run(0, LIMIT)
    moments: list[str] = []
    equal: list[float] = []
    while len(moments) < kills:
        out = folder / f"killed-{len(equal)}"
        words, checkpoint = make(out)
        left = min(PER_RUN, kills - len(moments))
        log, moment = folder / f"{out.name}.log", random.Random(seed + len(equal))
        moments += Job(words, checkpoint, log, variables, moment, spacing=checkpoints / (left + 4)).run(left, LIMIT)
        equal.append(float(same(folder / "whole", out)))
        print(name, f"{len(moments)} kills, runs equal to the undisturbed one: {equal}", flush=True)
    shared = {"model": "small networks", "data": "digits and random numbers", "block": "4x2 and 4x4", "sparsity": None}
    shared |= {"protocol": "two ranks, gloo, CPU", "metric": "runs equal to the undisturbed one", "unit": "share"}
    counts = {"kills": len(moments), "kills_at_start": moments.count("start")}
    return {"method": f"{name}: {len(moments)} kills", **shared, **summary(equal), **counts}


def summary(values: Sequence[float]) -> dict[str, Any]:
    mean = sum(values) / len(values)
    std = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5 if len(values) > 1 else None
    return {"values": list(values), "mean": mean, "std": std, "n": len(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="per job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the folder of the record")
    args = parser.parse_args()
    rows = []
    for name in JOBS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(name, args.kills, Path(folder), args.seed))
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "device": platform.machine(), "threads": "1"}
        settings = {"flags": FLAGS, "steps": STEPS, "kills": args.kills, "seed": args.seed}
        machine = ", ".join(f"{key} {value}" for key, value in versions.items())
        command = f"python bench/kills.py --kills {args.kills} --out records/{args.out.name}"
        save_record(args.out, {"rows": rows, "versions": [versions]}, settings, NOTE, [command], [machine])


if __name__ == "__main__":
    main()
