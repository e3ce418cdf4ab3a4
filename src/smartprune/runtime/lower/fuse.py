"""Fusing steps: batch norms, activations and additions become part of the convolution before them."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

import numpy as np
from torch import fx

from .steps import Step


def fuse(steps: Sequence[Step], kept: Set[fx.Node]) -> list[Step]:
    """The steps in order, with fewer passes over memory.

    ``kept`` are nodes whose own value is needed outside. A step that absorbs the next one computes the value of that step:
    its ``node`` becomes the other's.
    """
    return _Fusion(steps, kept).steps


class _Fusion:
    def __init__(self, steps: Sequence[Step], kept: Set[fx.Node]) -> None:
        self.steps: list[Step] = []
        self._kept = kept
        self._writer: dict[fx.Node, Step] = {}
        self._order: dict[fx.Node, int] = {}  # number of the step that starts to compute a value
        self._readers: dict[fx.Node, int] = {}
        self._alias: dict[fx.Node, fx.Node] = {}
        for step in steps:
            for source in step.inputs:
                self._readers[source] = self._readers.get(source, 0) + 1
        for number, original in enumerate(steps):
            step = replace(original, inputs=[self._alias.get(source, source) for source in original.inputs])
            if step.kind == "alias" and self._skip_alias(step):
                continue
            absorber = self._absorber(step)
            if absorber is None:
                self.steps.append(step)
                self._order[step.node], self._writer[step.node] = number, step
            else:
                self._order[step.node], self._writer[step.node] = self._order[absorber.node], absorber
                absorber.node = step.node

    def _only_reader(self, node: fx.Node) -> Step | None:
        """The step that writes a value, if only one step reads the value."""
        writer = self._writer.get(node)
        return writer if writer is not None and self._readers.get(node) == 1 and node not in self._kept else None

    def _skip_alias(self, step: Step) -> bool:
        """Lets readers of an alias read its source, unless one of the two is needed outside under its own name."""
        source = step.inputs[0]
        if step.node in self._kept or source in self._kept or source not in self._writer:
            return False
        self._alias[step.node] = source
        self._readers[source] += self._readers.get(step.node, 0) - 1
        return True

    def _absorber(self, step: Step) -> Step | None:
        """The earlier step that now includes this one; None if there is none."""
        if step.kind == "add":
            return self._absorb_addition(step)
        if step.kind not in ("affine", "unary"):
            return None
        before = self._only_reader(step.inputs[0])
        if before is None:
            return None
        return _absorb_affine(before, step) if step.kind == "affine" else _absorb_activation(before, step)

    def _absorb_addition(self, step: Step) -> Step | None:
        """The later of the two convolutions that are added adds the other operand."""
        candidates = [(self._order[source], i) for i, source in enumerate(step.inputs) if source in self._order]
        for _, i in sorted(candidates, reverse=True):
            before, other = self._only_reader(step.inputs[i]), step.inputs[1 - i]
            if before is None or before.kind != "conv" or before.addition != "none" or other is step.inputs[i]:
                continue
            if step.broadcast or self._order.get(other, -1) > self._order[step.inputs[i]]:
                continue
            before.addition = "before" if before.activation.is_identity else "after"
            before.inputs = [*before.inputs, other]
            return before
        return None


def _absorb_affine(before: Step, step: Step) -> Step | None:
    if not before.is_foldable or before.kind == "affine":
        return None
    assert before.weight is not None
    assert before.bias is not None
    assert step.scale is not None
    assert step.bias is not None
    scale = step.scale.astype(np.float64)
    before.weight = (before.weight * scale.reshape(-1, *[1] * (before.weight.ndim - 1))).astype(np.float32)
    before.bias = (before.bias * scale + step.bias).astype(np.float32)
    return before


def _absorb_activation(before: Step, step: Step) -> Step | None:
    if before.kind not in ("conv", "depthwise", "affine", "add", "multiply"):
        return None
    if not before.activation.is_identity or before.addition == "after":
        return None
    before.activation = step.activation
    return before
