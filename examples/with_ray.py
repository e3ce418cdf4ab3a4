"""Pruning in a training loop of ray.train, with two workers. Run: python examples/with_ray.py

It reports a checkpoint after every epoch. ``--epochs 1`` stops after one of three, and the same command without it continues.
"""

import argparse
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig, get_checkpoint, get_context, report
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import smartprune as sp

EPOCHS, SEARCH = 3, 2  # epochs of the training, and of the search at its beginning
WORKERS = 2


def make_data(samples: int = 192) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(samples, 16, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()


def train_on_worker(config: dict[str, Any]) -> None:
    rank, workers = get_context().get_world_rank(), get_context().get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    batches = list(zip(*(values[rank::workers].split(8) for values in make_data()), strict=True))
    # before prepare_model, which wraps the model in DDP, and before the optimizer, which then trains the scores, too
    pruner = sp.attach(model, sp.Smart(), block=(8, 4), sparsity=0.5, steps=SEARCH * len(batches))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    wrapped = prepare_model(model)
    parts = {"model": model, "optimizer": optimizer, "pruner": pruner}

    first = 0
    if checkpoint := get_checkpoint():  # of an earlier training in the same folder
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        for name, part in parts.items():
            part.load_state_dict(state[name])
        first = state["epochs"]
    for epoch in range(first, config["epochs"]):
        for x, y in batches:
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            pruner.step()
            optimizer.zero_grad()
        state = {name: part.state_dict() for name, part in parts.items()}
        save({"epoch": epoch + 1, "phase": pruner.phase}, rank, {"state.pt": {**state, "epochs": epoch + 1}})
    if pruner.phase == "search":
        return

    receipt = sp.bake(model)  # on every worker
    digest = hashlib.sha256(b"".join(value.numpy(force=True).tobytes() for value in model.state_dict().values())).hexdigest()
    digests = [None] * workers
    torch.distributed.all_gather_object(digests, digest)
    files = {"model.pt": model.state_dict(), "receipt.json": receipt}
    save({"kept": receipt.blocks.kept, "weights": digests, "resumed at": first}, rank, files)


def save(metrics: dict[str, Any], rank: int, files: dict[str, Any]) -> None:
    """Reports metrics on every worker, and a checkpoint with these files on the first one."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            if isinstance(content, sp.Receipt):
                content.save(Path(folder) / name)
            else:
                torch.save(content, Path(folder) / name)
        report(metrics, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


def main(folder: Path, epochs: int = EPOCHS) -> dict[str, Any]:
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={"epochs": epochs},
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(name="pruned", storage_path=str(folder.absolute())),
    )
    result = trainer.fit()
    result.checkpoint.to_directory(folder / "last")
    return dict(result.metrics)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/with_ray"))
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    args = parser.parse_args()
    if (args.out / "last" / "receipt.json").exists():
        parser.error(f"--out: {args.out} holds a finished training; choose another folder")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(log_to_driver=False)
    print(main(args.out, args.epochs), flush=True)
    ray.shutdown()
