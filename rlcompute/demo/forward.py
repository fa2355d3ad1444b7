"""The demo's own training forward: transformers' modules, batched, with two shortcuts that change no value.

Only the recipe uses it; serving and gate training go through the packed encoder.

Legend: B sequences, L tokens, d hidden size, P patches.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers.models.qwen3_5_moe.modeling_qwen3_5_moe as family
from transformers import Qwen3_5MoeModel

from rlcompute.demo.batches import Inputs

_CHUNK = 16
"""Gated DeltaNet pads sequences to a multiple of its chunk; the default of 64 would pad short queries fourfold."""


def _equal_length_attention(
    self: Any,
    hidden_states: torch.Tensor,
    cu_seqlens: torch.Tensor,
    position_embeddings: Any = None,
    **_: Any,
) -> torch.Tensor:
    """Vision attention when all images of the batch have one size: one call instead of one an image."""
    patches, length = hidden_states.shape[0], int(cu_seqlens[1])
    query, key, value = (
        self.qkv(hidden_states).reshape(patches, 3, self.num_heads, -1).permute(1, 0, 2, 3).unbind(0)
    )
    query, key = family.apply_rotary_pos_emb_vision(query, key, *position_embeddings)
    query, key, value = (
        x.reshape(patches // length, length, self.num_heads, -1).transpose(1, 2) for x in (query, key, value)
    )
    mixed = F.scaled_dot_product_attention(query, key, value, scale=self.scaling)
    projected: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(patches, -1))
    return projected


def use_shortcuts(model: Qwen3_5MoeModel) -> None:
    """Install the vision shortcut on this model's modules."""
    for block in model.visual.blocks:
        block.attn.forward = _equal_length_attention.__get__(block.attn)


def embed(model: Qwen3_5MoeModel, inputs: Inputs) -> torch.Tensor:
    """Final hidden state of each embedding token, not normalised: float32 ``[B, d]``.

    Visual sequences of one batch must all have the same tokens.
    """
    hidden_BLd: torch.Tensor = model.get_input_embeddings()(inputs.ids_BL)
    position_ids = None
    if inputs.patches is not None:
        features = model.visual(inputs.patches, grid_thw=inputs.grid_thw).pooler_output
        pad = model.config.video_token_id if inputs.has_video else model.config.image_token_id
        hidden_BLd = hidden_BLd.masked_scatter((inputs.ids_BL == pad)[..., None], features)
        position_ids = _position_ids(model, inputs).expand(-1, len(inputs.ids_BL), -1)
    output = model.language_model(
        inputs_embeds=hidden_BLd, position_ids=position_ids, use_cache=False, chunk_size=_CHUNK
    )
    hidden_BLd = output.last_hidden_state
    return hidden_BLd[torch.arange(len(inputs.last_B)), inputs.last_B].float()


def _position_ids(model: Qwen3_5MoeModel, inputs: Inputs) -> torch.Tensor:
    """Rotary positions of the batch's one layout, ``[3, 1, L]``."""
    ids = inputs.ids_BL[:1]
    kinds = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
    grid = inputs.grid_thw[:1]
    positions: torch.Tensor = model.get_rope_index(
        ids,
        image_grid_thw=None if inputs.has_video else grid,
        video_grid_thw=grid if inputs.has_video else None,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=kinds,
    )[0]
    return positions
