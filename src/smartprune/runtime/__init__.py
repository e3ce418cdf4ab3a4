"""The runtime: running a pruned model without work for its zero blocks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.block import Block
from ..core.kinds import is_masked
from ..core.layers import candidates, every_layer
from ..core.occupancy import occupied
from ..errors import SmartpruneError
from ..text import first_line
from .arguments import Call, in_order, names_of, signature_of
from .fallback import replace_layers
from .module import Accelerated, Options, inference_copy
from .trace.tracer import trace

DTYPES = ("float32", "float16", "int8")
BACKENDS = ("auto", "native", "reference")
MOST_THREADS = 256


def accelerate(
    model: nn.Module,
    block: Block | str | Sequence[int | None] | None = None,
    *,
    example: Tensor | Sequence[Any] | Mapping[str, Any] | None = None,
    dtype: str = "float32",
    threads: int | None = None,
    device: str = "cpu",
    backend: str = "auto",
) -> nn.Module:
    """Returns a module that computes what ``model.eval()`` computes and skips removed blocks. For inference only.

    The model does not change: its weights are copied and its batch norms folded. Operations that have kernels run as compiled
    programs, and torch runs the others. Zeros are found in the weights, whatever pruned them. Dense layers run on the same
    kernels.

    The first call for every structure, shape and dtype of the inputs takes longer, up to some seconds. It traces the model with
    torch.fx or, if that fails, with torch.export. It also times each compiled part and the same part in torch, and then all parts
    and the model. The faster one runs from then on, and ``print`` of the module says where that is torch.

    In these cases the model's own code runs, with its convolutions and linear layers replaced (except those inside modules of
    torch, such as attention) where that is faster. With int8 and float16 they raise an error:

    - models that neither tracer can trace, or whose traced graph gives another result;
    - more than four shapes of the inputs of a model that only torch.export can trace;
    - models that change inputs or buffers, or that change values in place in an order that may matter;
    - calls with inputs of an unknown class.

    Results agree with the model to float rounding, or to that of float16 or int8. The first result for every structure, shape and
    dtype of the inputs is compared with the model, and so is a result for random inputs. If rounding alone changes the result,
    because the model sorts or selects, only the layers are compared. Inputs must be finite: a skipped block does not turn infinity
    into NaN. There are no gradients, and later changes of the model's weights have no effect.

    Args:
        model: The pruned model.
        block: If given, an error is raised unless some block of this size is empty.
        example: An input, or a list of inputs; a tuple is one input of several tensors, and a dictionary holds keyword arguments.
            int8 and float16 need it to measure the range of activations. With float32 it makes the first call faster, and
            torch.export is only tried with it.
        dtype: ``"float32"``, ``"float16"`` or ``"int8"``; on a GPU ``"float32"``, ``"bfloat16"`` or ``"float16"``. On a CPU,
            float16 takes half the memory, and pays where the processor multiplies float16 numbers, as ARM from v8.2 on may do.
            Other processors convert them, which is slower than float32.
        threads: The number of threads. Defaults to the number that torch uses.
        device: ``"cpu"`` or ``"cuda"``.
        backend: ``"auto"``; ``"native"``, which uses the kernels without timing them, so that equal calls give equal bits in every
            process; or ``"reference"``, which runs the graph in torch: it needs no C compiler, and is not faster than the model.
            int8 and float16 are not timed.

    Returns:
        A module that is called like the model.

    Raises:
        SmartpruneError: An argument is unknown, the model is still masked, or its results differ.

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
        >>> x = torch.randn(2, 16)
        >>> fast = sp.accelerate(model, example=x, backend="reference")
        >>> torch.allclose(fast(x), model(x), atol=1e-5)
        True
    """
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"accelerate: model is a {type(model).__name__}; pass a torch module")
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
    checked = None if block is None else Block.of(block)
    copied = inference_copy(model)
    if checked is not None:
        _check_block(copied, checked)
    return DEVICES[kind](copied, _examples(copied, example), _options(dtype, threads, backend), str(device))


def _options(dtype: str, threads: int, backend: str) -> Options:
    return Options(dtype, threads, backend == "reference", backend == "auto" and dtype == "float32")


def _cpu(model: nn.Module, inputs: Sequence[Call], options: Options, device: str) -> nn.Module:
    if options.dtype not in DTYPES:
        raise SmartpruneError(f"accelerate: dtype={options.dtype!r} is not one of {', '.join(DTYPES)}")
    if not options.is_float32:
        if not inputs:
            raise SmartpruneError(
                f"accelerate: {options.dtype} needs example= to measure the range of activations; pass a list of typical inputs, "
                "for example a few dozen images"
            )
        if options.reference:
            raise SmartpruneError('accelerate: backend="reference" supports only float32; leave backend or dtype out')
    out = Accelerated(model, options, None if options.is_float32 else {})
    try:
        if not options.is_float32:
            out.measure(inputs)
        if inputs:
            args, kwargs = inputs[0]
            out(*args, **kwargs)
            return out.replaced_model() or out
    except SmartpruneError:
        raise
    except Exception as error:  # code of the model may raise anything
        raise SmartpruneError(
            f"accelerate: the model does not run on the example in float32 ({first_line(error)}); give one input as the model "
            "takes it, or a tuple of several"
        ) from error
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature_of(model)):  # tracing needs a call
        return out
    try:
        trace(copy.deepcopy(model, {id(p): p for p in model.parameters()}))  # a copy, because a model may store the symbols
    except Exception:  # model code may raise anything when it gets a symbol instead of a tensor
        return replace_layers(model, options)  # torch.export needs an example
    return out


def _cuda(model: nn.Module, inputs: Sequence[Call], options: Options, device: str) -> nn.Module:
    from .gpu.network import on_gpu  # lazily: it imports Triton

    return on_gpu(model, [in_order(names_of(model), *call)[0] for call in inputs], options, device)


def _examples(model: nn.Module, example: Tensor | Sequence[Any] | Mapping[str, Any] | None) -> list[Call]:
    """The positional and keyword arguments of every call."""
    if example is None:
        return []
    inputs: Iterable[Any] = example if isinstance(example, list) else [example]
    return [_call(model, item) for item in inputs]


def _call(model: nn.Module, item: Any) -> Call:
    if isinstance(item, Mapping):
        try:
            inspect.signature(model.forward).bind(**item)
        except (TypeError, ValueError):
            return (item,), {}  # a model that takes a dictionary
        return (), dict(item)
    return item if isinstance(item, tuple) else (item,), {}


def _check_block(model: nn.Module, block: Block) -> None:
    layers = every_layer(model, block)[0] if next(candidates(model), None) else ()
    for layer in layers:
        owner, attribute = layer.sites[0]
        if not occupied(layer.grid, getattr(model.get_submodule(owner), attribute)).all():
            return
    raise SmartpruneError(
        f"accelerate: no {block} block of this model is empty, so there is nothing to skip; prune and bake it first, or leave "
        "block out to run it anyway"
    )


DEVICES: dict[str, Callable[[nn.Module, Sequence[Call], Options, str], nn.Module]] = {"cpu": _cpu, "cuda": _cuda}
