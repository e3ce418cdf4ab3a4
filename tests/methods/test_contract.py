"""The contract of methods: every entry of METHODS passes the same tests. A new method needs no change here if its defaults fit."""

import copy
import dataclasses
import hashlib
import io
import json
import math
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import smartprune as sp
from helpers import zoo
from helpers.device_syncs import DeviceSyncs
from helpers.training_cases import STEPS, MethodCase, short_method
from smartprune.methods import METHODS, make, settings
from smartprune.methods.method import Clock


@pytest.fixture(params=sorted(METHODS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def node(weight: nn.Parameter) -> Any:
    """The node that accumulates gradients of a parameter. It is a new one once no graph with the parameter is alive."""
    function = weight.expand_as(weight).grad_fn
    assert function is not None
    return function.next_functions[0][0]


def test_a_step_leaves_no_graph(name: str) -> None:
    """Else the tensors of every step stay in memory, and a CUDA graph of the fine-tuning meets nodes of the search."""
    job = MethodCase(name)
    weights = [weight for weight in job.model.parameters() if weight.requires_grad]

    def mark(*_: Any) -> None:
        for weight in weights:
            node(weight).metadata["step"] = job.pruner.count

    handle = job.model.register_forward_hook(mark)
    job.run(STEPS)
    handle.remove()
    assert job.pruner.phase == "frozen"
    assert [node(weight).metadata for weight in weights] == [{}] * len(weights)


def test_a_step_does_not_wait_for_the_gpu(name: str) -> None:
    """Except when a method chooses a new mask, which is rare. (The soft top-k of masks with a warmth has a test of its own.)"""
    job = MethodCase(name, steps=100_000)
    job.run(1)
    job.model.to("meta")
    pruner, method = job.pruner, job.pruner.method
    pruner.search.to_device()
    state = pruner.search.values()
    with DeviceSyncs() as syncs:
        if not hasattr(method, "warmth"):
            method.mask(pruner.blocks, state, None)
        if hasattr(method, "penalty"):
            method.penalty(pruner.blocks, state)
        if hasattr(method, "update"):
            method.update(pruner.blocks, state, Clock(2, pruner.steps))
    assert syncs.operations == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_gpu_a_step_does_not_synchronize(name: str) -> None:
    job = MethodCase(name, steps=100_000)
    job.model.to("cuda")
    job.x, job.y = job.x.to("cuda"), job.y.to("cuda")
    job.run(4)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        job.run(3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("model", sorted(zoo.SMALL))
def test_exact_count(name: str, model: str) -> None:
    job = MethodCase(name, model).run()
    plan = job.pruner.plan
    assert int(job.pruner.mask.sum()) == math.ceil((1 - Fraction("0.8")) * plan.n)
    receipt = sp.bake(job.model)
    assert receipt.met
    assert sp.verify(job.model, receipt=receipt).ok


@pytest.mark.parametrize("steps", [6, 24, 100])
def test_short_and_long_searches(name: str, steps: int) -> None:
    job = MethodCase(name, "plain_cnn", steps=steps).run(steps)
    assert int(job.pruner.mask.sum()) == job.pruner.plan.keep


@pytest.mark.parametrize("kind", ["params", "macs"])
def test_budgets_in_costs(name: str, kind: str) -> None:
    x = zoo.mobilenet_block()[1]
    job = MethodCase(name, budget=sp.params(0.7) if kind == "params" else sp.macs(0.7, example=x)).run()
    cost, mask = job.pruner.plan.cost, job.pruner.mask
    kept = int(cost[mask].sum())
    assert kept <= job.pruner.plan.limit
    assert job.pruner.plan.limit - kept < int(cost[~mask].min())


def test_mask_is_a_mask(name: str) -> None:
    job = MethodCase(name)
    for _ in range(STEPS):
        mask = job.pruner.mask
        assert mask.shape == (job.pruner.plan.n,)
        assert float(mask.min()) >= -1e-6
        assert float(mask.max()) <= 1 + 1e-6
        job.step()
    assert job.pruner.mask.dtype == torch.bool


@pytest.mark.parametrize("stop", [1, 9, 13, 24])
def test_resuming_is_bit_exact(name: str, stop: int) -> None:
    job = MethodCase(name).run(stop)
    buffer = io.BytesIO()
    torch.save([job.model.state_dict(), job.pruner.state_dict(), job.optimizer.state_dict()], buffer)
    job.run(STEPS + 2 - stop)
    buffer.seek(0)
    model, pruner, optimizer = torch.load(buffer, weights_only=True)
    again = MethodCase(name)
    again.model.load_state_dict(model)
    again.pruner.load_state_dict(pruner)
    again.optimizer.load_state_dict(optimizer)
    again.run(STEPS + 2 - stop)
    for (key, a), b in zip(job.model.state_dict().items(), again.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert torch.equal(job.pruner.mask, again.pruner.mask)


@pytest.mark.parametrize("steps", [5, 20, 25])
def test_copies_are_masked(name: str, steps: int) -> None:
    job = MethodCase(name).run(steps)
    job.model.eval()
    twin = copy.deepcopy(job.model)
    assert torch.equal(twin(job.x), job.model(job.x))
    if job.pruner.phase == "search":
        mask = job.pruner.mask
        layer = job.pruner.plan.layers[0]
        raw = job.pruner.blocks.weights[0].detach()
        used = job.model.get_submodule(layer.sites[0][0]).weight.detach()
        assert torch.allclose(used, raw * layer.grid.expand(mask[layer.start : layer.stop]), atol=1e-7)


def test_accumulation(name: str) -> None:
    job = MethodCase(name, "plain_cnn").run(parts=2)
    assert int(job.pruner.mask.sum()) == job.pruner.plan.keep


def test_unknown_setting_lists_the_settings(name: str) -> None:
    fields = [field.name for field in dataclasses.fields(METHODS[name])]
    with pytest.raises(
        sp.SmartpruneError, match=f"unknown setting 'amount' for {METHODS[name].__name__}; it has: {', '.join(fields)}"
    ):
        METHODS[name](amount=0.5)


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("awg", "stages", 2.5),
        ("awg", "stages", "3"),
        ("acdc", "cycles", 1.5),
        ("acdc", "cycles", 0),
        ("gradual", "updates", 0.5),
        ("gradual", "through", "no"),
        ("pas", "exact", "false"),
        ("smart", "follow", None),
        ("smart", "gain", "false"),
        ("smart", "train_weights", "false"),
    ],
)
def test_settings_of_a_wrong_type_raise_at_attach(name: str, setting: str, value: object) -> None:
    model, _ = zoo.plain_cnn()
    with pytest.raises(sp.SmartpruneError, match=f"{METHODS[name].__name__}: {setting}={value!r} .*(integer|True, False)"):
        sp.attach(model, METHODS[name](**{setting: value}), block=(4, 4), sparsity=0.5, steps=50)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_gradient_scaler_skips(name: str, fused: bool) -> None:
    """A scale that is too large gives infinite gradients. The scaler skips the step and lowers the scale."""
    job = MethodCase(name)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.02, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=5)
    weight = job.pruner.blocks.weights[0]
    before = weight.detach().clone()
    for step in range(STEPS):
        loss = nn.functional.cross_entropy(job.model(job.x), job.y) + job.pruner.penalty()
        scaler.scale(1e3 * loss).backward()
        scaler.step(optimizer)
        scaler.update()
        job.pruner.step()
        optimizer.zero_grad()
        assert step > 0 or torch.equal(weight, before)
    assert scaler.get_scale() < 2.0**126
    assert int(job.pruner.mask.sum()) == job.pruner.plan.keep
    assert not torch.equal(weight, before)


def test_a_nan_loss_raises_in_its_step(name: str) -> None:
    job = MethodCase(name, steps=1000)
    for _ in range(3):
        job.step()
    job.x[0, 0, 0, 0] = math.nan
    with pytest.raises(sp.SmartpruneError, match=r"pruner\.step\(\): .* NaN or infini"):
        job.step()


def test_bfloat16(name: str) -> None:
    job = MethodCase(name).run(amp=True)
    assert int(job.pruner.mask.sum()) == job.pruner.plan.keep


def test_settings_survive_json(name: str) -> None:
    method = short_method(name)
    assert make(METHODS[name], json.loads(json.dumps(settings(method)))) == method
    with pytest.raises(sp.SmartpruneError, match=r"unknown setting 'nonsense' for \w+; it has: "):
        make(METHODS[name], {"nonsense": 1})


def test_telemetry(name: str) -> None:
    job = MethodCase(name).run(STEPS)
    telemetry = job.pruner.telemetry()
    assert sum(telemetry["kept"].values()) == job.pruner.plan.keep
    assert telemetry["phase"] == "frozen"


def rank_job(rank: int, folder: str, name: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    job = MethodCase(name, "plain_cnn")
    ddp = nn.parallel.DistributedDataParallel(job.model)
    torch.manual_seed(100 + rank)
    for _ in range(STEPS + 2):
        loss = nn.functional.cross_entropy(ddp(torch.randn(4, 3, 8, 8)), torch.randint(0, 10, (4,)))
        (loss + job.pruner.penalty()).backward()
        job.optimizer.step()
        job.pruner.step()
        job.optimizer.zero_grad()
    bits = b"".join(t.detach().numpy().tobytes() for t in (job.pruner.mask, *job.pruner.blocks.weights))
    Path(folder, f"rank{rank}").write_text(hashlib.sha256(bits).hexdigest())
    torch.distributed.barrier()
    os._exit(0)  # an orderly exit sometimes crashes in a gloo thread


def test_two_ranks_have_the_same_mask(name: str, tmp_path: Path) -> None:
    mp.spawn(rank_job, args=(str(tmp_path), name), nprocs=2)
    assert (tmp_path / "rank0").read_text() == (tmp_path / "rank1").read_text()
