"""Operations that change memory in place, and whether a graph can be executed as if there were none.

A program computes new values, and executes nodes in an order of its own. This is correct if all later readers of the changed
memory read it through the operation that changed it: its result is then a new value, and the old value remains.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

# They return a view or a copy, depending on the strides of the input, so they count as views.
POSSIBLE_VIEWS = ("contiguous", "reshape", "reshape_as", "flatten", "ravel", "Flatten")


class UnsafeInPlace(Exception):  # noqa: N818 - control flow: the model's own code then runs
    """The order of an in-place change may matter."""


class Aliases:
    """Which values of a graph share memory, and which nodes change it, as observed in one run."""

    def __init__(self) -> None:
        self.changes: dict[fx.Node, set[fx.Node]] = {}  # per node, the arguments that it changes
        self._memory: dict[fx.Node, dict[int, int]] = {}  # per node and address of a storage, the number of the memory
        self._leader: list[int] = []
        self._outside: set[int] = set()  # memory of inputs, weights and constants
        self._misleading: list[fx.Node] = []

    def record(self, node: fx.Node, out: Sequence[Tensor], changed: set[fx.Node], as_expected: bool) -> None:
        """Records a node that ran. ``as_expected`` is false if its name promises to return its changed argument and it does
        not."""
        if changed:
            self.changes[node] = changed
        if not as_expected:
            self._misleading.append(node)
        known: dict[int, int] = {}
        for source in node.all_input_nodes:
            known |= self._memory[source]  # all inputs exist now, so one address means one storage
        memory: dict[int, int] = {}
        for tensor in out:
            address = tensor.untyped_storage()._cdata
            if address not in known:
                known[address] = len(self._leader)
                self._leader.append(known[address])
                if node.op in ("placeholder", "get_attr"):
                    self._outside.add(known[address])
            memory[address] = known[address]
        self._memory[node] = memory
        if self._is_possible_view(node):
            numbers = [*memory.values(), *self._memory[node.all_input_nodes[0]].values()]
            for number in numbers:
                self._leader[self._find(number)] = self._find(numbers[0])

    def _is_possible_view(self, node: fx.Node) -> bool:
        if not node.all_input_nodes:
            return False
        if node.op == "call_module":
            module = node.graph.owning_module.get_submodule(str(node.target)) if node.graph.owning_module else None
            return type(module).__name__ in POSSIBLE_VIEWS
        name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]  # without the overload of an ATen operation
        return "memory_format" in node.kwargs or name in POSSIBLE_VIEWS

    def _find(self, number: int) -> int:
        while self._leader[number] != number:
            number = self._leader[number]
        return number

    def _memory_of(self, node: fx.Node) -> set[int]:
        return {self._find(number) for number in self._memory[node].values()}

    def required_copies(self, graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
        """For every node whose in-place change other nodes must not see: the arguments to clone before torch runs it.

        Raises :class:`UnsafeInPlace` if changed memory is read later through another value.
        """
        if self._misleading:
            raise UnsafeInPlace(f"{self._misleading[0]} is named like an in-place operation and does not return its argument")
        order = {node: i for i, node in enumerate(graph.nodes)}
        outside = {self._find(number) for number in self._outside}
        copies: dict[fx.Node, set[fx.Node]] = {}
        for node, changed in self.changes.items():
            memory = {number for source in changed for number in self._memory_of(source)}
            if memory & outside:
                raise UnsafeInPlace(f"{node} changes an input, a weight or a constant in place")
            names = [n for n in self._memory if order[n] < order[node] and self._memory_of(n) & memory]
            readers = {user for name in names for user in name.users}
            late = [user for user in readers if order[user] > order[node]]
            if late:
                raise UnsafeInPlace(f"{node} changes in place what {late[0]} reads under another name")
            if readers - {node, *names}:
                copies[node] = changed
        return copies
