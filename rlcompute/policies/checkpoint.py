"""Gates on disk: ``gates.safetensors`` and ``gate_config.json``, nothing pickled.

There are two kinds: heads with three actions, which GRPO trains (:mod:`rlcompute.policies.gates`), and sets of gates
with one action each, which are trained straight through their decisions (:mod:`rlcompute.policies.ste_gates`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlcompute.decision import Policy
from rlcompute.errors import CheckpointError
from rlcompute.policies.gates import Droppable, GateHeads
from rlcompute.policies.ste_gates import StraightThroughGates

FORMAT_VERSION = 1
TENSORS = "gates.safetensors"
CONFIG = "gate_config.json"
HEADS, STRAIGHT_THROUGH = GateHeads.kind, StraightThroughGates.kind
METHODS = {HEADS: "GRPO", STRAIGHT_THROUGH: "straight-through"}
"""What trains gates of each kind, in words."""


class Gates(Protocol):
    """Trained gates of any kind: what it takes to execute, compare and export them."""

    @property
    def kind(self) -> str:
        """One of :data:`METHODS`."""
        ...

    @property
    def droppable(self) -> Droppable:
        """Which tokens they may drop."""
        ...

    def to(self, device: torch.device | str | None = None) -> Gates:
        """The gates on a device."""
        ...

    def policy(self) -> Policy:
        """Their decisions in packed inference; nothing is drawn."""
        ...

    def shifted(self, amount: float) -> Gates:
        """Gates that save more: ``amount`` is added to the logits of whatever saves compute."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What was learned and measured, float32, by name."""
        ...

    def describe(self) -> dict[str, Any]:
        """What else they are made of (JSON)."""
        ...

    def summary(self) -> list[str]:
        """What they are, for people: a sentence or more."""
        ...


@dataclass(frozen=True)
class SavedGates:
    """Gates as loaded.

    Attributes:
        gates: in float32 on the CPU.
        backbone: ``{"path", "family", "hash"}`` of the backbone that they belong to.
        extra: whatever else was saved with them (JSON).
    """

    gates: Gates
    backbone: dict[str, str]
    extra: dict[str, Any]

    @property
    def method(self) -> str:
        """What trained them, in words."""
        return METHODS[self.gates.kind]


def save_gates(folder: Path, gates: Gates, backbone: dict[str, str], extra: dict[str, Any]) -> None:
    """Write gates and their description into ``folder``, which must exist.

    Args:
        folder: where to.
        gates: what to save, as float32.
        backbone: ``{"path", "family", "hash"}``.
        extra: more to keep in ``gate_config.json``, JSON values.
    """
    save_file(gates.tensors(), folder / TENSORS)
    described = gates.describe()
    config = {
        "format_version": FORMAT_VERSION,
        "kind": gates.kind,
        # Heads are described as they were when there was no other kind.
        **(described if gates.kind == HEADS else {"gates": described}),
        "backbone": backbone,
        **extra,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_gates(folder: str | Path) -> SavedGates:
    """Read gates written by :func:`save_gates`.

    Raises:
        CheckpointError: a file is missing or damaged, or format or kind are not known.
    """
    folder = Path(folder)
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder}: no {name}; give a folder written by `rlcompute train` or `export`"
            )
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / TENSORS)
        version, kind = config.pop("format_version"), config.pop("kind")
        if version != FORMAT_VERSION or kind not in METHODS:
            raise CheckpointError(
                f"{folder / CONFIG}: format {version!r} of kind {kind!r} is not known to this version, which reads "
                f"format {FORMAT_VERSION} of the kinds {', '.join(METHODS)}"
            )
        gates = _create(kind, config, tensors, folder)
        backbone = config.pop("backbone")
        names = [backbone[name] for name in ("path", "family", "hash")]
    except (json.JSONDecodeError, SafetensorError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{folder}: damaged gate files ({error!r}); export the gates again") from error
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{folder / CONFIG}: path, family and hash of the backbone are not all strings")
    return SavedGates(gates, backbone, config)


def _create(kind: str, config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> Gates:
    """The gates; takes what describes them out of ``config``."""
    try:
        if kind == HEADS:
            return GateHeads.create({"droppable": config.pop("droppable")}, tensors)
        return StraightThroughGates.create(config.pop("gates"), tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def heads_of(saved: SavedGates, folder: str | Path) -> GateHeads:
    """The heads that GRPO trains.

    Raises:
        CheckpointError: the gates of ``folder`` are of another kind.
    """
    if not isinstance(saved.gates, GateHeads):
        raise _other_kind(saved, folder, HEADS, "grpo")
    return saved.gates


def straight_through_of(saved: SavedGates, folder: str | Path) -> StraightThroughGates:
    """The gates that straight-through training goes on with.

    Raises:
        CheckpointError: the gates of ``folder`` are of another kind.
    """
    if not isinstance(saved.gates, StraightThroughGates):
        raise _other_kind(saved, folder, STRAIGHT_THROUGH, "ste")
    return saved.gates


def _other_kind(saved: SavedGates, folder: str | Path, wanted: str, method: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: {saved.method} trained these gates (kind {saved.gates.kind!r}), but run.method={method} trains "
        f"gates of kind {wanted!r}: give gates of that kind, or train with the other method"
    )


def check_backbone(
    saved: SavedGates, folder: str | Path, backbone_hash: str, backbone_path: str | Path
) -> None:
    """Refuse gates that were trained on another backbone.

    Raises:
        CheckpointError: the hashes differ.
    """
    if saved.backbone["hash"] != backbone_hash:
        raise CheckpointError(
            f"{folder}: these gates belong to backbone {saved.backbone['path']} with hash "
            f"{saved.backbone['hash'][:16]}…, but {backbone_path} has hash {backbone_hash[:16]}…; "
            "use the backbone that they were trained on, or train gates for this one"
        )
