"""Calibration on Ray Data: the same bits as in one process, and failures with names."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch

from rlcompute import policy_calibration
from rlcompute.actors import calibration as distributed
from rlcompute.config import Config
from rlcompute.data import Side
from rlcompute.errors import StageTimeoutError, WorkerError
from rlcompute.policies.calibration import PolicyCalibration
from rlcompute.policy_calibration import calibrate_policies, draw_sample
from tests.actors.tiny_run import make_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: None) -> Iterator[None]:
    """Workers give their CPUs back, however calibration ended: the cluster may be a user's own."""
    yield
    deadline = time.monotonic() + 60.0
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < deadline, "calibration left workers behind"
        time.sleep(0.1)


def configured(inputs: Path, runs: Path, workers: int) -> Config:
    values = {"pairs_per_modality": 5, "dir": str(runs / f"workers-{workers}"), "workers": workers}
    return make_config(inputs, runs, "calibration", calibration=values)


def test_workers_find_the_same_bits_as_one_process(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_calibration, "BATCH_PAIRS", 3)
    found: list[PolicyCalibration] = []
    for workers in (0, 2):
        calibration, folder = calibrate_policies(configured(inputs, tmp_path, workers))
        assert folder.parent.name == f"workers-{workers}"
        found.append(calibration)
    here, there = found
    assert here.sample["pairs"] == {"image": 5, "video": 5}
    assert there.sample == here.sample
    assert torch.equal(there.scales_NM, here.scales_NM)
    assert there.statistics.modalities == here.statistics.modalities
    for name, tensor in here.statistics.tensors().items():
        assert torch.equal(there.statistics.tensors()[name], tensor)


def test_silence_ends_at_the_deadline(inputs: Path, tmp_path: Path) -> None:
    config = configured(inputs, tmp_path, 1)
    # No worker can even have started by then.
    config = config.model_copy(update={"ray": config.ray.model_copy(update={"stage_timeout_s": 0.5})})
    with pytest.raises(StageTimeoutError, match=r"stage '(calibration|placement)': .* for 0\.5 s"):
        distributed.measure_batches(config, [draw_sample(config)])


def test_what_a_worker_raised_is_shown(inputs: Path, tmp_path: Path) -> None:
    config = configured(inputs, tmp_path, 1)
    pair = draw_sample(config)[0]
    broken = replace(pair, query=Side(None, None, (b"no image",), (), 2.0))
    with pytest.raises(WorkerError, match=f"{pair.id}"):
        distributed.measure_batches(config, [[broken]])
