"""Calibration on Ray Data: the same bits as in one process, and failures with names."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from rlcompute import policy_calibration
from rlcompute.actors import calibration as distributed
from rlcompute.config import Config
from rlcompute.data import Pair
from rlcompute.errors import StageTimeoutError, WorkerError
from rlcompute.policies.calibration import PolicyCalibration
from rlcompute.policy_calibration import BatchResult, calibrate_policies, draw_sample
from tests.actors.tiny_run import make_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


def configured(inputs: Path, runs: Path, workers: int) -> Config:
    values = {"pairs_per_modality": 5, "dir": str(runs / f"workers-{workers}"), "workers": workers}
    return make_config(inputs, runs, "calibration", calibration=values)


def test_any_number_of_workers_finds_the_same_bits(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_calibration, "BATCH_PAIRS", 3)
    found: list[PolicyCalibration] = []
    for workers in (0, 1, 2):
        calibration, folder = calibrate_policies(configured(inputs, tmp_path, workers))
        assert folder.parent.name == f"workers-{workers}"
        found.append(calibration)
    here, *others = found
    assert here.sample["pairs"] == {"image": 5, "video": 5}
    for other in others:
        assert other.sample == here.sample
        assert torch.equal(other.scales_NM, here.scales_NM)
        assert other.statistics.modalities == here.statistics.modalities
        for name, tensor in here.statistics.tensors().items():
            assert torch.equal(other.statistics.tensors()[name], tensor)


class Slow:
    def __init__(self, config: Config) -> None:
        pass

    def __call__(self, rows: dict[str, object]) -> dict[str, object]:
        time.sleep(600)
        return rows


def test_silence_ends_at_the_deadline(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_Worker", Slow)
    config = configured(inputs, tmp_path, 1)
    config = config.model_copy(update={"ray": config.ray.model_copy(update={"stage_timeout_s": 3.0})})
    with pytest.raises(StageTimeoutError, match="stage 'calibration': no batch was finished for 3 s"):
        distributed.measure_batches(config, [draw_sample(config)])


class Broken:
    def __init__(self, config: Config) -> None:
        pass

    def __call__(self, rows: dict[str, list[Pair]]) -> dict[str, list[BatchResult]]:
        raise RuntimeError("the page is upside down")


def test_what_a_worker_raised_is_shown(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_Worker", Broken)
    config = configured(inputs, tmp_path, 1)
    with pytest.raises(WorkerError, match="the page is upside down"):
        distributed.measure_batches(config, [draw_sample(config)])
