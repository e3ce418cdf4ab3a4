"""A plain PyTorch training loop. The lines marked + prune the model. Run: python examples/your_loop.py"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import smartprune as sp  # +


def main(epochs: int = 12, sparsity: float = 0.9) -> tuple[float, sp.Receipt]:
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(y))
    train, test = order[:1400], order[1400:]

    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    per_epoch = len(train) // 64

    pruner = sp.attach(model, sp.Smart(), block=(8, 4), sparsity=sparsity, steps=epochs // 2 * per_epoch)  # +
    optimizer.add_param_group(pruner.param_group())  # +
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train))].split(64)[:per_epoch]:
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            pruner.step()  # +
            optimizer.zero_grad()
    receipt = sp.bake(model)  # +

    model.eval()
    with torch.no_grad():
        accuracy = float((model(x[test]).argmax(1) == y[test]).float().mean())
    return accuracy, receipt


if __name__ == "__main__":
    accuracy, receipt = main()
    print(receipt)
    print(f"accuracy {accuracy:.3f}")
