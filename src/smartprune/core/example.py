"""Runs a model on an example input, once and without gradients, while something records what it does."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SmartpruneError

COMPILERS = ("torch._dynamo", "torch.nn.attention.flex_attention")  # modules that may compile what they run


def run_example(model: nn.Module, example: Any, recorder: AbstractContextManager[object]) -> Any:
    """The outputs of the model in eval mode, computed within ``recorder``. Training modes are restored.

    ``example`` is a tensor, or a tuple or dictionary of arguments.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), _uncompiled(), recorder:
            return _call(model, example)
    except SmartpruneError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SmartpruneError(f"example: the model does not run on it ({reason}); give one input as the model takes it") from error
    finally:
        for module in training:
            module.training = True


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


def _uncompiled() -> AbstractContextManager[object]:
    """Runs compiled models eagerly: compiled, hooks and modes would record a layer twice."""
    return torch.compiler.set_stance("force_eager") if any(name in sys.modules for name in COMPILERS) else nullcontext()
