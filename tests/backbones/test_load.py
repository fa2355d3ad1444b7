"""Loading checkpoints, and what is said of those that cannot be loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rlcompute.backbones import load_backbone
from rlcompute.backbones.fingerprint import checkpoint_hash
from rlcompute.errors import CheckpointError
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        load_backbone(tmp_path / "nowhere")


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_backbone(tmp_path)


def test_unsupported_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(CheckpointError, match="'bert' is not supported; supported families: qwen3_5_moe"):
        load_backbone(tmp_path)


def test_missing_weights_are_named(checkpoint: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    removed = next(name for name in tensors if "shared_expert_gate" in name)
    del tensors[removed]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 weights are missing.*shared_expert_gate"):
        load_backbone(broken)


def test_hash_tells_weights_and_configuration_apart(checkpoint: Path, tmp_path: Path) -> None:
    same = shutil.copytree(checkpoint, tmp_path / "same")
    assert checkpoint_hash(same) == checkpoint_hash(checkpoint)
    weights = bytearray((same / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (same / "model.safetensors").write_bytes(weights)
    assert checkpoint_hash(same) != checkpoint_hash(checkpoint)
    other = shutil.copytree(checkpoint, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] = 1e-5
    (other / "config.json").write_text(json.dumps(config))
    assert checkpoint_hash(other) != checkpoint_hash(checkpoint)
