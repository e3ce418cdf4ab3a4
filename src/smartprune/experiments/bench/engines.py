"""Engines side by side: the same model in torch, onnxruntime, OpenVINO and in our runtime, each in a process of its own.

Several thread pools in one process disturb each other, so every engine has its own process, and all but the one being timed
are stopped. They take turns in rounds, and the least time of a round counts. Before an engine is timed its outputs are
compared with torch's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ... import text
from ...core.block import Block
from ...errors import SmartpruneError
from ...files import write_atomic
from ...reports.draw import Drawing, room
from ...runtime import accelerate

TORCH = ("torch", "torch channels-last")
DENSE = (*TORCH, "onnxruntime", "openvino")
DENSE_INT8 = ("onnxruntime int8", "openvino int8")
OURS, OURS_INT8 = "smartprune", "smartprune int8"
CPU = (*DENSE, *DENSE_INT8, OURS, OURS_INT8)
GPU = ("torch cuda bf16", "smartprune cuda bf16")
GRAPHS = {"float.onnx": DENSE[2:], "int8.onnx": DENSE_INT8}  # the files that engines read
CLOSE, CLOSE_INT8, CLOSE_HALF = 1e-3, 0.5, 0.1  # of the largest output; RMS, of the outputs' spread; of the largest output
WIDTH = 80
Run = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """One engine at one batch size. ``ms`` is the least of all calls, ``rounds`` the least of every round."""

    engine: str
    batch: int
    ms: float
    rounds: tuple[float, ...]
    error: float
    failed: str | None = None


@dataclass(frozen=True)
class LayerTiming:
    """One layer alone, in microseconds: dense in torch (the faster layout) and in our runtime."""

    name: str
    kind: str
    batch: int
    kept: int
    blocks: int
    dense: float
    ours: float


@dataclass(frozen=True)
class Bench:
    """What :func:`bench` measured."""

    model: str
    block: str
    threads: int
    sparsity: float
    timings: tuple[Timing, ...]
    layers: tuple[LayerTiming, ...]
    left_out: Mapping[str, str]
    versions: Mapping[str, str]

    def best(self, batch: int, names: Sequence[str]) -> Timing | None:
        found = [t for t in self.timings if t.batch == batch and t.engine in names and t.failed is None]
        return min(found, key=lambda t: t.ms, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain data, with none for what failed."""
        data = asdict(self)
        for row in data["timings"]:
            if row["failed"] is not None:
                row |= {"ms": None, "error": row["error"] or None}
        return data

    def __str__(self) -> str:
        out = [f"{self.model}: {100 * self.sparsity:.2f} % of {self.block} blocks are zero; {self.threads} CPU threads"]
        for batch in sorted({timing.batch for timing in self.timings}):
            rows = []
            for names in ((*DENSE, OURS), (*DENSE_INT8, OURS_INT8), GPU):
                rival = self.best(batch, [name for name in names if not name.startswith("smartprune")])
                for timing in (t for t in self.timings if t.batch == batch and t.engine in names):
                    if timing.failed is not None:
                        rows.append((timing.engine, "-", "-", "failed"))
                        continue
                    ratio = "" if rival is None else f"{rival.ms / timing.ms:.2f}"
                    rows.append((timing.engine, f"{timing.ms:.3f}", ratio, f"{timing.error:.1e}"))
            out += ["", f"batch {batch}", *text.table(("engine", "ms", "x dense", "error"), rows, "<>>>", WIDTH)]
        if self.layers:
            lines = [
                (
                    row.name,
                    row.kind,
                    f"{row.kept:,}/{row.blocks:,}",
                    f"{row.dense:.1f}",
                    f"{row.ours:.1f}",
                    f"{row.dense / row.ours:.2f}",
                )
                for row in self.layers
            ]
            head = ("layer alone", "kind", "kept blocks", "torch us", "ours us", "x dense")
            out += ["", f"layers, float32, batch {self.layers[0].batch}", *text.table(head, lines, "<<>>>>", WIDTH)]
        out += ["", "x dense: over the fastest dense engine of its kind (float32, int8, GPU) here"]
        if self.left_out:
            out += textwrap.wrap(f"left out: {_reasons(self.left_out)}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        out += [f"failed: {t.engine}, batch {t.batch}: {t.failed}" for t in self.timings if t.failed is not None]
        return "\n".join(out)

    def drawing(self) -> Drawing:
        """Bars of milliseconds, one panel per batch size."""
        batches = sorted({t.batch for t in self.timings})
        shown = [t for t in self.timings if t.failed is None]
        left = 24 + max((room(t.engine, 12) for t in shown), default=0)
        height = 44 + sum(34 + 22 * sum(t.batch == batch for t in shown) for batch in batches)
        out = Drawing(720, height, f"{self.model}: milliseconds per call, by engine")
        out.text(
            "ink", 16, 24, f"{self.model}, {100 * self.sparsity:.1f} % of {self.block} blocks zero: ms per call", bold=True, size=13
        )
        y = 44.0
        for batch in batches:
            some = [t for t in shown if t.batch == batch]
            longest = max((t.ms for t in some), default=0.0)
            out.text("quiet", 16, y + 16, f"batch {batch}")
            y += 28
            for timing in some:
                ours = timing.engine.startswith("smartprune")
                right = left + (720 - left - 90) * timing.ms / longest
                out.text("ink", left - 8, y + 12, timing.engine, anchor="end")
                out.box("accent" if ours else "dim", left, y + 1, right, y + 16)
                out.text("quiet", right + 6, y + 12, f"{timing.ms:.3f}")
                y += 22
            y += 6
        return out

    def save(self, path: str | Path) -> None:
        """The bars as .svg or .png."""
        path = Path(path)
        if path.suffix not in (".svg", ".png"):
            raise SmartpruneError(f"{path} must end in .svg or .png")
        write_atomic(path, self.drawing().svg().encode() if path.suffix == ".svg" else self.drawing().png())


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
    tell: Callable[[str], None] = lambda words: None,
) -> Bench:
    """Times a pruned model in every engine that is installed, or in ``only`` some. ``example`` is one sample with a batch
    axis, ``calibration`` are inputs from which int8 engines learn how large activations become."""
    from ...artifacts.verify import verify

    if unknown := [name for name in only if name not in (*CPU, *GPU)]:
        raise SmartpruneError(f"bench: engine {unknown[0]!r} is not known; there are: {', '.join((*CPU, *GPU))}")
    found = verify(model, block)
    names, left_out = engines()
    if only and not {*only} & {*names}:
        raise SmartpruneError(f"bench: {', '.join(only)} cannot be timed here; left out: {_reasons(left_out)}")
    if only:
        names, left_out = [n for n in names if n in only], {n: why for n, why in left_out.items() if n in only}
    timings: list[Timing] = []
    alone: list[LayerTiming] = []
    with tempfile.TemporaryDirectory() as folder:
        for batch in batches:
            tell(f"batch {batch}: preparing")
            x = example.repeat(batch, *[1] * (example.dim() - 1))
            x = x + torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) if x.is_floating_point() else x
            left_out |= prepare(model, x, calibration, Path(folder), names, block)
            names = [n for n in names if n not in left_out]
            with ExitStack() as stack:
                group = [stack.enter_context(closing(Engine(n, Path(folder), threads))) for n in names]
                timings += times(group, batch, rounds, seconds, tell)
                if layers and batch == batches[0]:
                    alone = _layers(group, batch, found)
    return Bench(
        name,
        block,
        threads,
        found.zero / found.blocks if found.blocks else 0.0,
        tuple(timings),
        tuple(alone),
        left_out,
        versions(),
    )


