"""Training checkpoints: gates, Adam's moments and the trainer's state; safetensors and JSON, nothing pickled.

    checkpoints/latest                      name of the newest complete checkpoint, written last
    checkpoints/step_000100/
        gates.safetensors, gate_config.json
        lora/                               adapter of the backbone, if one is trained
        optimizer.safetensors               moments and step counts by parameter
        trainer_state.json                  iterations done, and what else the method has to remember
        COMPLETE                            written when the rest is there; without it the folder does not count

Learning rates, batches and random draws follow from the iteration, so there is nothing else to save.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlcompute.backbones.lora import FOLDER, Adapter
from rlcompute.errors import CheckpointError
from rlcompute.policies.checkpoint import Gates, SavedGates, load_gates, save_gates

FORMAT_VERSION = 1
OPTIMIZER = "optimizer.safetensors"
STATE = "trainer_state.json"
COMPLETE = "COMPLETE"
LATEST = "latest"


@dataclass(frozen=True)
class TrainerState:
    """What training has to remember between iterations.

    Attributes:
        completed: iterations done.
        parts: states by name, JSON: of GRPO's controller and collapse monitor, of straight-through training's engine.
    """

    completed: int
    parts: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as loaded, and where from."""

    folder: Path
    gates: SavedGates
    optimizer: dict[str, Tensor]
    state: TrainerState


def save_checkpoint(
    checkpoints: Path,
    *,
    gates: Gates,
    adapter: Adapter | None = None,
    optimizer: dict[str, Tensor],
    state: TrainerState,
    backbone: dict[str, str],
    extra: dict[str, Any],
) -> Path:
    """Writes a checkpoint after ``state.completed`` iterations and returns its folder.

    Args:
        checkpoints: folder that holds the run's checkpoints.
        gates: the current ones.
        adapter: what is trained on the backbone beside them.
        optimizer: the optimiser's tensors.
        state: the trainer's state.
        backbone, extra: see :func:`rlcompute.policies.checkpoint.save_gates`.
    """
    folder = checkpoints / f"step_{state.completed:06d}"
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted session left incomplete
    folder.mkdir(parents=True)
    save_gates(folder, gates, backbone, extra)
    if adapter is not None:
        adapter.save(folder / FOLDER)
    save_file(optimizer, folder / OPTIMIZER)
    content = {"format_version": FORMAT_VERSION, "completed": state.completed, **state.parts}
    (folder / STATE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / COMPLETE).touch()
    partial = checkpoints / f".{LATEST}.partial"
    partial.write_text(folder.name + "\n", encoding="utf-8")
    partial.replace(checkpoints / LATEST)
    return folder


def load_checkpoint(folder: Path, parts: Collection[str]) -> Checkpoint:
    """Reads a checkpoint written by :func:`save_checkpoint`.

    Args:
        folder: the checkpoint.
        parts: names that the trainer's state must have.

    Raises:
        CheckpointError: something is missing, damaged or of another version or method.
    """
    for name in (COMPLETE, OPTIMIZER, STATE):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder}: no {name}, so this checkpoint cannot be resumed; resume an earlier one"
            )
    gates = load_gates(folder)
    try:
        optimizer = load_file(folder / OPTIMIZER)
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
        version = content.pop("format_version")
        state = TrainerState(content.pop("completed"), content)
    except (json.JSONDecodeError, SafetensorError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder}: damaged ({error!r}); delete it and resume from an earlier one"
        ) from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder / STATE}: format {version!r}, but this version reads {FORMAT_VERSION}"
        )
    if set(content) != set(parts):
        raise CheckpointError(
            f"{folder / STATE}: holds {', '.join(content) or 'nothing'} besides the iteration, but this run needs "
            f"{', '.join(parts)}: resume with the run.method that wrote it, or resume an earlier checkpoint"
        )
    return Checkpoint(folder, gates, optimizer, state)
