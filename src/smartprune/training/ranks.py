"""Training with several processes, as torchrun starts them.

A rank is one of these processes. Rank 0 writes the files and shows progress. With a single process, every function here works for
that one rank at no cost.
"""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ..errors import SmartpruneError
from ..tasks.task import every_batch

if TYPE_CHECKING:
    from ..tasks import Data

TIMEOUT = datetime.timedelta(hours=2)  # longer than any evaluation; a rank that died is noticed at once, not by this timeout
FSDP_UNITS = 8  # FSDP gathers about this fraction of the model at a time
LOST_RANK = ("gloo", "Connection", "NCCL", "TCPStore", "ProcessGroup")  # words of torch's errors when another rank is gone

T = TypeVar("T")


def _initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def world_size() -> int:
    """The number of processes."""
    if _initialized():
        return torch.distributed.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ and "RANK" in os.environ else 1


def rank() -> int:
    if _initialized():
        return torch.distributed.get_rank()
    return int(os.environ["RANK"]) if world_size() > 1 else 0


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Joins the process group of the run. A group that exists already is used and not destroyed."""
    if world_size() == 1:
        yield
        return
    if not torch.distributed.is_available():
        raise SmartpruneError(f"WORLD_SIZE={world_size()}, but this torch was built without torch.distributed; start one process")
    created = not _initialized()
    if device == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            raise SmartpruneError(
                f"local rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}; "
                "start as many processes as there are GPUs"
            )
        torch.cuda.set_device(local_rank)
    try:
        if created:
            backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            torch.distributed.init_process_group(backend, timeout=TIMEOUT, **store_after_restart())
        yield
    except SmartpruneError as error:
        if rank() == 0:
            raise
        raise SmartpruneError(f"rank {rank()}: {error}") from None
    except RuntimeError as error:
        if not any(word in str(error) for word in LOST_RANK):
            raise
        message = str(error).strip().splitlines()[0]
        raise SmartpruneError(f"rank {rank()}: another process ended too early; read its error first ({message})") from None
    else:
        if created:
            any_rank(True)  # waits for all ranks, so that none ends while another still communicates with it
            torch.distributed.destroy_process_group()


def store_after_restart() -> dict[str, Any]:
    """Arguments of ``init_process_group`` for ranks that torchrun has restarted.

    torchrun keeps its key-value store, in which restarted ranks would find the addresses of ranks that are gone: they then fail to
    connect, or wait for each other. So every restart uses its own keys. (The torchruns of several machines count restarts
    separately; there, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives every restart a new store.)
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restart == "0" or not is_kept or os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return {}
    distributed: Any = torch.distributed
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = distributed.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    keys = distributed.PrefixStore(f"restart-{restart}", store)
    return {"store": keys, "rank": rank(), "world_size": world_size()}


def on_first(work: Callable[[], T]) -> T:
    """Runs ``work`` on rank 0 and returns its result on all ranks. An error is raised on every rank."""
    if world_size() == 1:
        return work()
    box: list[Any] = [None]
    if rank() == 0:
        try:
            box = [(work(), None)]
        except SmartpruneError as error:
            box = [(None, str(error))]
    torch.distributed.broadcast_object_list(box, 0)
    value, message = box[0]
    if message is not None:
        raise SmartpruneError(message)
    return value  # type: ignore[no-any-return]


def any_rank(*conditions: bool) -> tuple[bool, ...]:
    """For each condition, whether it is true on any rank."""
    if world_size() == 1:
        return conditions
    flags = torch.tensor(conditions, dtype=torch.int32, device="cpu")
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    return tuple(bool(flag) for flag in flags)


def gather(value: T) -> list[T]:
    """The value of every rank, in order."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def require_equal(name: str, digest: str) -> None:
    """Raises on every rank unless all ranks have the same digest."""
    digests = gather(digest)
    if len(set(digests)) > 1:
        raise SmartpruneError(
            f"the ranks do not agree on {name}: " + ", ".join(f"{i}: {value[:12]}" for i, value in enumerate(digests))
        )


def batches(data: Data, size: int, seed: int, epoch: int, first: int) -> Iterator[Any]:
    """This rank's equal part of every batch of ``size`` samples, from batch number ``first`` on.

    A batch of ``size`` consists of one smaller batch per rank, so the samples do not depend on the number of ranks.
    ``Data.batches`` may skip the batches of other ranks (``every``) to save work.
    """
    if world_size() == 1:
        return data.batches(size, seed, epoch, first)
    count, part, start = data.steps(size) - first, size // world_size(), first * world_size() + rank()
    return islice(every_batch(data, part, seed, epoch, start, world_size()), count)


def require_divisible(data: Data, size: int) -> None:
    """Raises unless every batch can be split equally among the ranks."""
    if size % world_size():
        raise SmartpruneError(
            f"batch={size} cannot be split equally among {world_size()} processes; choose a multiple of {world_size()}"
        )
    if world_size() > 1 and data.steps(size // world_size()) < data.steps(size) * world_size():
        raise SmartpruneError(f"batch={size} is larger than the training data; choose a smaller one for {world_size()} processes")


def wrap_ddp(model: nn.Module, device: torch.device, unused: bool) -> nn.Module:
    """The model in DDP, which averages gradients over the ranks. ``unused``: some parameters may get no gradient."""
    gc.collect()  # an uncollected wrapper of an earlier stage would average the gradients too
    device_ids = [torch.cuda.current_device()] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=device_ids, find_unused_parameters=unused)


def shard_fsdp(model: nn.Module, device: torch.device) -> None:
    """Shards the model's parameters over the ranks (FSDP2), in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world_size(),))
    largest = sum(p.numel() for p in model.parameters()) // FSDP_UNITS
    for unit in fsdp_units(model, largest):
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)  # the remaining parameters


def fsdp_units(model: nn.Module, largest: int) -> list[nn.Module]:
    """The largest modules of several layers that have at most ``largest`` parameters. Other layers stay with the model."""
    units: list[nn.Module] = []
    for child in model.children():
        if not any(True for _ in child.children()):
            continue
        has_forward = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if has_forward and sum(p.numel() for p in child.parameters()) <= largest:
            units.append(child)
        else:
            units += fsdp_units(child, largest)
    return [unit for unit in units if any(True for _ in unit.parameters())]


def gradient_sync(model: nn.Module, on: bool) -> AbstractContextManager[Any]:
    """A context in which backward passes synchronize gradients with the other ranks, or leave that to a later pass."""
    if on or world_size() == 1:
        return nullcontext()
    if hasattr(model, "set_requires_gradient_sync"):
        return _without_fsdp_sync(model)
    return model.no_sync()  # type: ignore[operator, no-any-return]


@contextmanager
def _without_fsdp_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
