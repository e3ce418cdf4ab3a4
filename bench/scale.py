"""How much memory and time does a search take per block, with very many blocks? Run: python bench/scale.py 1e6 1e7 1e8 --out DIR

Every size runs in a process of its own. The model is a row of square linear layers, pruned in blocks of one weight, so it has as
many blocks as weights. The same training without a pruner is measured first and subtracted. ``--ranks 2`` shards the layers with
FSDP2 over processes of this machine; numbers are then those of the rank that needs most.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import smartprune as sp
from smartprune.experiments.compare.record import save_record

WIDTH, STEPS = 1000, 4
NOTE = (
    "Blocks of one weight, so every weight has a score: the worst case. Peak: that of the process, minus that of the same training "
    "without a pruner; it includes the masked weights and their gradients, whatever the block is. Held: the pruner's own "
    "tensors between two steps, without the state of the optimizer. Times are processor time of one thread, the fastest of {n} "
    "steps with 4 samples, on a shared machine. One run per row: shows neither the spread nor GPUs."
)


def measure(rank: int, ranks: int, blocks: int, method: str, folder: str) -> None:
    """Writes the processor seconds of the fastest step, the largest size of the process, and the size of the pruner's tensors."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks // WIDTH**2)))
    if ranks > 1:
        shard(model, rank, ranks, folder)
    pruner = None
    if method != "dense":
        pruner = sp.attach(model, method, block=(1, 1), sparsity=0.9, include="*", steps=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    x, seconds = torch.randn(4, WIDTH), []
    for _ in range(STEPS):
        start = time.process_time()
        model(x).square().mean().backward()
        optimizer.step()
        if pruner is not None:
            pruner.step()
        held = 0 if pruner is None else held_bytes(pruner)
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    Path(folder, str(rank)).write_text(json.dumps({"seconds": min(seconds[1:]), "peak": peak, "held": held}))


def shard(model: nn.Sequential, rank: int, ranks: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = torch.distributed.init_device_mesh("cpu", (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def held_bytes(pruner: sp.Pruner) -> int:
    """The bytes of the tensors that the pruner holds after a step, and of the gradients of the scores."""
    search, last = pruner.search, pruner.live.last
    tensors = [*search.values().values(), *(p.grad for p in pruner.parameters()), search.telemetry.side]
    tensors += [pruner.blocks.sizes, pruner.blocks._layer, pruner.blocks.cost, *(() if last is None else (last.mask, last.factors))]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
    return sum(storages.values())


def run(ranks: int, blocks: int, method: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(ranks, blocks, method, folder), nprocs=ranks)
        results = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]
    return {name: max(result[name] for result in results) for name in results[0]}


def rows_of(results: dict[str, dict[str, float]], method: str, blocks: int, ranks: int) -> list[dict[str, Any]]:
    dense, own = results["dense"], results[method]
    values = {
        "peak, bytes per block": (own["peak"] - dense["peak"]) / blocks,
        "held, bytes per block": own["held"] / blocks,
        "step, ns per block": 1e9 * (own["seconds"] - dense["seconds"]) / blocks,
        "step, s": own["seconds"],
        "step without pruner, s": dense["seconds"],
        "peak, GiB": own["peak"] / 2**30,
    }
    host = "one process" if ranks == 1 else f"FSDP2 with {ranks} ranks"
    shared = {"model": f"linear layers of {WIDTH:,} by {WIDTH:,}", "data": "random numbers", "block": "1x1", "sparsity": 0.9}
    shared |= {"method": f"{method}, {blocks:,} blocks, {host}", "protocol": "4 samples", "blocks": blocks, "ranks": ranks}
    return [{**shared, "metric": name, "values": [value], "mean": value, "std": None, "n": 1} for name, value in values.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("blocks", nargs="*", type=float, default=[1e6, 1e7])
    parser.add_argument("--methods", default="smart,gradual")
    parser.add_argument("--ranks", default="1", help="numbers of ranks, such as 1,2")
    parser.add_argument("--largest", type=float, default=1e7, help="most blocks with more than one rank")
    parser.add_argument("--out", type=Path, help="the folder of the record")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for ranks in map(int, args.ranks.split(",")):
        for blocks in [int(size) for size in args.blocks if ranks == 1 or size <= args.largest]:
            results = {"dense": run(ranks, blocks, "dense")}
            for method in args.methods.split(","):
                results[method] = run(ranks, blocks, method)
                rows += rows_of(results, method, blocks, ranks)
                print(json.dumps({"ranks": ranks, "blocks": blocks, "method": method, **results[method]}), flush=True)
    if args.out:
        settings = {"width": WIDTH, "steps": STEPS, "threads": 1, "samples": 4, "block": "1x1", "sparsity": 0.9}
        machine = f"device {platform.machine()}, threads 1, torch {torch.__version__}, python {platform.python_version()}"
        sizes = " ".join(f"{blocks:g}" for blocks in args.blocks)
        command = f"python bench/scale.py {sizes} --methods {args.methods} --ranks {args.ranks} --out {args.out.name}"
        save_record(args.out, {"rows": rows, "versions": [machine]}, settings, NOTE.format(n=STEPS - 1), [command], [machine])


if __name__ == "__main__":
    main()
