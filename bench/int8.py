"""How accurate are pruned networks in int8, after training and with quantization-aware training?

python bench/int8.py [--network resnet8 | mobilenetv2] [--out records/int8-digits] [--seeds 3] [--kept FOLDER]

A resnet8 of half width, or a mobilenetv2, on digits: trained, pruned with SMART, baked, and then brought to int8 in four ways. The
three of smartprune measure ranges on 512 training samples. Quantization-aware training is that of torch.ao (FX) for 3 more epochs,
while ``hold`` keeps the zeros. Its row with float weights trains for 3 more epochs as well, so that both can be compared.
MobileNetV2 gets pictures of 16 pixels, and no quantization-aware training. --kept is a folder for the trained weights, which
another run then starts from.
Needs: pip install 'smartprune[onnx,litert,digits]'.
"""

import argparse
import copy
import platform
import statistics
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import smartprune as sp
from smartprune.experiments.compare.record import save_record
from smartprune.models import MODELS

MORE, TRAIN, BATCH = 3, 1300, 64


@dataclass(frozen=True)
class Case:
    """A network, and how it is trained and pruned."""

    model: str  # name in the record
    build: Callable[[], nn.Module]
    block: tuple[int, int]
    shares: tuple[float, ...]
    epochs: int
    rate: float
    side: int = 8  # of a picture
    aware: bool = True  # whether quantization-aware training is measured too


CASES = {
    "resnet8": Case("resnet8, width 8", lambda: MODELS["resnet8"](width=8), (8, 4), (0.0, 0.8, 0.9), 16, 0.1),
    "mobilenetv2": Case("mobilenetv2", lambda: MODELS["mobilenetv2"](10, 1), (16, 8), (0.0, 0.8), 12, 0.05, 16, False),
}
NOTE = (
    "Accuracy on the 497 test pictures of digits, of which one is 0.2 points: differences below half a point are noise. The task "
    "is easy; others may lose more in int8. The values of a seed start from the same float model. The error of outputs is the "
    "root mean square of their difference to the float model's on the test pictures, relative to their spread about their mean."
)


