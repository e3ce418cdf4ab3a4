"""Promise 7: all ranks hold the same scores and the same mask under DDP and FSDP2. (tests/training/test_ranks.py: whole jobs.)"""

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
from smartprune.pruning import checks
from smartprune.pruning.consensus import same_on_all_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
STEPS = 7  # four search steps, then fine-tuning


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    middle = nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 22))  # 22 rows of 4: the last block is partial
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), middle, nn.ReLU(), nn.Linear(22, 4))


def data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 12, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def train(model: nn.Module, pruner: sp.Pruner, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
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


DIFFERENT_WEIGHTS = {"smart": sp.Smart(), "magnitude": sp.Magnitude(), "acdc": sp.Acdc(cycles=1)}


DIFFERENT_ARGUMENTS: dict[str, dict[str, object]] = {"sparsity": {"sparsity": 0.8}, "floor": {"floor": 0.1}}  # of rank 1


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for parallel in ("ddp", "fsdp"):
        for name in METHODS:
            train_job(rank, parallel, name, f"{folder}/{parallel}-{name}-{rank}")
    for name in DIFFERENT_WEIGHTS:
        different_weights(rank, name, f"{folder}/seeded-{name}-{rank}")
    for name in ("wrapper", "module"):
        wrap_before_attach(name, data(0, rank), f"{folder}/{name}-{rank}")
    assign_state(rank, f"{folder}/assigned-{rank}")
    for steps in (2, 5):
        load_on_one_rank(rank, steps, f"{folder}/alone-{steps}-{rank}")
    frozen_weights(data(0, rank), f"{folder}/idle-{rank}")
    for name in DIFFERENT_ARGUMENTS:
        different_arguments(rank, name, f"{folder}/other-{name}-{rank}")
    numbers = ([1.0, math.nan, math.inf], [1.0, float(rank)], [1.0, math.nan if rank else 1.0])
    torch.save([same_on_all_ranks(torch.tensor(values)) for values in numbers], f"{folder}/same-{rank}")
    torch.distributed.barrier()
    os._exit(0)  # an orderly exit sometimes crashes in a gloo thread


def train_job(rank: int, parallel: str, name: str, file: str) -> None:
    model = make_model()
    if parallel == "fsdp":
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    pruner = sp.attach(model, METHODS[name], block=(4, 4), sparsity=0.7, steps=4)
    wrapped = nn.parallel.DistributedDataParallel(model) if parallel == "ddp" else model
    losses = train(wrapped, pruner, [data(step, rank) for step in range(STEPS)])
    weights = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in model.state_dict().items()}
    receipt = sp.bake(wrapped)
    assert receipt.met
    parts = [digest(pruner.mask), receipt.mask_hash, *(digest(value) for value in weights.values())]
    torch.save({"digests": parts, "weights": weights, "losses": losses, "mask": pruner.mask}, file)


def different_weights(rank: int, name: str, file: str) -> None:
    """Each rank initializes different weights. DDP broadcasts those of rank 0."""
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 22), nn.ReLU(), nn.Linear(22, 4)
    )
    pruner = sp.attach(model, DIFFERENT_WEIGHTS[name], block=(4, 4), sparsity=0.7, steps=4)
    wrapped = nn.parallel.DistributedDataParallel(model)
    digests = []
    for step in range(STEPS):
        train(wrapped, pruner, [data(step, rank)])
        digests += [digest(pruner.mask), *(digest(parameter) for parameter in model.parameters())]
    torch.save(digests, file)


def wrap_before_attach(name: str, batch: tuple[Tensor, Tensor], file: str) -> None:
    wrapped = nn.parallel.DistributedDataParallel(make_model())
    pruner = sp.attach(wrapped if name == "wrapper" else wrapped.module, sp.Smart(), block=(4, 4), sparsity=0.7, steps=4)
    try:
        train(wrapped, pruner, [batch])
    except sp.SmartpruneError as error:
        torch.save(str(error), file)


def assign_state(rank: int, file: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.7, steps=4)
    train(model, pruner, [data(0, rank)])
    model.load_state_dict({name: value.detach().clone() for name, value in model.state_dict().items()}, assign=True)
    train(model, pruner, [data(1, rank)])
    torch.save(digest(pruner.scores), file)


