"""What :func:`smartprune.compact` removed from a model, and what it could not remove."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from torch import Tensor

from .. import text
from ..core.kinds import is_layer, stores_inputs_first
from .compact_choose import Choice
from .compact_graph import Graph

WIDTH = 120
MOST_REASONS = 12


@dataclass(frozen=True)
class CompactedLayer:
    """One weight, before and after.

    ``outputs`` and ``inputs`` are channels: those of the weight that was given, and those that are left. ``empty`` counts
    channels that are left although they are constant or nothing reads them, and ``reason`` says why.
    """

    weight: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    empty: int
    reason: str

    @property
    def changed(self) -> bool:
        return self.before != self.after


@dataclass(frozen=True)
class Compaction:
    """What was removed from a model. ``print`` shows it.

    ``parameters`` and ``macs`` are pairs, before and after; MACs are those of one sample, and None if they cannot be counted.
    ``difference`` is the largest deviation of the outputs, over ``inputs`` batches, and ``scale`` the largest output.
    ``added`` names biases that the original does not have: they hold what removed channels contributed.
    """

    model: str
    layers: tuple[CompactedLayer, ...]
    parameters: tuple[int, int]
    macs: tuple[int, int] | None
    difference: float
    scale: float
    inputs: int
    added: tuple[str, ...] = ()
    stated: tuple[str, ...] = ()  # lines of code that state shapes, so that the tensors of these lines keep them

    @property
    def changed(self) -> bool:
        """Whether anything was removed."""
        return any(layer.changed for layer in self.layers)

    def to_json(self) -> dict[str, object]:
        """Plain data: numbers, strings, lists and dictionaries."""
        return {
            **asdict(self),
            "layers": [{**asdict(layer), "before": list(layer.before), "after": list(layer.after)} for layer in self.layers],
            "parameters": list(self.parameters),
            "macs": None if self.macs is None else list(self.macs),
            "added": list(self.added),
            "stated": list(self.stated),
        }

    def __repr__(self) -> str:
        before, after = self.parameters
        changed = sum(layer.changed for layer in self.layers)
        return (
            f"<Compaction of {self.model}: {changed} of {len(self.layers)} layers are smaller, {after:,} of {before:,} parameters>"
        )

    def __str__(self) -> str:
        changed = [layer for layer in self.layers if layer.changed]
        lines = [f"{self.model}: {len(changed)} of {len(self.layers)} layers are smaller" if changed else self._unchanged()]
        if changed:
            rows = [
                (
                    x.weight.removesuffix(".weight"),
                    text.format_shape(x.before),
                    text.format_shape(x.after),
                    _less(x.before, x.after),
                )
                for x in changed
            ]
            lines += ["", *text.table(("layer", "before", "after", "fewer weights"), rows, "<<<>", WIDTH), ""]
        for name, pair in (("parameters", self.parameters), ("MACs", self.macs)):
            if pair is not None:
                share = text.percent(pair[0] - pair[1], pair[0])
                lines.append(f"{name:<10} {pair[0]:,} before, {pair[1]:,} after: {share} fewer")
        lines.append(f"outputs    differ by at most {self.difference:.1e} of {self.scale:.3g}, over {self.inputs} batches")
        return "\n".join([*lines, *self._notes()])

    def _unchanged(self) -> str:
        if any(layer.empty for layer in self.layers):
            return f"{self.model}: an equal copy, because no empty channel can be removed"
        return f"{self.model}: an equal copy, because no channel is constant or unread"

    def _notes(self) -> Iterator[str]:
        left = [layer for layer in self.layers if layer.empty]
        for layer in left[:MOST_REASONS]:
            name = text.escape(layer.weight.removesuffix(".weight"))
            channels = f"{text.counted(layer.empty, 'empty channel')} {'stays' if layer.empty == 1 else 'stay'}"
            yield f"note       {name}: {channels}: {text.escape(layer.reason)}"
        if len(left) > MOST_REASONS:
            yield f"note       {text.counted(len(left) - MOST_REASONS, 'more layer')} with empty channels"
        for line in self.stated:
            yield f"note       this code states a shape: {text.escape(line)}"
        if self.added:
            yield f"note       new biases hold what removed channels contributed: {text.some_names(self.added)}"


def _less(before: tuple[int, ...], after: tuple[int, ...]) -> str:
    counts = []
    for shape in (before, after):
        count = 1
        for size in shape:
            count *= size
        counts.append(count)
    return text.percent(counts[0] - counts[1], counts[0])


def other_layers(graph: Graph, choice: Choice) -> Iterator[CompactedLayer]:
    """Layers that keep their shape, because another module reads their weight, as in an attention of torch, or none does."""
    read = {graph.parameter(node) for node in graph.nodes if node.op == "placeholder" and node.users}
    for prefix, module in graph.model.named_modules():
        weight = getattr(module, "weight", None) if is_layer(module) else None
        if not isinstance(weight, Tensor) or weight.dim() < 2:
            continue
        name = f"{prefix}.weight" if prefix else "weight"
        axis = int(stores_inputs_first(module))
        empty = (weight == 0).movedim(axis, 0).flatten(1).all(1)
        labels = graph.weights.get(graph.aliases.get(name, ""), {}).get(axis)
        if name not in graph.aliases:
            reason = "the weight is computed from other parameters"
        elif graph.aliases[name] not in read:
            reason = "the model does not use this layer for the example"
        elif labels is not None and len(labels) == len(empty) and bool(empty.any()):
            reason = choice.reason(int(labels[empty][0]))
        else:
            reason = "the model does not multiply by this weight as it is"
        shape, count = tuple(weight.shape), int(empty.sum())
        yield CompactedLayer(graph.aliases.get(name, name), shape, shape, count, reason if count else "")
