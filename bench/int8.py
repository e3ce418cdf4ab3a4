"""How accurate are pruned networks in int8, after training and with quantization-aware training?

python bench/int8.py [--out records/int8-digits] [--seeds 3]

A resnet8 of half width on digits: trained, pruned with SMART, baked, and then brought to int8 in four ways. The three of
smartprune measure ranges on 512 training samples. Quantization-aware training is that of torch.ao (FX) for 3 more epochs, while
``hold`` keeps the zeros. Its row with float weights trains for 3 more epochs as well, so that both can be compared.
Needs: pip install 'smartprune[onnx,litert,digits]'.
"""

import argparse
import copy
import platform
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import smartprune as sp
from smartprune.experiments.compare.record import save_record
from smartprune.models import MODELS

BLOCK, SHARES, EPOCHS, MORE, TRAIN, BATCH = (8, 4), (0.0, 0.8, 0.9), 16, 3, 1300, 64
NOTE = (
    "Accuracy on the 497 test pictures of digits, of which one is 0.2 points: differences below half a point are noise. The "
    "network is small and its task is easy; larger networks may lose more in int8. The values of a seed start from the same "
    "float model."
)


def data() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return (torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16)[order], torch.tensor(digits.target)[order]


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


def trained(x: Tensor, y: Tensor, share: float) -> nn.Module:
    model = MODELS["resnet8"](width=8)
    optimizer = sgd(model, 0.1)
    if not share:
        train(model, x, y, optimizer, EPOCHS)
        return model
    pruner = sp.attach(model, sp.Smart(), block=BLOCK, sparsity=share, steps=EPOCHS // 2 * (TRAIN // BATCH))
    optimizer.add_param_group(pruner.param_group())
    train(model, x, y, optimizer, EPOCHS, pruner)
    sp.bake(model)
    return model


def accuracy(run: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        outputs = torch.cat([run(batch) for batch in x.split(1)])
    return 100 * float((outputs.argmax(1) == y).float().mean())


def in_onnx(model: nn.Module, x: Tensor, folder: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    path = folder / "m.onnx"
    sp.export_onnx(model, path, x[:1], block=BLOCK, int8=True, calibration=list(x[:512].split(64)))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda batch: torch.from_numpy(session.run(None, {name: batch.numpy()})[0])


def in_litert(model: nn.Module, x: Tensor, folder: Path) -> Callable[[Tensor], Tensor]:
    from ai_edge_litert.interpreter import Interpreter

    path = folder / "m.tflite"
    sp.export_litert(model, path, x[:1], block=BLOCK, int8=True, calibration=list(x[:512].split(64)))
    runner = Interpreter(str(path), num_threads=1).get_signature_runner()
    (name,) = runner.get_input_details()
    return lambda batch: torch.from_numpy(np.array(runner(**{name: batch.numpy()})["output"]))


def accelerated(model: nn.Module, x: Tensor, folder: Path) -> Callable[[Tensor], Tensor]:
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


def measure(seed: int, share: float, x: Tensor, y: Tensor) -> dict[str, float]:
    torch.manual_seed(seed)
    model = trained(x, y, share)
    test, labels = x[TRAIN:], y[TRAIN:]
    out = {"float32": accuracy(model, test, labels)}
    for name, make in {"ONNX int8": in_onnx, "LiteRT int8": in_litert, "accelerate int8": accelerated}.items():
        with tempfile.TemporaryDirectory() as folder:
            out[name] = accuracy(make(model, x[:TRAIN], Path(folder)), test, labels)
    for name, int8 in {"float32, 3 more epochs": False, "torch.ao QAT int8": True}.items():
        torch.manual_seed(seed)
        out[name] = accuracy(quantization_aware(model, x, y, int8), test, labels)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the record to write")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    x, y = data()
    rows = []
    for share in SHARES:
        results = [measure(seed, share, x, y) for seed in range(args.seeds)]
        for name in results[0]:
            values = [round(result[name], 2) for result in results]
            print(f"{share:g} {name:<24} {', '.join(f'{value:.1f}' for value in values)}", flush=True)
            std = statistics.stdev(values) if len(values) > 1 else None
            row = {"model": "resnet8, width 8", "data": "digits", "method": name, "block": "8x4", "sparsity": share or "dense"}
            row |= {"protocol": f"{EPOCHS} epochs", "metric": "accuracy", "unit": "%", "values": values}
            rows.append(row | {"mean": statistics.mean(values), "std": std, "n": len(values)})
    if args.out is not None:
        settings = {"epochs": EPOCHS, "more": MORE, "train": TRAIN, "batch": BATCH, "seeds": args.seeds, "block": BLOCK}
        machine = f"{platform.machine()}, 1 thread, Python {platform.python_version()}, torch {torch.__version__}"
        save_record(args.out, {"rows": rows}, settings, NOTE, ["python bench/int8.py --out records/int8-digits"], [machine])


if __name__ == "__main__":
    main()
