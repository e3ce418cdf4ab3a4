"""Programs in fewer kinds of operations compute the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.compact_parts import Net
from smartprune.artifacts.decompose import decompose


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.export itself
def test_products_of_several_tensors_and_gates_become_simpler_operations() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = F.glu(x, 1).clone()
        y.add_(1)
        return torch.einsum("bij,bkj->bik", y, x)

    torch.manual_seed(0)
    x = torch.randn(2, 6, 5)
    model = Net(forward)
    program = decompose(torch.export.export(model, (x,), strict=False))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    operations = {target.split(".")[1] for target in targets if target.startswith("aten.")}
    assert not operations & {"einsum", "glu", "add_"}
    assert {"sigmoid", "bmm"} <= operations
    torch.testing.assert_close(program.module()(x), model(x))
