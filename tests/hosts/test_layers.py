"""Which layers of known models are chosen. The expectations come from the architectures, not from smartprune."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import smartprune as sp
from helpers.hosts.models import make, missing_package
from helpers.hosts.stages import BLOCK, FLOOR, SPARSITY, call

HEADS = {  # the layers that compute the outputs; MONAI adds the input of its last layer to its output, so that one has no head
    "ultralytics/yolov8n": r"model\.22\.cv[23]\.[012]\.2",
    "ultralytics/yolo11n": r"model\.23\.cv[23]\.[012]\.2",
    "ultralytics/yolo11n-seg": r"model\.23\.cv[234]\.[012]\.2",
    "transformers/detr": r"class_labels_classifier|bbox_predictor\.layers\.2",
    "transformers/yolos": r"(class_labels_classifier|bbox_predictor)\.layers\.2",
    "timm/deit_tiny_distilled_patch16_224": r"head|head_dist",
    "timm/resnet18": r"fc",
    "timm/vit_tiny_patch16_224": r"head",
    "timm/efficientnet_b0": r"classifier",
    "torchvision/deeplabv3_mobilenet_v3_large": r"classifier\.4",
    "transformers/segformer": r"decode_head\.classifier",
    "transformers/llama": r"lm_head",
    "segmentation_models_pytorch/Unet": r"segmentation_head\.0",
    "diffusers/UNet2DModel": r"conv_out",
    "torch/lstm_tagger": r"classify",
}
PRUNED = {  # layers next to a head, which must not be taken for one
    "transformers/bert": [r"cls\.predictions\.transform\.dense"],
    "transformers/detr": [r"bbox_predictor\.layers\.[01]"],
    "transformers/yolos": [r"(class_labels_classifier|bbox_predictor)\.layers\.[01]"],
    "ultralytics/yolov8n": [r"model\.22\.cv[23]\.[012]\.[01]\.conv"],
    "torch/lstm_tagger": [r"project"],
}


def planned(host: str, with_example: bool = True, **options: Any) -> sp.Plan:
    if package := missing_package(host):
        pytest.skip(f"{package} is not installed; run make hosts")
    model, example = make(host)
    return sp.plan(model, BLOCK, SPARSITY, example=example if with_example else None, **options)


def names(layers: Sequence[Any]) -> list[str]:
    return [layer.name for layer in layers]


@pytest.mark.parametrize("host", HEADS)
def test_output_heads_are_spared_and_named(host: str) -> None:
    plan = planned(host)
    assert [name for name in names(plan.layers) if re.fullmatch(HEADS[host], name)] == []
    assert any(re.fullmatch(HEADS[host], name) for name in names(plan.skipped)), "the plan does not list the head"


@pytest.mark.parametrize("host", PRUNED)
def test_layers_next_to_a_head_are_pruned(host: str) -> None:
    layers = names(planned(host).layers)
    for pattern in PRUNED[host]:
        assert any(re.fullmatch(pattern, name) for name in layers), pattern


def test_auxiliary_heads_of_googlenet_are_left_out_and_named() -> None:
    plan = planned("torchvision/googlenet")
    assert not any(name.startswith("aux") for name in names(plan.layers))
    skipped = {layer.name: layer.reason for layer in plan.skipped}
    assert {"aux1.conv.conv", "aux1.fc1", "aux2.conv.conv", "aux2.fc1"} <= skipped.keys()
    assert "aux1" in str(plan)


def test_auxiliary_heads_of_googlenet_can_be_included() -> None:
    layers = names(planned("torchvision/googlenet", include="aux*").layers)
    assert {"aux1.conv.conv", "aux1.fc1", "aux2.conv.conv", "aux2.fc1"} <= set(layers)


@pytest.mark.parametrize("host", ["timm/resnetv2_50x1_bit", "timm/nf_regnet_b0"])
def test_standardized_convolutions_do_not_match_a_wildcard(host: str) -> None:
    if package := missing_package(host):
        pytest.skip(f"{package} is not installed; run make hosts")
    model, example = make(host)
    plan = sp.plan(model, BLOCK, SPARSITY, include="*", example=example)
    kinds = {type(model.get_submodule(layer.name)).__name__ for layer in plan.layers}
    assert not any("Std" in kind for kind in kinds), kinds


def test_a_standardized_convolution_that_is_named_raises() -> None:
    with pytest.raises(sp.SmartpruneError, match=r"stages\.0\.blocks\.0\.conv1"):
        planned("timm/resnetv2_50x1_bit", include="stages.0.blocks.0.conv1")


@pytest.mark.parametrize("with_example", [True, False])
@pytest.mark.parametrize("host", ["ultralytics/yolov8n", "ultralytics/yolo11n"])
def test_the_constant_of_yolo_is_never_chosen(host: str, with_example: bool) -> None:
    plan = planned(host, with_example)
    assert not any(name.endswith("dfl.conv") for name in names(plan.layers))
    assert any(layer.name.endswith("dfl.conv") for layer in plan.skipped)


def test_the_tied_decoder_of_bert_is_named() -> None:
    plan = planned("transformers/bert")
    reasons = {layer.name: layer.reason for layer in plan.skipped}
    (reason,) = [reason for name, reason in reasons.items() if "word_embeddings" in name or "decoder" in name]
    assert "decoder" in reason or "cls.predictions.decoder" in reasons
    assert "tied" in reason


class KernelInputs(TorchDispatchMode):
    """Records what tensors operations compute with. Views of a tensor have its storage."""

    VIEWS = ("aten::t", "aten::transpose", "aten::view", "aten::_unsafe_view", "aten::permute", "aten::detach", "aten::expand")
    VIEWS += ("aten::unsqueeze", "aten::squeeze", "aten::slice", "aten::select", "aten::alias", "aten::split", "aten::chunk")

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name not in self.VIEWS:
            tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
            self.storages |= {x.untyped_storage().data_ptr() for x in tensors}
        return func(*args, **(kwargs or {}))


USED = ["torchvision/googlenet", "timm/convnext_atto", "timm/vit_tiny_patch16_224", "transformers/detr", "transformers/t5"]
USED += ["ultralytics/yolov8n", "ultralytics/yolo11n-seg", "monai/UNet_3d", "diffusers/UNet2DModel", "torch/nn_transformer"]


@pytest.mark.parametrize("host", USED)
def test_inference_computes_with_every_pruned_weight(host: str) -> None:
    """What the receipt counts is what inference skips: kernels receive the zeros of every layer."""
    if package := missing_package(host):
        pytest.skip(f"{package} is not installed; run make hosts")
    model, example = make(host)
    pruner = sp.attach(model, sp.Magnitude(), block=BLOCK, sparsity=SPARSITY, floor=FLOOR, steps=1, example=example)
    pruner.freeze(force=True)
    receipt = sp.bake(model)
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)  # the fused kernel of attention reads weights where no mode sees it
    try:
        with torch.no_grad(), KernelInputs() as inputs:
            call(model, example)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    weights = dict(model.named_parameters(remove_duplicate=False))
    unused = [row.name for row in receipt.layers if weights[row.weight].untyped_storage().data_ptr() not in inputs.storages]
    assert unused == []


def test_layers_count_only_modules_that_inference_calls() -> None:
    """The same with hooks, for the network whose auxiliary heads only train."""
    if package := missing_package("torchvision/googlenet"):
        pytest.skip(f"{package} is not installed; run make hosts")
    model, example = make("torchvision/googlenet")
    called: set[nn.Module] = set()
    for module in model.modules():
        module.register_forward_hook(lambda m, *_: called.add(m))
    plan = sp.plan(model, BLOCK, SPARSITY, example=example)
    called.clear()
    model.eval()(example)
    assert all(model.get_submodule(name) in called for name in names(plan.layers))
