"""A training loop as users write it: FSDP2, and torch.distributed.checkpoint.

``torchrun --max-restarts=9 --nproc-per-node=2 tests/helpers/distributed_checkpoints.py FOLDER STEPS`` writes a checkpoint after
every step and continues from the last complete one. It needs the environment variable of ``NEW_STORE``.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import smartprune as sp

SAMPLES = 12  # per step, divided among the ranks
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # otherwise restarted ranks may look for ranks that are gone
METADATA = ".metadata"  # PyTorch writes this file of a checkpoint last


def setup(search: int, sparsity: float = 0.7) -> tuple[nn.Module, sp.Pruner, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    middle = nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 22))  # 22 rows of 4: the last block is partial
    model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), middle, nn.ReLU(), nn.Linear(22, 4))
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    weights = list(fully_shard(model, mesh=mesh).parameters())
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=sparsity, steps=search, floor=0.1)
    return model, pruner, torch.optim.AdamW([{"params": weights}, pruner.param_group(lr=3e-3)], lr=0.01)


def train(model: nn.Module, pruner: sp.Pruner, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """The samples of a step do not depend on the number of ranks."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(SAMPLES, 12, generator=generator), torch.randint(0, 4, (SAMPLES,), generator=generator)
        nn.functional.cross_entropy(model(x[rank::world]), y[rank::world]).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()


def save(model: nn.Module, pruner: sp.Pruner, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    from torch.distributed import checkpoint

    checkpoint.save(_states(model, pruner, optimizer), checkpoint_id=folder)


def load(model: nn.Module, pruner: sp.Pruner, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state = _states(model, pruner, optimizer)
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _states(model: nn.Module, pruner: sp.Pruner, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "pruner": pruner}


def result(model: nn.Module, pruner: sp.Pruner) -> dict[str, Any]:
    receipt = sp.bake(model)
    weights: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        weights[name] = getattr(value, "full_tensor", lambda v=value: v)()
    counts = {"kept": receipt.blocks.kept, "total": receipt.blocks.total}
    return {"weights": weights, "mask": pruner.mask, "hash": receipt.mask_hash, "met": receipt.met, **counts}


def last_checkpoint(folder: Path) -> int:
    """The step of the last complete checkpoint, or 0."""
    return max((int(path.parent.name) for path in folder.glob(f"*/{METADATA}")), default=0)


def loop(folder: Path, steps: int) -> None:
    parts, first = setup(search=steps // 2), last_checkpoint(folder)
    if first:
        load(*parts, folder / str(first))
    for step in range(first, steps):
        train(*parts, step, step + 1)
        save(*parts, folder / str(step + 1))
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(folder / str(step - 1), ignore_errors=True)
    torch.save(result(parts[0], parts[1]), folder / f"result-{torch.distributed.get_rank()}.pt")


def main(folder: Path, steps: int) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.init_process_group("gloo")
    loop(folder, steps)
    torch.distributed.barrier()
    os._exit(0)  # an orderly exit sometimes crashes in a gloo thread


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
