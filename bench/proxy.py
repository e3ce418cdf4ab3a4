"""Compares forms of pruning methods on networks that are small enough to train many of them on one GPU.

python bench/proxy.py --data DIR --plan PLAN.json --out DIR [--processes 8] [--seconds 540] [--mps]
python bench/proxy.py --plan PLAN.json --list

A plan is a list of groups, {"name": "a", "cells": [...]}. A dense cell trains a checkpoint:

    {"dense": "half", "pictures": 45000, "epochs": 200, "batch": 256, "lr": 0.2}

A pruning cell starts from that checkpoint, searches and fine-tunes (batch 128, SGD, one cosine over both stages):

    {"network": "half", "pictures": 45000, "epochs": [8, 12], "sparsity": 0.97, "seeds": [0, 1, 2],
     "method": "smart", "settings": {"ramp": "cubic"}}

``{"best": 4, "of": "a", "name": "b", "seeds": [2]}`` waits for group a, then repeats its best forms with more seeds as group b.
Methods listed in ``always`` are repeated whatever their rank. Cells start in order, as processes become free.

The last 5,000 training images are held out. Base decisions on their accuracy only. The accuracy on the test split is written
to the file for the final report. Images, crops and flips are on the GPU, a step is one CUDA graph, and several processes share
the GPU. Each finished cell is one line of ``cells.jsonl``. A cell starts only if it can end within ``--seconds``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import signal
import statistics
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from proxy_cells import Cell, checkpoint_name, make_method, prune, store_images, train_dense

STEP_SECONDS = {"quarter": 0.015, "half": 0.018, "mobilenetv2": 0.04, "densenet": 0.08}  # upper bounds, until a cell is timed
START_SECONDS = 12.0  # upper bound of what a cell takes besides its steps


def run_cells(pipe: Connection, folder: Path, device: str) -> None:
    """Runs cells until it receives None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    while (cell := pipe.recv()) is not None:
        began = time.perf_counter()
        try:
            out = train_dense(cell, folder, device) if "dense" in cell else prune(cell, folder, device)
        except Exception as error:  # a cell that fails must not end the others
            out = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        pipe.send({**cell, **out, "seconds": round(time.perf_counter() - began, 2)})


