"""Times a model in several engines: each in its own process, in turns.

Several thread pools in one process disturb each other, so every engine has its own process, and all but the one being timed
are stopped. The engines take turns in rounds, and the fastest call of a round counts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...artifacts.onnx_export import export_onnx
from ...artifacts.receipt import Receipt
from ...artifacts.verify import Verification, verify
from ...core.block import Block
from ...errors import SmartpruneError
from .engines import CPU, DENSE, GPU, ONNX_FILES, OURS, available_engines, list_reasons, package_versions
from .eta import Eta
from .result import Bench, LayerTiming, Timing
from .worker import CASE

WORKER = "smartprune.experiments.bench.worker"


def bench(
    model: nn.Module,
    example: Tensor,
    *,
    name: str = "model",
    block: str = "16x8",
    batches: Sequence[int] = (1, 8),
    threads: int = 1,
    rounds: int = 3,
    seconds: float = 0.3,
    layers: bool = True,
    calibration: Sequence[Tensor] = (),
    only: Sequence[str] = (),
    announce: Callable[[str], None] = lambda message: None,
    receipt: Receipt | None = None,
) -> Bench:
    """Times a pruned model in every engine that is installed, or in the engines of ``only``. ``example`` is one sample with a batch
    axis. int8 engines take the range of their activations from ``calibration``. ``receipt`` is the receipt of the model; it gives
    the sparsity."""
    verified = verify(model, block)
    receipt = receipt if receipt is not None and str(receipt.block) == str(Block.of(block)) else None
    if receipt is not None and not (checked := verify(model, receipt=receipt)).ok:
        raise SmartpruneError(f"bench: the model does not match its receipt: {checked.problems[0]}")
    engines, left_out = _select_engines(only)
    timings: list[Timing] = []
    layer_timings: list[LayerTiming] = []
    steps = [("preparing", len(batches)), ("round", rounds * len(batches)), ("layers", int(layers))]
    eta = Eta(announce, dict(steps), {"round": len(engines) * seconds})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for batch in batches:
            with ExitStack() as stack:
                with eta.step("preparing", f"batch {batch}: preparing {len(engines)} engines"):
                    left_out |= write_case(model, _inputs(example, batch), calibration, folder, engines, block)
                    engines = [engine for engine in engines if engine not in left_out]
                    group = [stack.enter_context(closing(EngineProcess(engine, folder, threads))) for engine in engines]
                timings += time_in_turns(group, batch, rounds, seconds, eta)
                if layers and batch == batches[0]:
                    with eta.step("layers", f"batch {batch}: layers"):
                        layer_timings = _layer_timings(group, batch, verified, timings)
    zeros = verified.zero / verified.blocks if verified.blocks else 0.0
    return Bench(
        model=name,
        block=block,
        threads=threads,
        sparsity=zeros if receipt is None else receipt.sparsity,
        timings=tuple(timings),
        layers=tuple(layer_timings),
        left_out=left_out,
        versions=package_versions(),
        sparsity_of="all layers" if receipt is None else "pruned layers",
    )


def _select_engines(only: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The engines to time, and the reason for each that is not available."""
    if unknown := [name for name in only if name not in (*CPU, *GPU)]:
        raise SmartpruneError(f"bench: unknown engine {unknown[0]!r}; choose from: {', '.join((*CPU, *GPU))}")
    engines, left_out = available_engines()
    if not only:
        return engines, left_out
    if not {*only} & {*engines}:
        raise SmartpruneError(f"bench: {', '.join(only)} cannot be timed on this machine; left out: {list_reasons(left_out)}")
    return [n for n in engines if n in only], {n: reason for n, reason in left_out.items() if n in only}


def _inputs(example: Tensor, batch: int) -> Tensor:
    x = example.repeat(batch, *[1] * (example.dim() - 1))
    return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) if x.is_floating_point() else x


