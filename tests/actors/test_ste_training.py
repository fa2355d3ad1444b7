"""Whole straight-through runs on Ray Train with a tiny backbone: what happens to workers changes no result."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcompute.actors import ste_train, train
from rlcompute.actors.checkpoints import TrainerState, save_checkpoint
from rlcompute.actors.mailbox import Row
from rlcompute.actors.ste_train import Session
from rlcompute.config import Config
from rlcompute.config_loading import dump_yaml
from rlcompute.config_ste import SteConfig
from rlcompute.errors import CheckpointError, ConfigError, StageTimeoutError, WorkerError
from rlcompute.policies.gates import init_heads
from rlcompute.runlog import read_metrics
from tests.actors.ports import is_loopback, watched_ports
from tests.actors.tiny_run import make_config

slow = pytest.mark.slow
ray_train = pytest.mark.usefixtures("cluster")

STE: dict[str, Any] = {
    "iterations": 10,
    "pairs_per_batch": 4,
    "checkpoint_every": 4,
    "actions": ("token_pruner", "expert_skip"),
    "skip_target": 0.3,
    "prune_layer": 1,
    "warmup_share": 0.0,
    "ramp_share": 0.2,
    "lr": 0.05,
    "lora_rank": 2,
    "lora_alpha": 4,
    "lora_targets": ("attention",),
}


def ste_config(inputs: Path, runs: Path, name: str, **sections: dict[str, Any]) -> Config:
    ste = STE | sections.pop("ste", {})
    ray = {"num_workers": 2, "stage_timeout_s": 120.0} | sections.pop("ray", {})
    return make_config(inputs, runs, name, run={"method": "ste"}, ste=ste, ray=ray, **sections)


def gates_of(run_folder: Path) -> dict[str, Any]:
    return load_file(run_folder / "export" / "gates.safetensors")


def assert_same_end(folder: Path, reference: Path) -> None:
    """The same bits in gates and adapter, and one row for each iteration."""
    for name in ("gates.safetensors", "lora/adapter_model.safetensors"):
        assert (folder / "export" / name).read_bytes() == (reference / "export" / name).read_bytes()
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == list(range(1, STE["iterations"] + 1))
    losses = [[row["loss/total"] for row in read_metrics(f / "metrics.jsonl")] for f in (folder, reference)]
    assert losses[0] == losses[1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ste_runs")


@pytest.fixture(scope="module")
def reference(inputs: Path, runs: Path, cluster: None) -> Path:
    """Ten undisturbed iterations on two workers, which open no port to the network."""
    pictures = {"images_every": 5, "overlay_inputs": 2}
    with watched_ports() as listening:
        folder = train.run(ste_config(inputs, runs, "reference", logging=pictures), resume=False)
    assert any("RayTrainWorker" in process for process, _ in listening)
    assert all(is_loopback(address) for _, address in listening), listening
    return folder


@slow
@ray_train
def test_a_run_leaves_what_it_promises(reference: Path) -> None:
    rows = read_metrics(reference / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == list(range(1, 11))
    groups = {tag.split("/")[0] for tag in rows[0] if "/" in tag}
    assert groups == {"loss", "rate", "recall", "distill", "compute", "policy", "timing", "progress"}
    assert (reference / "checkpoints" / "latest").read_text().strip() == "step_000010"
    for step in ("step_000004", "step_000008", "step_000010"):
        assert {path.name for path in (reference / "checkpoints" / step).iterdir()} == {
            "gates.safetensors",
            "gate_config.json",
            "optimizer.safetensors",
            "trainer_state.json",
            "lora",
            "COMPLETE",
        }
    assert {path.name for path in (reference / "export").iterdir()} == {
        "gates.safetensors",
        "gate_config.json",
        "README.md",
        "lora",
    }
    described = json.loads((reference / "export" / "gate_config.json").read_text())
    assert described["combination"] == "simultaneous"
    assert not (reference / "failure.json").exists()
    assert picture_counts(reference / "tb") == {
        "actions/by_layer": 2,
        "overlays": 4,
        "rates/over_training": 1,
    }


def picture_counts(folder: Path) -> dict[str, int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    counts: dict[str, int] = {}
    for tag in events.Tags()["images"]:
        name = "overlays" if tag.startswith("overlays/") else tag
        counts[name] = counts.get(name, 0) + len(events.Images(tag))
    return counts


@slow
@ray_train
def test_one_worker_trains_the_same_gates(reference: Path, inputs: Path, runs: Path) -> None:
    folder = train.run(ste_config(inputs, runs, "one-worker", ray={"num_workers": 1}), resume=False)
    curves = [[row["loss/total"] for row in read_metrics(f / "metrics.jsonl")] for f in (folder, reference)]
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-4)
    ours, theirs = gates_of(folder), gates_of(reference)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name], tensor, rtol=1e-3, atol=1e-3, err_msg=name)


DRIVER = """
import os, signal, sys, time
from rlcompute.actors import ste_train, train
from rlcompute.actors.ste_train import Session
from rlcompute.config_loading import load_config

