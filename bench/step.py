"""How much longer than a dense training step are a search step and a frozen (fine-tuning) step?

python bench/step.py [--device cpu|cuda] [--model resnet18] [--batch N] [--repeat N] [--out FILE.json]

All variants take turns in one run; compare ratios, not milliseconds. On CUDA: bfloat16 autocast, channels_last and SGD with
momentum (foreach), in eager mode and as one CUDA graph of forward, backward and optimizer, with the fused kernels and without
them ("torch"). On the CPU: float32 on two threads. The second table shows the parts on their own.
"""

import argparse
import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from graphs import capture
from torch import Tensor, nn

import smartprune
from smartprune.models import MODELS
from smartprune.pruning import multiply as multiply_module
from smartprune.pruning.pruner import Pruner

BLOCK, SPARSITY = (16, 8), 0.95
SEARCH_STEPS = 1_000_000  # more than are timed
Call = Callable[[], object]


@dataclass
class Variant:
    """A kind of training step. A sample is ``inner`` steps."""

    name: str
    call: Call
    backend: str = "auto"


@contextmanager
def backend(name: str) -> Iterator[None]:
    before = multiply_module.BACKEND
    multiply_module.BACKEND = name
    try:
        yield
    finally:
        multiply_module.BACKEND = before


class Training:
    """A model in training: dense, in the search, or frozen."""

    def __init__(self, kind: str, model: str, batch: int, device: str) -> None:
        torch.manual_seed(0)
        self.cuda = device == "cuda"
        self.model: nn.Module = MODELS[model](in_channels=3).to(device)
        self.x = torch.randn(batch, 3, 32, 32, device=device)
        self.y = torch.randint(0, 10, (batch,), device=device)
        if self.cuda:
            self.model.to(memory_format=torch.channels_last)
            self.x = self.x.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4, foreach=self.cuda)
        self.pruner: Pruner | None = None
        if kind != "dense":
            self.pruner = smartprune.attach(self.model, smartprune.Smart(), block=BLOCK, sparsity=SPARSITY, steps=SEARCH_STEPS)
            self.optimizer.add_param_group(self.pruner.param_group())
        if self.pruner is not None and kind == "frozen":
            self.pruner.freeze(force=True)
        self.loss = torch.zeros((), device=device)

    def forward_backward(self) -> None:
        with torch.autocast("cuda", torch.bfloat16) if self.cuda else nullcontext():
            loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.loss = loss.detach()

    def eager(self) -> None:
        self.forward_backward()
        self.optimizer.step()
        if self.pruner is not None:
            self.pruner.step()
        self.optimizer.zero_grad()

    def graph(self) -> Call:
        """One CUDA graph of forward, backward and optimizer. pruner.step() stays outside."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):
                self.eager()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            self.forward_backward()
            self.optimizer.step()

        def step() -> None:
            graph.replay()
            if self.pruner is not None:
                self.pruner.step()

        return step


def sample(call: Call, inner: int, device: str) -> float:
    """Milliseconds per call."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(inner):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / inner * 1e3


def take_turns(variants: list[Variant], repeat: int, inner: int, device: str) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for variant in variants:
        with backend(variant.backend):
            sample(variant.call, inner if device == "cuda" else 1, device)
    for turn in range(repeat):
        shift = turn % len(variants)
        for variant in variants[shift:] + variants[:shift]:
            with backend(variant.backend):
                out[variant.name].append(sample(variant.call, inner, device))
    return out


