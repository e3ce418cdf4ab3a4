"""The hooks on a pruned model: masked weights around its forward pass, and checks when it is saved and loaded."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import SmartpruneError
from .state import PREFIX, SearchState
from .weights import LiveWeights

HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks")


class ModelHooks:
    """The hooks that a pruner adds to its model."""

    def __init__(self, search: SearchState, live: LiveWeights) -> None:
        self.search, self.live = search, live

    def add(self) -> None:
        model = self.search.model
        model.register_forward_pre_hook(self.live.before_forward, prepend=True)
        model.register_forward_hook(self.live.after_forward, always_call=True)
        model.register_state_dict_pre_hook(self.before_save)
        model.register_load_state_dict_post_hook(self.after_load)
        nn.Module.load_state_dict = _load_state_dict  # type: ignore[method-assign]

    def remove(self) -> None:
        model = self.search.model
        for table in HOOK_TABLES:
            hooks = getattr(model, table)
            for key in [key for key, hook in hooks.items() if _owner(hook) in (id(self), id(self.live))]:
                del hooks[key]
                model._forward_hooks_always_called.pop(key, None)

    def before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Saved weights of a frozen model have their zeros, whatever wrote to them since the last step."""
        if self.search.hard is not None:
            self.search.zero_removed_blocks()

    def after_load(self, module: nn.Module, incompatible: Any) -> None:
        """Raises for a checkpoint without scores, and prepares the search for new parameters."""
        missing = [name for name in incompatible.missing_keys if name.rpartition(".")[2].startswith(PREFIX)]
        if missing:
            raise SmartpruneError(
                f"load_state_dict(): the checkpoint has no {missing[0]!r}, so it was saved before attach (or after bake); load it "
                "first and attach afterwards, or resume with a checkpoint of this search"
            )
        self.live.last = None
        self.search.average_gradients()  # assign=True replaces parameters
        if self.search.calibration is not None:
            self.search.calibration.pause_parameters()


_torch_load_state_dict = nn.Module.load_state_dict


@functools.wraps(_torch_load_state_dict)
def _load_state_dict(self: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces ``nn.Module.load_state_dict``, whose error does not say why a plain model has no scores."""
    try:
        return _torch_load_state_dict(self, state_dict, *args, **kwargs)
    except RuntimeError as error:
        scores = next((name for name in state_dict if name.rpartition(".")[2].startswith(PREFIX)), None)
        if scores is None or f'"{scores}"' not in str(error):
            raise
        raise SmartpruneError(
            f"load_state_dict: {scores} is in the state dict and not in the model, because it was saved during a search; its "
            "weights are not pruned yet: attach with the same arguments before you load it, or finish the search and bake the model"
        ) from error


def _owner(hook: Any) -> int:
    """The id of the object that a bound method belongs to."""
    return id(getattr(hook, "__self__", None))
