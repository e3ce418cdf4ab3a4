"""Promise 7, for DDP: two processes with different data hold the same scores and the same mask, checked by hash."""

import hashlib
import os
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import smartprune as sp

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def worker(rank: int, folder: str, mask_type: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 4))
    pruner = sp.attach(model, sp.Smart(mask_type=mask_type), block=(4, 4), sparsity=0.7, steps=4)
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(100 + rank)
    for _ in range(7):  # four steps of search, then fine-tuning: the scores must not stall DDP
        loss = nn.functional.cross_entropy(ddp(torch.randn(8, 12)), torch.randint(0, 4, (8,)))
        loss.backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    parts = [digest(pruner.mask), *(digest(weight) for weight in pruner.blocks.weights)]
    receipt = sp.bake(ddp)
    parts.append(receipt.mask_hash)
    Path(folder, f"rank{rank}").write_text("\n".join(parts))
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads do not always survive an orderly end


@pytest.mark.parametrize("mask_type", ["deterministic", "stochastic"])
def test_two_ranks_agree(tmp_path: Path, mask_type: str) -> None:
    mp.spawn(worker, args=(str(tmp_path), mask_type), nprocs=2)
    first, second = ((tmp_path / f"rank{rank}").read_text() for rank in (0, 1))
    assert first == second
    assert len(first.splitlines()) == 4
