"""A random Qwen3.5-MoE embedder of a few thousand weights, written like any transformers checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeModel
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from rlcompute.demo.model import image_processor, initialise
from rlcompute.preprocess import Preprocessor

LAYER_TYPES = ("linear_attention", "full_attention", "linear_attention", "full_attention")
_SPECIAL = (
    "<|endoftext|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|emb|>",
)


def byte_tokenizer() -> Qwen3_5Tokenizer:
    """One token a byte, and the family's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen3_5Tokenizer(
        vocab={token: i for i, token in enumerate(alphabet)},
        merges=[],
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    return tokenizer


def tiny_config(tokenizer: Qwen3_5Tokenizer, layer_types: Sequence[str] = LAYER_TYPES) -> Qwen3_5MoeConfig:
    token = tokenizer.convert_tokens_to_ids
    return Qwen3_5MoeConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "num_hidden_layers": len(layer_types),
            "layer_types": list(layer_types),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
            "pad_token_id": token("<|endoftext|>"),
            "eos_token_id": token("<|endoftext|>"),
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
    )


def write_tiny_checkpoint(folder: Path, layer_types: Sequence[str] = LAYER_TYPES, seed: int = 0) -> Path:
    """Write the checkpoint in float32 and return its folder."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    model = Qwen3_5MoeModel(copy.deepcopy(tiny_config(tokenizer, layer_types)))
    initialise(model)
    with torch.no_grad():
        for weight in model.parameters():  # norms too: a weight at its default would hide a mistake
            weight.add_(0.05 * torch.randn_like(weight))
    model.save_pretrained(folder)
    preprocessor = Preprocessor(tokenizer, image_processor())
    preprocessor.tokenizer.save_pretrained(folder)
    preprocessor.image_processor.save_pretrained(folder)
    return folder