def engines() -> tuple[list[str], dict[str, str]]:
    """Engines that can be run here, and why others cannot."""
    left_out = {}
    missing = [package for package in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(package) is None]
    if missing:
        readers = [name for users in GRAPHS.values() for name in users]
        left_out = dict.fromkeys(readers, f"{', '.join(missing)} not installed (smartprune[onnx])")
    if importlib.util.find_spec("openvino") is None:
        left_out |= dict.fromkeys(("openvino", "openvino int8"), "not installed")
    if not torch.cuda.is_available():
        left_out["GPU"] = "torch finds no CUDA device"
    return [name for name in (*CPU, *(() if "GPU" in left_out else GPU)) if name not in left_out], left_out


def _reasons(left_out: Mapping[str, str]) -> str:
    """Engines by reason; one that shares it with its int8 form stands for both."""
    groups: dict[str, list[str]] = {}
    for name, why in left_out.items():
        group = groups.setdefault(why, [])
        if name.removesuffix(" int8") not in group:
            group.append(name)
    return "; ".join(f"{', '.join(group)}: {why}" for why, group in groups.items())


def prepare(
    model: nn.Module,
    x: Tensor,
    calibration: Sequence[Tensor],
    folder: Path,
    names: Sequence[str],
    block: Block | str | Sequence[int | None],
) -> dict[str, str]:
    """Writes what the processes of ``names`` read, and says which of them cannot have it and why."""
    from ...artifacts.onnx_export import export_onnx

    torch.save((model.cpu().eval(), x, list(calibration)), folder / "case.pt")
    left_out: dict[str, str] = {}
    for file, users in GRAPHS.items():
        wanted = [name for name in users if name in names]
        if not wanted:
            continue
        int8 = file == "int8.onnx"
        batches = [x, *(part for one in calibration for part in one.split(len(x)) if len(part) == len(x))] if int8 else None
        try:  # with any tolerance, for every engine is compared with torch itself
            export_onnx(model, folder / file, x, block, int8=int8, calibration=batches, dynamic_batch=False, tolerance=1.0)
        except SmartpruneError as error:
            left_out |= dict.fromkeys(wanted, str(error).splitlines()[0])
    return left_out


