"""Runs a model on an example input, once and without gradients, while something records what it does."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..errors import SmartpruneError

CHANGED_INPUTS = 2  # random inputs that are tried
COMPILERS = ("torch._dynamo", "torch.nn.attention.flex_attention")  # modules that may compile what they run


def run_example(model: nn.Module, example: Any, recorder: AbstractContextManager[object], where: str = "example") -> Any:
    """The outputs of the model in eval mode, computed within ``recorder``. Training modes are restored.

    ``example`` is a tensor, or a tuple or dictionary of arguments. ``where`` says in errors what it is.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), uncompiled(), recorder:
            return _call(model, example)
    except SmartpruneError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SmartpruneError(f"{where}: the model does not run on it ({reason}); give one input as the model takes it") from error
    finally:
        for module in training:
            module.training = True


def outputs_depend_on(model: nn.Module, example: Any) -> bool:
    """Whether an output of the model changes when the example does. Floating-point inputs are replaced by random numbers of the
    same size, and integers by others that the example holds."""
    leaves, structure = tree_flatten(dict(example) if isinstance(example, Mapping) else example)
    devices = [torch.device("cuda", p.device.index or 0) for p in model.parameters() if p.is_cuda][:1]
    with torch.random.fork_rng(devices):
        first = _outputs(model, example)
        for seed in range(CHANGED_INPUTS):
            generator = torch.Generator().manual_seed(seed)
            changed = [_changed(leaf, generator) for leaf in leaves]
            second = _outputs(model, tree_unflatten(changed, structure))
            if len(first) != len(second) or not all(_same(a, b) for a, b in zip(first, second, strict=True)):
                return True
    return not first or all(_same_leaf(a, b) for a, b in zip(leaves, changed, strict=True))  # then the answer is not known


def _outputs(model: nn.Module, example: Any) -> list[Tensor]:
    torch.manual_seed(0)  # for layers that draw random numbers
    out = run_example(model, example, nullcontext())
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]


def _changed(leaf: Any, generator: torch.Generator) -> Any:
    if not isinstance(leaf, Tensor) or leaf.dtype == torch.bool or not leaf.numel():
        return leaf
    if not leaf.is_floating_point():
        return leaf.reshape(-1)[torch.randperm(leaf.numel(), generator=generator)].reshape(leaf.shape)
    size = float(leaf.detach().float().abs().max()) or 1.0
    return (torch.randn(leaf.shape, generator=generator) * size).to(leaf)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.nan_to_num() if a.is_floating_point() else a, b.nan_to_num() if b.is_floating_point() else b
    )


def _same_leaf(a: Any, b: Any) -> bool:
    return not isinstance(a, Tensor) or torch.equal(a, b)


def _call(model: nn.Module, example: Any) -> Any:
    if isinstance(example, Tensor):
        return model(_writable(example))
    if isinstance(example, Mapping):
        return model(**{name: _writable(value) for name, value in example.items()})
    if isinstance(example, Sequence):
        return model(*map(_writable, example))
    raise SmartpruneError(f"example is a {type(example).__name__}; give a tensor, or a tuple or dict of arguments")


def _writable(value: Any) -> Any:
    """A copy of an inference tensor, which a model could not modify in place. Other values are returned as they are."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def uncompiled() -> AbstractContextManager[object]:
    """Runs compiled models eagerly: compiled, hooks and modes would record a layer twice."""
    return torch.compiler.set_stance("force_eager") if any(name in sys.modules for name in COMPILERS) else nullcontext()
