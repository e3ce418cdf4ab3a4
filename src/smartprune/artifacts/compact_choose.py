"""Which channels of a graph are removed: those that are constant or unread everywhere, as far as all shapes allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.kinds import LAYER_TYPES
from .compact_graph import Graph, Known, Reader, by_position
from .compact_labels import STAYS
from .compact_rules import arguments, flat, name_of

Frozen = Mapping[str, int | None]  # line of code -> the only axis that may shrink in the tensors that it reshapes, or None
BIAS, MEAN, NEW = "bias", "running_mean", "new"  # where the effect of a removed constant goes


@dataclass
class Choice:
    """The channels that are removed."""

    removed: Tensor  # bool, by label
    merged: dict[int, dict[int, int]]  # reader -> channel -> the channel that takes over its constant
    targets: list[str | None]  # by reader
    why: dict[int, str] = field(default_factory=dict)  # root of a label -> why it stays
    roots: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    slabs: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # id of a tensor -> axis -> removed positions

    def of(self, label: Tensor) -> Tensor:
        """Whether entries with these labels are removed."""
        return self.removed[label]

    def reason(self, label: int) -> str:
        return self.why.get(int(self.roots[label]), "")


def all_values(graph: Graph) -> list[Known]:
    """All tensors of a graph, with the parameters that it reads as they are."""
    return [*(value for values in graph.values.values() for value in flat(values)), *graph.forms.values()]


def choose(graph: Graph, frozen: Frozen, held: Collection[int] = (), multiple: int = 1) -> Choice:
    """The channels that can be removed, if the code of the model allows all shapes except those that are ``frozen``.

    ``held`` are roots of labels that stay in any case. A layer that loses outputs keeps a multiple of ``multiple``.
    """
    roots = graph.labels.roots()
    why = {graph.labels.root(label): reason for label, reason in graph.labels.reasons.items()}
    possible = torch.zeros(len(roots), dtype=torch.bool)
    values = all_values(graph)
    for value in values:
        possible[roots[value.label.reshape(-1)]] = True
    for value in values:
        needed = value.label[value.live & ~value.constant]
        for root in roots[needed].unique().tolist():
            why.setdefault(root, f"tied to channels of {value.where or 'the model'} that are in use")
    for labels in graph.products:
        for root in roots[labels()].unique().tolist():
            why.setdefault(root, "they are multiplied with each other")
    for reader in graph.readers:
        used = (reader.reads & reader.live_outputs()[:, None]).any(0) & ~reader.constant
        for root in roots[reader.label[used]].unique().tolist():
            why.setdefault(root, f"{reader.weight.rpartition('.')[0]} reads them")
    for root in held:
        why.setdefault(root, "the code of the model depends on their number")
    targets = _targets(graph)
    merged = _constants(graph, targets, roots, why)
    possible[list(why)] = False
    choice = Choice(possible[roots], merged, targets, why, roots)
    _Shapes(graph, choice, values, frozen, multiple).settle()
    return choice


def roots_by_weight(graph: Graph, choice: Choice) -> list[frozenset[int]]:
    """The roots of all labels, one set for each weight that computes or reads such channels, in the order of the model."""
    parts, seen = [], {STAYS}
    for axes in graph.weights.values():
        part = {root for labels in axes.values() for root in choice.roots[labels].tolist()} - seen
        seen |= part
        parts.append(frozenset(part))
    parts.append(frozenset(set(choice.roots.tolist()) - seen))
    return [part for part in parts if part]


def _targets(graph: Graph) -> list[str | None]:
    """For each reader, where the effect of constant inputs can go: its bias, the mean of the next normalization, or a new bias."""
    found = {}
    for weight, calls in _calls(graph).items():
        found[weight] = None if _count(graph, weight) > len(calls) else _target(graph, calls)
    return [found[reader.weight] for reader in graph.readers]


def _calls(graph: Graph) -> dict[str, list[Reader]]:
    """The readers of each weight: several if the model runs a layer several times."""
    calls: dict[str, list[Reader]] = {}
    for reader in graph.readers:
        calls.setdefault(reader.weight, []).append(reader)
    return calls


def _target(graph: Graph, calls: list[Reader]) -> str | None:
    if any(reader.border for reader in calls):
        return None
    weight, bias = calls[0].weight, calls[0].bias
    if bias is not None:
        return BIAS if _count(graph, bias) == len(calls) == sum(reader.bias == bias for reader in calls) else None
    if any(reader.bias is not None for reader in calls):
        return None
    if all(_has_mean(graph, reader) for reader in calls):
        return MEAN
    owner = graph.model.get_submodule(weight.rpartition(".")[0])
    plain = isinstance(owner, LAYER_TYPES) and weight.rpartition(".")[2] == "weight"
    return NEW if plain and owner._parameters.get("bias", owner) is None else None


def _has_mean(graph: Graph, reader: Reader) -> bool:
    """Whether the outputs are only read by a normalization with a mean of its own."""
    users = list(reader.node.users)
    if len(users) != 1 or name_of(users[0]) not in ("batch_norm", "_native_batch_norm_legit_no_training"):
        return False
    mean = graph.parameter(arguments(users[0])["running_mean"])
    return mean is not None and _count(graph, mean) == 1


def mean_of(graph: Graph, reader: Reader) -> str:
    """The mean of the normalization after a layer."""
    mean = graph.parameter(arguments(next(iter(reader.node.users)))["running_mean"])
    assert mean is not None
    return mean


def _count(graph: Graph, name: str) -> int:
    """How many operations read a parameter."""
    return sum(len(node.users) for node in graph.nodes if node.op == "placeholder" and graph.parameter(node) == name)


def _constants(graph: Graph, targets: list[str | None], roots: Tensor, why: dict[int, str]) -> dict[int, dict[int, int]]:
    """Decides what happens to constant channels that a layer reads and that no bias can replace.

    A layer with zero padding gives another result at the border. There, one constant channel takes over the weights of the
    others, since they differ by a factor only. In a grouped convolution, each group has such a channel.
    """
    carried: dict[int, dict[int, int]] = {}  # root -> reader -> channel
    calls = _calls(graph)
    for index, reader in enumerate(graph.readers):
        alike = _alike(calls[reader.weight])
        channels = reader.constants() & ~alike if targets[index] in (BIAS, NEW) else reader.constants()
        if targets[index] == MEAN or not bool(channels.any()):
            continue
        where = reader.weight.rpartition(".")[0]
        known, several = _count(graph, reader.weight) == len(calls[reader.weight]), Counter(roots[reader.label].tolist())
        for channel in channels.nonzero().flatten().tolist():
            root = int(roots[reader.label[channel]])
            if not bool(alike[channel]):
                why.setdefault(root, f"{where} reads other constants each time the model runs it")
            elif several[root] > 1 or not known:
                why.setdefault(root, f"{where} reads them as a constant that no bias can replace")
            carried.setdefault(root, {})[index] = channel
    by_readers: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for root, places in carried.items():
        if root not in why:
            key = tuple((index, graph.readers[index].group(channel)) for index, channel in places.items())
            by_readers.setdefault(key, []).append(root)
    merged: dict[int, dict[int, int]] = {}
    for members in by_readers.values():
        readers = list(carried[members[0]])
        sizes = {root: min(abs(float(graph.readers[i].value[carried[root][i]])) for i in readers) for root in members}
        carrier = max(members, key=sizes.__getitem__)
        others = "" if len(members) == 1 else ", for all channels that are constant there"
        why[carrier] = f"a constant that {graph.readers[readers[0]].weight.rpartition('.')[0]} cannot replace{others}"
        for i in readers:
            merged.setdefault(i, {}).update({carried[root][i]: carried[carrier][i] for root in members if root != carrier})
    return merged


def _alike(calls: list[Reader]) -> Tensor:
    """The inputs of a layer that are the same constant each time the model runs it, bool [inputs]."""
    first = calls[0]
    alike = torch.ones_like(first.constant)
    for reader in calls[1:]:
        alike &= (reader.constant == first.constant) & (reader.value == first.value)
    return alike


class _Shapes:
    """Keeps more channels until every tensor loses only whole positions of its axes."""

    def __init__(self, graph: Graph, choice: Choice, values: list[Known], frozen: Frozen, multiple: int) -> None:
        self.graph, self.choice, self.multiple = graph, choice, multiple
        self.removed, self.roots, self.why = choice.removed, choice.roots, choice.why
        self.values = [value for value in values if bool(choice.of(value.label).any())]
        self.keep = {id(value): {axis: mask.clone() for axis, mask in value.keep.items()} for value in self.values}
        self.changed = False
        self.stated = {id(value) for line in frozen for value in graph.reshapes[line]}
        for line, allowed in frozen.items():
            for value in graph.reshapes[line]:
                for axis in value.axes():
                    if axis != allowed:
                        self._hold(value, axis, torch.ones(value.label.shape[axis], dtype=torch.bool))

    def settle(self) -> None:
        self.changed = True
        while self.changed:
            self.changed = False
            for value in self.values:
                self._keep_shape(value)
            for group in self.graph.alike:
                self._keep_alike(group)
            for parts in self.graph.balanced:
                self._keep_equal([self._gone(part) for part in parts], parts, "parts of a split have equal widths")
            for weight, (groups, label) in self.graph.groups.items():
                self._keep_groups(weight, groups, label)
            for reader in self.graph.readers if self.multiple > 1 else ():
                self._keep_multiple(self.graph.weights[reader.weight][reader.out_axis])
        self.choice.slabs = {id(value): self._slabs(value) for value in self.values}

    def _stay(self, labels: Tensor, reason: str) -> None:
        """Keeps entries that were chosen for removal."""
        roots = self.roots[labels.reshape(-1)].unique()
        if len(roots):
            self.removed[torch.isin(self.roots, roots)] = False
            self.changed = True
            for root in roots.tolist():
                self.why.setdefault(root, reason)

    def _hold(self, value: Known, axis: int, positions: Tensor) -> None:
        axes = self.keep.setdefault(id(value), {})
        axes[axis] = axes[axis] | positions if axis in axes else positions

    def _slabs(self, value: Known) -> dict[int, Tensor]:
        """For each axis, the positions whose entries are all removed."""
        gone = self.removed[value.label]
        slabs = {}
        for axis in value.axes():
            slab = by_position(gone, axis).all(1)
            slab &= ~self.keep.get(id(value), {}).get(axis, torch.zeros_like(slab))
            if bool(slab.all()):
                slab[0] = False
            slabs[axis] = slab
        return slabs

    def _keep_shape(self, value: Known) -> None:
        gone = self.removed[value.label]
        if not bool(gone.any()):
            return
        covered = torch.zeros_like(gone)
        for axis, slab in self._slabs(value).items():
            shape = [1] * gone.dim()
            shape[axis] = len(slab)
            covered = covered | slab.view(shape)
        left = gone & ~covered
        if bool(left.any()):
            reason = "a layer keeps one channel" if bool(gone.all()) else "the shapes of the model do not allow it"
            self._stay(value.label[left], "the code of the model states their number" if id(value) in self.stated else reason)

    def _keep_alike(self, group: list[tuple[Known, int]]) -> None:
        """The same positions are removed from an axis of several tensors."""
        group = [(value, axis) for value, axis in group if value.shape[axis] > 1]
        slabs = []
        for value, axis in group:
            none = torch.zeros(value.shape[axis], dtype=torch.bool)
            slabs.append(self._slabs(value).get(axis, none) if bool(self.removed[value.label].any()) else none)
        common = torch.stack(slabs).all(0)
        for (value, axis), slab in zip(group, slabs, strict=True):
            if bool((slab & ~common).any()):
                self._hold(value, axis, slab & ~common)
                self.changed = True

    def _gone(self, labels: Tensor) -> Tensor:
        return self.removed[labels].all(1)

    def _keep_equal(self, gone: list[Tensor], labels: list[Tensor], reason: str) -> None:
        least = min(int(part.sum()) for part in gone)
        for part, label in zip(gone, labels, strict=True):
            self._stay(label[part.nonzero().flatten()[least:]], reason)

    def _keep_multiple(self, labels: Tensor) -> None:
        """A layer keeps a multiple of outputs, or all of them."""
        gone = self.removed[labels].nonzero().flatten()
        missing = min(len(gone), -(len(labels) - len(gone)) % self.multiple)
        self._stay(labels[gone[:missing]], f"the number of channels is a multiple of {self.multiple}")

    def _keep_groups(self, weight: str, groups: int, label: Tensor) -> None:
        """Groups of a convolution lose equally many channels, or all of them."""
        if len(label) == groups:
            return
        inputs, outputs = label.view(groups, -1), self.graph.weights[weight][0].view(groups, -1)
        whole = self.removed[inputs].all(1) & self.removed[outputs].all(1)
        for labels in (inputs[~whole], outputs[~whole]):
            if len(labels):
                parts = [part[:, None] for part in labels]
                self._keep_equal([self._gone(part) for part in parts], parts, "groups of a convolution have equal widths")