def times(
    group: Sequence[Engine], batch: int, rounds: int, seconds: float, tell: Callable[[str], None] = lambda words: None
) -> list[Timing]:
    """Times the engines in turns, each round in another order."""
    least: list[list[float]] = [[] for _ in group]
    for turn in range(rounds):
        tell(f"batch {batch}: round {turn + 1} of {rounds}")
        for place in range(len(group)):
            i = (turn + place) % len(group)
            if group[i].failed is None:
                least[i].append(group[i].ask({"time": seconds})["ms"])
    return [
        Timing(engine.name, batch, min(ms, default=0.0), tuple(ms), engine.error, engine.failed)
        for engine, ms in zip(group, least, strict=True)
    ]


def _layers(group: Sequence[Engine], batch: int, found: Any) -> list[LayerTiming]:
    told = {e.name: e.ask({"layers": True}) for e in group if e.name in (*TORCH, OURS) and e.failed is None}
    if OURS not in told or not set(TORCH) & set(told):
        return []
    rows = {row.name: row for row in found.layers}
    out = []
    for name, (kind, ours) in told[OURS].items():
        dense = min(told[engine][name][1] for engine in TORCH if engine in told)
        kept, blocks = (rows[name].blocks - rows[name].zero, rows[name].blocks) if name in rows else (0, 0)
        out.append(LayerTiming(name, kind, batch, kept, blocks, dense * 1e6, ours * 1e6))
    return out


class Engine:
    """One engine in a process of its own, stopped unless it is its turn. It runs what :func:`prepare` wrote into ``folder``;
    ``allowed`` is the error that its outputs may have, in place of :func:`difference`'s own limit."""

    def __init__(self, name: str, folder: Path, threads: int, allowed: float | None = None) -> None:
        self.name = name
        command = [
            sys.executable,
            "-m",
            "smartprune.experiments.bench.engines",
            name,
            str(folder),
            str(threads),
            json.dumps(allowed),
        ]
        source = str(Path(__file__).parents[3])
        env = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(filter(None, (source, "", os.environ.get("PYTHONPATH")))),
        }
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        )
        told = self._read()
        self.failed: str | None = told.get("failed")
        self.error: float = told.get("error", 0.0)
        self._signal("SIGSTOP")

    def ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self._signal("SIGCONT")
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        told = self._read()
        self._signal("SIGSTOP")
        if "failed" in told:
            raise SmartpruneError(f"bench: {self.name}: {told['failed']}")
        return told

    def close(self) -> None:
        self._signal("SIGCONT")
        assert self.process.stdin is not None
        self.process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # engines print things of their own
                return json.loads(line)  # type: ignore[no-any-return]
        return {"failed": f"the process ended with exit code {self.process.wait()}"}

    def _signal(self, name: str) -> None:
        if hasattr(signal, name) and self.process.poll() is None:
            self.process.send_signal(getattr(signal, name))


# ---- in the process of an engine


