"""Do damaged files of each format ever do anything but work or raise SmartpruneError, and how much memory do they take?

python bench/mutate.py [--count 1000] [--seed 0] [--only NAME ...] [--record]

Makes a valid file of every format that smartprune reads, and mutates it with a fixed seed: flipped bits, cuts, splices, edited
length fields and numbers, and values of JSON and of pickles replaced by others. Each mutation is read in a child process, which
measures the time and the growth of its memory, and whose end by a signal counts as a crash. Prints a line per format, and the
number of the mutation for every other exception; --only NAME --first NUMBER --count 1 repeats it. --record writes
records/mutated-files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from helpers.mutated_formats import FORMATS, Format  # noqa: E402
from smartprune.errors import SmartpruneError  # noqa: E402
from smartprune.experiments.compare.record import load_rows, save_record  # noqa: E402

SECONDS = 60  # for one file, after which it counts as a crash
ADDRESS_SPACE = 8 << 30  # bytes that the child may have besides those of its parent
METRICS = ("files tried", "worked", "refused", "other exceptions", "crashes", "peak MB", "slowest s")
NOTE = (
    "Small files of one seed each, mutated at random: that nothing else happened does not prove that it cannot. "
    "Memory is the growth of the resident set of the process while one file is read, with all libraries loaded. "
    "Times are those of a shared machine, in which other work ran."
)


class Tally:
    """What happened to the mutations of one format."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("worked", "refused", "other exceptions", "crashes"), 0)
        self.megabytes = self.seconds = 0.0

    def add(self, outcome: str, megabytes: float, seconds: float) -> None:
        self.counts[outcome] += 1
        self.megabytes, self.seconds = max(self.megabytes, megabytes), max(self.seconds, seconds)

    @property
    def values(self) -> list[float]:
        return [sum(self.counts.values()), *self.counts.values(), round(self.megabytes, 1), round(self.seconds, 2)]


def run_format(form: Format, folder: Path, numbers: range, seed: int) -> Tally:
    """Reads the mutations in child processes: a new one after each crash."""
    tally, left = Tally(), numbers
    while left:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            try:
                with os.fdopen(writing, "w") as results:
                    _serve(form, folder, left, seed, results)
            finally:
                os._exit(0)
        os.close(writing)
        done = 0
        with os.fdopen(reading) as results:
            for line in results:
                outcome, megabytes, seconds, message = json.loads(line)
                tally.add(outcome, megabytes, seconds)
                if outcome == "other exceptions":
                    print(f"{form.name} {left[done]}: {message}", flush=True)
                done += 1
        status = os.waitpid(child, 0)[1]
        if done < len(left):
            print(f"{form.name} {left[done]}: the process ended with status {status}", flush=True)
            tally.add("crashes", 0.0, 0.0)
            done += 1
        left = left[done:]
    return tally


def _serve(form: Format, folder: Path, numbers: range, seed: int, results: Any) -> None:
    """The child process. It writes a line per file."""
    limit = _status("VmSize") + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    form.read(form.write(folder / "valid", folder / "damaged", None))  # works, and loads what reading needs
    for number in numbers:
        path = form.write(folder / "valid", folder / "damaged", random.Random(f"{seed} {form.name} {number}"))
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before, began = _status("VmRSS"), time.perf_counter()
        signal.alarm(SECONDS)
        message = ""
        try:
            form.read(path)
            outcome = "worked"
        except SmartpruneError:
            outcome = "refused"
        except BaseException as error:
            frames = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-4:]]
            outcome, message = "other exceptions", f"{type(error).__name__}: {str(error)[:200]} ({' '.join(frames)})"
        signal.alarm(0)
        megabytes = (_status("VmHWM") - before) / 2**20
        results.write(json.dumps([outcome, megabytes, time.perf_counter() - began, message]) + "\n")
        results.flush()


def _status(key: str) -> int:
    """A line of the status of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def rows_of(name: str, tally: Tally) -> list[dict[str, object]]:
    common = {"model": "-", "data": "-", "block": "-", "sparsity": None, "protocol": "mutated files", "method": name, "n": 1}
    return [
        {**common, "metric": metric, "values": [v], "mean": v, "std": None} for metric, v in zip(METRICS, tally.values, strict=True)
    ]


def write_record(rows: list[dict[str, object]], count: int, seed: int) -> None:
    """Writes the rows after those of other formats that the record has, so that formats can be run one by one."""
    folder, names = ROOT / "records" / "mutated-files", {row["method"] for row in rows}
    kept = [row for row in load_rows(folder) if row["method"] not in names] if folder.exists() else []
    order = {form.name: number for number, form in enumerate(FORMATS)}
    merged = sorted([*kept, *rows], key=lambda row: order[str(row["method"])])
    settings = {"count": count, "seed": seed, "seconds": SECONDS, "address space": ADDRESS_SPACE}
    machine = f"python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}"
    save_record(folder, {"rows": merged}, settings, NOTE, [f"python bench/mutate.py --count {count} --record"], [machine])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="mutations of each format")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[form.name for form in FORMATS])
    parser.add_argument("--record", action="store_true", help="write records/mutated-files")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[dict[str, object]] = []
    for form in FORMATS:
        if args.only and form.name not in args.only:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            form.prepare(folder / "valid")
            tally = run_format(form, folder, range(args.first, args.first + args.count), args.seed)
            rows += rows_of(form.name, tally)
            print(f"{form.name:<32} " + "  ".join(f"{n} {v:g}" for n, v in zip(METRICS, tally.values, strict=True)), flush=True)
            if args.record:
                write_record(rows, args.count, args.seed)


if __name__ == "__main__":
    main()
