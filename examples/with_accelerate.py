"""Pruning in a loop with Accelerate. Run: accelerate launch --cpu --num_processes 2 examples/with_accelerate.py

It saves its state after every epoch. ``--resume`` continues from the last one, and ``--epochs 1`` stops after one of three.
"""

import argparse
import hashlib
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import smartprune as sp

EPOCHS, SEARCH = 3, 2  # epochs of the training, and of the search at its beginning


def make_data(samples: int = 192) -> TensorDataset:
    x = torch.randn(samples, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


def main(folder: Path, epochs: int = EPOCHS, resume: bool = False, cpu: bool = True) -> str:
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=2)
    set_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    loader = DataLoader(make_data(), batch_size=8)
    steps_per_epoch = len(loader) // accelerator.num_processes // accelerator.gradient_accumulation_steps
    # before prepare, which wraps the model in DDP, and before the optimizer, which then trains the scores, too
    pruner = sp.attach(model, sp.Smart(), block=(8, 4), sparsity=0.5, steps=SEARCH * steps_per_epoch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(pruner)  # save_state and load_state include it from now on

    first = 0
    if resume:
        last = max((folder / "states").iterdir(), key=lambda path: int(path.name))
        accelerator.load_state(str(last))
        first = int(last.name)
    for epoch in range(first, epochs):
        for x, y in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward(nn.functional.cross_entropy(wrapped(x), y))
                optimizer.step()
                if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
                    pruner.step()  # after real steps of the optimizer only
                optimizer.zero_grad()
        accelerator.save_state(str(folder / "states" / str(epoch + 1)))
    if pruner.phase == "search":
        return f"rank {accelerator.process_index}: step {pruner.count} of {pruner.steps} of the search"
    receipt = sp.bake(accelerator.unwrap_model(wrapped))  # on every process
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        receipt.save(folder / "receipt.json")
        torch.save(model.state_dict(), folder / "model.pt")
    weights = hashlib.sha256(b"".join(value.numpy(force=True).tobytes() for value in model.state_dict().values())).hexdigest()
    return f"rank {accelerator.process_index}: kept {receipt.blocks.kept} of {receipt.blocks.total} blocks, weights {weights}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/with_accelerate"))
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    print(main(args.out, args.epochs, args.resume), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
