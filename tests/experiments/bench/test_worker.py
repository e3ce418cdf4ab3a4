"""The child process of an engine: its outputs are checked before it is timed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smartprune import SmartpruneError
from smartprune.experiments.bench.worker import output_error


class NumberOutput(nn.Module):
    def forward(self, x: torch.Tensor) -> float:
        return 1.0


def test_wrong_outputs_raise() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    outputs = model(x).detach()
    assert output_error("torch", outputs, model, x) == 0
    with pytest.raises(SmartpruneError, match=r"its outputs are off by 0\.01; 0\.001 is allowed"):
        output_error("smartprune", outputs * 1.01, model, x)
    assert output_error("smartprune", outputs * 1.01, model, x, tolerance=0.02) == pytest.approx(0.01, rel=1e-3)
    for other in (outputs[:1], outputs * torch.inf, outputs * torch.nan):
        with pytest.raises(SmartpruneError, match="differ from torch's in their shape, or in where they are NaN or infinite"):
            output_error("torch", [other], model, x)
    with pytest.raises(SmartpruneError, match="no tensors to compare"):
        output_error("torch", [], NumberOutput(), x)


def test_int8_errors_are_relative_to_the_spread_of_the_outputs() -> None:
    model, x = nn.Identity(), torch.tensor([[99.0, 101.0]])
    assert output_error("smartprune int8", x + 0.25, model, x) == pytest.approx(0.25)
    with pytest.raises(SmartpruneError, match=r"off by 0\.75; 0\.5 is allowed"):
        output_error("openvino int8", x + 0.75, model, x)
    assert output_error("openvino int8", (x + 0.75).numpy(), model, x, tolerance=1.0) == pytest.approx(0.75)
    one = torch.tensor([[4.0]])  # a single output has no spread
    assert output_error("smartprune int8", one + 1, model, one) == pytest.approx(0.25)
    infinite = torch.tensor([[-torch.inf, 1.0, 3.0]])  # infinite outputs of torch do not count
    assert output_error("smartprune int8", infinite, model, infinite) == 0
