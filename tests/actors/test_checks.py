"""What a user can get wrong is said before Ray starts and before anything is written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlcompute.actors import grpo_train, train
from rlcompute.config import Config
from rlcompute.data import Pair, write_pairs
from rlcompute.errors import CheckpointError, ConfigError, DataError
from rlcompute.policies.checkpoint import save_gates
from rlcompute.policies.gates import init_heads
from tests.actors.tiny_run import make_config, make_pairs


def refuse(config: Config, error: type[Exception], message: str, *, resume: bool = False) -> None:
    with pytest.raises(error, match=message):
        train.run(config, resume=resume)
    assert not config.run.folder.exists()


def with_rows(inputs: Path, tmp_path: Path, pairs: list[Pair], on_bad_row: str = "error") -> Config:
    write_pairs(tmp_path / "train.parquet", pairs)
    data = {
        "train": str(tmp_path / "train.parquet"),
        "test": str(inputs / "test.parquet"),
        "on_bad_row": on_bad_row,
    }
    return make_config(inputs, tmp_path / "runs", "x", data=data)


def test_missing_backbone(inputs: Path, tmp_path: Path) -> None:
    config = make_config(inputs, tmp_path, "x", backbone={"path": str(tmp_path / "nowhere")})
    refuse(config, CheckpointError, "nowhere is not a folder")


def test_unsupported_family(inputs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(inputs / "checkpoint", folder)
    content = json.loads((folder / "config.json").read_text()) | {"model_type": "bert"}
    (folder / "config.json").write_text(json.dumps(content))
    config = make_config(inputs, tmp_path, "x", backbone={"path": str(folder)})
    refuse(config, CheckpointError, "'bert' is not supported")


def test_undecodable_image_is_an_error_or_skipped(inputs: Path, tmp_path: Path) -> None:
    pairs = make_pairs(5)
    broken = replace(pairs[3], target=replace(pairs[3].target, images=(b"no image",)))
    pairs[3] = broken
    refuse(with_rows(inputs, tmp_path, pairs), DataError, f"id '{broken.id}'")
    found = grpo_train.check(with_rows(inputs, tmp_path, pairs, on_bad_row="skip"), resume=False)
    assert len(found.pairs) == 9
    assert [line.split(":")[0] for line in found.skipped] == [broken.id]


def test_more_negatives_than_there_are(inputs: Path, tmp_path: Path) -> None:
    config = make_config(inputs, tmp_path, "x", reward={"negatives": 100})
    refuse(config, ConfigError, "reward.negatives=100 but a gallery has 14")


def test_the_pair_itself_is_no_negative_of_the_bank(inputs: Path, tmp_path: Path) -> None:
    grpo_train.check(make_config(inputs, tmp_path, "x", reward={"negatives": 14}), resume=False)
    config = make_config(inputs, tmp_path, "x", reward={"negatives": 15})
    refuse(config, ConfigError, "reward.negatives=15 but a gallery has 14")


def test_too_few_pairs_for_a_batch(inputs: Path, tmp_path: Path) -> None:
    refuse(with_rows(inputs, tmp_path, make_pairs(1)), ConfigError, "takes 2 pairs of each of 2 tasks")


def test_gates_of_another_backbone(inputs: Path, tmp_path: Path) -> None:
    gates = tmp_path / "gates"
    gates.mkdir()
    heads = init_heads(
        torch.zeros(4, 32), torch.ones(4), skip=0.1, drop=0.1, late_skip_bias=0.0, droppable="all"
    )
    save_gates(gates, heads, {"path": "elsewhere", "family": "qwen3_5_moe", "hash": "0" * 64}, {})
    config = make_config(inputs, tmp_path, "x", policy={"init_from": str(gates)})
    refuse(config, CheckpointError, "belong to backbone elsewhere")


def test_nothing_to_resume(inputs: Path, tmp_path: Path) -> None:
    refuse(make_config(inputs, tmp_path, "x"), CheckpointError, "nothing to resume", resume=True)
