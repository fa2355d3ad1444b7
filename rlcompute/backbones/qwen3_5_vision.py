"""Qwen3.5's vision tower over packed patches of images and frames of any size.

Shape legend: P patches, H heads, D head width, c tower width, M merged visual tokens (4 patches each), d hidden
size of the language model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from rlcompute.backbones.base import Backbone


def _rotate_vision(x_PHD: Tensor, cos_PD: Tensor, sin_PD: Tensor) -> Tensor:
    low, high = x_PHD.chunk(2, dim=-1)
    return x_PHD * cos_PD[:, None] + torch.cat((-high, low), dim=-1) * sin_PD[:, None]


class VisionTower:
    """The frozen tower: every frame attends to itself only, all frames of a call in one packed pass."""

    def __init__(self, module: Any, backbone: Backbone) -> None:
        self.module, self.config, self.backbone = module, module.config, backbone
        proj = module.patch_embed.proj
        # A convolution over exactly one window is a linear layer, and much faster as one.
        self.w_patch, self.b_patch = proj.weight.flatten(1), proj.bias

    def __call__(self, patches: Tensor, grid_thw: Tensor) -> Tensor:
        """Visual tokens [M,d] of ``patches`` [P, channels*frames*height*width], grids int64 [n,3]."""
        module, merge = self.module, self.config.spatial_merge_size
        index, weight = get_vision_interpolation_indices_and_weights(
            grid_thw,
            num_grid_per_side=module.num_grid_per_side,
            mode=module.interpolation_mode,
            align_corners=module.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        device = patches.device
        learned = (module.pos_embed(index.to(device)) * weight.to(device)[:, :, None]).sum(1)
        h_Pc = F.linear(patches, self.w_patch, self.b_patch) + learned.to(patches.dtype)
        cos_PD, sin_PD = module.rotary_pos_emb(h_Pc, get_vision_position_ids(grid_thw, merge).to(device))
        cu_seqlens = get_vision_cu_seqlens(grid_thw).long().cpu()
        for block in module.blocks:
            h_Pc = h_Pc + self._attend(block.attn, block.norm1(h_Pc), cos_PD, sin_PD, cu_seqlens)
            h_Pc = h_Pc + block.mlp(block.norm2(h_Pc))
        merged: Tensor = module.merger(h_Pc)
        return merged

    def _attend(self, attn: Any, x_Pc: Tensor, cos_PD: Tensor, sin_PD: Tensor, cu_seqlens: Tensor) -> Tensor:
        wide = torch.promote_types(x_Pc.dtype, torch.float32)
        query, key, value_PHD = attn.qkv(x_Pc).view(x_Pc.shape[0], 3, attn.num_heads, -1).unbind(1)
        query_PHD = _rotate_vision(query.to(wide), cos_PD, sin_PD).to(x_Pc.dtype)
        key_PHD = _rotate_vision(key.to(wide), cos_PD, sin_PD).to(x_Pc.dtype)
        out_PHD = self.backbone.kernels.attention(
            query_PHD, key_PHD, value_PHD, cu_seqlens, cu_seqlens, scale=attn.scaling, causal=False
        )
        out: Tensor = attn.proj(out_PHD.flatten(1))
        return out

    def flops(self, grid_thw: list[int]) -> float:
        """FLOPs (2 per multiply-add) of the tower on one image or video of this patch grid."""
        c, config = self.config.hidden_size, self.config
        t, height, width = grid_thw
        patches, frame = t * height * width, height * width
        per_patch = 2 * self.w_patch.shape[1] * c
        per_patch += config.depth * (8 * c * c + 4 * c * config.intermediate_size + 4 * frame * c)
        merge = config.spatial_merge_size**2
        per_merged = 2 * (merge * c) * (merge * c + config.out_hidden_size)
        return float(patches * per_patch + patches // merge * per_merged)
