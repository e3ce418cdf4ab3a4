"""Which models of other packages can be pruned, exported and run?

python bench/hosts.py [--only GLOB ...] [--stages STAGE ...] [--again] [--record]

Takes every model of tests/helpers/hosts through every stage: plan, attach, train, bake, an independent count of the blocks, verify,
pack, ONNX, accelerate, report and copies. Each model runs in a process of its own, with a limit on time and memory. The results are
in one JSON file per model, so an interrupted run continues where it stopped; --again runs models that have a result. --record
writes records/hosts from all results. Needs the environment of `make hosts`.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from helpers.hosts import stages  # noqa: E402
from helpers.hosts.models import HOSTS, missing_package  # noqa: E402
from smartprune.errors import SmartpruneError  # noqa: E402
from smartprune.experiments.compare.record import git_commit, save_record  # noqa: E402

PACKAGES = ["torch", "timm", "torchvision", "transformers", "ultralytics", "segmentation-models-pytorch", "monai", "diffusers"]
PACKAGES += ["onnx", "onnxscript", "onnxruntime"]
NOTE = (
    "Random weights, small inputs and few training steps: the table shows that the stages work and that their results are correct. "
    "It does not show that a pruned model is accurate or fast. Many models are smaller than the originals. One seed. "
    "Stages of one model can be of different commits: a stage that changed was run again by itself."
)
LONGEST_REASON = 240


def run_stages(host: str, path: Path, folder: Path, chosen: list[str]) -> None:
    """Runs one model in this process and writes what is known after every stage. Stages that are not chosen keep their results."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    result = json.loads(path.read_text())
    run = stages.HostRun(host, folder)

    def passes(name: str, check: Callable[[stages.HostRun], str]) -> bool:
        result["running"] = name
        path.write_text(json.dumps(result))
        began = time.perf_counter()
        try:
            entry = {"outcome": check(run)}
        except Exception as error:  # code of the package can raise anything
            outcome = "nothing to prune" if isinstance(error, stages.NothingToPruneError) else "fails"
            entry = {"outcome": outcome, "reason": describe(error)}
        result["stages"][name] = {**entry, "seconds": round(time.perf_counter() - began, 1)}
        return "reason" not in entry

    if all(passes(name, check) for name, check in stages.LIFE.items()):
        for name, check in stages.USES.items():
            if name in chosen:
                passes(name, check)
    result["running"] = None
    path.write_text(json.dumps(result))


def describe(error: BaseException) -> str:
    """The first line of an error, without folders of this machine."""
    line = next((line for line in str(error).splitlines() if line.strip()), "no message")
    if not isinstance(error, (AssertionError, SmartpruneError, stages.NothingToPruneError)):
        line = f"{type(error).__name__}: {line}"
    line = re.sub(r"(?:/[\w.@+-]+)+/([\w.-]+)", r"\1", line)
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 3] + "..."


def run_limited(host: str, path: Path, chosen: list[str], seconds: int, gigabytes: int) -> None:
    """Runs one model in another process. Its result says where it stopped if it was killed."""
    known = json.loads(path.read_text())["stages"] if path.exists() else {}
    kept = {name: entry for name, entry in known.items() if name not in chosen and name not in stages.LIFE}
    path.write_text(json.dumps({"host": host, "commit": git_commit(), "stages": kept, "running": "plan"}))
    command = [sys.executable, __file__, "--child", host, "--result", str(path), "--stages", *chosen]

    def limit_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30, gigabytes << 30))

    try:
        done = subprocess.run(command, timeout=seconds, capture_output=True, text=True, preexec_fn=limit_memory)
        problem = f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"stopped after {seconds} s"
    if problem:
        result = json.loads(path.read_text())
        result["stages"][result["running"]] = {"outcome": "fails", "reason": problem}
        path.write_text(json.dumps(result))


def versions() -> dict[str, str]:
    out = {}
    for package in PACKAGES:
        try:
            out[package] = version(package)
        except PackageNotFoundError:
            continue
    return out


def rows_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for result in results:
        for name in stages.STAGES:
            entry = result["stages"].get(name, {"outcome": "-"})
            value = float(entry["outcome"] not in ("-", "fails", "nothing to prune"))
            row = {
                "model": result["host"],
                "data": "random inputs",
                "method": name,
                "block": "x".join(map(str, stages.BLOCK)),
                "sparsity": stages.SPARSITY,
                "protocol": f"{stages.SEARCH_STEPS} search + {stages.MORE_STEPS} fine-tuning steps, floor {stages.FLOOR:g}",
                "metric": "passed",
                "values": [value],
                "mean": value,
                "std": None,
                "n": 1,
                "outcome": entry["outcome"],
            }
            rows.append(row | ({"reason": entry["reason"]} if entry.get("reason") else {}))
    return rows


def record(folder: Path) -> None:
    results = [json.loads(path.read_text()) for host in HOSTS if (path := result_path(folder, host)).exists()]
    commits = sorted({str(result["commit"]) for result in results})
    settings = {"versions": versions(), "commits": commits, "models": [result["host"] for result in results]}
    packages = ", ".join(f"{name} {number}" for name, number in versions().items())
    machine = f"{platform.machine()}, 1 thread, Python {platform.python_version()}, {packages}"
    save_record(
        ROOT / "records" / "hosts", {"rows": rows_of(results)}, settings, NOTE, ["python bench/hosts.py --record"], [machine]
    )


def result_path(folder: Path, host: str) -> Path:
    return folder / f"{host.replace('/', '--')}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="models to run, such as 'timm/*'")
    parser.add_argument("--again", action="store_true", help="run models that have a result")
    parser.add_argument(
        "--stages", nargs="+", default=list(stages.USES), choices=list(stages.USES), help="stages after bake to run"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "hosts")
    parser.add_argument("--seconds", type=int, default=600, help="time limit per model")
    parser.add_argument("--gigabytes", type=int, default=12, help="limit on the address space of a model's process")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        with tempfile.TemporaryDirectory() as folder:
            run_stages(args.child, args.result, Path(folder), args.stages)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    for host in HOSTS:
        path = result_path(args.folder, host)
        if not any(fnmatchcase(host, glob) for glob in args.only) or (path.exists() and not args.again):
            continue
        if package := missing_package(host):
            print(f"{host}: {package} is not installed")
            continue
        began = time.perf_counter()
        run_limited(host, path, args.stages, args.seconds, args.gigabytes)
        entries = json.loads(path.read_text())["stages"]
        cells = " ".join(f"{name}={entry['outcome'].replace(' ', '')}" for name, entry in entries.items())
        print(f"{host} ({time.perf_counter() - began:.0f} s): {cells}", flush=True)
        for name, entry in entries.items():
            if entry.get("reason"):
                print(f"    {name}: {entry['reason']}", flush=True)
    if args.record:
        record(args.folder)


if __name__ == "__main__":
    main()
