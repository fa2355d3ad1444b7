"""Configuration and initialisation of the demo embedder: a true ``Qwen3_5MoeModel`` of 4.9 million parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import Qwen2VLImageProcessorPil, Qwen3_5MoeConfig, Qwen3_5MoeModel

HIDDEN = 128
LAYERS = 8
PATCH = 8
_MIN_PIXELS, _MAX_PIXELS = 16 * 16, 256 * 256


def image_processor() -> Qwen2VLImageProcessorPil:
    """Image parameters: 8 pixel patches, merged two by two, sides a multiple of 16, at most 256 tokens an image."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": _MIN_PIXELS, "longest_edge": _MAX_PIXELS},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def build_config(tokenizer: Any) -> Qwen3_5MoeConfig:
    """The family's architecture in small: full attention every fourth layer, 16 experts of which 4 run a token."""
    token = tokenizer.convert_tokens_to_ids
    return Qwen3_5MoeConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
            "pad_token_id": token("<|endoftext|>"),
            "eos_token_id": token("<|endoftext|>"),
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 96,
            "intermediate_size": 288,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": HIDDEN,
            "num_position_embeddings": 256,
            "initializer_range": 0.05,
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
    )


@torch.no_grad()
def initialise(model: Qwen3_5MoeModel) -> None:
    """Replace transformers' initialisation, under which a small model does not learn.

    Its Gated DeltaNet starts with ``dt_bias`` 1 and decay rates up to 16, so the state forgets within a token and a
    contrastive loss stays at chance. Here decay starts as in Mamba (dt log-uniform in [0.001, 0.1], rates in
    [1, 8]), the convolution near identity, and matrices are scaled by fan-in, those that write to the residual
    stream by half of it.
    """
    for layer in model.language_model.layers:
        if hasattr(layer, "linear_attn"):
            mixer = layer.linear_attn
            step = torch.exp(torch.empty(mixer.num_v_heads).uniform_(math.log(0.001), math.log(0.1)))
            mixer.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # inverse of softplus
            mixer.A_log.copy_(torch.empty(mixer.num_v_heads).uniform_(1, 8).log())
            mixer.in_proj_a.weight.normal_(0, 0.02)
            mixer.conv1d.weight.normal_(0, 0.2)
            mixer.conv1d.weight[:, :, -1] += 1
    writers = ("out_proj.weight", "o_proj.weight", "down_proj.weight", "down_proj", "linear_fc2.weight")
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            weight.normal_(0, 0.5)
        elif "in_proj_a" in name or "pos" in name or not (weight.ndim == 2 or "experts" in name):
            continue
        else:
            gain = 0.4 if name.endswith(writers) and "merger" not in name else 0.8
            weight.normal_(0, gain * weight.shape[-1] ** -0.5)


def build_model(tokenizer: Any) -> Qwen3_5MoeModel:
    """A freshly initialised model in float32."""
    config = build_config(tokenizer)
    config._experts_implementation = "grouped_mm"
    model = Qwen3_5MoeModel(config)
    initialise(model)
    return model
