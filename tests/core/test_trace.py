"""The recorded graph of a run, on models whose graph is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smartprune.core.trace import Trace, tensors_in, trace


def products(recorded: Trace, model: nn.Module) -> list[set[str]]:
    """The names of the weights that every product reads, in the order of the run."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [{names[i] for i in node.weights} for node in recorded.nodes if node.weights]


def test_products_are_recorded_in_the_order_of_the_run() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first, self.unused = nn.Linear(4, 2), nn.Conv1d(3, 4, 1), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu().mean(-1))  # type: ignore[no-any-return]

    model = Net()
    recorded = trace(model, torch.randn(2, 3, 5))
    assert products(recorded, model) == [{"first.weight", "first.bias"}, {"last.weight", "last.bias"}]
    reached = {name for name, parameter in model.named_parameters() if id(parameter) in recorded.reached}
    assert reached == {"first.weight", "first.bias", "last.weight", "last.bias"}
    (output,) = recorded.outputs
    assert recorded.nodes[output].weights == {id(model.last.weight), id(model.last.bias)}
    assert recorded.forms == []
    assert not recorded.depends_on_values


def test_inputs_of_a_node_are_earlier_nodes() -> None:
    recorded = trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(1, 4))
    assert all(max(node.inputs, default=-1) < number for number, node in enumerate(recorded.nodes))


def test_a_calculated_weight_is_a_form_and_a_view_is_not() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(x, self.a.weight.view(4, 4)), self.b.weight - self.b.weight.mean())

    model = Net()
    with torch.no_grad():
        model.b.weight.copy_(torch.arange(16.0).reshape(4, 4))  # the mean, 7.5, is not an entry
    (form,) = trace(model, torch.randn(1, 4), count_zeros=True).forms
    assert (form.params, form.elements, form.zeros) == ({id(model.b.weight)}, 16, 0)


def test_a_tensor_written_in_parts_depends_on_all_of_them() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros(2, len(x), 4)
            out[0] = self.a(x)
            out[1] = self.b(x)
            return out

    model = Net()
    recorded = trace(model, torch.randn(3, 4))
    waiting, seen = list(recorded.outputs), set()
    while waiting:
        number = waiting.pop()
        seen |= recorded.nodes[number].weights
        waiting += recorded.nodes[number].inputs
    assert seen == {id(model.a.weight), id(model.b.weight)}


def test_a_value_that_decides_what_runs_is_noted() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return y if y.sum() > 0 else -y

    assert trace(Routed(), torch.randn(1, 4)).depends_on_values


def test_tracing_changes_neither_the_model_nor_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    trace(model, torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_tensors_are_found_in_nested_objects() -> None:
    @dataclass
    class Answer:
        boxes: Tensor
        extra: Any

    class Plain:
        def __init__(self, value: Any) -> None:
            self.value = value

    a, b, c = (torch.full((1,), float(i)) for i in range(3))
    tensors = list(tensors_in({"x": [a, (Answer(b, Plain(c)),)], "text": "no tensor", "number": 3}))
    assert [float(tensor) for tensor in tensors] == [0.0, 1.0, 2.0]
