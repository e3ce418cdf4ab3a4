"""Plain keys in the state dict of an attached model, so that the checkpoints of a trainer fit the plain model."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

from ..artifacts.torch_file import parse_torch_file
from ..errors import SmartpruneError
from ..pruning.pruner import Pruner

LABEL = "smartprune: "  # the beginning of the key that says what a state dict contains


class Carrier:
    """Keeps the keys of a model's state dict plain while it is attached. The scores are in the state of the pruner.

    A checkpoint saved during the search is not pruned yet. Its state dict has one more key, whose name says so in the error message
    of a plain model that loads it. With ``carry``, this key holds the state of the pruner.
    """

    def __init__(self, pruner: Pruner, carry: bool, flexible: bool) -> None:
        self.pruner, self.carry, self.flexible = pruner, carry, flexible
        self.state_missing = False  # whether weights were loaded without the state of the pruner
        self._loaded: dict[str, Any] | None = None
        model = pruner.model
        self._handles = [
            model.register_state_dict_post_hook(self),
            model.register_load_state_dict_pre_hook(self._before_load),
            model.register_load_state_dict_post_hook(self._after_load),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def restore(self, state: dict[str, Any]) -> None:
        """A search whose length is a share of the training keeps the length that it started with."""
        self.pruner.load_state_dict(state, adopt_steps=self.flexible)
        self.state_missing = False

    def _names(self, model: nn.Module) -> dict[str, Tensor]:
        scores = {id(parameter) for parameter in self.pruner.parameters()}
        return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in scores}

    def __call__(self, model: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        if self.pruner.phase == "baked":
            return
        for name in self._names(model):
            state_dict.pop(prefix + name, None)
        if self.pruner.phase == "search" or self.carry:
            state_dict[prefix + self._label()] = _packed(self.pruner.state_dict() if self.carry else {})

    def _label(self) -> str:
        if self.pruner.phase != "search":
            return (
                f"{LABEL}resumes the fine-tuning of pruned weights, whose removed blocks are zero; a plain model does not need it"
            )
        return (
            f"{LABEL}saved at step {self.pruner.count} of the search, when no block was removed yet; resume the training with it, "
            "or load a checkpoint that was saved after the search"
        )

    def _before_load(self, model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        if self.pruner.phase == "baked":
            return
        labels = [key for key in state_dict if key.startswith(prefix + LABEL)]
        states = [_unpacked(state_dict.pop(key)) for key in labels]
        self._loaded = next((state for state in states if state), None)
        for name, parameter in self._names(model).items():
            state_dict.setdefault(prefix + name, parameter.detach().clone())
        self.state_missing = True

    def _after_load(self, model: nn.Module, incompatible: Any) -> None:
        if self._loaded is not None:
            state, self._loaded = self._loaded, None
            self.restore(state)


def _packed(state: dict[str, Any]) -> Tensor:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> dict[str, Any]:
    try:
        state = parse_torch_file(io.BytesIO(packed.cpu().numpy().tobytes()), "load_state_dict()")
    except (SmartpruneError, RuntimeError, TypeError) as error:
        raise SmartpruneError(f"load_state_dict(): the state of the pruner in the checkpoint is damaged ({error})") from None
    return state if isinstance(state, dict) else {}
