"""The calibration pass: sample, storage, thresholds by target."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcompute import policy_calibration
from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.config import Config
from rlcompute.data import read_pairs, write_pairs
from rlcompute.encoder import encode
from rlcompute.errors import CheckpointError, ConfigError, DataError
from rlcompute.policies.calibration import MODES, TENSORS, PolicyCalibration
from rlcompute.policies.expert_statistics import collect
from rlcompute.policies.modes import Modes, layer_losses, layer_scales
from rlcompute.policy_calibration import (
    PolicyCalibrator,
    calibrate_policies,
    describe_sample,
    draw_sample,
    embed_batch,
)
from tests.pairs import write_small_pairs
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibration")
    write_tiny_checkpoint(folder / "checkpoint")
    write_small_pairs(folder / "train.parquet", 8)
    return folder


@pytest.fixture(scope="module")
def backbone(folder: Path) -> Backbone:
    return load_backbone(folder / "checkpoint")


def make_config(
    folder: Path, runs: Path, *, seed: int = 0, train: str = "train.parquet", **calibration: Any
) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "x", "seed": seed},
            "backbone": {"path": str(folder / "checkpoint")},
            "data": {"train": str(folder / train), "test": "test.parquet"},
            "calibration": {"pairs_per_modality": 3, "dir": str(runs), "modes_grid": 4} | calibration,
        }
    )


def test_the_sample_is_balanced_and_does_not_depend_on_the_order_of_rows(
    folder: Path, tmp_path: Path
) -> None:
    config = make_config(folder, tmp_path)
    sample = draw_sample(config)
    assert [pair.modality for pair in sample] == ["image"] * 3 + ["text"] * 3
    assert len({pair.id for pair in sample}) == 6
    pairs = read_pairs(folder / "train.parquet").pairs
    write_pairs(tmp_path / "reversed.parquet", pairs[::-1])
    assert draw_sample(make_config(tmp_path, tmp_path, train="reversed.parquet")) == sample
    assert draw_sample(make_config(folder, tmp_path, seed=1)) != sample
    assert len(draw_sample(make_config(folder, tmp_path, pairs_per_modality=99))) == len(pairs)


def test_the_digest_tells_samples_apart(folder: Path, tmp_path: Path) -> None:
    config = make_config(folder, tmp_path)
    pairs = draw_sample(config)
    digest = describe_sample(config, pairs)["digest"]
    assert describe_sample(config, list(pairs))["digest"] == digest
    other_text = dataclasses.replace(pairs[0], query=dataclasses.replace(pairs[0].query, text="else"))
    other_image = dataclasses.replace(pairs[0], target=pairs[1].target)
    variants = [[other_text, *pairs[1:]], [other_image, *pairs[1:]], pairs[1:], pairs[::-1]]
    assert len({digest, *(describe_sample(config, x)["digest"] for x in variants)}) == 5
    longer = config.model_copy(update={"data": config.data.model_copy(update={"max_tokens": 99})})
    assert describe_sample(longer, pairs)["digest"] != digest


def test_a_calibration_is_what_its_parts_measure_and_is_loaded_again(
    folder: Path, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_calibration, "BATCH_PAIRS", 4)
    config = make_config(folder, tmp_path)
    calibration, where = calibrate_policies(config)
    assert where.parent == tmp_path and where.name.startswith(backbone.hash[:16])
    assert calibration.backbone_hash == backbone.hash
    assert calibration.sample["pairs"] == {"image": 3, "text": 3}
    inputs, groups = embed_batch(backbone, draw_sample(config))
    assert groups == ["image"] * 6 + ["text"] * 6
    torch.testing.assert_close(
        calibration.scales_NM, layer_scales(layer_losses(backbone, inputs)), rtol=1e-3, atol=1e-6
    )
    whole = collect(backbone, inputs, groups, 12)
    assert calibration.statistics.modalities == whole.modalities == ("image", "text")
    assert torch.equal(calibration.statistics.tokens_GN, whole.tokens_GN)
    torch.testing.assert_close(calibration.statistics.mass_GNE, whole.mass_GNE, rtol=1e-4, atol=1e-5)

    def measure_batch(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(policy_calibration, "measure_batch", measure_batch)
    again, same = calibrate_policies(config)
    assert same == where and torch.equal(again.scales_NM, calibration.scales_NM)
    with pytest.raises(AssertionError, match="measured again"):
        calibrate_policies(make_config(folder, tmp_path, seed=1))


def test_thresholds_are_searched_once(
    folder: Path, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(folder, tmp_path)
    calibrator = PolicyCalibrator(config, backbone)
    tau = calibrator.modes_thresholds(0.5)
    inputs, _ = embed_batch(backbone, draw_sample(config))
    policy = Modes(calibrator.calibration.scales_NM, tau)
    trace = encode(backbone, *backbone.pack(inputs), policy).trace
    assert 0.5 <= 1 - int(trace.rows_NS.sum()) / (3 * int(trace.decided_NS.sum())) < 0.6
    assert (calibrator.folder / MODES).is_file()

    def search(*_: object) -> None:
        raise AssertionError("searched again")

    monkeypatch.setattr(policy_calibration, "ModesSearch", search)
    assert PolicyCalibrator(config, backbone).modes_thresholds(0.5) == tau
    with pytest.raises(AssertionError, match="searched again"):
        PolicyCalibrator(config, backbone).modes_thresholds(0.6)
    finer = make_config(folder, tmp_path, modes_grid=5)
    with pytest.raises(AssertionError, match="searched again"):
        PolicyCalibrator(finer, backbone).modes_thresholds(0.5)
    with pytest.raises(ConfigError, match="not a share"):
        calibrator.modes_thresholds(1.5)


def test_an_empty_file_is_refused(folder: Path, backbone: Backbone, tmp_path: Path) -> None:
    write_pairs(tmp_path / "train.parquet", [])
    with pytest.raises(DataError, match=r"train\.parquet: no usable row"):
        _ = PolicyCalibrator(make_config(tmp_path, tmp_path), backbone).calibration
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_what_is_stored_is_checked(folder: Path, backbone: Backbone, tmp_path: Path) -> None:
    config = make_config(folder, tmp_path, pairs_per_modality=1)
    calibration, where = calibrate_policies(config)
    (where / TENSORS).write_bytes(b"")
    with pytest.raises(CheckpointError, match="delete the folder and calibrate again"):
        calibrate_policies(config)
    PolicyCalibration("f" * 64, calibration.sample, calibration.scales_NM, calibration.statistics).save(where)
    with pytest.raises(CheckpointError, match="belongs to the backbone with hash ffff"):
        calibrate_policies(config)


def test_the_number_of_threads_is_as_before(folder: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        calibrate_policies(make_config(folder, tmp_path, pairs_per_modality=1))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
