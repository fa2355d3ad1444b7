"""Models of known size to measure on: the embedded demo checkpoint, and Qwen3.5-MoE with random weights.

Random weights change no shape, and the router's are scaled like the others: experts receive unequal but comparable
shares, as in a trained model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModel, Qwen3_5MoeConfig

from rlcompute.backbones import load_backbone
from rlcompute.backbones.qwen3_5_moe import Qwen35MoeBackbone
from rlcompute.config import DEMO_BACKBONE
from rlcompute.demo import CHECKPOINT
from rlcompute.demo.model import build_config, initialise
from rlcompute.errors import ConfigError
from rlcompute.kernels import registry
from rlcompute.preprocess import Preprocessor

GDN, ATTENTION = "linear_attention", "full_attention"


@dataclass(frozen=True)
class Geometry:
    """Widths of a model and the batch it is measured on.

    Attributes:
        name: what the command line calls it.
        description: for the report.
        text: keys of transformers' text configuration; None for the demo checkpoint.
        vision: keys of its vision configuration.
        inputs: inputs of the batch of equal lengths.
        length: tokens of each of them.
        mixed_inputs: inputs of the batch of mixed lengths.
        mixed_range: shortest and longest of them, in tokens.
        prune_layer: layer in whose mixture-of-experts block table i drops tokens.
        expert_tokens: token counts of table iii.
    """

    name: str
    description: str
    text: Mapping[str, Any] | None
    vision: Mapping[str, Any]
    inputs: int
    length: int
    mixed_inputs: int
    mixed_range: tuple[int, int] = (16, 512)
    prune_layer: int = 1
    expert_tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)


def _text(
    layer_types: list[str], d: int, heads: int, kv_heads: int, head_dim: int, **widths: int
) -> dict[str, Any]:
    """The proportions of Qwen3.5-35B-A3B: value heads of the delta rule and queries twice as wide as the model."""
    quarter = (
        head_dim // 8
    )  # a quarter of the head turns; its channel pairs are shared out over time, height, width
    return {
        "hidden_size": d,
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": d // 128,
        "linear_num_value_heads": 2 * d // 128,
        "moe_intermediate_size": d // 4,
        "shared_expert_intermediate_size": d // 4,
        "num_experts_per_tok": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [quarter - 2 * (quarter // 3), quarter // 3, quarter // 3],
            "mrope_interleaved": True,
        },
        **widths,
    }


GEOMETRIES: dict[str, Geometry] = {
    geometry.name: geometry
    for geometry in (
        Geometry(
            name="demo",
            description="the embedded demo checkpoint: d 128, 8 layers, 16 experts of width 64, top-4",
            text=None,
            vision={},
            inputs=32,
            length=96,
            mixed_inputs=32,
        ),
        Geometry(
            name="bench",
            description="random weights: d 512, 12 layers (3 Gated DeltaNet to 1 attention), 64 experts of "
            "width 128, top-8, one shared expert; proportions of Qwen3.5-35B-A3B",
            text=_text([GDN, GDN, GDN, ATTENTION] * 3, 512, 8, 1, 128, num_experts=64),
            vision={"depth": 4, "hidden_size": 256, "intermediate_size": 768, "num_heads": 4},
            inputs=16,
            length=256,
            mixed_inputs=16,
        ),
        Geometry(
            name="qwen3_5_35b_a3b",
            description="random weights at the true widths of Qwen3.5-35B-A3B: d 2048, 256 experts of width "
            "512, top-8; a Gated DeltaNet layer, an attention layer, and a last layer, of which every pass "
            "computes <emb> tokens only",
            text=_text([GDN, ATTENTION, GDN], 2048, 16, 2, 256, num_experts=256),
            vision={"depth": 1, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16},
            inputs=8,
            length=512,
            mixed_inputs=24,
            prune_layer=0,
        ),
    )
}


def find(name: str) -> Geometry:
    """The geometry of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in GEOMETRIES:
        raise ConfigError(f"no geometry {name!r}; there are {', '.join(GEOMETRIES)}")
    return GEOMETRIES[name]


def build(
    geometry: Geometry,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    kernels: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Qwen35MoeBackbone:
    """The model behind the backbone contract.

    Args:
        geometry: its widths.
        device, dtype: where and in what precision, as in :func:`rlcompute.backbones.load_backbone`.
        kernels: backends to force, by operation.
        seed: of the random weights.

    Raises:
        BackendError: a forced backend cannot run there.
        ConfigError: the device is not there.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} was asked for, but torch finds no GPU here")
    if geometry.text is None:
        backbone = load_backbone(DEMO_BACKBONE, device=device, dtype=dtype, kernels=kernels)
        assert isinstance(backbone, Qwen35MoeBackbone)
        return backbone
    chosen = registry.resolve(device, getattr(torch, dtype), kernels)
    # Random weights have no folder of their own: tokens and picture settings are the demo's.
    preprocessor = Preprocessor.from_pretrained(CHECKPOINT)
    model = _random_model(geometry, preprocessor, device, getattr(torch, dtype), seed)
    return Qwen35MoeBackbone(model, CHECKPOINT, preprocessor, chosen)


def _random_model(
    geometry: Geometry, preprocessor: Preprocessor, device: str, dtype: torch.dtype, seed: int
) -> Any:
    demo = build_config(preprocessor.tokenizer)
    assert geometry.text is not None
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = Qwen3_5MoeConfig(
        text_config={**demo.text_config.to_dict(), **geometry.text},
        vision_config={
            **demo.vision_config.to_dict(),
            **geometry.vision,
            "out_hidden_size": geometry.text["hidden_size"],
        },
        **{name: getattr(demo, name) for name in tokens},
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa")
        initialise(model)
    return model
