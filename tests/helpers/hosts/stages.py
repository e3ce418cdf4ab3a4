"""The stages that a model goes through, each with an independent check. A stage raises if its check fails."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import smartprune as sp

from .models import make

BLOCK = (16, 8)
SPARSITY = 0.8
FLOOR = 0.1  # random weights say nothing about which layers matter; without a floor some of them lose every block
SEARCH_STEPS, MORE_STEPS = 4, 2
ROUNDING = 1e-4  # of the largest output


class NothingToPruneError(Exception):
    """No layer of the model can be pruned by default, and the plan says why."""


class HostRun:
    """One model on its way through the stages."""

    def __init__(self, host: str, folder: Path) -> None:
        self.host = host
        self.folder = folder  # for the files of the stages
        self.model, self.example = make(host)
        self.parameters = dict(self.model.named_parameters())
        self.keys = list(self.model.state_dict())
        self.plan: sp.Plan | None = None
        self.pruner: sp.Pruner | None = None
        self.masked: list[Tensor] = []
        self.receipt: sp.Receipt | None = None

    def outputs(self, model: Callable[..., Any] | None = None) -> list[Tensor]:
        """The output tensors of a model for the example, in eval mode."""
        model = model or self.model
        if isinstance(model, nn.Module):
            model.eval()
        torch.manual_seed(1)
        with torch.no_grad():
            return list(tensors_of(call(model, self.example)))

    def baked(self) -> sp.Receipt:
        assert self.receipt is not None
        return self.receipt


def call(model: Callable[..., Any], example: Any) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def tensors_of(output: Any) -> Iterator[Tensor]:
    """The tensors of an output, however it is nested."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_of(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors_of(value)


def check_plan(run: HostRun) -> str:
    """The plan is feasible, and every weight with two axes or more is either a layer or skipped with a reason."""
    try:
        run.plan = sp.plan(run.model, BLOCK, SPARSITY, floor=FLOOR, example=run.example)
    except sp.SmartpruneError as error:
        if "nothing to prune" in str(error):
            raise NothingToPruneError(str(error)) from None
        raise
    assert run.plan.feasible, run.plan.problem
    assert str(run.plan)
    listed = len(run.plan.layers) + len(run.plan.skipped)
    weights = {id(p) for p in run.model.parameters() if p.dim() > 1}
    assert listed == len(weights), f"the plan lists {listed} of {len(weights)} weights"
    assert all(skipped.reason for skipped in run.plan.skipped)
    return f"{len(run.plan.layers)} of {len(weights)}"


def check_attach(run: HostRun) -> str:
    """Parameters stay the same objects with the same names, and the layers are those of the plan."""
    assert run.plan is not None
    run.pruner = sp.attach(
        run.model, sp.Smart(), block=BLOCK, sparsity=SPARSITY, floor=FLOOR, steps=SEARCH_STEPS, example=run.example
    )
    assert [layer.name for layer in run.pruner.plan.layers] == [layer.name for layer in run.plan.layers]
    now = dict(run.model.named_parameters())
    assert all(now[name] is parameter for name, parameter in run.parameters.items())
    return "pass"


def check_train(run: HostRun) -> str:
    """A few steps of search and fine-tuning: gradients are finite, weights and scores change, and the mask becomes hard."""
    assert run.pruner is not None
    run.model.train()
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    weights_before = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for _ in range(SEARCH_STEPS + MORE_STEPS):
        tensors = [x for x in tensors_of(call(run.model, run.example)) if x.is_floating_point() and x.requires_grad]
        loss = sum(((x - 1).square().mean() for x in tensors), torch.zeros(()))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        assert bool(norm.isfinite()), "a gradient is not finite"
        assert float(norm) > 0, "all gradients are zero"
        optimizer.step()
        run.pruner.step()
        optimizer.zero_grad()
    assert any(not torch.equal(a, b.detach()) for a, b in zip(weights_before, parameters, strict=True))
    keep = math.ceil((1 - Fraction(str(SPARSITY))) * run.pruner.plan.n)
    assert int(run.pruner.mask.sum()) == keep
    run.masked = run.outputs()
    assert all(bool(x.isfinite().all()) for x in run.masked if x.is_floating_point()), "an output is not finite"
    return "pass"


