"""Checkpoints: the state dict of a pruner, and the copies of a model that follow it."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ..errors import SmartpruneError
from . import optimizers, zeros
from .state import Observations, SearchState

FORMAT = 2  # in format 1, the mask of a search and measurements before the first step were None
DAMAGED = "pruner.load_state_dict(): the state is damaged; give what pruner.state_dict() returned"


ENTRIES = (
    *("method", "blocks", "limit", "steps", "block", "settings", "layers", "floor", "budget"),
    *("seed", "count", "phase", "tensors", "floats", "mask", "side", "measured", "forgets"),
)


def state_dict(search: SearchState) -> dict[str, Any]:
    """Everything but the weights, as tensors and plain values.

    Names, types and shapes are the same at every step: torch.distributed.checkpoint loads into the state of a new pruner.
    """
    values = {name: value for name, value in search.values().items() if isinstance(value, Tensor) and name != "watched"}
    blocks = search.blocks
    side, measured = search.telemetry.state(blocks.n, blocks.device)
    no_mask = torch.zeros(blocks.n, dtype=torch.bool, device=blocks.device)
    return {
        "format": FORMAT,
        **search.identity(),
        "seed": search.seed,
        "count": search.count,
        "phase": search.phase,
        "tensors": {name: value.detach().clone() for name, value in values.items()},
        "floats": {name: value for name, value in search.tensors.items() if not isinstance(value, Tensor)},
        "mask": no_mask if search.hard is None else search.hard.clone(),  # valid outside the search
        "side": side,
        "measured": measured,
        "forgets": search.momentum_resets(),
    }


def load_state_dict(search: SearchState, state: dict[str, Any], adopt_steps: bool = False) -> None:
    """Continues from a state. With ``adopt_steps`` the search takes over the length of the saved one."""
    _require_loadable(search, state, adopt_steps)
    search.reshard()
    search.to_device()
    _require_same_tensors(search, state)
    values = search.values()
    with torch.no_grad():
        for name, value in state["tensors"].items():
            values[name].copy_(value)
    search.tensors |= state["floats"]
    search.steps, search.seed, search.count = int(state["steps"]), int(state["seed"]), int(state["count"])
    device = search.blocks.device
    search.hard = state["mask"].to(device, torch.bool).clone() if _has_mask(state) else None
    search.telemetry.load(state["side"], state["measured"], device)
    search.seen = Observations()
    search.advance()
    if search.hard is not None:
        search.harden(search.hard)
    else:
        zeros.release_zeros(search.blocks.weights)  # a frozen pruner may go back into its search
    optimizers.cancel_momentum_resets(search.model.parameters())
    search.pending_resets = list(state["forgets"])
    search.activate()


def _require_loadable(search: SearchState, state: dict[str, Any], adopt_steps: bool) -> None:
    if not isinstance(state, dict) or type(state.get("format")) is not int or state["format"] not in (1, FORMAT):
        raise SmartpruneError("pruner.load_state_dict(): this is not the state of a pruner; give what pruner.state_dict() returned")
    if not _is_complete(state, search.blocks.n):
        raise SmartpruneError(DAMAGED)
    expected = search.identity()
    if adopt_steps:
        expected["steps"] = state["steps"]
    for name, value in expected.items():
        if state[name] != value:
            saved, present = _first_difference(state[name], value)
            is_measured = name in ("limit", "cost") and hasattr(search.plan.budget, "measured")
            hint = ", and give the budget the table= of that run, because two measurements differ" if is_measured else ""
            raise SmartpruneError(
                f"pruner.load_state_dict(): the saved pruner has {name}={saved!r}, this one {present!r}; attach with the arguments "
                f"of the saved run{hint}"
            )
    if search.baked:
        raise SmartpruneError("pruner.load_state_dict(): this model is baked; load into a freshly attached one")


def _is_complete(state: dict[str, Any], n: int) -> bool:
    """Whether a state has all its entries, of the right types and shapes."""
    if not all(name in state for name in ENTRIES):
        return False
    if not isinstance(state["tensors"], dict) or not all(isinstance(value, Tensor) for value in state["tensors"].values()):
        return False
    if not all(isinstance(state.get(name), int) for name in ("seed", "count", "steps")) or state["count"] < 0 or state["steps"] < 1:
        return False
    if not isinstance(state["floats"], dict) or not isinstance(state["forgets"], list):
        return False
    if not all(isinstance(name, str) for name in state["forgets"]):
        return False
    if not all(isinstance(name, str) and type(value) in (int, float) for name, value in state["floats"].items()):
        return False
    if any(_has_tensor(value) for name, value in state.items() if name not in ("tensors", "mask", "side", "measured")):
        return False
    if state["phase"] not in ("search", "frozen", "baked") or (state["phase"] != "search" and state["mask"] is None):
        return False
    vectors = [value for value in (state["mask"], state["side"]) if value is not None]
    if not all(isinstance(value, Tensor) and tuple(value.shape) == (n,) for value in vectors):
        return False
    measured = state["measured"]
    return measured is None or (isinstance(measured, Tensor) and measured.dim() in (1, 2) and measured.shape[-1] == 3)


def _has_mask(state: dict[str, Any]) -> bool:
    return state["phase"] != "search" and state["mask"] is not None


def _has_tensor(value: object) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return any(map(_has_tensor, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor)


def _require_same_tensors(search: SearchState, state: dict[str, Any]) -> None:
    missing = [name for name in search.trained if name not in state["tensors"]]
    if missing:
        raise SmartpruneError(f"pruner.load_state_dict(): the state has no {missing[0]!r}; give what pruner.state_dict() returned")
    values = search.values()
    for name, value in state["tensors"].items():
        if name not in values or tuple(values[name].shape) != tuple(value.shape):
            raise SmartpruneError(f"pruner.load_state_dict(): unexpected state {name!r} of shape {tuple(value.shape)}")


def _first_difference(saved: Any, present: Any) -> tuple[Any, Any]:
    """Two different values for a message; of two lists their first entries that differ."""
    if not isinstance(saved, list) or not isinstance(present, list):
        return saved, present
    return next(pair for pair in zip_longest(saved, present) if pair[0] != pair[1])
