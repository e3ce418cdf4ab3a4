"""Pruning in the Trainer of Lightning. Run: python examples/with_lightning.py"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import smartprune as sp
from smartprune.integrations.lightning import PruneCallback


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(epochs: int = 10) -> tuple[nn.Module, sp.Receipt]:
    lightning.seed_everything(0)
    x = torch.randn(512, 16)
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()), batch_size=32, shuffle=True)
    prune = PruneCallback(block=(8, 4), sparsity=0.75)
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, callbacks=[prune], logger=False)
    module = Classifier()
    trainer.fit(module, loader)
    return module, prune.receipt


if __name__ == "__main__":
    print(main()[1])
