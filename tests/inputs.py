"""Small inputs of every modality, and transformers' own embedding of them as the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlcompute.preprocess import ModelInput, Preprocessor


def picture(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    return rng.integers(0, 255, (height, width, 3), dtype=np.uint8)


def every_modality(preprocessor: Preprocessor, seed: int = 0) -> list[ModelInput]:
    """Text, image, page with an instruction, video, and a mix with two images and a video."""
    rng = np.random.default_rng(seed)
    assemble = preprocessor.assemble

    def clip(frames: int) -> np.ndarray:
        return np.stack([picture(rng, 32, 48) for _ in range(frames)])

    return [
        assemble(text="a moving moon"),
        assemble(images=[picture(rng, 48, 64)]),
        assemble(instruction="find the page", images=[picture(rng, 80, 33)], text="invoice"),
        assemble(video=clip(5), video_fps=3.0),
        assemble(images=[picture(rng, 32, 32), picture(rng, 64, 32)], video=clip(2), text="both"),
        assemble(text="x"),
    ]


def transformers_embedding(model: Any, x: ModelInput) -> Tensor:
    """Unit-norm ``<emb>`` row of the stock forward of one input alone, [d]."""
    types = torch.zeros_like(x.input_ids, dtype=torch.int32)
    types[x.input_ids == model.config.image_token_id] = 1
    types[x.input_ids == model.config.video_token_id] = 2
    images = len(x.grid_thw) - int(x.has_video)
    split = int(x.grid_thw[:images].prod(1).sum())
    kwargs: dict[str, Tensor] = {}
    if images:
        assert x.patches is not None
        kwargs |= {"pixel_values": x.patches[:split], "image_grid_thw": x.grid_thw[:images]}
    if x.has_video:
        assert x.patches is not None
        kwargs |= {"pixel_values_videos": x.patches[split:], "video_grid_thw": x.grid_thw[images:]}
    with torch.no_grad():
        out = model(input_ids=x.input_ids[None], mm_token_type_ids=types[None], use_cache=False, **kwargs)
    return F.normalize(out.last_hidden_state[0, -1].float(), dim=-1)


def relative_error(a: Tensor, b: Tensor) -> float:
    """Largest relative error over rows."""
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max())