def load_on_one_rank(rank: int, steps: int, file: str) -> None:
    """Only rank 0 loads a checkpoint, and DDP broadcasts the weights."""
    first, resumed = make_model(), make_model()
    pruner = sp.attach(first, sp.Smart(), block=(4, 4), sparsity=0.7, steps=4)
    train(nn.parallel.DistributedDataParallel(first), pruner, [data(step, rank) for step in range(steps)])
    other = sp.attach(resumed, sp.Smart(), block=(4, 4), sparsity=0.7, steps=4)
    if rank == 0:
        resumed.load_state_dict(first.state_dict())
        other.load_state_dict(pruner.state_dict())
    try:
        train(nn.parallel.DistributedDataParallel(resumed), other, [data(steps, rank)])
    except sp.SmartpruneError as error:
        torch.save(str(error), file)


def different_arguments(rank: int, name: str, file: str) -> None:
    arguments = {"block": (4, 4), "sparsity": 0.7} | (DIFFERENT_ARGUMENTS[name] if rank else {})
    model = make_model()
    pruner = sp.attach(model, sp.Smart(), steps=4, **arguments)  # type: ignore[arg-type]
    try:
        train(nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), pruner, [data(0, rank)])
    except sp.SmartpruneError as error:
        torch.save(str(error), file)


