"""Promise 7: two processes with different data hold the same scores and the same mask, checked by hash, under DDP and FSDP2.

(Whole runs by several processes: tests/test_ranks.py.)
"""

import hashlib
import math
import os
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import smartprune as sp
from smartprune.core.budget import Budget
from smartprune.pruning.consensus import same_everywhere

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
STEPS = 7  # four of search, then fine-tuning


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def made() -> nn.Module:
    torch.manual_seed(0)
    middle = nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 22))  # 22 rows of 4: the last block is partial
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), middle, nn.ReLU(), nn.Linear(22, 4))


def data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 12, generator=draw), torch.randint(0, 4, (8,), generator=draw)


def loop(model: nn.Module, pruner: sp.Pruner, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    losses = []
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


METHODS = {
    "smart": sp.Smart(),
    "stochastic": sp.Smart(mask_type="stochastic"),
    "gain": sp.Smart(gain=True, follow=True, reach=20.0),
}


SEEDED = {"smart": sp.Smart(), "magnitude": sp.Magnitude(), "acdc": sp.Acdc(cycles=1)}


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for parallel in ("ddp", "fsdp"):
        for name in METHODS:
            work(rank, parallel, name, f"{folder}/{parallel}-{name}-{rank}")
    for name in SEEDED:
        seeded(rank, name, f"{folder}/seeded-{name}-{rank}")
    for name in ("wrapper", "module"):
        wrapped_first(name, data(0, rank), f"{folder}/{name}-{rank}")
    assigned(rank, f"{folder}/assigned-{rank}")
    for steps in (2, 5):
        loaded_alone(rank, steps, f"{folder}/alone-{steps}-{rank}")
    idle(data(0, rank), f"{folder}/idle-{rank}")
    numbers = ([1.0, math.nan, math.inf], [1.0, float(rank)], [1.0, math.nan if rank else 1.0])
    torch.save([same_everywhere(torch.tensor(mine)) for mine in numbers], f"{folder}/same-{rank}")
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads do not always survive an orderly end


def work(rank: int, parallel: str, name: str, file: str) -> None:
    model = made()
    if parallel == "fsdp":
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    pruner = sp.attach(model, METHODS[name], block=(4, 4), sparsity=0.7, steps=4)
    wrapped = nn.parallel.DistributedDataParallel(model) if parallel == "ddp" else model
    losses = loop(wrapped, pruner, [data(step, rank) for step in range(STEPS)])
    weights = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in model.state_dict().items()}
    receipt = sp.bake(wrapped)
    assert receipt.met
    parts = [digest(pruner.mask), receipt.mask_hash, *(digest(value) for value in weights.values())]
    torch.save({"digests": parts, "weights": weights, "losses": losses, "mask": pruner.mask}, file)


def seeded(rank: int, name: str, file: str) -> None:
    """Weights that each rank has drawn for itself; DDP gives all the first rank's."""
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 22), nn.ReLU(), nn.Linear(22, 4)
    )
    pruner = sp.attach(model, SEEDED[name], block=(4, 4), sparsity=0.7, steps=4)
    wrapped = nn.parallel.DistributedDataParallel(model)
    digests = []
    for step in range(STEPS):
        loop(wrapped, pruner, [data(step, rank)])
        digests += [digest(pruner.mask), *(digest(parameter) for parameter in model.parameters())]
    torch.save(digests, file)


def wrapped_first(name: str, batch: tuple[Tensor, Tensor], file: str) -> None:
    wrapped = nn.parallel.DistributedDataParallel(made())
    pruner = sp.attach(wrapped if name == "wrapper" else wrapped.module, sp.Smart(), block=(4, 4), sparsity=0.7, steps=4)
    try:
        loop(wrapped, pruner, [batch])
    except sp.SmartpruneError as error:
        torch.save(str(error), file)


def assigned(rank: int, file: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = made()
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.7, steps=4)
    loop(model, pruner, [data(0, rank)])
    model.load_state_dict({name: value.detach().clone() for name, value in model.state_dict().items()}, assign=True)
    loop(model, pruner, [data(1, rank)])
    torch.save(digest(pruner.scores), file)


def loaded_alone(rank: int, steps: int, file: str) -> None:
    """A checkpoint that the first rank loads, for DDP to share."""
    first, again = made(), made()
    pruner = sp.attach(first, sp.Smart(), block=(4, 4), sparsity=0.7, steps=4)
    loop(nn.parallel.DistributedDataParallel(first), pruner, [data(step, rank) for step in range(steps)])
    other = sp.attach(again, sp.Smart(), block=(4, 4), sparsity=0.7, steps=4)
    if rank == 0:
        again.load_state_dict(first.state_dict())
        other.load_state_dict(pruner.state_dict())
    try:
        loop(nn.parallel.DistributedDataParallel(again), other, [data(steps, rank)])
    except sp.SmartpruneError as error:
        torch.save(str(error), file)


