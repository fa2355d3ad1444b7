"""What every training run reads before it starts: the backbone's files and the training pairs, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcompute.actors.checkpoints import Checkpoint, load_checkpoint
from rlcompute.backbones import checkpoint_family, resolve_path
from rlcompute.backbones.fingerprint import checkpoint_hash
from rlcompute.config import DEMO_BACKBONE, Config
from rlcompute.data import Pair, read_pairs
from rlcompute.export import latest_checkpoint
from rlcompute.plan import Shape, read_shape
from rlcompute.policies.checkpoint import check_backbone
from rlcompute.runlog import RunFolder, logged_iterations


@dataclass(frozen=True)
class BackboneFiles:
    """A backbone's checkpoint, not loaded.

    Attributes:
        folder: where it is.
        described: its path as gates name it, family and hash.
        shape: its sizes.
    """

    folder: Path
    described: dict[str, str]
    shape: Shape

    @property
    def hash(self) -> str:
        """Hash of its files."""
        return self.described["hash"]


def find_backbone(config: Config) -> BackboneFiles:
    """The configured backbone.

    Raises:
        CheckpointError: it is not a checkpoint of a supported family.
    """
    folder = resolve_path(config.backbone.path)
    described = {
        # What the exported gates name must also lead there from another working directory.
        "path": config.backbone.path if config.backbone.path == DEMO_BACKBONE else str(folder.resolve()),
        "family": checkpoint_family(folder),
        "hash": checkpoint_hash(folder),
    }
    return BackboneFiles(folder, described, read_shape(folder))


def read_training_pairs(config: Config) -> tuple[list[Pair], list[str]]:
    """Training pairs, sorted by id, and the bad rows that were left out.

    Raises:
        DataError: the file or, unless they are skipped, one of its rows cannot be used.
    """
    found = read_pairs(
        config.data.train, limit_per_task=config.data.pairs_per_task, on_bad_row=config.data.on_bad_row
    )
    return sorted(found.pairs, key=lambda pair: pair.id), found.skipped


def checkpoint_to_resume(config: Config, backbone: BackboneFiles, parts: tuple[str, ...]) -> Checkpoint:
    """The newest complete checkpoint of the run whose iterations are all logged.

    A checkpoint that workers write themselves may be ahead of the driver's log when the driver dies.

    Args:
        config: of the run.
        backbone: the one it must have been written with.
        parts: what its trainer state must hold (:class:`TrainerState`).

    Raises:
        CheckpointError: there is none, it is damaged, or it belongs to another backbone.
    """
    latest = latest_checkpoint(
        config.run.folder, logged=logged_iterations(RunFolder(config.run.folder).metrics)
    )
    checkpoint = load_checkpoint(latest, parts)
    check_backbone(checkpoint.gates, latest, backbone.hash, backbone.folder)
    return checkpoint


def first_of_each_task(pairs: Sequence[Pair], count: int) -> list[Pair]:
    """The first ``count`` pairs of each task; ``pairs`` are sorted by id."""
    taken: dict[str, list[Pair]] = {}
    for pair in pairs:
        members = taken.setdefault(pair.task, [])
        if len(members) < count:
            members.append(pair)
    return [pair for task in sorted(taken) for pair in taken[task]]