def steps_of(cell: Cell) -> int:
    epochs = cell["epochs"] if "dense" in cell else sum(cell["epochs"])
    return int(epochs * (cell["pictures"] // cell.get("batch", 128)))


def network_of(cell: Cell) -> str:
    return str(cell.get("dense", cell.get("network")))


def form_of(cell: Cell) -> tuple[str, str]:
    return cell["method"], json.dumps(cell["settings"], sort_keys=True)


def expand(group: str, cells: list[Cell]) -> list[Cell]:
    """One cell per seed, with all settings."""
    out = []
    for cell in cells:
        if "dense" in cell or "best" in cell:
            out.append({**cell, "group": cell.get("group", group)} if "dense" in cell else cell)
            continue
        full = dataclasses.asdict(make_method(cell["method"], cell.get("settings", {})))
        common = {"sparsity": 0.97, **{k: v for k, v in cell.items() if k != "seeds"}, "settings": full, "group": group}
        out += [{**common, "seed": seed} for seed in cell.get("seeds", [0])]
    return sorted(out, key=lambda cell: cell.get("seed", 0))  # every form gets its first seed before any gets its second


def best_of(cell: Cell, done: list[Cell]) -> list[Cell]:
    """More seeds for the best forms of a group."""
    cells = [c for c in done if c.get("group") == cell["of"] and "validation" in c and "method" in c]
    if cell.get("network"):
        cells = [c for c in cells if c["network"] == cell["network"]]
    groups: dict[tuple[str, str], list[Cell]] = {}
    for c in cells:
        groups.setdefault(form_of(c), []).append(c)
    order = sorted(groups, key=lambda form: -statistics.fmean(c["validation"] for c in groups[form]))
    best = order[: cell["best"]] + [form for form in order[cell["best"] :] if form[0] in cell.get("always", [])]
    new = []
    for form in best:
        common = {key: groups[form][0][key] for key in ("network", "pictures", "epochs", "sparsity", "method", "settings")}
        common |= cell.get("change", {})
        new += [{**common, "group": cell["name"], "seed": seed} for seed in cell["seeds"]]
    return new


class Board:
    """The cells that are waiting, running and finished."""

    def __init__(self, plan: list[dict[str, Any]], out: Path, end: float) -> None:
        self.out, self.end, self.done, self.running = out, end, [], {}
        self.waiting: list[Cell] = [cell for group in plan for cell in expand(group["name"], group["cells"])]
        self.step_times: dict[str, list[float]] = {}
        self.skipped = 0

    def time_of(self, cell: Cell) -> float:
        step_time = max(self.step_times.get(network_of(cell), [STEP_SECONDS[network_of(cell)]])[-6:])
        return START_SECONDS + steps_of(cell) * step_time

    def busy(self, group: str) -> bool:
        cells = [*self.waiting, *self.running.values()]
        return any(cell.get("group") == group or cell.get("name") == group for cell in cells)

    def next(self) -> Cell | None:
        """The first cell that can start now and ends in time."""
        for cell in list(self.waiting):
            if "best" in cell:
                if not self.busy(cell["of"]):
                    index = self.waiting.index(cell)
                    self.waiting[index : index + 1] = best_of(cell, self.done)
                    return self.next()
                continue
            if "dense" not in cell and not (self.out / checkpoint_name(cell["network"], cell["pictures"])).exists():
                continue
            if time.time() + self.time_of(cell) > self.end:
                if "dense" not in cell and network_of(cell) in self.step_times:  # the estimate will not get shorter
                    self.waiting.remove(cell)
                    self.skipped += 1
                continue
            self.waiting.remove(cell)
            return cell
        return None

    def finish(self, cell: Cell) -> None:
        self.done.append(cell)
        if "error" not in cell:
            self.step_times.setdefault(network_of(cell), []).append(max(0.0, cell["seconds"] - 2) / max(1, steps_of(cell)))
        with (self.out / "cells.jsonl").open("a") as file:
            file.write(json.dumps(cell) + "\n")


def name_of(cell: Cell) -> str:
    if "dense" in cell:
        return f"dense {cell['dense']} {cell['pictures']}"
    defaults = dataclasses.asdict(make_method(cell["method"], {}))
    changed = ", ".join(f"{k}={v}" for k, v in cell["settings"].items() if defaults[k] != v)
    return f"{cell['network']} {cell['pictures'] // 1000}k {cell['epochs']} {cell['method']}({changed}) seed {cell['seed']}"


def describe(cell: Cell) -> str:
    outcome = cell.get("error") or f"{cell['validation']:.4f} loss {cell['loss']:.4f}"
    return f"{cell['seconds']:6.1f} s  {outcome}  {name_of(cell)}"


def list_cells(plan: list[dict[str, Any]]) -> None:
    for group in plan:
        for cell in expand(group["name"], group["cells"]):
            if "best" in cell:
                print(f"{group['name']}: the best {cell['best']} forms of {cell['of']}, seeds {cell['seeds']}")
            else:
                print(f"{group['name']}: {name_of(cell)}, {steps_of(cell)} steps")


def run_all(board: Board, processes: int, device: str) -> None:
    """Runs the cells of the board in worker processes until none is left or time is over."""
    began = time.time()
    spawn = multiprocessing.get_context("spawn")
    workers: dict[Connection, Any] = {}
    for _ in range(processes):
        parent, child = spawn.Pipe()
        worker = spawn.Process(target=run_cells, args=(child, board.out, device), daemon=True)
        worker.start()
        workers[parent] = worker
    idle = list(workers)
    while board.waiting or board.running:
        for pipe in list(idle):
            cell = board.next()
            if cell is None:
                break
            idle.remove(pipe)
            board.running[pipe] = cell
            pipe.send(cell)
        if not board.running:
            break
        for pipe in wait(list(board.running), timeout=1.0):
            cell = pipe.recv()
            del board.running[pipe]
            idle.append(pipe)
            board.finish(cell)
            print(f"{time.time() - began:5.0f}  {describe(cell)}", flush=True)
        if time.time() > board.end + 20:
            print("out of time; stopping the running cells", flush=True)
            break
    for pipe, worker in workers.items():
        if pipe in board.running:
            worker.terminate()
        else:
            pipe.send(None)
        worker.join(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="folder of checkpoints and cells.jsonl")
    parser.add_argument("--list", action="store_true", help="train nothing; print the cells")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mps", action="store_true", help="share the GPU under NVIDIA's Multi-Process Service")
    args = parser.parse_args()
    if args.list:
        list_cells(json.loads(args.plan.read_text()))
        return
    if args.data is None or args.out is None:
        parser.error("--data and --out are needed to train")
    began = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    store_images(args.data, args.out)
    board = Board(json.loads(args.plan.read_text()), args.out, began + args.seconds)
    service: Any = nullcontext()
    if args.mps:
        from smartprune.experiments.sweep.mps import MultiProcessService

        service = MultiProcessService()
    with service:
        run_all(board, args.processes, args.device)
    left = len(board.waiting) + board.skipped + len(board.running)
    print(f"{len(board.done)} cells in {time.time() - began:.0f} s, {left} skipped", flush=True)


if __name__ == "__main__":
    main()
