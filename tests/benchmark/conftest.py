"""A geometry that takes milliseconds: every kind of layer, few experts."""

from __future__ import annotations

import pytest

from rlcompute.benchmark.bench import Bench
from rlcompute.benchmark.geometry import ATTENTION, GDN, Geometry

TINY = Geometry(
    name="tiny",
    description="three layers for tests",
    text={
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "layer_types": [GDN, ATTENTION, GDN],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "num_experts": 16,
        "num_experts_per_tok": 8,
    },
    vision={"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2},
    inputs=2,
    length=16,
    prune_layer=0,
    mixed_inputs=3,
    mixed_range=(16, 40),
    expert_tokens=(64, 128),
)


@pytest.fixture(scope="session")
def tiny() -> Geometry:
    return TINY


@pytest.fixture(scope="session")
def bench() -> Bench:
    return Bench(TINY, "cpu", "float32", budget_s=0.0)