def spread(values: list[float]) -> dict[str, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return {"median": statistics.median(values), "low": low, "high": high, "n": len(values)}


def steps(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Times of all variants, and their ratios to the dense step of the same mode."""
    kinds = ("dense", "search", "frozen")
    plans: list[list[Variant]] = []
    backends = ["auto", "torch"] if args.device == "cuda" and importlib.util.find_spec("triton") else ["auto"]
    for mode in ("eager", "graph") if args.device == "cuda" else ("eager",):
        variants = []
        for kind in kinds:
            for name in backends if kind != "dense" else ["auto"]:
                with backend(name):
                    training = Training(kind, args.model, args.batch, args.device)
                    call = training.graph() if mode == "graph" else training.eager
                label = f"{mode} {kind}" + (" (torch)" if name == "torch" else "")
                variants.append(Variant(label, call, name))
        plans.append(variants)
    out: dict[str, dict[str, Any]] = {}
    for variants in plans:
        times = take_turns(variants, args.repeat, args.inner, args.device)
        dense = times[variants[0].name]
        for name, values in times.items():
            ratios = [value / base for value, base in zip(values, dense, strict=True)]
            row = {**spread(values), "ratio": statistics.median(values) / statistics.median(dense)}
            out[name] = row | {"ratio_low": spread(ratios)["low"], "ratio_high": spread(ratios)["high"]}
    return out


def try_capture(call: Call) -> Call | None:
    """The call as a CUDA graph, or None if it cannot be captured."""
    try:
        return capture(call)
    except RuntimeError as error:
        print(f"not captured: {str(error).splitlines()[0]}")
        return None


def time_call(call: Call, device: str, repeat: int = 15) -> dict[str, float]:
    """Milliseconds per call, measured with events on CUDA."""
    inner = 20 if device == "cuda" else 1
    call()
    values = []
    for _ in range(repeat):
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(inner):
                call()
            end.record()
            torch.cuda.synchronize()
            values.append(start.elapsed_time(end) / inner)
        else:
            values.append(sample(call, inner, device))
    return spread(values)


def part_calls(args: argparse.Namespace) -> dict[str, Call]:
    """The parts that a search step and a frozen step add to a dense step, and the casts that they replace."""
    search, frozen = (Training(kind, args.model, args.batch, args.device) for kind in ("search", "frozen"))
    search.eager()
    pruner, hard = search.pruner, frozen.pruner
    assert pruner is not None
    assert hard is not None
    masked_weights = pruner.take_forward()
    assert masked_weights is not None
    weights, held = pruner.blocks.weights, hard.blocks.weights
    kinds = [torch.bfloat16] * len(weights) if search.cuda else None
    soft = pruner.search.soft_mask(None)
    leaf = soft.detach().requires_grad_()
    hard_mask = hard.mask
    gradient = torch.randn_like(leaf)
    (scores,) = pruner.parameters()
    scores.grad = torch.zeros_like(scores)
    score_optimizer = torch.optim.SGD([scores], lr=0.0, momentum=0.9, foreach=search.cuda)
    products = pruner.search.multiplier.multiply(leaf, weights, False, kinds)
    masked = hard.search.multiplier.mask_gradients(hard_mask, held, (), kinds)
    grads = [torch.randn_like(product) for product in products]

    def casts() -> None:
        for weight in weights:
            weight.detach().to(torch.bfloat16)

    def optimizer() -> None:
        score_optimizer.step()

    def step() -> None:
        pruner.restore_forward(masked_weights)  # as after a replay of a CUDA graph: no optimizer has to step in between
        pruner.step()

    @torch.no_grad()
    def solve() -> Tensor:
        return pruner.search.soft_mask(None)

    return {
        "top-k forward": solve,
        "top-k backward": lambda: torch.autograd.grad(soft, scores, gradient, retain_graph=True),
        "multiply forward": torch.no_grad()(lambda: pruner.search.multiplier.multiply(leaf, weights, False, kinds)),
        "multiply backward": lambda: torch.autograd.grad(products, [leaf, *weights], grads, retain_graph=True),
        "hold forward": torch.no_grad()(lambda: hard.search.multiplier.mask_gradients(hard_mask, held, (), kinds)),
        "hold backward": lambda: torch.autograd.grad(masked, held, grads, retain_graph=True),
        "clean after step": lambda: hard.search.multiplier.multiply_(hard_mask, [weight.detach() for weight in held]),
        "telemetry": lambda: pruner.search.telemetry.measure(leaf),
        "optimizer on the scores": optimizer,
        "pruner.step() in all": step,
        "dense: casts of the weights": casts,
    }


def parts(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for name in ["auto", "torch"] if args.device == "cuda" else ["auto"]:
        with backend(name):
            for part, call in part_calls(args).items():
                if args.device == "cpu" and part.startswith("dense"):
                    continue
                label = part + (" (torch)" if name == "torch" else "")
                if name == "torch" and not part.startswith(("multiply", "hold", "clean", "telemetry")):
                    continue
                times: dict[str, Any] = {"eager": time_call(call, args.device)}
                if args.device == "cuda" and part != "pruner.step() in all":
                    replay = try_capture(call)
                    times["graph"] = None if replay is None else time_call(replay, args.device)
                out[label] = times
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=sorted(MODELS), default="resnet18")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--repeat", type=int)
    parser.add_argument("--inner", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    args.batch = args.batch or (128 if cuda else 32)
    args.repeat = args.repeat or (40 if cuda else 5)
    args.inner = args.inner or (10 if cuda else 1)
    if not cuda:
        torch.set_num_threads(2)
    result: dict[str, Any] = {
        "question": "a search step and a frozen step over a dense step",
        "model": args.model,
        "batch": args.batch,
        "block": list(BLOCK),
        "sparsity": SPARSITY,
        "unit": "ms",
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "triton": triton_version()},
    }
    result["steps"] = steps(args)
    print(f"{args.model}, batch {args.batch}, {result['device']}, n = {args.repeat} x {args.inner} steps each, in turns\n")
    print(f"{'step':28s} {'ms':>9s} {'quartiles':>19s} {'over dense':>11s} {'quartiles':>15s}")
    for name, row in result["steps"].items():
        print(
            f"{name:28s} {row['median']:9.3f} {row['low']:9.3f} {row['high']:9.3f} {row['ratio']:11.3f} "
            f"{row['ratio_low']:7.3f} {row['ratio_high']:7.3f}"
        )
    result["parts"] = parts(args)
    print(f"\n{'part on its own':38s} {'eager ms':>9s} {'graph ms':>9s}")
    for name, row in result["parts"].items():
        replayed = row.get("graph")
        shown = "" if replayed is None else f"{replayed['median']:9.4f}"
        print(f"{name:38s} {row['eager']['median']:9.4f} {shown:>9s}")
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nresults written to {args.out}")


def triton_version() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return None
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return str(triton.__version__)


if __name__ == "__main__":
    main()