def idle(batch: tuple[Tensor, Tensor], file: str) -> None:
    """Weights that get no gradient, which DDP has to be told of."""
    model = made()
    pruner = sp.attach(model, sp.Smart(train_weights=False), block=(4, 4), sparsity=0.7, steps=4)
    try:
        loop(nn.parallel.DistributedDataParallel(model), pruner, [batch])
    except sp.SmartpruneError as error:
        torch.save(str(error), file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both ranks hold in the end."""
    out = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, args=(str(out),), nprocs=2)
    return out


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_agree(folder: Path, parallel: str, method: str) -> None:
    told = [torch.load(folder / f"{parallel}-{method}-{rank}", weights_only=True) for rank in (0, 1)]
    assert told[0]["digests"] == told[1]["digests"]
    assert len(told[0]["digests"]) == 2 + 8 + 1  # weights and biases, and the scores

    # and they hold what one process would that sees all of the data
    model = made()
    pruner = sp.attach(model, METHODS[method], block=(4, 4), sparsity=0.7, steps=4)
    pairs = [[data(step, rank) for rank in (0, 1)] for step in range(STEPS)]
    together = loop(model, pruner, [(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in pairs])
    assert torch.equal(told[0]["mask"], pruner.mask)
    for a, b, both in zip(told[0]["losses"], told[1]["losses"], together, strict=True):
        assert (a + b) / 2 == pytest.approx(both, rel=1e-4)
    for name, value in model.named_parameters():
        if name.endswith("smartprune_scores"):
            continue  # once frozen they are of no use, and DDP goes on to decay them
        torch.testing.assert_close(told[0]["weights"][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", SEEDED)
def test_ranks_that_began_with_different_weights_agree(folder: Path, method: str) -> None:
    told = [torch.load(folder / f"seeded-{method}-{rank}", weights_only=True) for rank in (0, 1)]
    assert told[0] == told[1]


@pytest.mark.parametrize("how", ["wrapper", "module"])
def test_wrapped_before_attach_is_an_error(folder: Path, how: str) -> None:
    """DDP averages no gradients of parameters that came later: every rank would learn scores of its own."""
    for rank in (0, 1):
        assert "attach first, then wrap" in torch.load(folder / f"{how}-{rank}", weights_only=True)


def test_scores_that_were_assigned_are_still_averaged(folder: Path) -> None:
    """load_state_dict(assign=True) of a model in parts puts other parameters in place of the scores."""
    assert len({torch.load(folder / f"assigned-{rank}", weights_only=True) for rank in (0, 1)}) == 1


@pytest.mark.parametrize("steps", [2, 5])
def test_a_state_that_one_rank_loaded_alone_is_an_error(folder: Path, steps: int) -> None:
    """Ranks that freeze at different steps would wait for each other, or mistake one message for another."""
    for rank in (0, 1):
        said = torch.load(folder / f"alone-{steps}-{rank}", weights_only=True)
        assert "the ranks stand at different steps of the search" in said
        assert "load the state of the pruner on every rank" in said


def test_ddp_has_to_be_told_of_weights_that_do_not_train(folder: Path) -> None:
    for rank in (0, 1):
        assert "find_unused_parameters=True" in torch.load(folder / f"idle-{rank}", weights_only=True)


def test_scores_that_are_nan_on_every_rank_do_not_differ(folder: Path) -> None:
    """A loss that is NaN in the first step, which on a GPU is told later, is no matter of how DDP wrapped the model."""
    for rank in (0, 1):
        assert torch.load(folder / f"same-{rank}", weights_only=True) == [True, False, False]


def test_sharding_after_attach_is_an_error(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = made()
        pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.7, steps=4)
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(sp.SmartpruneError, match=r"call fully_shard first, then attach: scores stay whole on every rank"):
            loop(model, pruner, [data(0, 0)])
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("method", [sp.Awg(stages=1), sp.Pdp()])
def test_methods_that_need_whole_weights_say_so(tmp_path: Path, method: object) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = made()
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(sp.SmartpruneError, match=r"needs whole weights, and FSDP has split them; use DDP, or another method"):
            sp.attach(model, method, block=(4, 4), sparsity=0.7, steps=10)  # type: ignore[arg-type]
    finally:
        torch.distributed.destroy_process_group()


def test_ddp_of_one_process(tmp_path: Path) -> None:
    """Frozen scores have no gradient of their own, and DDP waits for one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 4))
        pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, include="*", steps=2)
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
        for _ in range(5):
            wrapped(torch.randn(8, 12)).square().mean().backward()
            optimizer.step()
            pruner.step()
            optimizer.zero_grad()
        assert sp.bake(wrapped).met
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("method", [sp.Smart(), sp.Acdc(cycles=1)])
@pytest.mark.parametrize("budget", [None, sp.macs(0.7, example=data(0, 0)[0])])
def test_evaluation_between_steps_of_fsdp(tmp_path: Path, method: object, budget: Budget | None) -> None:
    """After a forward pass without a backward one, FSDP's root holds its weights whole: what is written to these is lost."""
    from torch.distributed.fsdp import fully_shard

    def trained(split: bool) -> dict[str, Tensor]:
        model = made()
        if split:
            mesh = torch.distributed.init_device_mesh("cpu", (1,))
            fully_shard(model[2], mesh=mesh)
            fully_shard(model, mesh=mesh)
        judge(model)
        pruner = sp.attach(model, method, (4, 4), 0.7 if budget is None else None, budget, steps=4)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(STEPS):
            x, y = data(step, 0)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            judge(model)
            pruner.step()
            optimizer.zero_grad()
            judge(model)
        sp.bake(model)
        return {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in model.state_dict().items()}

    def judge(model: nn.Module) -> None:
        with torch.no_grad():
            model(data(0, 1)[0])

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ours, plain = trained(True), trained(False)
    finally:
        torch.distributed.destroy_process_group()
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)
        assert torch.equal(ours[name].signbit(), value.signbit())  # a zero is a zero
