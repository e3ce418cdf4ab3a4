"""``prune``: removes blocks from a trained model with a few hundred unlabelled inputs, and without a training loop."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ... import __version__
from ...artifacts.receipt import Receipt, remember_receipt
from ...core.block import Block
from ...core.budget import Budget
from ...core.kinds import is_masked
from ...core.layers import Patterns
from ...core.trace import tensors_in
from ...errors import SmartpruneError
from .. import optimizers, zeros
from ..bake import dead_layers, dead_outputs
from ..hold import release_layers
from ..multiply import BlockMultiplier
from ..plan import Plan, make_plan
from ..recalibrate import norms_with_statistics
from ..receipt import make_receipt
from .allocate import with_barriers
from .batches import first_sample, read_batches, size_of
from .job import Job, Progress, Settings
from .store import Store, key_of

SAMPLES = 512
MEMORY = 4.0


def prune(
    model: nn.Module,
    batches: Iterable[Any],
    block: Block | str | Sequence[int | None] = (16, 8),
    sparsity: float | None = None,
    budget: Budget | None = None,
    *,
    floor: float | None = None,
    include: Patterns = (),
    skip: Patterns = (),
    example: Any = None,
    samples: int = SAMPLES,
    memory: float = MEMORY,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Receipt:
    """Removes blocks from a trained model without training it. A few hundred inputs without labels are enough.

    Blocks are removed where the outputs of their layer can be restored best by the weights that stay, and where the loss depends
    least on these outputs. The weights that stay are then refitted by least squares, layer by layer. Where you can train, a
    search (:func:`attach`) or fine-tuning afterwards is more accurate at high sparsities.

    Args:
        model: The trained model. It is pruned in place. If anything fails, it does not change.
        batches: Any iterable of inputs, such as a DataLoader: tensors, dictionaries of arguments, or tuples whose first entries
            are the inputs. Labels are not used.
        block: The size of a block, such as ``(16, 8)`` or ``"16x8"``: output channels, input channels, then the kernel.
        sparsity: The share of the blocks to remove, in [0, 1).
        budget: Any other budget, such as ``macs(0.5, example=x)``. Give ``sparsity`` or ``budget``, not both.
        floor: The smallest share of its blocks that every layer keeps.
        include: Layers to prune although they are skipped by default: a glob of names such as ``"head.*"``, a layer type, or a
            list.
        skip: Layers to leave out, in the same form. It takes precedence over ``include``.
        example: One input of the model, by default the first of the calibration data. See :func:`plan`.
        samples: The least number of samples to read, if there are that many.
        memory: How many GiB the moments of the layers may take at once. At least one layer is always held.
        seed: The seed of the labels and rows that are drawn.
        folder: A new folder for intermediate results. If the call is interrupted, the same call with this folder continues and
            gives the same bits. It is deleted at the end.
        progress: A function that is called with the name of a step, how much of it is done, and of how much.

    Returns:
        The receipt. The model has the zeros already, as after :func:`bake`, and optimizers keep them.

    Warns:
        UserWarning: Layers lost every block, or the outputs no longer depend on the input.

    Raises:
        SmartpruneError: The budget cannot be met, the data is missing or unusable, a layer is never reached, values are not finite,
            or an argument is out of range.

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> receipt = sp.prune(model, [torch.randn(64, 8) for _ in range(4)], block=(4, 4), sparsity=0.5)
        >>> receipt.blocks.kept, receipt.blocks.total
        (12, 24)
    """
    _check_arguments("prune", model, samples, memory, seed)
    if sparsity is None and budget is None:
        raise SmartpruneError("prune: no budget given; give sparsity=0.5, or budget=smartprune.macs(0.5, example=x)")
    if folder is not None and hasattr(budget, "measured") and getattr(budget, "table", None) is None:
        raise SmartpruneError(
            f"prune: folder={str(folder)!r} is for calls that continue with the same bits, and this budget would measure again; "
            "give the budget a file for its measurement, such as table='latency.json'"
        )
    with torch.inference_mode(False), torch.no_grad():
        inputs = read_batches("prune", model, batches, int(samples))
    with torch.inference_mode(False), torch.no_grad(), _own_state(model, int(seed)):
        sample = first_sample(inputs[0]) if example is None else example
        with _own_buffers(model):
            plan = make_plan(model, block, sparsity, budget, floor=floor, include=include, skip=skip, example=sample).require()
        _check_weights(model, plan)
        settings = Settings(seed=int(seed), memory=int(memory * 2**30))
        store = Store(folder, "" if folder is None else _key(model, plan, inputs, settings))
        job = Job(model, plan, inputs, settings, progress or _no_progress, store)
        mask = job.run()
        receipt = make_receipt(plan, dict(job.work.named_parameters(remove_duplicate=False)), mask, "oneshot", job.facts())
        problems = dead_layers(receipt) + dead_outputs(job.work, sample)
        _take_over(model, job.work)
        _hold(model, plan, mask)
        remember_receipt(model, receipt)
        store.clear()
    for problem in problems:  # last, since warnings may be errors, and then the model is pruned already
        warnings.warn(f"prune: {problem.replace('attach with', 'use')}", stacklevel=2)
    return receipt


def saliencies(
    model: nn.Module,
    batches: Iterable[Any],
    block: Block | str | Sequence[int | None] = (16, 8),
    *,
    include: Patterns = (),
    skip: Patterns = (),
    example: Any = None,
    samples: int = SAMPLES,
    memory: float = MEMORY,
    seed: int = 0,
    progress: Progress | None = None,
) -> torch.Tensor:
    """What the removal of each block costs, as :func:`prune` sees it, in the order of the plan. The model does not change.

    A search can start from these numbers: ``attach(..., start=saliencies(...))``.

    Args:
        model: The trained model.
        batches: Any iterable of inputs, as for :func:`prune`.
        block: The size of a block, such as ``(16, 8)`` or ``"16x8"``: output channels, input channels, then the kernel.
        include: Layers to prune although they are skipped by default, as for :func:`prune`.
        skip: Layers to leave out, in the same form.
        example: One input of the model, by default the first of the calibration data. See :func:`plan`.
        samples: How many samples are read at least, if there are so many.
        memory: How many GiB the moments of the layers may take at once.
        seed: The seed of the labels and rows that are drawn.
        progress: A function that is called with the name of a step, how much of it is done, and of how much.

    Returns:
        How much the loss rises, to second order, when a block is removed after all that cost less: float64, one entry per block.
        The numbers grow as a layer loses its signal, so the last blocks of a layer have the highest.

    Raises:
        SmartpruneError: The data is missing or unusable, a layer is never reached, values are not finite, or an argument is out of
            range.

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> costs = sp.saliencies(model, [torch.randn(64, 8) for _ in range(4)], block=(4, 4))
        >>> pruner = sp.attach(model, "smart", block=(4, 4), sparsity=0.5, steps=100, start=costs)
        >>> pruner.scores.argmax() == costs.argmax()
        tensor(True)
    """
    _check_arguments("saliencies", model, samples, memory, seed)
    with torch.inference_mode(False), torch.no_grad():
        inputs = read_batches("saliencies", model, batches, int(samples))
    with torch.inference_mode(False), torch.no_grad(), _own_state(model, int(seed)):
        sample = first_sample(inputs[0]) if example is None else example
        with _own_buffers(model):
            plan = make_plan(model, block, None, None, floor=None, include=include, skip=skip, example=sample).require()
        _check_weights(model, plan)
        settings = Settings(seed=int(seed), memory=int(memory * 2**30))
        job = Job(model, plan, inputs, settings, progress or _no_progress, Store(None, ""))
        return with_barriers(plan.layers, job.costs(torch.zeros(plan.n, dtype=torch.bool, device="cpu")))


def _key(model: nn.Module, plan: Plan, inputs: Sequence[Any], settings: Settings) -> str:
    """A hash of everything that the result depends on."""
    facts = {
        "version": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "layers": [(layer.name, layer.grid.weight_shape, layer.sites) for layer in plan.layers],
        "plan": (str(plan.block), plan.share, plan.bound, plan.unit, plan.floor),
        "settings": settings,
        "sizes": [size_of(batch) for batch in inputs],
    }
    tensors = [("input", tensor) for tensor in tensors_in(inputs)]
    return key_of(facts, [*model.named_parameters(), *model.named_buffers(), *tensors])


@contextmanager
def _own_state(model: nn.Module, seed: int) -> Iterator[None]:
    """Models that draw random numbers draw the same in every call, autocast of the caller is off, since the threads of the job
    do not inherit it, and the state of the caller does not change."""
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    with ExitStack() as stack:
        for kind in {"cpu", *(device.type for device in devices)}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.random.fork_rng(sorted(devices, key=str)))
        torch.manual_seed(seed)
        yield


@contextmanager
def _own_buffers(model: nn.Module) -> Iterator[None]:
    """Buffers that the model changes in forward passes, such as counters, get their values back."""
    before = [
        (module, name, buffer, buffer.clone(), buffer._version)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_inference() and not buffer.is_meta
    ]
    try:
        yield
    finally:
        for module, name, buffer, value, version in before:
            strided = buffer.layout == torch.strided  # torch cannot compare sparse tensors
            if not torch.equal(buffer, value) if strided else buffer._version != version:
                buffer.copy_(value)
            module._buffers[name] = buffer


def _no_progress(step: str, done: int, total: int) -> None:
    pass


def _check_arguments(where: str, model: nn.Module, samples: int, memory: float, seed: int) -> None:
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"{where}: model is a {type(model).__name__}; give a torch.nn.Module")
    masked = next((name for name, module in model.named_modules() if is_masked(module)), None)
    if masked is not None:
        raise SmartpruneError(f"{where}: {masked or 'the model'} has a pruner; bake it first, or start from a fresh model")
    for name, value, least in (("samples", samples, 2), ("seed", seed, None)):
        if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
            raise SmartpruneError(f"{where}: {name}={value!r}; give an integer{'' if least is None else f', at least {least}'}")
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not 0 < memory < 2**20:
        raise SmartpruneError(f"{where}: memory={memory!r}; give a positive number of GiB, such as {MEMORY:g}")


def _check_weights(model: nn.Module, plan: Plan) -> None:
    """The weights must have finite values that can change."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    created = next((name for name, parameter in parameters.items() if parameter.is_inference()), None)
    if created is not None:
        raise SmartpruneError(
            f"prune: {created} was created in inference_mode and cannot change; create or load the model outside of it"
        )
    for layer in plan.layers:
        weight = parameters[layer.weight]
        if weight.is_meta:
            raise SmartpruneError(f"prune: {layer.weight} is on the meta device and has no values; load them first")
        if not bool(weight.detach().isfinite().all()):
            raise SmartpruneError(f"prune: {layer.weight} contains NaN or infinity; load finite weights first")


def _take_over(model: nn.Module, work: nn.Module) -> None:
    """Copies the parameters and batch-norm statistics of the pruned copy into the model."""
    pairs = [*zip(model.parameters(), work.parameters(), strict=True)]
    for norm, other in zip(norms_with_statistics(model), norms_with_statistics(work), strict=True):
        pairs += [(norm.running_mean, other.running_mean), (norm.running_var, other.running_var)]  # type: ignore[list-item]
    for old, new in pairs:
        if not torch.equal(old, new):
            old.copy_(new)


def _hold(model: nn.Module, plan: Plan, mask: torch.Tensor) -> None:
    """Optimizers of this process keep the zeros."""
    optimizers.install()
    weights = plan.blocks(model).weights
    release_layers(model, weights, plan.layers)
    mask = mask.to(weights[0].device)
    zeros.hold_frozen(weights, BlockMultiplier([layer.grid for layer in plan.layers]), mask)
