"""Labels of channels: entries of tensors that can only be removed together have the same label."""

from __future__ import annotations

import torch
from torch import Tensor

STAYS = 0  # the label of entries that are never removed


class Labels:
    """Sets of labels that are united while a graph is read, and the reasons why some cannot be removed."""

    def __init__(self) -> None:
        self.parents = [STAYS]
        self.reasons: dict[int, str] = {STAYS: "not a channel"}  # by root

    def fresh(self, count: int) -> Tensor:
        """New labels, int64 [count]."""
        start = len(self.parents)
        self.parents.extend(range(start, start + count))
        return torch.arange(start, start + count)

    def root(self, label: int) -> int:
        parents = self.parents
        while parents[label] != label:
            parents[label] = parents[parents[label]]
            label = parents[label]
        return label

    def unite(self, a: Tensor, b: Tensor, reason: str) -> None:
        """Ties entries of two tensors of labels, which broadcast. Entries that are tied to ``STAYS`` stay, for this reason."""
        pairs = torch.stack(torch.broadcast_tensors(a, b)).reshape(2, -1)
        pairs = pairs[:, pairs[0] != pairs[1]].unique(dim=1)
        for first, second in pairs.t().tolist():
            if STAYS in (first, second):
                self._fix(first + second, reason)
                continue
            x, y = self.root(first), self.root(second)
            if x != y:
                self.parents[y] = x
                if y in self.reasons:
                    self.reasons.setdefault(x, self.reasons[y])

    def same(self, labels: Tensor) -> Tensor:
        """The labels, with equal numbers for entries that were tied so far."""
        distinct, inverse = labels.unique(return_inverse=True)
        return torch.tensor([self.root(label) for label in distinct.tolist()])[inverse]

    def fix(self, labels: Tensor, reason: str) -> None:
        """Keeps the entries with these labels, for this reason."""
        for label in labels.unique().tolist():
            self._fix(label, reason)

    def _fix(self, label: int, reason: str) -> None:
        self.reasons.setdefault(self.root(label), reason)

    def roots(self) -> Tensor:
        """The root of every label, int64 [labels]."""
        return torch.tensor([self.root(label) for label in range(len(self.parents))])
