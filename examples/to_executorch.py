"""Prunes output channels, compacts the model, and writes it for ExecuTorch with XNNPACK. Run: make executorch

Needs `pip install executorch`, which keeps your PyTorch. The file runs on phones and boards with the runtime of ExecuTorch.
"""

import sys
import tempfile
from pathlib import Path

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
from sklearn.datasets import load_digits
from torch import nn

import smartprune as sp


def pruned_model(x: torch.Tensor, y: torch.Tensor, epochs: int) -> tuple[nn.Module, sp.Receipt]:
    """A small network for digits without half of its output channels, trained in an ordinary loop."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    steps = epochs // 2 * (len(x) // 64)
    pruner = sp.attach(model, sp.Smart(), block=(1, None, None, None), sparsity=0.5, floor=0.2, steps=steps)
    optimizer.add_param_group(pruner.param_group())
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64)[: len(x) // 64]:
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            pruner.step()
            optimizer.zero_grad()
    return model.eval(), sp.bake(model)


def write_program(model: nn.Module, example: torch.Tensor, path: Path) -> int:
    """Writes a .pte file, and returns its size."""
    program = to_edge_transform_and_lower(torch.export.export(model, (example,)), partitioner=[XnnpackPartitioner()])
    path.write_bytes(program.to_executorch().buffer)
    return path.stat().st_size


def main(epochs: int = 6) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    model, receipt = pruned_model(x[:1400], y[:1400], epochs)
    example, test, labels = x[:1], x[1400:], y[1400:]
    small = sp.compact(model, example)  # channels that are gone are removed: no runtime needs to know about zeros
    print(receipt)
    print(sp.compaction(small))

    folder = Path(tempfile.mkdtemp())
    sizes = [write_program(net, example, folder / name) for net, name in ((model, "dense.pte"), (small, "small.pte"))]
    method = Runtime.get().load_program(folder / "small.pte").load_method("forward")
    with torch.no_grad():
        outputs = torch.cat([method.execute([sample])[0] for sample in test.split(1)])
        expected = model(test)
    difference = float((outputs - expected).abs().max() / expected.abs().max())
    accuracies = [float((out.argmax(1) == labels).float().mean()) for out in (expected, outputs)]
    print(f"dense.pte {sizes[0]:,} bytes, small.pte {sizes[1]:,} bytes")
    print(f"accuracy {accuracies[0]:.3f} in torch, {accuracies[1]:.3f} in ExecuTorch")
    print(f"outputs differ by {difference:.1e} of the largest")
    if difference > 1e-4 or sizes[1] > sizes[0]:
        sys.exit("the program does not compute what the model computes, or is not smaller")


if __name__ == "__main__":
    main()