def check_bake(run: HostRun) -> str:
    """The baked model is plain, has its original keys and parameters, and computes the same bits as the masked one."""
    run.receipt = sp.bake(run.model)
    assert run.receipt.met
    assert list(run.model.state_dict()) == run.keys
    now = dict(run.model.named_parameters())
    assert list(now) == list(run.parameters)
    assert all(now[name] is parameter for name, parameter in run.parameters.items())
    assert_equal(run.outputs(), run.masked)
    return "pass"


def check_count(run: HostRun) -> str:
    """Nonzero blocks, counted in numpy from the stored weights and the types of their modules, are as many as requested."""
    receipt = run.baked()
    total = kept = 0
    for row in receipt.layers:
        module_name, _, attribute = row.weight.rpartition(".")
        module = run.model.get_submodule(module_name)
        counts = count_blocks(getattr(module, attribute).detach().numpy(), *layout(module, attribute))
        assert counts == (row.blocks.total, row.blocks.kept), f"{row.weight}: {counts} blocks in all and nonzero"
        total, kept = total + counts[0], kept + counts[1]
    assert kept == math.ceil((1 - Fraction(str(SPARSITY))) * total), f"{kept} of {total} blocks are nonzero"
    return f"{kept:,} of {total:,}"


def layout(module: nn.Module, attribute: str) -> tuple[bool, int]:
    """Whether a weight stores its input axis first, and into how many segments its first axis is divided."""
    if isinstance(module, nn.MultiheadAttention) and attribute == "in_proj_weight":
        return False, 3
    if isinstance(module, (nn.LSTMCell, nn.GRUCell)):
        return False, 4 if isinstance(module, nn.LSTMCell) else 3
    transposed = isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
    return transposed or type(module).__name__ == "Conv1D", int(getattr(module, "groups", 1))


def count_blocks(weight: np.ndarray[Any, Any], input_first: bool, segments: int) -> tuple[int, int]:
    """How many blocks a weight has, and how many of them hold a nonzero number."""
    sizes = [*(reversed(BLOCK) if input_first else BLOCK), *[1] * (weight.ndim - 2)]
    ranges = []
    for axis, size in enumerate(sizes):
        part = weight.shape[axis] // (segments if axis == 0 else 1)
        starts = range(0, weight.shape[axis], part)
        ranges.append([slice(s + i, min(s + i + size, s + part)) for s in starts for i in range(0, part, size)])
    occupied = [bool(weight[place].any()) for place in itertools.product(*ranges)]
    return len(occupied), sum(occupied)


def check_verify(run: HostRun) -> str:
    """The model, and its state dict in a file, agree with the receipt. A changed weight does not."""
    receipt = run.baked()
    result = sp.verify(run.model, receipt=receipt)
    assert result.ok, str(result)
    path = run.folder / "plain.pt"
    torch.save(run.model.state_dict(), path)
    stored = sp.verify(path, receipt=receipt)
    assert stored.ok, str(stored)
    damaged = copy.deepcopy(run.model.state_dict())
    row = next(row for row in receipt.layers if row.blocks.removed)
    damaged[row.weight].fill_(1.0)
    assert not sp.verify(damaged, receipt=receipt).ok, "verify accepts a model that lost its zeros"
    return "pass"


