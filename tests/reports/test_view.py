"""What a report gathers about a model."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from helpers import zoo
from helpers.html_pages import HtmlPage
from smartprune.reports.page import render
from smartprune.reports.view import gather


def test_norms_of_half_precision_weights_are_finite_float32() -> None:
    view = gather(nn.Linear(32, 32).half(), (8, 8))
    weight = view.layers[0]
    assert weight.norms.dtype == np.float32
    assert np.isfinite(weight.norms).all()


@pytest.mark.parametrize("name", sorted(zoo.SMALL))
def test_axes_of_every_kind_of_layer_match_its_grid(name: str) -> None:
    model, _ = zoo.SMALL[name]()
    view = gather(model, (4, 4))
    for layer, shown in zip(view.layers, HtmlPage(render(view)).data["layers"], strict=True):
        assert [parts * -(-length // step) for parts, length, step in shown["axes"]] == list(layer.row.grid)
