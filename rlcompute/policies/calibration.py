"""What calibration found, on disk: safetensors and JSON, nothing pickled.

    <calibration.dir>/<backbone hash>-<sample digest>/
        calibration.safetensors     scales of MoDES, statistics of the experts
        calibration.json            backbone, sample, digest of the tensors; written last: without it nothing counts
        modes.json                  thresholds of MoDES by target, and every point that the search has executed

Shape legend: N layers, M kinds of token.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rlcompute.errors import CheckpointError
from rlcompute.policies.expert_statistics import ExpertStatistics
from rlcompute.policies.modes_search import Outcome, Thresholds

FORMAT_VERSION = 1
TENSORS = "calibration.safetensors"
DESCRIPTION = "calibration.json"
MODES = "modes.json"


def calibration_folder(parent: str | Path, backbone_hash: str, sample_digest: str) -> Path:
    """Where the calibration of a backbone on a sample is kept."""
    return Path(parent) / f"{backbone_hash[:16]}-{sample_digest[:8]}"


@dataclass(frozen=True)
class PolicyCalibration:
    """A backbone's calibration.

    Attributes:
        backbone_hash: the backbone that was measured.
        sample: what it was measured on, JSON values: seed, digest, pairs by modality, dtype and so on.
        scales_NM: float64 scales of MoDES (:func:`rlcompute.policies.modes.layer_scales`).
        statistics: of the routed experts, by modality.
    """

    backbone_hash: str
    sample: Mapping[str, Any]
    scales_NM: Tensor
    statistics: ExpertStatistics

    def save(self, folder: Path) -> None:
        """Write into ``folder``, which is made if it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = save({"scales": self.scales_NM, **self.statistics.tensors()})
        _write_atomically(folder / TENSORS, tensors)
        description = {
            "format_version": FORMAT_VERSION,
            "backbone_hash": self.backbone_hash,
            "sample": dict(self.sample),
            "modalities": list(self.statistics.modalities),
            "tensors_sha256": hashlib.sha256(tensors).hexdigest(),
        }
        _write_json(folder / DESCRIPTION, description)

    @classmethod
    def load(cls, folder: Path, *, backbone_hash: str) -> PolicyCalibration:
        """Read what :meth:`save` wrote.

        Args:
            folder: where it lies.
            backbone_hash: the backbone that it is to be used with.

        Raises:
            CheckpointError: a file is missing or damaged, the format is not known, or the calibration belongs to
                another backbone.
        """
        content = _read_json(folder / DESCRIPTION)
        _check_version(folder / DESCRIPTION, content)
        try:
            if content["backbone_hash"] != backbone_hash:
                raise CheckpointError(
                    f"{folder}: this calibration belongs to the backbone with hash "
                    f"{content['backbone_hash'][:16]}…, not to the one with {backbone_hash[:16]}…: calibrate this "
                    "backbone with `rlcompute calibrate policies`"
                )
            blob = (folder / TENSORS).read_bytes()
            if hashlib.sha256(blob).hexdigest() != content["tensors_sha256"]:
                raise CheckpointError(f"{folder / TENSORS}: not what {DESCRIPTION} describes; {_REMEDY}")
            tensors = load(blob)
            statistics = ExpertStatistics.from_tensors(content["modalities"], tensors)
            return cls(backbone_hash, content["sample"], tensors["scales"], statistics)
        except (OSError, SafetensorError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder}: damaged calibration ({error!r}); {_REMEDY}") from error


_REMEDY = "delete the folder and calibrate again"


def is_stored(folder: Path) -> bool:
    """Whether a complete calibration lies in a folder."""
    return (folder / DESCRIPTION).is_file()


@dataclass
class ModesRecord:
    """What the search for MoDES' thresholds has found on one calibration's sample.

    Attributes:
        found: thresholds by (thresholds tried of each kind of token, target share of skipped rows).
        known: every point that was executed.
    """

    found: dict[tuple[int, float], Thresholds] = field(default_factory=dict)
    known: dict[Thresholds, Outcome] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write into a calibration's folder."""
        content = {
            "format_version": FORMAT_VERSION,
            "found": [[*key, *tau] for key, tau in sorted(self.found.items())],
            "known": [[*tau, *outcome] for tau, outcome in sorted(self.known.items())],
        }
        _write_json(folder / MODES, content)

    @classmethod
    def load(cls, folder: Path) -> ModesRecord:
        """Read what :meth:`save` wrote; an empty record if there is none.

        Raises:
            CheckpointError: the file is damaged, or the format is not known.
        """
        path = folder / MODES
        if not path.is_file():
            return cls()
        content = _read_json(path)
        _check_version(path, content)
        try:
            return cls(
                {
                    (int(points), float(target)): (float(a), float(b))
                    for points, target, a, b in content["found"]
                },
                {
                    (float(a), float(b)): Outcome(float(skip), float(loss))
                    for a, b, skip, loss in content["known"]
                },
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: damaged ({error!r}); delete it, and thresholds are searched again"
            ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {_REMEDY}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not what `rlcompute calibrate policies` writes; {_REMEDY}")
    return content


def _check_version(path: Path, content: Mapping[str, Any]) -> None:
    if content.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format {content.get('format_version')!r}, but this version reads {FORMAT_VERSION}; {_REMEDY}"
        )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    _write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def _write_atomically(path: Path, content: bytes) -> None:
    """The file appears under its name only when it is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.replace(path)
