"""Output layers that are found without an example: by position, by name, and by their place in lists."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from smartprune.core.block import Block
from smartprune.core.heads import has_head_name
from smartprune.core.layers import find_layers

LAST = "last layer, assumed to be the classifier"


def heads(model: nn.Module) -> dict[str, str]:
    """The layers that are skipped as output layers, with the reason."""
    return {s.name: s.reason for s in find_layers(model, Block(4, 4))[1] if s.cause == "output layer"}


def modules(**children: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(children))


def linears(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(i, o) for i, o in pairwise(sizes)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("head", True),
        ("head_dist", True),
        ("class_labels_classifier", True),
        ("bbox_predictor.layers.2", True),
        ("roi_heads.box_predictor.cls_score", True),
        ("classifier.6", True),
        ("cls.predictions.decoder", True),
        ("lm_head", True),
        ("encoder.layer.3.attention.heads", False),  # after a number: one of many hidden layers
        ("model.22.cv3.0.2", False),
        ("multihead", False),
        ("fc1", False),
        ("decoder.up1", False),
        ("", False),
    ],
)
def test_names_of_output_layers(name: str, expected: bool) -> None:
    assert has_head_name(name) == expected


def test_the_last_layer_of_every_head_is_an_output_layer() -> None:
    detr = modules(
        backbone=linears(8, 8, 8), class_labels_classifier=nn.Linear(8, 5), bbox_predictor=modules(layers=linears(8, 8, 8, 4))
    )
    assert heads(detr) == {"class_labels_classifier": "output layer, by its name", "bbox_predictor.layers.2": LAST}
    deit = modules(blocks=linears(8, 8, 8), head=nn.Linear(8, 5), head_dist=nn.Linear(8, 5))
    assert heads(deit) == {"head": "output layer, by its name", "head_dist": LAST}
    vgg = modules(features=linears(8, 8, 8), classifier=linears(8, 8, 8, 5))
    assert heads(vgg) == {"classifier.2": LAST}
    nested = modules(head=modules(classes=modules(conv=linears(8, 8, 8), cls_logits=nn.Linear(8, 5)), boxes=nn.Linear(8, 4)))
    assert heads(nested) == {"head.classes.cls_logits": "output layer, by its name", "head.boxes": LAST}


class Scales(nn.Module):
    """Two lists of branches for three scales, and a frozen constant that is defined last, as in YOLOv8."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.backbone = nn.ModuleList(linears(8, 8) for _ in range(3))  # these fit behind each other
        self.cv2 = nn.ModuleList(linears(n, 8, 6) for n in widths)
        self.cv3 = nn.ModuleList(linears(n, 8, 5) for n in widths)
        self.dfl = nn.Linear(4, 1, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_the_ends_of_parallel_branches_are_output_layers() -> None:
    model = modules(model=Scales((8, 12, 16)))
    expected = {f"model.cv{b}.{i}.1": "output layer, parallel to model.cv3.2.1" for b in (2, 3) for i in range(3)}
    assert heads(model) == expected | {"model.cv3.2.1": LAST}
    assert heads(nn.ModuleList(nn.Linear(n, 4) for n in (8, 12, 16))) == {"2": LAST}  # the model itself is not a list in a module


def test_layers_of_a_chain_are_not_parallel() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ModuleList(modules(up=nn.Linear(8, 16), down=nn.Linear(16, 8)) for _ in range(4))

    assert heads(Encoder()) == {"layer.3.down": LAST}


def test_a_frozen_constant_is_never_the_last_layer() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 1).requires_grad_(False))
    assert heads(model) == {"1": LAST}
    assert heads(model.requires_grad_(False)) == {}  # all are skipped because they are frozen


def test_a_tied_decoder_is_the_last_layer() -> None:
    model = modules(
        embed=nn.Embedding(20, 8), body=nn.Linear(8, 8), transform=nn.Linear(8, 8), decoder=nn.Linear(8, 20, bias=False)
    )
    model.decoder.weight = model.embed.weight  # type: ignore[union-attr, assignment]
    assert heads(model) == {"embed": "embedding, tied to the output layer decoder"}
    with torch.device("meta"):
        untied = modules(embed=nn.Embedding(20, 8), body=nn.Linear(8, 8), decoder=nn.Linear(8, 20))
    assert heads(untied) == {"decoder": LAST}