def work(name: str, folder: Path, threads: int, allowed: float | None) -> None:
    torch.set_num_threads(threads)
    try:
        model, x, calibration = torch.load(folder / "case.pt", weights_only=False)  # written by the process that started this one
        run = made(name, model, x, calibration, threads, folder)
        told: dict[str, Any] = {"error": difference(name, run(), model, x, allowed)}
    except Exception as error:  # an engine that cannot run the model is a result, too
        told = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    print(json.dumps(told), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = alone(name, model, x) if "layers" in asked else {"ms": least(run, asked["time"]) * 1e3}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def made(name: str, model: nn.Module, x: Tensor, calibration: list[Tensor], threads: int, folder: Path) -> Run:
    """A function that runs the engine once and gives its outputs."""
    if name in GPU:
        return _on_gpu(name, model, x)
    if name.startswith("torch"):
        form = torch.channels_last if name.endswith("channels-last") and x.dim() == 4 else torch.contiguous_format
        own, y = model.to(memory_format=form), x.contiguous(memory_format=form)  # type: ignore[call-overload]
        return torch.inference_mode()(lambda: own(y))
    if name == OURS:
        fast = accelerate(model, example=x, threads=threads)
        return lambda: fast(x)
    if name == OURS_INT8:
        fast = accelerate(model, dtype="int8", example=[x, *calibration], threads=threads)
        return lambda: fast(x)
    path = folder / next(file for file, users in GRAPHS.items() if name in users)
    if name.startswith("openvino"):
        return _in_openvino(path, x, threads)
    import onnxruntime  # type: ignore[import-untyped,import-not-found,unused-ignore]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feed)


def _in_openvino(path: Path, x: Tensor, threads: int) -> Run:
    import openvino  # type: ignore[import-untyped,import-not-found,unused-ignore]

    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
    data = x.numpy()
    return lambda: list(request.infer([data], share_inputs=True, share_outputs=True).values())


def _on_gpu(name: str, model: nn.Module, x: Tensor) -> Run:
    """As a CUDA graph, so that launches from Python do not count."""
    torch.backends.cudnn.benchmark = True
    y = x.cuda().bfloat16()
    y = y.contiguous(memory_format=torch.channels_last) if y.dim() == 4 else y
    if name.startswith("smartprune"):
        own = accelerate(model, example=x.cuda(), device="cuda", dtype="bfloat16")
    else:
        own = model.cuda().bfloat16().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    side = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):
            own(y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = own(y)

    def run() -> Any:
        graph.replay()
        torch.cuda.synchronize()
        return out

    return run


def difference(name: str, outputs: Any, model: nn.Module, x: Tensor, allowed: float | None = None) -> float:
    """How far the outputs lie from torch's float32; a wrong engine is not worth timing.

    For int8 it is the RMS error relative to the outputs' RMS about their mean, for others the largest error relative to the
    largest output. Infinity and NaN have to be where torch has them.
    """
    with torch.no_grad():
        theirs = _tensors(model.cpu().float()(x))
    if not theirs:
        raise SmartpruneError("the model gives no tensors to compare")
    worst = torch.zeros(())
    for a, b in zip(_tensors(outputs), theirs, strict=True):
        real = b.isfinite()
        if not torch.equal(a.isfinite(), real):
            raise SmartpruneError("its outputs have another shape than torch's, or other NaN or infinite numbers")
        if not real.any():
            continue
        a, b = a[real], b[real]
        if name.endswith("int8"):
            off, scale = (a - b).norm(), (b - b.mean() if b.numel() > 1 else b).norm()
        else:
            off, scale = (a - b).abs().max(), b.abs().max()
        worst = worst.maximum(off / scale.clamp(min=1e-12))  # which keeps NaN
    if allowed is None:
        allowed = CLOSE_INT8 if name.endswith("int8") else CLOSE_HALF if name.endswith("bf16") else CLOSE
    if not worst <= allowed:
        raise SmartpruneError(f"its outputs are off by {float(worst):.3g}; {allowed:g} is allowed")
    return float(worst)


def _tensors(result: Any) -> list[Tensor]:
    """All tensors and arrays in the outputs of an engine, on the CPU in float32."""
    if isinstance(result, np.ndarray):
        result = torch.tensor(result)
    if isinstance(result, Tensor):
        return [result.float().cpu()]
    if isinstance(result, Mapping):
        result = list(result.values())
    return [tensor for part in result for tensor in _tensors(part)] if isinstance(result, (list, tuple)) else []


def least(run: Run, seconds: float) -> float:
    """Seconds of the fastest call."""
    run()
    best, calls, end = float("inf"), 0, time.perf_counter() + seconds
    while calls < 5 or time.perf_counter() < end:
        began = time.perf_counter()
        run()
        best, calls = min(best, time.perf_counter() - began), calls + 1
    return best


def alone(name: str, model: nn.Module, x: Tensor, seconds: float = 0.05) -> dict[str, tuple[str, float]]:
    """Every convolution and linear layer on its own, with the inputs it has in the network."""
    seen: dict[str, Tensor] = {}

    def note(path: str, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.setdefault(path, (args[0] if args else named["input"]).clone())

    hooks = [
        module.register_forward_pre_hook(partial(note, path), with_kwargs=True)
        for path, module in model.named_modules()
        if type(module) in (nn.Conv2d, nn.Linear)
    ]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    out = {}
    for path, given in seen.items():
        layer: nn.Module = model.get_submodule(path)
        size = getattr(layer, "kernel_size", None)
        if name == OURS:
            layer = accelerate(nn.Sequential(layer), example=given, threads=torch.get_num_threads())
        with torch.inference_mode():
            taken = least(partial(layer, given), seconds)
        out[path] = ("linear" if size is None else f"{text.format_shape(size)} conv", taken)
    return out


def versions() -> dict[str, str]:
    """Of the packages, and the name of the GPU."""
    found = {"torch": str(torch.__version__)}
    packages = packages_distributions()
    found |= {name: version(packages[name][0]) for name in ("onnxruntime", "openvino") if name in packages}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


if __name__ == "__main__":
    work(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
