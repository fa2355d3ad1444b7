from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlcompute.actors.checkpoints import TrainerState, load_checkpoint, save_checkpoint
from rlcompute.errors import CheckpointError
from rlcompute.policies.gates import GateHeads

HEADS = GateHeads(torch.randn(2, 3, 5), torch.randn(2, 4), torch.rand(2), "visual")
OPTIMIZER = {"weight.exp_avg": torch.randn(2, 3, 4), "weight.step": torch.tensor(7.0)}
PARTS = ("controller", "monitor")
STATE = TrainerState(7, {"controller": {"lambda": 0.1 + 0.2, "tasks": {}}, "monitor": {"flat": 2}})


def save(folder: Path, completed: int = 7) -> Path:
    return save_checkpoint(
        folder,
        gates=HEADS,
        optimizer=OPTIMIZER,
        state=TrainerState(completed, STATE.parts),
        backbone={"path": "demo", "family": "qwen3_5_moe", "hash": "abc"},
        extra={"iteration": completed},
    )


def test_a_checkpoint_comes_back_exactly(tmp_path: Path) -> None:
    loaded = load_checkpoint(save(tmp_path), PARTS)
    assert torch.equal(loaded.gates.gates.weight_N3F, HEADS.weight_N3F)
    assert {name: tensor.tolist() for name, tensor in loaded.optimizer.items()} == {
        name: tensor.tolist() for name, tensor in OPTIMIZER.items()
    }
    assert loaded.state == STATE


def test_latest_names_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save(tmp_path, 10)
    assert (tmp_path / "latest").read_text().strip() == "step_000010"


def test_leftovers_of_an_interrupted_checkpoint_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "step_000007").mkdir()
    (tmp_path / "step_000007" / "garbage").touch()
    assert not (save(tmp_path) / "garbage").exists()


@pytest.mark.parametrize(
    "name",
    ["COMPLETE", "optimizer.safetensors", "trainer_state.json", "gates.safetensors", "gate_config.json"],
)
def test_a_missing_file_is_an_error(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(folder, PARTS)


@pytest.mark.parametrize("name", ["optimizer.safetensors", "trainer_state.json"])
def test_a_damaged_file_is_an_error(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path)
    (folder / name).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(folder, PARTS)


def test_another_format_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    state = folder / "trainer_state.json"
    state.write_text(state.read_text().replace('"format_version": 1', '"format_version": 99'))
    with pytest.raises(CheckpointError, match="format 99"):
        load_checkpoint(folder, PARTS)


@pytest.mark.parametrize("parts", [("controller",), ("stages",), (*PARTS, "stages")])
def test_state_of_another_method_is_refused(tmp_path: Path, parts: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"trainer_state\.json: holds controller, monitor"):
        load_checkpoint(save(tmp_path), parts)
