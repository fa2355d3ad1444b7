"""Seeded random inputs: a picture's tokens between two runs of text, as an embedder's inputs look.

Shape legend: L tokens of one input, P patches of its picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rlcompute.backbones.qwen3_5_moe import Qwen35MoeBackbone
from rlcompute.preprocess import ModelInput

VISUAL_SHARE = 0.7
FRAME_TOKENS = (
    4  # tokens of an input that are neither picture nor free text: vision start and end, text, <emb>
)


def mixed_lengths(inputs: int, shortest: int, longest: int, seed: int) -> list[int]:
    """Lengths log-uniform between ``shortest`` and ``longest``, both of which occur: many short and few long."""
    generator = torch.Generator().manual_seed(seed)
    drawn = shortest * torch.exp(math.log(longest / shortest) * torch.rand(inputs, generator=generator))
    return [shortest, longest, *drawn.round().long().tolist()][:inputs]


def random_inputs(backbone: Qwen35MoeBackbone, lengths: Sequence[int], seed: int) -> list[ModelInput]:
    """One input of each length; about ``VISUAL_SHARE`` of its tokens are a picture's."""
    generator = torch.Generator().manual_seed(seed)
    return [_random_input(backbone, length, generator) for length in lengths]


def _random_input(backbone: Qwen35MoeBackbone, length: int, generator: torch.Generator) -> ModelInput:
    config, preprocessor = backbone.model.config, backbone.preprocessor
    # The picture is a near square of merged patches, each of which is one token.
    visual = max(1, int(VISUAL_SHARE * length) - FRAME_TOKENS)
    height = max(1, math.isqrt(visual))
    width = visual // height
    visual = height * width
    special = torch.tensor(
        [
            config.image_token_id,
            config.video_token_id,
            config.vision_start_token_id,
            config.vision_end_token_id,
        ]
    )
    ids_L = torch.randint(0, int(special.min()), (length,), generator=generator)
    before = (length - visual) // 3
    ids_L[before] = config.vision_start_token_id
    ids_L[before + 1 : before + 1 + visual] = config.image_token_id
    ids_L[before + 1 + visual] = config.vision_end_token_id
    ids_L[-1] = preprocessor.emb_token_id
    vision = config.vision_config
    merge = vision.spatial_merge_size
    patch_width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    patches = torch.randn(visual * merge**2, patch_width, generator=generator)
    grid_thw = torch.tensor([[1, height * merge, width * merge]])
    return ModelInput(ids_L, patches, grid_thw, has_video=False)