def check_pack(run: HostRun) -> str:
    """A packed file is smaller, and restores every bit in a fresh model."""
    path = run.folder / "packed"
    sp.pack(run.model, path, receipt=run.baked())
    assert sp.verify(path).ok
    fresh, _ = make(run.host, seed=1)
    sp.unpack(path, fresh)
    stored = fresh.state_dict()
    for name, tensor in run.model.state_dict().items():
        assert stored[name].numpy().tobytes() == tensor.numpy().tobytes(), f"{name} differs after unpacking"
    assert_equal(run.outputs(fresh), run.masked)
    dense = sum(x.numel() * x.element_size() for x in {id(x): x for x in run.model.state_dict(keep_vars=True).values()}.values())
    return f"{100 * path.stat().st_size / dense:.0f} %"


def check_onnx(run: HostRun) -> str:
    """onnxruntime computes what the model computes."""
    import onnxruntime

    path = run.folder / "model.onnx"
    sp.export_onnx(run.model, path, run.example, receipt=run.baked())
    assert sp.verify(path).ok
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    if isinstance(run.example, Mapping) and set(names) <= set(run.example):
        values = [run.example[name] for name in names]
    else:
        values = list(tensors_of(run.example))
    assert len(values) == len(names), f"the file has the inputs {names}"
    outputs = session.run(None, dict(zip(names, [x.numpy() for x in values], strict=True)))
    assert_close([torch.from_numpy(x) for x in outputs], run.masked)
    return "pass"


def check_accelerate(run: HostRun) -> str:
    """The accelerated model computes what the model computes, from a traced graph or with replaced layers."""
    fast = sp.accelerate(run.model, example=run.example, backend="native")
    assert_close(run.outputs(fast), run.masked)
    assert_equal(run.outputs(), run.masked)
    assert_close(run.outputs(sp.accelerate(run.model, example=run.example)), run.masked)
    return "layers" if "own code" in repr(fast) else "export" if "torch.export" in repr(fast) else "fx"


def check_report(run: HostRun) -> str:
    """The report counts the same blocks as the receipt."""
    report = sp.report(run.model, BLOCK)
    assert str(report)
    rows = {row.weight: row.blocks for row in report.layers}
    for row in run.baked().layers:
        assert (rows[row.weight].total, rows[row.weight].kept) == (row.blocks.total, row.blocks.kept), row.weight
    return "pass"


def check_copies(run: HostRun) -> str:
    """A deep copy, a pickled copy and a fresh model with the same state dict compute the same bits."""
    fresh, _ = make(run.host, seed=1)
    fresh.load_state_dict(run.model.state_dict())
    copies = [copy.deepcopy(run.model), fresh]
    for model in copies:
        assert_equal(run.outputs(model), run.masked)
        assert sp.verify(model, receipt=run.baked()).ok
    if pickled(fresh) is None:  # no model of this class can be pickled after a forward pass, pruned or not
        return "not pickled"
    model = pickled(run.model)
    assert model is not None, "the model cannot be pickled, and one that was never pruned can"
    assert_equal(run.outputs(model), run.masked)
    return "pass"


def pickled(model: nn.Module) -> nn.Module | None:
    """A copy of a model through a file, or None if it cannot be saved."""
    buffer = io.BytesIO()
    try:
        torch.save(model, buffer)
    except (AttributeError, TypeError, pickle.PicklingError):
        return None
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b), f"outputs differ by {float((a.double() - b.double()).abs().max()):.1e}"


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(actual) == len(expected), f"{len(actual)} outputs in place of {len(expected)}"
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        scale, difference = float(b.double().abs().max()), float((a.double() - b.double()).abs().max())
        assert difference <= ROUNDING * scale, f"outputs differ by {difference:.1e} of {scale:.1e}"


LIFE = {"plan": check_plan, "attach": check_attach, "train": check_train, "bake": check_bake}  # each needs the one before it
USES = {
    "count": check_count,
    "verify": check_verify,
    "pack": check_pack,
    "onnx": check_onnx,
    "accelerate": check_accelerate,
    "report": check_report,
    "copies": check_copies,
}  # each needs a baked model
STAGES: dict[str, Callable[[HostRun], str]] = {**LIFE, **USES}
