"""Does LiteRT gain from zero blocks? Size and time of dense and sparse LiteRT files of the same pruned network, on one thread.

python bench/litert.py [--out records/litert-cpu] [--rounds 5] [--repeats 20]

Masks are random, so that every layer has the same sparsity. The dense and the sparse file hold the same weights, and the rounds
alternate between them. Needs: pip install 'smartprune[litert]'.
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import smartprune as sp
from smartprune.experiments.compare.record import save_record
from smartprune.models import MODELS

SHARES = (0.7, 0.8, 0.9, 0.95)
BLOCK = (16, 8)
NOTE = (
    "Time of a dense file divided by that of a sparse file with the same weights, both in LiteRT with XNNPACK, batch 1, and "
    "sizes of both. Above 1, sparse is faster. Only linear layers have a kernel that skips zeros; convolutions are made dense when "
    "the file is loaded, so they save space and no time, and MobileNetV2 is slower. Masks are random. "
    "Measured on one shared x86 machine: ratios within 10 % of 1 are noise, and ARM was not measured."
)


def linear_layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 100)
    )


def pointwise() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(64, 256, 1), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(256, 256, 1), nn.ReLU()]
    return nn.Sequential(*layers)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "four linear layers": (linear_layers, (1, 512)),
    "five 1x1 convolutions": (pointwise, (1, 64, 28, 28)),
    "mobilenetv2": (MODELS["mobilenetv2"], (1, 3, 64, 64)),
    "resnet18": (MODELS["resnet18"], (1, 3, 32, 32)),
    "googlenet": (MODELS["googlenet"], (1, 3, 32, 32)),
    "densenet": (MODELS["densenet"], (1, 3, 32, 32)),
    "resnet50": (MODELS["resnet50"], (1, 3, 64, 64)),
    "yolov5m": (MODELS["yolov5m"], (1, 3, 64, 64)),
    "bisenetv2": (MODELS["bisenetv2"], (1, 3, 64, 64)),
}


def zero_blocks(model: nn.Module, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)) and module.weight.shape[1] >= BLOCK[1]:
            grid = sp.Block(*BLOCK).grid(tuple(module.weight.shape))
            mask = (torch.rand(grid.n, generator=generator) >= share).float()
            module.weight.data *= grid.expand(mask)


def runner(path: Path, x: Tensor) -> Callable[[], None]:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(path), num_threads=1)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x.numpy())
    interpreter.invoke()
    return interpreter.invoke  # type: ignore[no-any-return]


def seconds(run: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(name: str, share: float, int8: bool, args: argparse.Namespace) -> dict[str, Any]:
    make, shape = CASES[name]
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(shape)
    zero_blocks(model, share)
    settings: dict[str, Any] = {"int8": True, "calibration": [torch.randn(shape) for _ in range(4)]} if int8 else {}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / "dense.tflite", Path(folder) / "sparse.tflite"]
        results = [
            sp.export_litert(model, path, x, sparse=sparse, **settings) for path, sparse in zip(paths, (False, True), strict=True)
        ]
        dense, sparse = (runner(path, x) for path in paths)
        times = [(seconds(dense, args.repeats), seconds(sparse, args.repeats)) for _ in range(args.rounds)]
    return {
        "ratios": [a / b for a, b in times],
        "dense ms": 1e3 * statistics.median(a for a, _ in times),
        "sizes": [result.size for result in results],
        "difference": results[1].difference / results[1].scale,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the record to write")
    parser.add_argument("--case", action="append", help="only these networks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in args.case or CASES:
        for share, int8 in [*((share, False) for share in (SHARES if "layers" in name or "1x1" in name else (0.9,))), (0.9, True)]:
            result = measure(name, share, int8, args)
            dense, sparse = result["sizes"]
            kind, ratios = "int8" if int8 else "float32", [round(value, 3) for value in result["ratios"]]
            print(
                f"{name:<22} {share:<5g} {kind:<8} {dense:>11,} {sparse:>11,} bytes   dense {result['dense ms']:.3f} ms, "
                f"dense / sparse {statistics.median(ratios):.2f}   differs by {result['difference']:.0e}",
                flush=True,
            )
            row = {"model": name, "data": "x".join(map(str, CASES[name][1])), "block": "16x8", "sparsity": share, "unit": "ratio"}
            row |= {"protocol": f"median of {args.repeats}", "method": f"LiteRT {kind}"}
            spread = statistics.stdev(ratios) if len(ratios) > 1 else None
            rows.append(
                row
                | {
                    "metric": "dense time / sparse time",
                    "values": ratios,
                    "mean": statistics.mean(ratios),
                    "std": spread,
                    "n": len(ratios),
                }
            )
            size = round(dense / sparse, 3)
            rows.append(
                row
                | {
                    "metric": "dense bytes / sparse bytes",
                    "values": [size],
                    "mean": size,
                    "std": None,
                    "n": 1,
                    "bytes": [dense, sparse],
                }
            )
    if args.out is not None:
        machine = f"{platform.machine()}, 1 thread, Python {platform.python_version()}, torch {torch.__version__}"
        settings = {"rounds": args.rounds, "repeats": args.repeats, "block": BLOCK, "sparsities": SHARES}
        cases = "".join(f" --case {name!r}" for name in args.case or ())
        save_record(
            args.out, {"rows": rows}, settings, NOTE, [f"python bench/litert.py{cases} --out records/litert-cpu"], [machine]
        )


if __name__ == "__main__":
    main()
