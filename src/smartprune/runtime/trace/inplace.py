"""Operations that change memory in place, and whether it is proved that a graph may be run as if none did.

A program computes new values and runs nodes in an order of its own. That is right if whoever reads the changed memory
afterwards reads it through the operation that changed it: then its result can be a new value, and the old one stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

# a view or a copy, as the strides of the input want it: taken for views whatever they were in the run that was watched
PERHAPS_VIEWS = ("contiguous", "reshape", "reshape_as", "flatten", "ravel", "Flatten")


class Unproved(Exception):  # noqa: N818 - it is no error of anybody's
    """A change in place whose order matters, as far as one can see."""


class Aliases:
    """Which values of a graph share memory, and which nodes change it; seen in one run."""

    def __init__(self) -> None:
        self.changes: dict[fx.Node, set[fx.Node]] = {}  # per node, those of its arguments that it changes
        self._memory: dict[fx.Node, dict[int, int]] = {}  # per node and storage: the number of the memory
        self._leader: list[int] = []
        self._outside: set[int] = set()  # memory of inputs, weights and constants
        self._broken: list[fx.Node] = []

    def note(self, node: fx.Node, out: Sequence[Tensor], changed: set[fx.Node], kept_name: bool) -> None:
        """A node has run. ``kept_name``: it did not promise to change its argument and give it back, or it did so."""
        if changed:
            self.changes[node] = changed
        if not kept_name:
            self._broken.append(node)
        known: dict[int, int] = {}
        for source in node.all_input_nodes:
            known |= self._memory[source]  # all of these are alive, so that one address means one storage
        mine: dict[int, int] = {}
        for tensor in out:
            address = tensor.untyped_storage()._cdata
            if address not in known:
                known[address] = len(self._leader)
                self._leader.append(known[address])
                if node.op in ("placeholder", "get_attr"):
                    self._outside.add(known[address])
            mine[address] = known[address]
        self._memory[node] = mine
        if self._perhaps_view(node):
            numbers = [*mine.values(), *self._memory[node.all_input_nodes[0]].values()]
            for number in numbers:
                self._leader[self._find(number)] = self._find(numbers[0])

    def _perhaps_view(self, node: fx.Node) -> bool:
        if not node.all_input_nodes:
            return False
        if node.op == "call_module":
            module = node.graph.owning_module.get_submodule(str(node.target)) if node.graph.owning_module else None
            return type(module).__name__ in PERHAPS_VIEWS
        return "memory_format" in node.kwargs or getattr(node.target, "__name__", node.target) in PERHAPS_VIEWS

    def _find(self, number: int) -> int:
        while self._leader[number] != number:
            number = self._leader[number]
        return number

    def _parts(self, node: fx.Node) -> set[int]:
        return {self._find(number) for number in self._memory[node].values()}

    def settle(self, graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
        """Per node that changes what others may still want to read as it was: the arguments to be copied first, where torch
        runs it. Raises where somebody reads changed memory under another name."""
        if self._broken:
            raise Unproved(f"{self._broken[0]} looks like a change in place and gives something else")
        order = {node: i for i, node in enumerate(graph.nodes)}
        outside = {self._find(number) for number in self._outside}
        copies: dict[fx.Node, set[fx.Node]] = {}
        for node, changed in self.changes.items():
            memory = {number for source in changed for number in self._parts(source)}
            if memory & outside:
                raise Unproved(f"{node} changes an input, a weight or a constant in place")
            names = [n for n in self._memory if order[n] < order[node] and self._parts(n) & memory]
            readers = {user for name in names for user in name.users}
            late = [user for user in readers if order[user] > order[node]]
            if late:
                raise Unproved(f"{node} changes in place what {late[0]} reads under another name")
            if readers - {node, *names}:
                copies[node] = changed
        return copies
