"""What a dry run of straight-through training promises, against what autograd keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlcompute import plan_ste
from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.config import DEMO_BACKBONE, Config
from rlcompute.pack import IMAGE, EmbeddedInput
from rlcompute.policies.ste_build import build_gates
from rlcompute.policies.ste_gates import StepContext
from rlcompute.soft_encoder import encode_soft

LENGTHS = [96, 24, 60, 40]

QWEN3_5_35B_A3B = {
    "num_hidden_layers": 40,
    "full_attention_interval": 4,
    "hidden_size": 2048,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def ste_config(**ste: Any) -> Config:
    return Config.model_validate(
        {"run": {"name": "x", "method": "ste"}, "data": {"train": "a", "test": "b"}, "ste": ste}
    )


@pytest.fixture(scope="module")
def demo() -> Backbone:
    return load_backbone(DEMO_BACKBONE)


def kept_bytes(backbone: Backbone, config: Config) -> int:
    """Bytes of what autograd keeps of a forward pass, weights left out, each storage counted once."""
    generator = torch.Generator().manual_seed(0)
    d = backbone.hidden_size
    inputs = [
        EmbeddedInput(
            torch.randn(length, d, generator=generator),
            torch.arange(length).expand(3, length).contiguous(),
            torch.full((length,), IMAGE, dtype=torch.int8),
            0.0,
        )
        for length in LENGTHS
    ]
    ones = torch.ones(backbone.num_layers)
    gates = build_gates(config.ste, backbone, inputs, torch.zeros(backbone.num_layers, d), ones)
    weights = {weight.untyped_storage().data_ptr() for weight in backbone.model.parameters()}
    kept: dict[int, Tensor] = {}  # holds the tensors, so that no address is used twice

    def keep(x: Tensor) -> Tensor:
        kept.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    context = StepContext(1.0, torch.arange(len(inputs)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        encode_soft(backbone, *backbone.pack(inputs), gates.soft_policy(context))
    return sum(x.untyped_storage().nbytes() for address, x in kept.items() if address not in weights)


@pytest.mark.parametrize(
    "ste",
    [
        {"actions": ("expert_skip",)},
        {"actions": ("token_pruner",), "prune_layer": 3},
        {"actions": ("layer_skip",), "layer_first": 4},
    ],
    ids=lambda ste: ste["actions"][0],
)
def test_kept_activations_are_those_of_autograd(demo: Backbone, ste: dict[str, Any]) -> None:
    config = ste_config(**ste)
    widths = plan_ste.read_widths(demo.path)
    promised = plan_ste.activations(widths, LENGTHS, plan_ste.first_layer(config), 4)
    assert sum(promised.by_layer) == pytest.approx(kept_bytes(demo, config), rel=0.15)


def test_adapters_need_the_activations_of_all_layers() -> None:
    assert plan_ste.first_layer(ste_config(actions=("token_pruner",), prune_layer=3)) == 4
    assert plan_ste.first_layer(ste_config(actions=("token_pruner",), prune_layer=3, lora_rank=8)) == 0
    several = {"actions": ("token_pruner", "expert_skip"), "combination": "shared"}
    assert plan_ste.first_layer(ste_config(**several)) == 1


def test_recomputing_layers_keeps_one_of_them_at_the_35b_geometry() -> None:
    widths = plan_ste.Widths.of(QWEN3_5_35B_A3B)
    assert sum(widths.attention) == 10
    kept = plan_ste.activations(widths, [64, 448] * 4, 1, 2)
    peaks = {recompute: kept.peak(recompute=recompute) for recompute in (False, True)}
    assert peaks[True] < 0.1 * peaks[False]
    longer = plan_ste.activations(widths, [128, 896] * 4, 1, 2)
    assert longer.peak(recompute=False) > 2 * peaks[False]