def write_case(
    model: nn.Module,
    x: Tensor,
    calibration: Sequence[Tensor],
    folder: Path,
    engines: Sequence[str],
    block: Block | str | Sequence[int | None],
) -> dict[str, str]:
    """Writes the files that the processes of ``engines`` read. Returns the engines without a file, and the reasons."""
    torch.save((model.cpu().eval(), x, list(calibration)), folder / CASE)
    left_out: dict[str, str] = {}
    for file, readers in ONNX_FILES.items():
        selected = [name for name in readers if name in engines]
        if not selected:
            continue
        int8 = file == "int8.onnx"
        batches = [x, *(part for one in calibration for part in one.split(len(x)) if len(part) == len(x))] if int8 else None
        try:  # the tolerance is loose because every engine is compared with torch afterwards
            export_onnx(model, folder / file, x, block, int8=int8, calibration=batches, dynamic_batch=False, tolerance=1.0)
        except SmartpruneError as error:
            left_out |= dict.fromkeys(selected, str(error).splitlines()[0])
    return left_out


def time_in_turns(
    group: Sequence[EngineProcess],
    batch: int,
    rounds: int,
    seconds: float,
    eta: Eta | None = None,
) -> list[Timing]:
    """Times the engines in turns, in a different order in every round."""
    fastest: list[list[float]] = [[] for _ in group]
    eta = eta or Eta(lambda message: None, {"round": rounds})
    for number in range(rounds):
        with eta.step("round", f"batch {batch}: round {number + 1} of {rounds}"):
            for offset in range(len(group)):
                i = (number + offset) % len(group)
                if group[i].failed is None:
                    fastest[i].append(group[i].request({"time": seconds})["ms"])
    return [
        Timing(engine.name, batch, min(ms, default=0.0), tuple(ms), engine.error, engine.failed)
        for engine, ms in zip(group, fastest, strict=True)
    ]


def _layer_timings(
    group: Sequence[EngineProcess], batch: int, verified: Verification, timings: Sequence[Timing]
) -> list[LayerTiming]:
    """The layers in the runtime of smartprune, and in the dense engine that is the fastest for the whole network."""
    working = {engine.name: engine for engine in group if engine.failed is None}
    dense = min(
        (t for t in timings if t.batch == batch and t.engine in DENSE and t.engine in working), key=lambda t: t.ms, default=None
    )
    if OURS not in working or dense is None:
        return []
    ours, theirs = (working[name].request({"layers": True}) for name in (OURS, dense.engine))
    rows = {row.name: row for row in verified.layers}
    layers = []
    for name, (kind, seconds) in ours.items():
        if name in theirs:
            kept, blocks = (rows[name].blocks - rows[name].zero, rows[name].blocks) if name in rows else (0, 0)
            layers.append(LayerTiming(name, kind, batch, kept, blocks, 1e6 * theirs[name][1], 1e6 * seconds, dense.engine))
    return layers


class EngineProcess:
    """One engine in its own process, which is stopped while other engines are timed.

    It reads what :func:`write_case` wrote into ``folder``. ``tolerance`` replaces the engine's usual limit on its error.
    """

    def __init__(self, name: str, folder: Path, threads: int, tolerance: float | None = None) -> None:
        self.name = name
        command = [sys.executable, "-m", WORKER, name, str(folder), str(threads), json.dumps(tolerance)]
        source = str(Path(__file__).parents[3])
        env = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(filter(None, (source, "", os.environ.get("PYTHONPATH")))),
        }
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        )
        reply = self._read()
        self.failed: str | None = reply.get("failed")
        self.error: float = reply.get("error", 0.0)
        self._signal("SIGSTOP")

    def request(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request to the worker, and returns its reply."""
        assert self.process.stdin is not None
        self._signal("SIGCONT")
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        reply = self._read()
        self._signal("SIGSTOP")
        if "failed" in reply:
            raise SmartpruneError(f"bench: {self.name}: {reply['failed']}")
        return reply

    def close(self) -> None:
        self._signal("SIGCONT")
        assert self.process.stdin is not None
        self.process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # engines print messages of their own
                return json.loads(line)  # type: ignore[no-any-return]
        return {"failed": f"the process ended with exit code {self.process.wait()}"}

    def _signal(self, name: str) -> None:
        if hasattr(signal, name) and self.process.poll() is None:  # Windows has neither signal
            self.process.send_signal(getattr(signal, name))
