"""Facts about each parameter: whether inference uses it, whether its zeros survive, and whether it belongs to an output layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SmartpruneError
from .heads import has_head_name, heads_in_trace
from .layers import Candidate, candidates
from .sharding import is_sharded
from .trace import Form, Trace, trace

PROBE = 7  # every 7th element of a weight is set to zero, to see whether the zeros survive
SURVIVING = 0.9  # a weight that is cut into pieces may have slightly fewer zeros in one of them


@dataclass(frozen=True)
class Facts:
    """What inference does with the parameters of a model, by their id."""

    unreached: frozenset[int]  # the example computes nothing from them
    transformed: frozenset[int]  # layers compute with other values, in which zeros do not survive
    heads: frozenset[int]  # weights of output layers


def observe(model: nn.Module, example: Any) -> Facts:
    """Runs the model on ``example`` to see what it does with its weights. The model is not changed.

    This is one run in eval mode, and two more if layers compute with values that are calculated from their weights.
    """
    weights: dict[int, list[Candidate]] = {}
    for candidate in candidates(model):
        if not candidate.lazy:
            weights.setdefault(id(candidate.weight), []).append(candidate)
    recorded = trace(model, example)
    return Facts(
        unreached=frozenset(_unreached(recorded, weights)),
        transformed=frozenset(_transformed(model, example, recorded, weights)),
        heads=frozenset(_heads(model, recorded, weights)),
    )


def _unreached(recorded: Trace, weights: Mapping[int, Sequence[Candidate]]) -> Iterator[int]:
    reached = {users[0].name for key, users in weights.items() if key in recorded.reached}
    patterns = {_without_numbers(name) for name in reached} if recorded.depends_on_values else set()
    for key, users in weights.items():
        # where values decide what runs, another input may reach the other members of a list, such as the experts of a mixture
        routed = any(part.isdigit() for part in users[0].name.split(".")) and _without_numbers(users[0].name) in patterns
        if key not in recorded.reached and not routed:
            yield key


def _without_numbers(name: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _heads(model: nn.Module, recorded: Trace, weights: Mapping[int, Sequence[Candidate]]) -> set[int]:
    frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
    trains = any(users[0].supported and key not in frozen for key, users in weights.items())
    narrow = {key for key, users in weights.items() if _is_narrow(users[0])}
    named = {key for key, users in weights.items() if any(has_head_name(user.module_name) for user in users)}
    return heads_in_trace(recorded, frozen if trains else frozenset(), narrow, named)


def _is_narrow(weight: Candidate) -> bool:
    outputs, inputs = weight.weight.shape[:2][::-1] if weight.transposed else weight.weight.shape[:2]
    return outputs < inputs * weight.parts


# -- zeros that do not survive --------------------------------------------------------------------------------------------


def _transformed(model: nn.Module, example: Any, recorded: Trace, weights: Mapping[int, Sequence[Candidate]]) -> set[int]:
    """The weights that layers transform before use, so that zeros do not stay zero.

    To test a weight, zeros are added to it, and every form of it must contain them.
    """
    probed = {
        key: users[0].weight
        for key, users in weights.items()
        if any(key in form.params for form in recorded.forms) and any(user.supported for user in users)
        if not (users[0].weight.is_meta or is_sharded(users[0].weight) or not users[0].weight.is_floating_point())
    }
    if not probed:
        return set()
    try:
        starts = _starts(recorded.forms, probed)
        with _probes(model, {}):
            before = trace(model, example, count_zeros=True).forms
        with _probes(model, starts):
            after = trace(model, example, count_zeros=True).forms
    except SmartpruneError:  # the model does not run with other weights
        return set(probed)
    if [form.params for form in before] != [form.params for form in after]:
        return set(probed)
    bad = [b.params for a, b in zip(before, after, strict=True) if not _survive(a, b, probed, starts)]
    return {key for key in probed if any(key in params for params in bad)}


def _starts(forms: Sequence[Form], probed: Mapping[int, Tensor]) -> dict[int, int]:
    """Where the zeros of each weight start. Weights that are computed with together, such as the terms of a sum, get different
    zeros, because a search also removes different blocks of them."""
    starts: dict[int, int] = {}
    for key in probed:
        taken = {starts[other] for form in forms if key in form.params for other in form.params if other in starts}
        starts[key] = next((start for start in range(PROBE) if start not in taken), 0)
    return starts


def _survive(before: Form, after: Form, probed: Mapping[int, Tensor], starts: Mapping[int, int]) -> bool:
    zeros = [len(range(starts[key], probed[key].numel(), PROBE)) for key in after.params if key in probed]
    expected = min(sum(zeros), after.elements / PROBE)
    return (after.zeros or 0) - (before.zeros or 0) >= SURVIVING * expected


@contextmanager
def _probes(model: nn.Module, starts: Mapping[int, int]) -> Iterator[None]:
    """Temporarily gives the model parameters without zeros, and those in ``starts`` known zeros."""
    stored: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for parameter in model.parameters():
            if is_sharded(parameter) or isinstance(parameter, nn.UninitializedParameter) or not parameter.is_floating_point():
                continue
            values = parameter.data.clone(memory_format=torch.contiguous_format)
            values[values == 0] = float(values.abs().max() or 1) if values.numel() else 1
            if id(parameter) in starts:
                values.view(-1)[starts[id(parameter)] :: PROBE] = 0
            stored.append((parameter, parameter.data))
            parameter.data = values
        yield
    finally:
        for parameter, values in stored:
            parameter.data = values
