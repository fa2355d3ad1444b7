from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from rlcompute.config import Config
from rlcompute.config_loading import load_config
from rlcompute.errors import CheckpointError, ConfigError, WorkerError
from rlcompute.progress import ProgressReporter
from rlcompute.runlog import RunFolder, RunLog, check_run_folder, read_metrics


def make_config(tmp_path: Path, *overrides: str) -> Config:
    base = ["run.name=r", f"run.dir={tmp_path}", "data.train=a", "data.test=b", "grpo.iterations=6"]
    return load_config(None, [*base, *overrides])


def run_iterations(config: Config, count: int, *, completed: int = 0) -> RunFolder:
    with RunLog(config, completed=completed) as log:
        for iteration in range(completed + 1, completed + count + 1):
            log.record({"reward/mean": iteration / 10, "compute/saved": 0.5})
    return log.folder


def complete_checkpoint(folder: RunFolder, step: int) -> None:
    path = folder.checkpoints / f"step_{step:06d}"
    path.mkdir(parents=True)
    (path / "COMPLETE").touch()


@pytest.fixture(autouse=True)
def event_files_sort_by_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Event files of one second are told apart by a counter in their names, in which 10 sorts before 9."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(10))


def scalars(folder: RunFolder, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder.tensorboard)).Reload()
    return [(event.step, round(event.value, 6)) for event in events.Scalars(tag)]


def test_a_run_leaves_config_environment_metrics_and_tensorboard(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    image = np.zeros((8, 12, 3), np.uint8)
    with RunLog(config) as log:
        log.record({"reward/mean": 0.25}, images={"actions/fractions": image})
        log.record({"reward/mean": float("nan")})
    assert load_config(log.folder.config) == config
    session = json.loads(log.folder.environment.read_text())["sessions"][0]
    assert session["packages"]["torch"]
    assert session["machine"]["cores"] >= 1
    rows = read_metrics(log.folder.metrics)
    assert [(row["iteration"], row["reward/mean"]) for row in rows] == [(1, 0.25), (2, None)]
    assert scalars(log.folder, "reward/mean")[0] == (1, 0.25)
    events = EventAccumulator(str(log.folder.tensorboard)).Reload()
    assert (events.Images("actions/fractions")[0].width, events.Images("actions/fractions")[0].height) == (
        12,
        8,
    )


def test_metrics_are_on_disk_after_each_iteration(tmp_path: Path) -> None:
    with RunLog(make_config(tmp_path)) as log:
        log.record({"reward/mean": 0.5})
        assert len(read_metrics(log.folder.metrics)) == 1


def test_a_resumed_run_continues_where_the_checkpoint_stands(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    folder = run_iterations(config, 5)
    with folder.metrics.open("a") as stream:
        stream.write('{"iteration": 6, "rew')
    with RunLog(config, completed=3) as log:
        assert [row["iteration"] for row in read_metrics(folder.metrics)] == [1, 2, 3]
        log.record({"reward/mean": 9.0})
    assert [row["reward/mean"] for row in read_metrics(folder.metrics)] == [0.1, 0.2, 0.3, 9.0]
    assert scalars(folder, "reward/mean") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 9.0)]
    sessions = json.loads(folder.environment.read_text())["sessions"]
    assert [session["first_iteration"] for session in sessions] == [1, 4]


def test_resume_refuses_metrics_that_lack_an_iteration(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    folder = run_iterations(config, 2)
    with pytest.raises(CheckpointError, match="iterations 1 to 3"):
        RunLog(config, completed=3)
    assert len(read_metrics(folder.metrics)) == 2


def test_a_new_run_clears_what_never_reached_a_checkpoint(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    folder = run_iterations(config, 4)
    (folder.checkpoints / "step_000004").mkdir(parents=True)
    check_run_folder(config, resume=False)
    run_iterations(config, 1)
    assert len(read_metrics(folder.metrics)) == 1
    assert scalars(folder, "reward/mean") == [(1, 0.1)]
    assert not folder.checkpoints.exists()


def test_checkpoints_are_never_overwritten_silently(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    complete_checkpoint(run_iterations(config, 2), 2)
    with pytest.raises(ConfigError, match="--resume"):
        check_run_folder(config, resume=False)
    check_run_folder(config, resume=True)


def test_nothing_to_resume_is_an_error_and_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        check_run_folder(make_config(tmp_path), resume=True)
    assert list(tmp_path.iterdir()) == []


def test_resume_refuses_changed_results_but_not_changed_placement(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    complete_checkpoint(run_iterations(config, 2), 2)
    check_run_folder(make_config(tmp_path, "ray.num_workers=1", "logging.images_every=2"), resume=True)
    with pytest.raises(ConfigError, match=r"grpo\.lr was 0\.005, is 0\.1; .*|grpo\.iterations was 6, is 7"):
        check_run_folder(make_config(tmp_path, "grpo.iterations=7", "grpo.lr=0.1"), resume=True)


def test_failure_report_keeps_the_first_cause(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with RunLog(config) as log:
        log.record({"reward/mean": 0.1})
        try:
            raise WorkerError("worker 1: bad expert index")
        except WorkerError as error:
            log.write_failure(error, stage="sample", details={"actor_memory_bytes": {"worker_1": 10}})
        log.write_failure(RuntimeError("later"), stage="shutdown")
    report = json.loads(log.folder.failure.read_text())
    assert report["stage"] == "sample"
    assert report["iteration"] == 2
    assert report["error"] == "WorkerError"
    assert report["message"] == "worker 1: bad expert index"
    assert any("test_runlog.py" in line for line in report["traceback"])
    assert report["actor_memory_bytes"] == {"worker_1": 10}
    run_iterations(config, 1)
    assert not log.folder.failure.exists()


def test_progress_prints_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with ProgressReporter("training", 4, unit="iteration", done=1, stream=stream) as progress:
        for reward in ("[0.1]", "0.2", "0.3"):
            progress.advance(note=f"reward {reward}")
        progress.message("done")
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("training 2/4 | ")
    assert lines[0].endswith("| reward [0.1]")
    assert lines[-2].startswith("training 4/4 | ")
    assert "0:00 left" in lines[-2]
    assert lines[-1] == "done"
    assert "\x1b" not in stream.getvalue()


def test_rewound_iterations_are_logged_again(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with RunLog(config) as log:
        log.begin()
        for value in range(4):
            log.record({"reward/mean": float(value)})
        log.rewind(2)
        assert log.iteration == 2
        log.record({"reward/mean": 9.0})
    rows = read_metrics(log.folder.metrics)
    assert [(row["iteration"], row["reward/mean"]) for row in rows] == [(1, 0.0), (2, 1.0), (3, 9.0)]
    assert scalars(log.folder, "reward/mean") == [(1, 0.0), (2, 1.0), (3, 9.0)]


def test_every_metric_is_explained(repository: Path) -> None:
    text = (repository / "docs" / "metrics.md").read_text()
    groups = "actions|compute|controller|distill|loss|policy|progress|recall|reward|timing"
    pattern = re.compile(rf'f?"((?:{groups})/[a-z_]+)')
    files = [
        *(repository / "rlcompute" / "actors").glob("*.py"),
        repository / "rlcompute" / "envs" / "controller.py",
    ]
    names = {name for path in files for name in pattern.findall(path.read_text())}
    assert {"reward/mean", "compute/lm_saved", "controller/lambda", "distill/cosine"} <= names
    assert [name for name in sorted(names) if f"`{name}" not in text] == []
