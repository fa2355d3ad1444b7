"""Whole runs on Ray with a tiny backbone: the result depends on the configuration, not on what happened to workers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rlcompute.actors import train
from rlcompute.actors.dispatch import WorkerPool
from rlcompute.actors.scoring import Scorer
from rlcompute.config import Config
from rlcompute.config_loading import dump_yaml
from rlcompute.errors import CheckpointError, StageTimeoutError, WorkerError
from rlcompute.runlog import read_metrics
from tests.actors.ports import is_loopback, watched_ports
from tests.actors.tiny_run import make_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


def gate_hash(run_folder: Path) -> str:
    return hashlib.sha256((run_folder / "export" / "gates.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def reference(inputs: Path, runs: Path, cluster: None) -> Path:
    """Ten iterations on one worker, which open no port to the network."""
    pictures = {"images_every": 5, "overlay_inputs": 2}
    with watched_ports() as listening:
        folder = train.run(make_config(inputs, runs, "one-worker", logging=pictures), resume=False)
    assert any("RolloutWorker" in process for process, _ in listening)
    assert all(is_loopback(address) for _, address in listening), listening
    return folder


def test_a_run_leaves_what_it_promises(reference: Path) -> None:
    rows = read_metrics(reference / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == list(range(1, 11))
    groups = {tag.split("/")[0] for tag in rows[0] if "/" in tag}
    assert groups == {"reward", "policy", "actions", "recall", "compute", "timing", "progress", "controller"}
    assert (reference / "checkpoints" / "latest").read_text().strip() == "step_000010"
    for step in ("step_000005", "step_000010"):
        assert {path.name for path in (reference / "checkpoints" / step).iterdir()} == {
            "gates.safetensors",
            "gate_config.json",
            "optimizer.safetensors",
            "trainer_state.json",
            "COMPLETE",
        }
    assert {path.name for path in (reference / "export").iterdir()} == {
        "gates.safetensors",
        "gate_config.json",
        "README.md",
    }
    assert not (reference / "failure.json").exists()
    assert picture_tags(reference / "tb") >= {"actions/by_layer"}


def picture_tags(folder: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    tags = set(events.Tags()["images"])
    overlays = {tag for tag in tags if tag.startswith("overlays/")}
    assert len(overlays) == 2
    assert all(len(events.Images(tag)) == 2 for tag in tags)
    return tags


def test_two_workers_end_with_the_same_gates(reference: Path, inputs: Path, runs: Path) -> None:
    folder = train.run(make_config(inputs, runs, "two-workers", ray={"num_workers": 2}), resume=False)
    assert gate_hash(folder) == gate_hash(reference)


def kill_worker(pool: WorkerPool, worker: int) -> None:
    os.kill(pool.replies[worker].pid, signal.SIGKILL)


def test_killed_workers_change_nothing(
    reference: Path, inputs: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One death between the phases of iteration 3, and the other worker's in the middle of sampling iteration 6."""
    pools: list[WorkerPool] = []
    scores, samples = iter(range(1, 100)), iter(range(1, 100))
    score, call = Scorer.score, WorkerPool.call

    def score_and_kill(self: Scorer, *arguments: Any) -> Any:
        result = score(self, *arguments)
        if next(scores) == 3:
            kill_worker(pools[0], 2)
        return result

    def call_and_kill(self: WorkerPool, stage: str, *arguments: Any, **keywords: Any) -> Any:
        pools.append(self)
        # What the first death lost is sampled again, so the 7th call is that of iteration 6.
        if stage == "sample" and next(samples) == 7:
            threading.Timer(0.005, kill_worker, [self, 1]).start()
        return call(self, stage, *arguments, **keywords)

    monkeypatch.setattr(Scorer, "score", score_and_kill)
    monkeypatch.setattr(WorkerPool, "call", call_and_kill)
    folder = train.run(make_config(inputs, runs, "killed", ray={"num_workers": 2}), resume=False)
    assert read_metrics(folder / "metrics.jsonl")[-1]["progress/worker_deaths"] == 2
    assert gate_hash(folder) == gate_hash(reference)


DRIVER = """
import os, signal, sys
from rlcompute.actors import train
from rlcompute.config_loading import load_config
from rlcompute.runlog import RunLog

record = RunLog.record

def record_and_die(self, *arguments, **keywords):
    record(self, *arguments, **keywords)
    if self.iteration == 8:
        os.kill(os.getpid(), signal.SIGKILL)

RunLog.record = record_and_die
train.run(load_config(sys.argv[1]), resume=False)
"""


