"""The runtime: a pruned model that skips the blocks it does not have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.block import Block
from ..core.kinds import is_masked
from ..core.layers import candidates, find_layers
from ..core.occupancy import occupied
from ..errors import SmartpruneError
from .fallback import layered
from .module import Accelerated, Options, copied, parameters
from .trace.tracer import trace

DTYPES = ("float32", "int8")
BACKENDS = ("native", "reference")
MOST_THREADS = 256


def accelerate(
    model: nn.Module,
    block: Block | str | Sequence[int | None] | None = None,
    *,
    example: Tensor | Sequence[Any] | None = None,
    dtype: str = "float32",
    threads: int | None = None,
    device: str = "cpu",
    backend: str = "native",
) -> nn.Module:
    """A module that computes what ``model.eval()`` computes and does no work for pruned blocks.

    The model itself is not touched: its weights are copied, batch norms folded, and everything that the kernels know is
    run as one program. What they do not know is run by torch in between. A model that cannot be traced keeps its own code,
    with its convolutions and linear layers replaced (those inside torch's own modules, such as attention, stay); so does one
    that changes its inputs or buffers, or values in place in an order that is not proved to be kept, one whose traced form
    gives another result, and a call with inputs of an unknown class. int8 has no such form and raises. Zeros are found in
    the weights, whatever pruned them, and dense layers are run by the same kernels. ``block`` is only checked: naming it
    makes a model without a single empty block of that shape an error instead of a disappointment.

    ``example``: an input, or a list of inputs (a tuple is one input of several tensors). int8 needs it to measure how
    large activations become; with float32 it only saves time at the first call. ``threads``: torch's number of threads
    unless given. ``backend="reference"`` runs the same graph in torch, without a C compiler and without any gain.

    Results agree with the model's to float rounding, and with int8 to its rounding; the first result for every structure,
    shape and dtype of inputs is compared with the model's own, and so is one for random inputs; where a model sorts or selects,
    so that rounding alone changes what it gives, layer by layer. Inputs must be finite, for a block that is absent does not
    turn infinity into NaN. For inference only: there are no gradients, and later changes of
    the model's weights are not seen.
    """
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"accelerate: model is a {type(model).__name__}; give a torch module")
    if backend not in BACKENDS:
        raise SmartpruneError(f"accelerate: backend={backend!r} is not one of {', '.join(BACKENDS)}")
    kind = str(device).partition(":")[0]
    if kind not in DEVICES:
        raise SmartpruneError(f"accelerate: device={device!r} is not one of {', '.join(DEVICES)}")
    if threads is None:
        threads = min(torch.get_num_threads(), MOST_THREADS)
    if type(threads) is not int or not 1 <= threads <= MOST_THREADS:
        raise SmartpruneError(f"accelerate: threads={threads!r} is not a number from 1 to {MOST_THREADS}")
    if any(is_masked(module) for module in model.modules()):
        raise SmartpruneError("accelerate: the model is still being pruned; call smartprune.bake(model) first")
    wanted = None if block is None else Block.of(block)
    own = copied(model)
    if wanted is not None:
        _check_block(own, wanted)
    return DEVICES[kind](own, _examples(example), Options(dtype, threads, backend == "reference"), str(device))


def _cpu(own: nn.Module, inputs: Sequence[tuple[Any, ...]], options: Options, device: str) -> nn.Module:
    if options.dtype not in DTYPES:
        raise SmartpruneError(f"accelerate: dtype={options.dtype!r} is not one of {', '.join(DTYPES)}")
    if options.dtype == "int8":
        if not inputs:
            raise SmartpruneError(
                "accelerate: int8 needs example=, an input or a list of inputs like those to come (a few dozen images), to "
                "measure how large the activations become"
            )
        if options.reference:
            raise SmartpruneError('accelerate: backend="reference" knows float32 only')
    out = Accelerated(own, options, {} if options.dtype == "int8" else None)
    if options.dtype == "int8":
        out.measure(inputs)
    if inputs:
        out(*inputs[0])
        return out.own_code() or out
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters(own)):  # only a call says what they are
        return out
    try:
        trace(copy.deepcopy(own, {id(p): p for p in own.parameters()}))  # a model may keep what it is given, symbols too
    except Exception:  # whatever the model's own code raises when it meets a symbol instead of a tensor
        return layered(own, options)
    return out


def _cuda(model: nn.Module, inputs: Sequence[tuple[Any, ...]], options: Options, device: str) -> nn.Module:
    from .gpu.layers import on_gpu  # not before it is needed: it brings Triton

    return on_gpu(model, inputs, options, device)


def _examples(example: Tensor | Sequence[Any] | None) -> list[tuple[Any, ...]]:
    """One tuple of inputs per call."""
    if example is None:
        return []
    each: Iterable[Any] = example if isinstance(example, list) else [example]
    return [one if isinstance(one, tuple) else (one,) for one in each]


def _check_block(model: nn.Module, block: Block) -> None:
    layers = find_layers(model, block, include="*")[0] if next(candidates(model), None) else ()
    for layer in layers:
        owner, attribute = layer.sites[0]
        if not occupied(layer.grid, getattr(model.get_submodule(owner), attribute)).all():
            return
    raise SmartpruneError(
        f"accelerate: no {block} block of this model is empty, so nothing would be gained; prune and bake it first, or leave "
        "block out to run it as it is"
    )


DEVICES: dict[str, Callable[[nn.Module, Sequence[tuple[Any, ...]], Options, str], nn.Module]] = {"cpu": _cpu, "cuda": _cuda}
