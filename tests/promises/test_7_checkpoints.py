"""Promise 7: a search under FSDP2 continues from torch.distributed.checkpoint with any number of ranks."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

import smartprune as sp
from helpers import distributed_checkpoints
from helpers.distributed_checkpoints import last_checkpoint, load, loop, result, save, setup, train
from helpers.killed_ranks import Job

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
SEARCH, STEPS = 4, 7
SAVED_AT = (2, 5)  # in the search, and in fine-tuning
LOOP_STEPS = 30
WORLDS = (2, 3, 1)  # the numbers of ranks that load what two ranks saved


def save_and_go_on(folder: str) -> None:
    parts, rank, saved = setup(SEARCH), torch.distributed.get_rank(), {}
    for step in range(STEPS):
        train(*parts, step, step + 1)
        if step + 1 in SAVED_AT:
            save(*parts, Path(folder, f"step-{step + 1}"))
            saved[step + 1] = parts[1].state_dict()
    torch.save(result(parts[0], parts[1]) | {"saved": saved}, f"{folder}/whole-{rank}")


def load_and_go_on(folder: str) -> None:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for step in SAVED_AT:
        parts = setup(SEARCH)
        load(*parts, Path(folder, f"step-{step}"))
        at_load = parts[1].state_dict()
        train(*parts, step, STEPS)
        torch.save(result(parts[0], parts[1]) | {"loaded": at_load}, f"{folder}/{world}-{step}-{rank}")


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for job, world in ((save_and_go_on, 2), *((load_and_go_on, world) for world in WORLDS)):
        if rank < world:
            store = f"file://{folder}/store-{job.__name__}-{world}"
            torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
            job(folder)
            torch.distributed.barrier()
            if world == 1:
                load_another_search(folder)
            elif job is save_and_go_on:
                Path(folder, "loop").mkdir(exist_ok=True)
                loop(Path(folder, "loop"), LOOP_STEPS)
            torch.distributed.destroy_process_group()
    os._exit(0)  # an orderly exit sometimes crashes in a gloo thread


def load_another_search(folder: str) -> None:
    try:
        load(*setup(SEARCH, sparsity=0.6), Path(folder, f"step-{SAVED_AT[0]}"))
    except sp.SmartpruneError as error:
        Path(folder, "refused").write_text(str(error))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of two ranks, and with the results of one, two and three ranks."""
    out = tmp_path_factory.mktemp("checkpoints")
    mp.spawn(worker, args=(str(out),), nprocs=max(WORLDS))
    return out


def results(folder: Path, name: str, world: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}-{rank}", weights_only=True) for rank in range(world)]


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {**state["tensors"], **{name: value for name, value in state.items() if isinstance(value, Tensor)}}


def plain_values(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "tensors" and not isinstance(value, Tensor)}


@pytest.mark.parametrize("step", SAVED_AT)
@pytest.mark.parametrize("world", WORLDS)
def test_any_number_of_ranks_loads_the_exact_state(folder: Path, world: int, step: int) -> None:
    saved = results(folder, "whole", 2)[0]["saved"][step]
    for loaded in (of_rank["loaded"] for of_rank in results(folder, f"{world}-{step}", world)):
        torch.testing.assert_close(tensors(loaded), tensors(saved), rtol=0, atol=0, equal_nan=True)
        assert str(plain_values(loaded)) == str(plain_values(saved))
        assert loaded["phase"] == ("search" if step < SEARCH else "frozen")


@pytest.mark.parametrize("step", SAVED_AT)
def test_resuming_with_the_same_number_of_ranks_is_bit_exact(folder: Path, step: int) -> None:
    for whole, resumed in zip(results(folder, "whole", 2), results(folder, f"2-{step}", 2), strict=True):
        torch.testing.assert_close(resumed["weights"], whole["weights"], rtol=0, atol=0)
        assert resumed["hash"] == whole["hash"]


@pytest.mark.parametrize("step", SAVED_AT)
@pytest.mark.parametrize("world", [3, 1])
def test_another_number_of_ranks_gives_the_same_mask_and_the_exact_budget(folder: Path, world: int, step: int) -> None:
    """The order in which gradients are added differs, so weights are equal up to rounding."""
    whole = results(folder, "whole", 2)[0]
    first, *others = results(folder, f"{world}-{step}", world)
    for other in others:
        torch.testing.assert_close(other["weights"], first["weights"], rtol=0, atol=0)
        assert torch.equal(other["mask"], first["mask"])
    assert first["met"]
    assert first["kept"] == -(-3 * first["total"] // 10) == whole["kept"]  # ceil((1 - 0.7) * total)
    assert torch.equal(first["mask"], whole["mask"])
    torch.testing.assert_close(first["weights"], whole["weights"], rtol=1e-4, atol=1e-6)


def test_the_checkpoint_of_another_search_is_refused(folder: Path) -> None:
    message = (folder / "refused").read_text()
    assert "pruner.load_state_dict(): the saved pruner has limit=" in message
    assert "attach with the arguments of the saved run" in message


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")
def test_a_killed_rank_restarted_by_torchrun_changes_no_bit(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "loop"
    words = [distributed_checkpoints.__file__, str(out), str(LOOP_STEPS)]
    job = Job(words, lambda: last_checkpoint(out), tmp_path / "log", distributed_checkpoints.NEW_STORE, longest=0.05)
    assert job.run(kills=1, seconds=300)
    whole = torch.load(folder / "loop" / "result-0.pt", weights_only=True)
    for rank in (0, 1):
        resumed = torch.load(out / f"result-{rank}.pt", weights_only=True)
        torch.testing.assert_close(resumed["weights"], whole["weights"], rtol=0, atol=0)
        assert (resumed["hash"], resumed["kept"], resumed["met"]) == (whole["hash"], whole["kept"], True)