record, to_kill = Session._record, [1]

def record_and_kill(self, row):
    record(self, row)
    if row.iteration == 3 and to_kill:
        os.kill(self.replies[to_kill.pop()].pid, signal.SIGKILL)
    if row.iteration == 7:
        deadline = time.monotonic() + 60
        newest = self._log.folder.checkpoints / "step_000008" / "COMPLETE"
        while not newest.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

Session._record = record_and_kill
ste_train.POLL_S = 0.01  # iterations take a tenth of a second here
train.run(load_config(sys.argv[1]), resume=False)
"""


@slow
@ray_train
def test_killed_workers_and_a_killed_driver_change_nothing(
    reference: Path,
    inputs: Path,
    runs: Path,
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker dies around the first checkpoint, the driver after the second, then the worker that logs and saves."""
    config = ste_config(inputs, runs, "killed")
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    killed = subprocess.run(
        [sys.executable, "-c", DRIVER, str(path)],
        cwd=repository,
        env=environment,
        capture_output=True,
        timeout=300,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    # The newest checkpoint is ahead of the log: the one before must be taken.
    rows = read_metrics(config.run.folder / "metrics.jsonl")
    assert len(rows) == 7 and rows[-1]["progress/worker_restarts"] == 1
    assert (config.run.folder / "checkpoints" / "step_000004" / "COMPLETE").exists()
    assert (config.run.folder / "checkpoints" / "step_000008" / "COMPLETE").exists()

    record, to_kill = Session._record, [0]

    def record_and_kill(self: Session, row: Row) -> None:
        record(self, row)
        if row.iteration == 7 and to_kill:
            os.kill(self.replies[to_kill.pop()].pid, signal.SIGKILL)

    monkeypatch.setattr(Session, "_record", record_and_kill)
    monkeypatch.setattr(ste_train, "POLL_S", 0.01)
    folder = train.run(config, resume=True)
    assert read_metrics(folder / "metrics.jsonl")[-1]["progress/worker_restarts"] == 1
    assert_same_end(folder, reference)


@slow
@ray_train
def test_a_worker_exception_ends_the_run_with_its_traceback(inputs: Path, runs: Path, tmp_path: Path) -> None:
    """A weight is missing, which shows only when a worker loads the checkpoint."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(inputs / "checkpoint", checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["language_model.norm.weight"]
    save_file(tensors, checkpoint / "model.safetensors")
    config = ste_config(inputs, runs, "broken", backbone={"path": str(checkpoint)}, ray={"num_workers": 1})
    with pytest.raises(
        WorkerError, match=r"(?s)stage 'load backbone': training worker 0 .*Traceback.*weights are missing"
    ):
        train.run(config, resume=False)
    failure = json.loads((config.run.folder / "failure.json").read_text())
    assert failure["stage"] == "load backbone"
    assert "weights are missing" in failure["message"]
    assert failure["workers"]["0"]["memory_bytes"] > 0


@slow
@ray_train
def test_a_stopped_worker_is_a_timeout_with_stacks_of_the_others(
    inputs: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ste_config(inputs, runs, "stopped")
    record, stopped = Session._record, []

    def record_and_stop(self: Session, row: Row) -> None:
        record(self, row)
        if not stopped:
            self._timeout_s = 3.0
            stopped.append(self.replies[1].pid)
            os.kill(stopped[0], signal.SIGSTOP)

    monkeypatch.setattr(Session, "_record", record_and_stop)
    try:
        with pytest.raises(StageTimeoutError, match=r"no training worker got any further within 3 s"):
            train.run(config, resume=False)
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):  # Ray may have been quicker
                os.kill(pid, signal.SIGKILL)
    failure = json.loads((config.run.folder / "failure.json").read_text())
    assert "Thread" in failure["workers"]["0"]["stacks"]


def test_a_shared_budget_that_was_not_met_is_said() -> None:
    """The last tenth of 20 iterations saves 41 %."""
    rows = [{"compute/lm_saved": 0.5}] * 18 + [{"compute/lm_saved": 0.40}, {"compute/lm_saved": 0.42}]
    shared = SteConfig.model_validate({"actions": ("token_pruner", "expert_skip"), "combination": "shared"})
    said = ste_train.shortfall(shared.model_copy(update={"flops_saved": 0.45, "flops_weight": 3.0}), rows)
    assert said is not None
    assert "41.0%" in said and "45.0%" in said and "ste.flops_weight (now 3)" in said
    assert ste_train.shortfall(shared.model_copy(update={"flops_saved": 0.415}), rows) is None
    assert ste_train.shortfall(shared.model_copy(update={"combination": "alternating"}), rows) is None


@slow
@ray_train
@pytest.mark.parametrize("name", ["trainer_state.json", "optimizer.safetensors"])
def test_missing_state_on_resume_is_an_error(reference: Path, inputs: Path, runs: Path, name: str) -> None:
    path = reference / "checkpoints" / "step_000010" / name
    content = path.read_bytes()
    path.unlink()
    try:
        with pytest.raises(CheckpointError, match=f"no {name}"):
            train.run(ste_config(inputs, runs, "reference"), resume=True)
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("ste", "message"),
    [
        ({"prune_layer": 9}, "ste.prune_layer=9"),
        ({"actions": ("layer_skip",), "layer_first": 9}, "ste.layer_first=9"),
        ({"pairs_per_batch": 14}, "ste.pairs_per_batch=14 takes 7 pairs of each of 2 tasks"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_starts(
    inputs: Path, tmp_path: Path, ste: dict[str, Any], message: str
) -> None:
    config = ste_config(inputs, tmp_path, "x", ste=ste)
    with pytest.raises(ConfigError, match=message):
        train.run(config, resume=False)
    assert not config.run.folder.exists()


def test_a_checkpoint_of_the_other_method_is_not_resumed(inputs: Path, tmp_path: Path) -> None:
    config = ste_config(inputs, tmp_path, "x")
    heads = init_heads(
        torch.zeros(4, 32), torch.ones(4), skip=0.1, drop=0.1, late_skip_bias=0.0, droppable="all"
    )
    save_checkpoint(
        config.run.folder / "checkpoints",
        gates=heads,
        optimizer={"weight.step": torch.tensor(1.0)},
        state=TrainerState(1, {"controller": {}, "monitor": {}}),
        backbone={"path": "x", "family": "qwen3_5_moe", "hash": "0" * 64},
        extra={},
    )
    (config.run.folder / "config.yaml").write_text(dump_yaml(config))
    with pytest.raises(CheckpointError, match="this run needs engine"):
        ste_train.check(config, resume=True)