def test_a_run_resumed_after_its_driver_was_killed_ends_with_the_same_gates(
    reference: Path, inputs: Path, runs: Path, repository: Path, tmp_path: Path
) -> None:
    """Killed in iteration 8, three after the checkpoint."""
    config = make_config(inputs, runs, "resumed")
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    killed = subprocess.run(
        [sys.executable, "-c", DRIVER, str(path)],
        cwd=repository,
        env=environment,
        capture_output=True,
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert len(read_metrics(config.run.folder / "metrics.jsonl")) == 8
    assert (config.run.folder / "checkpoints" / "latest").read_text().strip() == "step_000005"

    folder = train.run(config, resume=True)
    assert gate_hash(folder) == gate_hash(reference)
    assert [row["iteration"] for row in read_metrics(folder / "metrics.jsonl")] == list(range(1, 11))


def test_several_updates_per_batch_train(inputs: Path, runs: Path) -> None:
    config = make_config(
        inputs, runs, "clipped", grpo={"updates_per_batch": 2, "iterations": 2}, ray={"num_workers": 2}
    )
    rows = read_metrics(train.run(config, resume=False) / "metrics.jsonl")
    assert rows[1]["policy/weight_norm"] > rows[0]["policy/weight_norm"] > 0


def test_a_worker_exception_ends_the_run_with_its_traceback(inputs: Path, runs: Path, tmp_path: Path) -> None:
    """A weight is missing, which shows only when a worker loads the checkpoint."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(inputs / "checkpoint", checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["language_model.norm.weight"]
    save_file(tensors, checkpoint / "model.safetensors")
    config = make_config(inputs, runs, "broken", backbone={"path": str(checkpoint)})
    with pytest.raises(
        WorkerError, match=r"(?s)stage 'load backbone': rollout worker 1 .*Traceback.*weights are missing"
    ):
        train.run(config, resume=False)
    failure = json.loads((config.run.folder / "failure.json").read_text())
    assert failure["stage"] == "load backbone"
    assert failure["error"] == "WorkerError"
    assert failure["workers"]["1"]["memory_bytes"] > 0


def test_a_stopped_worker_is_a_timeout_with_stacks_of_the_others(
    inputs: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(inputs, runs, "stopped", ray={"num_workers": 2, "stage_timeout_s": 20.0})
    stopped: list[int] = []
    score = Scorer.score

    def stop_worker(pool: WorkerPool) -> Callable[..., Any]:
        def run_score(self: Scorer, *arguments: Any) -> Any:
            if not stopped:
                stopped.append(pool.replies[2].pid)
                pool._timeout_s = 2.0
                os.kill(stopped[0], signal.SIGSTOP)
            return score(self, *arguments)

        return run_score

    call = WorkerPool.call

    def watch(self: WorkerPool, *arguments: Any, **keywords: Any) -> Any:
        monkeypatch.setattr(Scorer, "score", stop_worker(self))
        return call(self, *arguments, **keywords)

    monkeypatch.setattr(WorkerPool, "call", watch)
    try:
        with pytest.raises(StageTimeoutError, match=r"stage 'gradients': rollout worker\(s\) 2"):
            train.run(config, resume=False)
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):  # Ray may have been quicker
                os.kill(pid, signal.SIGKILL)
    failure = json.loads((config.run.folder / "failure.json").read_text())
    assert failure["stage"] == "gradients"
    assert "Thread" in failure["workers"]["1"]["stacks"]


def test_missing_state_on_resume_is_an_error(reference: Path, inputs: Path, runs: Path) -> None:
    state = reference / "checkpoints" / "step_000010" / "trainer_state.json"
    content = state.read_text()
    state.unlink()
    try:
        with pytest.raises(CheckpointError, match=r"no trainer_state\.json"):
            train.run(make_config(inputs, runs, "one-worker"), resume=True)
    finally:
        state.write_text(content)


def test_teacher_embeddings_are_computed_once(
    reference: Path, inputs: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[str] = []
    call = WorkerPool.call

    def listen(self: WorkerPool, stage: str, *arguments: Any, **keywords: Any) -> Any:
        stages.append(stage)
        return call(self, stage, *arguments, **keywords)

    monkeypatch.setattr(WorkerPool, "call", listen)
    config: Config = make_config(inputs, runs, "again", grpo={"iterations": 1})
    train.run(config, resume=False)
    assert "sample" in stages
    assert "teacher embeddings" not in stages