def data(side: int = 8) -> tuple[Tensor, Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    if side != x.shape[-1]:
        x = nn.functional.interpolate(x, size=side, mode="bilinear")
    return x[order], torch.tensor(digits.target)[order]


def train(model: nn.Module, x: Tensor, y: Tensor, optimizer: Any, epochs: int, pruner: Any = None) -> None:
    model.train()
    steps = epochs * (TRAIN // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for batch in torch.randperm(TRAIN).split(BATCH)[: TRAIN // BATCH]:
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            if pruner is not None:
                pruner.step()
            optimizer.zero_grad()
            schedule.step()
    model.eval()


def sgd(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)


def trained(case: Case, x: Tensor, y: Tensor, share: float, kept: Path | None) -> nn.Module:
    model = case.build()
    if kept is not None and kept.exists():
        model.load_state_dict(torch.load(kept))
        return model.eval()
    optimizer = sgd(model, case.rate)
    pruner = None
    if share:
        steps = case.epochs // 2 * (TRAIN // BATCH)
        pruner = sp.attach(model, sp.Smart(), block=case.block, sparsity=share, steps=steps)
        optimizer.add_param_group(pruner.param_group())
    train(model, x, y, optimizer, case.epochs, pruner)
    if share:
        sp.bake(model)
    if kept is not None:
        torch.save(model.state_dict(), kept)
    return model


def outputs_of(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([run(batch) for batch in x.split(1)])


def accuracy(outputs: Tensor, y: Tensor) -> float:
    return 100 * float((outputs.argmax(1) == y).float().mean())


def error(outputs: Tensor, exact: Tensor) -> float:
    return 100 * float((outputs - exact).norm() / (exact - exact.mean(0)).norm())


def in_onnx(model: nn.Module, x: Tensor, block: tuple[int, int], folder: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    path = folder / "m.onnx"
    sp.export_onnx(model, path, x[:1], block=block, int8=True, calibration=list(x[:512].split(64)))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda batch: torch.from_numpy(session.run(None, {name: batch.numpy()})[0])


def in_litert(model: nn.Module, x: Tensor, block: tuple[int, int], folder: Path) -> Callable[[Tensor], Tensor]:
    from ai_edge_litert.interpreter import Interpreter

    path = folder / "m.tflite"
    sp.export_litert(model, path, x[:1], block=block, int8=True, calibration=list(x[:512].split(64)))
    runner = Interpreter(str(path), num_threads=1).get_signature_runner()
    (name,) = runner.get_input_details()
    return lambda batch: torch.from_numpy(np.array(runner(**{name: batch.numpy()})["output"]))


def accelerated(model: nn.Module, x: Tensor, block: tuple[int, int], folder: Path) -> Callable[[Tensor], Tensor]:
    return sp.accelerate(model, example=list(x[:512].split(64)), dtype="int8")


def quantization_aware(model: nn.Module, x: Tensor, y: Tensor, int8: bool) -> nn.Module:
    """The model after more training, with fake quantization and converted, or in float."""
    from torch.ao.quantization import get_default_qat_qconfig_mapping, quantize_fx

    model = copy.deepcopy(model).train()
    if int8:
        torch.backends.quantized.engine = "fbgemm" if "fbgemm" in torch.backends.quantized.supported_engines else "qnnpack"
        mapping = get_default_qat_qconfig_mapping(torch.backends.quantized.engine)
        model = quantize_fx.prepare_qat_fx(model, mapping, (x[:2],))
    if any(bool((p == 0).any()) for p in model.parameters() if p.dim() > 1):
        sp.hold(model)
    train(model, x, y, sgd(model, 0.01), MORE)
    return quantize_fx.convert_fx(model) if int8 else model


def measure(case: Case, seed: int, share: float, data: tuple[Tensor, Tensor], kept: Path | None) -> dict[tuple[str, str], float]:
    """Accuracy and errors by method and metric."""
    x, y = data
    torch.manual_seed(seed)
    model = trained(case, x, y, share, None if kept is None else kept / f"{seed}-{share}.pt")
    test, labels = x[TRAIN:], y[TRAIN:]
    exact = outputs_of(model, test)
    out = {("float32", "accuracy"): accuracy(exact, labels)}
    for name, make in {"ONNX int8": in_onnx, "LiteRT int8": in_litert, "accelerate int8": accelerated}.items():
        with tempfile.TemporaryDirectory() as folder:
            outputs = outputs_of(make(model, x[:TRAIN], case.block, Path(folder)), test)
        out[name, "accuracy"] = accuracy(outputs, labels)
        out[name, "error of outputs"] = error(outputs, exact)
    for name, int8 in {"float32, 3 more epochs": False, "torch.ao QAT int8": True}.items() if case.aware else ():
        torch.manual_seed(seed)
        out[name, "accuracy"] = accuracy(outputs_of(quantization_aware(model, x, y, int8), test), labels)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=CASES, default="resnet8")
    parser.add_argument("--out", type=Path, help="folder of the record to write")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kept", type=Path, help="folder for trained weights")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    case = CASES[args.network]
    given = data(case.side)
    rows = []
    for share in case.shares:
        results = [measure(case, seed, share, given, args.kept) for seed in range(args.seeds)]
        for name, metric in results[0]:
            values = [round(result[name, metric], 2) for result in results]
            print(f"{share:g} {name:<24} {metric:<18} {', '.join(f'{value:.2f}' for value in values)}", flush=True)
            std = statistics.stdev(values) if len(values) > 1 else None
            row = {"model": case.model, "data": "digits", "method": name, "block": "x".join(map(str, case.block))}
            row |= {
                "sparsity": share or "dense",
                "protocol": f"{case.epochs} epochs",
                "metric": metric,
                "unit": "%",
                "values": values,
            }
            rows.append(row | {"mean": statistics.mean(values), "std": std, "n": len(values)})
    if args.out is not None:
        settings = {
            "network": args.network,
            "epochs": case.epochs,
            "more": MORE,
            "train": TRAIN,
            "batch": BATCH,
            "seeds": args.seeds,
        }
        settings |= {"block": case.block, "rate": case.rate, "side": case.side}
        machine = f"{platform.machine()}, 1 thread, Python {platform.python_version()}, torch {torch.__version__}"
        command = f"python bench/int8.py --network {args.network} --seeds {args.seeds} --out {args.out}"
        save_record(args.out, {"rows": rows}, settings, NOTE, [command], [machine])


if __name__ == "__main__":
    main()
