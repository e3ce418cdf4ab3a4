"""Labels of channels that are removed together."""

from __future__ import annotations

import torch

from smartprune.artifacts.compact_labels import STAYS, Labels


def sets(labels: Labels) -> set[frozenset[int]]:
    roots = labels.roots().tolist()
    return {frozenset(i for i, root in enumerate(roots) if root == wanted) for wanted in roots}


def test_labels_are_united_like_edges_of_a_graph() -> None:
    """The sets are the connected components, computed by repeated multiplication of the adjacency matrix."""
    torch.manual_seed(0)
    for _ in range(20):
        labels = Labels()
        channels = labels.fresh(30)
        a, b = channels[torch.randint(0, 30, (2, 18))]
        labels.unite(a, b, "")
        reach = torch.eye(31, dtype=torch.bool)
        reach[a, b] = reach[b, a] = True
        for _ in range(6):
            reach = (reach.float() @ reach.float()) > 0
        assert sets(labels) == {frozenset(row.nonzero().flatten().tolist()) for row in reach}


def test_labels_broadcast() -> None:
    labels = Labels()
    channels, places = labels.fresh(3), labels.fresh(6).view(2, 3)
    labels.unite(places, channels, "")
    assert labels.same(places).tolist() == [labels.same(channels).tolist()] * 2


def test_a_reason_belongs_to_the_whole_set() -> None:
    labels = Labels()
    channels = labels.fresh(4)
    labels.unite(channels[0], channels[1], "")
    labels.unite(channels[1], torch.tensor(STAYS), "it is an output")
    labels.unite(channels[2], channels[0], "")
    roots = labels.roots()
    assert labels.reasons[int(roots[channels[2]])] == "it is an output"
    assert int(roots[channels[3]]) not in labels.reasons
    labels.fix(channels[3], "first")
    labels.fix(channels[3], "second")
    assert labels.reasons[int(labels.roots()[channels[3]])] == "first"
