from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.policies.checkpoint import save_gates
from rlcompute.policies.gates import init_heads
from rlcompute.policies.ste_expert_skip import ExpertSkip
from rlcompute.policies.ste_gates import StraightThroughGates
from rlcompute.policies.ste_pruner import TokenPruner
from tests.pairs import write_small_pairs
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session")
def suite_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint, 12 pairs of each of two modalities, the gates of two seeds, and straight-through gates."""
    root = tmp_path_factory.mktemp("compare")
    write_tiny_checkpoint(root / "tiny")
    write_small_pairs(root / "test.parquet", 12)
    backbone = load_backbone(root / "tiny")
    mean, scale = torch.zeros(backbone.num_layers, backbone.hidden_size), torch.ones(backbone.num_layers)
    heads = init_heads(mean, scale, skip=0.2, drop=0.1, late_skip_bias=2.0, droppable="all")
    names = {"path": "somewhere", "family": backbone.family, "hash": backbone.hash}
    for seed in (0, 1):
        noise = torch.randn(heads.weight_N3F.shape, generator=torch.Generator().manual_seed(seed))
        folder = root / f"gates_{seed}"
        folder.mkdir()
        save_gates(folder, replace(heads, weight_N3F=heads.weight_N3F + 0.3 * noise), names, {})
    (root / "straight").mkdir()
    save_gates(root / "straight", _straight_through(backbone), names, {})
    return root


def _straight_through(backbone: Backbone) -> StraightThroughGates:
    """Gates that look at their inputs."""
    gates = StraightThroughGates(
        [
            TokenPruner(1, backbone.num_layers, backbone.hidden_size),
            ExpertSkip(backbone.num_layers, backbone.hidden_size),
        ]
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in gates.named_parameters():
            if "weight" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator))
    return gates
