"""Several processes at one run, as torchrun starts them: who is who, what they agree on, and how an error stops them all.

A rank is one of these processes; the first one has number 0, writes the files and shows progress. In a single process
every function here is what its name says for a world of one, and costs nothing.
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

WAIT = datetime.timedelta(hours=2)  # longer than any evaluation: a rank that is gone is noticed at once, not by waiting
UNITS = 8  # FSDP gathers about so large a part of the model at a time
LOST = ("gloo", "Connection", "NCCL", "TCPStore", "ProcessGroup")  # what torch says when another rank is gone

T = TypeVar("T")


def _started() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def world() -> int:
    """Number of processes."""
    if _started():
        return torch.distributed.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ and "RANK" in os.environ else 1


def rank() -> int:
    if _started():
        return torch.distributed.get_rank()
    return int(os.environ["RANK"]) if world() > 1 else 0


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Meets the other processes, if there are any; a process group that is there already is used and left alone."""
    if world() == 1:
        yield
        return
    if not torch.distributed.is_available():
        raise SmartpruneError(f"WORLD_SIZE={world()}, but this torch was built without torch.distributed; start one process")
    own = not _started()
    if device == "cuda":
        here = int(os.environ.get("LOCAL_RANK", "0"))
        if here >= torch.cuda.device_count():
            raise SmartpruneError(
                f"process {here} of this machine finds {torch.cuda.device_count()} GPUs; start as many processes as there are GPUs"
            )
        torch.cuda.set_device(here)
    try:
        if own:
            torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=WAIT)
        yield
    except SmartpruneError as error:
        if rank() == 0:
            raise
        raise SmartpruneError(f"rank {rank()}: {error}") from None
    except RuntimeError as error:
        if not any(word in str(error) for word in LOST):
            raise
        said = str(error).strip().splitlines()[0]
        raise SmartpruneError(
            f"rank {rank()}: another process ended before its time; its error is the one to read ({said})"
        ) from None
    else:
        if own:
            any_of(True)  # waits for all: none ends while another still talks to it
            torch.distributed.destroy_process_group()


def first(work: Callable[[], T]) -> T:
    """What ``work`` gives on the first rank, for all of them; an error there is raised on every rank."""
    if world() == 1:
        return work()
    box: list[Any] = [None]
    if rank() == 0:
        try:
            box = [(work(), None)]
        except SmartpruneError as error:
            box = [(None, str(error))]
    torch.distributed.broadcast_object_list(box, 0)
    value, wrong = box[0]
    if wrong is not None:
        raise SmartpruneError(wrong)
    return value  # type: ignore[no-any-return]


def any_of(*said: bool) -> tuple[bool, ...]:
    """For each question, whether any rank says yes."""
    if world() == 1:
        return said
    flags = torch.tensor(said, dtype=torch.int32, device="cpu")
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    return tuple(bool(flag) for flag in flags)


def gathered(value: T) -> list[T]:
    """Every rank's value, in order."""
    if world() == 1:
        return [value]
    out: list[Any] = [None] * world()
    torch.distributed.all_gather_object(out, value)
    return out


def require_same(what: str, digest: str) -> None:
    """Raises on every rank unless all have the same digest."""
    found = gathered(digest)
    if len(set(found)) > 1:
        raise SmartpruneError(
            f"the ranks do not agree on {what}: " + ", ".join(f"{i}: {value[:12]}" for i, value in enumerate(found))
        )


def batches(data: Data, size: int, seed: int, epoch: int, at: int) -> Iterator[Any]:
    """This rank's equal part of every batch of ``size`` samples, from batch number ``at`` on.

    A batch of ``size`` is ``world`` batches of a ``world``-th of it, of which every rank takes its own: samples are the
    same whatever the number of ranks. ``Data.batches`` may skip what is not asked for (``every``), and save the work.
    """
    if world() == 1:
        return data.batches(size, seed, epoch, at)
    count, share, start = data.steps(size) - at, size // world(), at * world() + rank()
    return islice(every_batch(data, share, seed, epoch, start, world()), count)


def require_shares(data: Data, size: int) -> None:
    """Raises unless every batch can be shared among the ranks equally."""
    if size % world():
        raise SmartpruneError(f"batch={size} cannot be shared among {world()} processes equally; choose a multiple of {world()}")
    if world() > 1 and data.steps(size // world()) < data.steps(size) * world():
        raise SmartpruneError(f"batch={size} is more than there is to train on; choose a smaller one for {world()} processes")


def wrap(model: nn.Module, device: torch.device, unused: bool) -> nn.Module:
    """The model whose backward pass averages gradients over the ranks (DDP). ``unused``: some parameters may get none."""
    gc.collect()  # the wrapper of an earlier stage may be waiting to go, and would average too
    places = [torch.cuda.current_device()] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=places, find_unused_parameters=unused)


def shard(model: nn.Module, device: torch.device) -> None:
    """Splits the model's parameters among the ranks (FSDP2), in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world(),))
    most = sum(p.numel() for p in model.parameters()) // UNITS
    for unit in units(model, most):
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)  # the rest


def units(model: nn.Module, most: int) -> list[nn.Module]:
    """The largest modules of several layers with at most ``most`` parameters; layers that are none's belong to the model."""
    out: list[nn.Module] = []
    for child in model.children():
        if not any(True for _ in child.children()):
            continue
        called = not isinstance(child, (nn.ModuleList, nn.ModuleDict))  # these have no forward pass to gather for
        if called and sum(p.numel() for p in child.parameters()) <= most:
            out.append(child)
        else:
            out += units(child, most)
    return [unit for unit in out if any(True for _ in unit.parameters())]


def exchange(model: nn.Module, on: bool) -> AbstractContextManager[Any]:
    """In here backward passes exchange gradients with the other ranks, or leave that to a later one."""
    if on or world() == 1:
        return nullcontext()
    if hasattr(model, "set_requires_gradient_sync"):
        return _held_back(model)
    return model.no_sync()  # type: ignore[operator, no-any-return]


@contextmanager
def _held_back(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