def frozen_weights(batch: tuple[Tensor, Tensor], file: str) -> None:
    """Weights get no gradient, so DDP needs find_unused_parameters=True."""
    model = make_model()
    pruner = sp.attach(model, sp.Smart(train_weights=False), block=(4, 4), sparsity=0.7, steps=4)
    try:
        train(nn.parallel.DistributedDataParallel(model), pruner, [batch])
    except sp.SmartpruneError as error:
        torch.save(str(error), file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of both ranks."""
    out = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, args=(str(out),), nprocs=2)
    return out


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("method", METHODS)
def test_ranks_agree_and_match_a_single_process(folder: Path, parallel: str, method: str) -> None:
    results = [torch.load(folder / f"{parallel}-{method}-{rank}", weights_only=True) for rank in (0, 1)]
    assert results[0]["digests"] == results[1]["digests"]
    assert len(results[0]["digests"]) == 2 + 8 + 1  # weights and biases, and the scores

    # a single process that sees all data gives the same result
    model = make_model()
    pruner = sp.attach(model, METHODS[method], block=(4, 4), sparsity=0.7, steps=4)
    pairs = [[data(step, rank) for rank in (0, 1)] for step in range(STEPS)]
    together = train(model, pruner, [(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in pairs])
    assert torch.equal(results[0]["mask"], pruner.mask)
    for a, b, both in zip(results[0]["losses"], results[1]["losses"], together, strict=True):
        assert (a + b) / 2 == pytest.approx(both, rel=1e-4)
    for name, value in model.named_parameters():
        if name.endswith("smartprune_scores"):
            continue  # unused once frozen, and DDP still decays them
        torch.testing.assert_close(results[0]["weights"][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", DIFFERENT_WEIGHTS)
def test_ranks_with_different_initial_weights_agree(folder: Path, method: str) -> None:
    results = [torch.load(folder / f"seeded-{method}-{rank}", weights_only=True) for rank in (0, 1)]
    assert results[0] == results[1]


@pytest.mark.parametrize("how", ["wrapper", "module"])
def test_wrapping_before_attach_raises(folder: Path, how: str) -> None:
    """DDP does not average gradients of parameters added later, so each rank would learn different scores."""
    for rank in (0, 1):
        assert "attach first, then wrap" in torch.load(folder / f"{how}-{rank}", weights_only=True)


def test_scores_are_still_averaged_after_load_state_dict_with_assign(folder: Path) -> None:
    """load_state_dict(assign=True) replaces the scores by other parameters."""
    assert len({torch.load(folder / f"assigned-{rank}", weights_only=True) for rank in (0, 1)}) == 1


@pytest.mark.parametrize("steps", [2, 5])
def test_loading_a_state_on_one_rank_only_raises(folder: Path, steps: int) -> None:
    """Ranks that freeze at different steps would deadlock or mix up their messages."""
    for rank in (0, 1):
        message = torch.load(folder / f"alone-{steps}-{rank}", weights_only=True)
        assert "the ranks are at different steps of the search" in message
        assert "load the state of the pruner on every rank" in message


@pytest.mark.parametrize("name", ["sparsity", "floor"])
def test_different_arguments_of_attach_raise_on_every_rank(folder: Path, name: str) -> None:
    for rank in (0, 1):
        message = torch.load(folder / f"other-{name}-{rank}", weights_only=True)
        assert "the ranks prune differently" in message
        assert "same arguments on every rank" in message


def test_ddp_without_find_unused_parameters_raises_for_frozen_weights(folder: Path) -> None:
    for rank in (0, 1):
        assert "find_unused_parameters=True" in torch.load(folder / f"idle-{rank}", weights_only=True)


def test_nan_on_every_rank_counts_as_equal(folder: Path) -> None:
    """A NaN loss in the first step is reported as such, and not as ranks that differ."""
    for rank in (0, 1):
        assert torch.load(folder / f"same-{rank}", weights_only=True) == [True, False, False]


def test_sharding_after_attach_raises(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = make_model()
        pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.7, steps=4)
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(sp.SmartpruneError, match=r"but every rank needs all scores; call fully_shard first, then attach"):
            train(model, pruner, [data(0, 0)])
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("method", [sp.Awg(stages=1), sp.Pdp()])
def test_methods_that_need_whole_weights_refuse_fsdp(tmp_path: Path, method: object) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = make_model()
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(sp.SmartpruneError, match=r"needs whole weights, and FSDP has split them; use DDP, or another method"):
            sp.attach(model, method, block=(4, 4), sparsity=0.7, steps=10)  # type: ignore[arg-type]
    finally:
        torch.distributed.destroy_process_group()


def test_fsdp_refuses_more_blocks_than_every_rank_should_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = make_model()
        blocks = sp.plan(model, block=(4, 4), sparsity=0.7).n
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        monkeypatch.setattr(checks, "MOST_REPLICATED", blocks)
        sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.7, steps=4).detach()
        monkeypatch.setattr(checks, "MOST_REPLICATED", blocks - 1)
        with pytest.raises(
            sp.SmartpruneError, match=rf"attach: {blocks} blocks .* at most {blocks - 1} are allowed; give a larger block"
        ):
            sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.7, steps=4)
    finally:
        torch.distributed.destroy_process_group()


def train_one_rank(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=1)
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
    torch.save(sp.bake(wrapped).met, f"{folder}/met")
    os._exit(0)  # releasing the last reference to a DDP model joins gloo's threads, which sometimes wait for this thread


def test_ddp_with_one_process(tmp_path: Path) -> None:
    """DDP expects a gradient for the frozen scores, too."""
    mp.spawn(train_one_rank, args=(str(tmp_path),), nprocs=1)
    assert torch.load(tmp_path / "met", weights_only=True)


@pytest.mark.parametrize("method", [sp.Smart(), sp.Acdc(cycles=1)])
@pytest.mark.parametrize("budget", [None, sp.macs(0.7, example=data(0, 0)[0])])
def test_evaluation_between_fsdp_steps_does_not_change_the_result(tmp_path: Path, method: object, budget: Budget | None) -> None:
    """After a forward pass without backward, the FSDP root holds unsharded weights, and writes to them are lost."""
    from torch.distributed.fsdp import fully_shard

    def trained(split: bool) -> dict[str, Tensor]:
        model = make_model()
        if split:
            mesh = torch.distributed.init_device_mesh("cpu", (1,))
            fully_shard(model[2], mesh=mesh)
            fully_shard(model, mesh=mesh)
        evaluate(model)
        pruner = sp.attach(model, method, (4, 4), 0.7 if budget is None else None, budget, steps=4)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(STEPS):
            x, y = data(step, 0)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            evaluate(model)
            pruner.step()
            optimizer.zero_grad()
            evaluate(model)
        sp.bake(model)
        return {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in model.state_dict().items()}

    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            model(data(0, 1)[0])

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded, plain = trained(True), trained(False)
    finally:
        torch.distributed.destroy_process_group()
    for name, value in plain.items():
        torch.testing.assert_close(sharded[name], value, rtol=1e-4, atol=1e-6)
        assert torch.equal(sharded[name].signbit(), value.signbit())  # zeros have the same sign
