"""Calibrations on disk: what comes back, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlcompute.errors import CheckpointError
from rlcompute.policies.calibration import (
    DESCRIPTION,
    MODES,
    TENSORS,
    ModesRecord,
    PolicyCalibration,
    calibration_folder,
    is_stored,
)
from rlcompute.policies.expert_statistics import ExpertStatistics
from rlcompute.policies.modes_search import Outcome

HASH = "a" * 64


@pytest.fixture
def calibration() -> PolicyCalibration:
    torch.manual_seed(0)
    statistics = ExpertStatistics.zeros(["image", "text"], 3, 5)
    for tensor in statistics.tensors().values():
        tensor += (torch.rand(tensor.shape, dtype=torch.float64) * 9).to(tensor.dtype)
    return PolicyCalibration(HASH, {"seed": 1, "pairs": {"image": 2}}, torch.rand(3, 2).double(), statistics)


def test_a_calibration_comes_back_bit_by_bit(calibration: PolicyCalibration, tmp_path: Path) -> None:
    folder = calibration_folder(tmp_path / "new", HASH, "b" * 64)
    assert folder.name == "a" * 16 + "-" + "b" * 8
    assert not is_stored(folder)
    calibration.save(folder)
    assert is_stored(folder)
    assert sorted(path.name for path in folder.iterdir()) == [DESCRIPTION, TENSORS]
    loaded = PolicyCalibration.load(folder, backbone_hash=HASH)
    assert loaded.sample == calibration.sample
    assert torch.equal(loaded.scales_NM, calibration.scales_NM)
    assert loaded.statistics.modalities == calibration.statistics.modalities
    for name, tensor in calibration.statistics.tensors().items():
        assert torch.equal(loaded.statistics.tensors()[name], tensor)


def test_another_backbone_is_refused(calibration: PolicyCalibration, tmp_path: Path) -> None:
    calibration.save(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"belongs to the backbone with hash aaaa.*not to the one with cccc"
    ):
        PolicyCalibration.load(tmp_path, backbone_hash="c" * 64)


def flip_a_byte(folder: Path) -> None:
    blob = bytearray((folder / TENSORS).read_bytes())
    blob[-1] ^= 1
    (folder / TENSORS).write_bytes(blob)


def change(**values: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / DESCRIPTION).read_text())
        (folder / DESCRIPTION).write_text(json.dumps(content | values))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_byte, "not what calibration.json describes"),
        (lambda folder: (folder / TENSORS).unlink(), "damaged calibration"),
        (lambda folder: (folder / DESCRIPTION).unlink(), "cannot be read"),
        (lambda folder: (folder / DESCRIPTION).write_text('{"format_version"'), "cannot be read"),
        (
            lambda folder: (folder / DESCRIPTION).write_text("[]"),
            "not what `rlcompute calibrate policies` writes",
        ),
        (change(format_version=0), "format 0, but this version reads 1"),
        (change(tensors_sha256=None), "not what calibration.json describes"),
        (change(backbone_hash=None), "damaged calibration"),
        (change(modalities=["image"]), "does not fit"),
    ],
)
def test_damage_is_named_with_a_remedy(
    calibration: PolicyCalibration, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    calibration.save(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message) as raised:
        PolicyCalibration.load(tmp_path, backbone_hash=HASH)
    assert "calibrate" in str(raised.value)


def test_thresholds_come_back_exactly(tmp_path: Path) -> None:
    assert ModesRecord.load(tmp_path) == ModesRecord()
    record = ModesRecord(
        found={(8, 0.1 + 0.2): (1 / 3, 0.0), (6, 0.5): (0.1, 0.2)},
        known={(1 / 3, 0.0): Outcome(1 / 7, 1e-9), (0.1, 0.2): Outcome(0.5, 0.25)},
    )
    record.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [MODES]
    assert ModesRecord.load(tmp_path) == record


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"format_version": 1}', '{"format_version": 1, "found": [[1]], "known": []}', "{}"],
)
def test_damaged_thresholds_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MODES).write_text(text)
    with pytest.raises(CheckpointError, match=MODES):
        ModesRecord.load(tmp_path)
