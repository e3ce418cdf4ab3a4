"""Models of transformers, made from small configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, dict[str, Tensor]]
WORDS = 120  # size of the vocabulary


def words(length: int = 12) -> Tensor:
    return torch.randint(5, WORDS, (2, length))


def image(side: int = 32) -> Tensor:
    return torch.randn(2, 3, side, side)


def bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    return BertForMaskedLM(BertConfig(vocab_size=WORDS, **sizes)), {
        "input_ids": words(),
        "attention_mask": torch.ones(2, 12).long(),
    }


def distilbert() -> Made:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(vocab_size=WORDS, dim=64, n_layers=2, n_heads=4, hidden_dim=128)
    return DistilBertForSequenceClassification(config), {"input_ids": words()}


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4, use_cache=False, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config), {"input_ids": words()}


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, use_cache=False, **sizes)), {"input_ids": words()}


def mixtral() -> Made:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(
        vocab_size=WORDS, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False, **sizes
    )
    return MixtralForCausalLM(config), {"input_ids": words()}


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=WORDS, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, use_cache=False)
    return T5ForConditionalGeneration(config), {"input_ids": words(), "decoder_input_ids": words(7)}


def whisper() -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = WhisperConfig(
        vocab_size=WORDS,
        d_model=64,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=16,
        max_source_positions=20,
        max_target_positions=20,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        **layers,
    )
    return WhisperForConditionalGeneration(config), {"input_features": torch.randn(2, 16, 40), "decoder_input_ids": words(7)}


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=10, **sizes)), {"pixel_values": image()}


def dinov2() -> Made:
    from transformers import Dinov2Config, Dinov2ForImageClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2}
    return Dinov2ForImageClassification(Dinov2Config(image_size=32, patch_size=8, num_labels=10, **sizes)), {
        "pixel_values": image()
    }


def clip() -> Made:
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = CLIPTextConfig(vocab_size=WORDS, max_position_embeddings=16, bos_token_id=0, eos_token_id=1, pad_token_id=2, **sizes)
    vision = CLIPVisionConfig(image_size=32, patch_size=8, **sizes)
    model = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=32))
    return model, {"input_ids": words(), "pixel_values": image(), "attention_mask": torch.ones(2, 12).long()}


def detr() -> Made:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 32, 64, 64], depths=[1, 1, 1, 1], layer_type="basic", out_features=["stage4"]
    )
    config = DetrConfig(
        backbone_config=backbone,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        num_queries=10,
        num_labels=5,
    )
    return DetrForObjectDetection(config), {"pixel_values": image(64)}


def yolos() -> Made:
    from transformers import YolosConfig, YolosForObjectDetection

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = YolosConfig(image_size=[32, 32], patch_size=8, num_detection_tokens=10, num_labels=5, **sizes)
    return YolosForObjectDetection(config), {"pixel_values": image()}


def segformer() -> Made:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 64, 64], decoder_hidden_size=64, num_labels=5)
    return SegformerForSemanticSegmentation(config), {"pixel_values": image(64)}


def resnet() -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[32, 32, 64, 64], depths=[1, 1, 1, 1], layer_type="basic", num_labels=10)
    return ResNetForImageClassification(config), {"pixel_values": image(64)}


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    make.__name__: make
    for make in (
        bert,
        distilbert,
        gpt2,
        llama,
        mixtral,
        t5,
        whisper,
        vit,
        dinov2,
        clip,
        detr,
        yolos,
        segformer,
        resnet,
    )
}
