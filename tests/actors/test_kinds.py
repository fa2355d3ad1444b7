"""Each method of training starts from its own gates only; said before Ray starts and before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlcompute.actors import grpo_train, ste_loop, train
from rlcompute.actors.checkpoints import TrainerState, save_checkpoint
from rlcompute.backbones.fingerprint import checkpoint_hash
from rlcompute.config_loading import dump_yaml
from rlcompute.errors import CheckpointError
from rlcompute.policies.checkpoint import Gates, save_gates
from rlcompute.policies.gates import init_heads
from rlcompute.policies.ste_gates import StraightThroughGates
from rlcompute.policies.ste_pruner import TokenPruner
from tests.actors.tiny_run import make_config

STRAIGHT = StraightThroughGates([TokenPruner(1, 4, 32)])
HEADS = init_heads(torch.zeros(4, 32), torch.ones(4), skip=0.1, drop=0.1, late_skip_bias=0.0, droppable="all")
STATES = {"grpo": grpo_train.STATE_PARTS, "ste": ste_loop.STATE_PARTS}


def names(inputs: Path) -> dict[str, str]:
    folder = inputs / "checkpoint"
    return {"path": str(folder), "family": "qwen3_5_moe", "hash": checkpoint_hash(folder)}


def test_grpo_does_not_start_from_straight_through_gates(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "gates").mkdir()
    save_gates(tmp_path / "gates", STRAIGHT, names(inputs), {})
    config = make_config(inputs, tmp_path, "x", policy={"init_from": str(tmp_path / "gates")})
    with pytest.raises(CheckpointError, match=r"straight-through trained these gates .* run\.method=grpo"):
        train.run(config, resume=False)
    assert not config.run.folder.exists()


@pytest.mark.parametrize(("method", "gates"), [("grpo", STRAIGHT), ("ste", HEADS)])
@pytest.mark.parametrize("state_of", ["grpo", "ste"])
def test_no_method_goes_on_with_the_others_checkpoint(
    method: str, gates: Gates, state_of: str, inputs: Path, tmp_path: Path
) -> None:
    config = make_config(inputs, tmp_path, "x", run={"method": method})
    checkpoints = config.run.folder / "checkpoints"
    save_checkpoint(
        checkpoints,
        gates=gates,
        optimizer={"step": torch.ones(1)},
        state=TrainerState(5, {name: {} for name in STATES[state_of]}),
        backbone=names(inputs),
        extra={},
    )
    (config.run.folder / "config.yaml").write_text(dump_yaml(config))
    before = sorted(config.run.folder.rglob("*"))
    with pytest.raises(CheckpointError, match=rf"{config.run.folder}.*run\.method"):
        train.run(config, resume=True)
    assert sorted(config.run.folder.rglob("*")) == before
