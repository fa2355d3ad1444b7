"""The run folder: what a run writes while it trains, and how it continues after a resume.

    <run.dir>/<run.name>/
        config.yaml      resolved configuration
        env.json         versions, machine and commit of every session of the run
        metrics.jsonl    one JSON object per iteration
        rates.png        rates of the actions over training, of straight-through gates
        tb/              TensorBoard: scalars and pictures
        logs/            logs of the processes
        failure.json     only after a failure
        checkpoints/     written by the trainer
        evaluation/      written by `evaluate`
        export/          written by `export`

An iteration is numbered from 1; a run that resumes from a checkpoint after iteration n continues with n + 1.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlcompute import environment
from rlcompute.config import Config
from rlcompute.config_loading import dump_yaml, fields, load_config
from rlcompute.errors import CheckpointError, ConfigError
from rlcompute.progress import ProgressReporter

# Keys that a resumed run may change: they alter no result of training.
RESUMABLE = (
    "run.dir",
    "ray.",
    "logging.",
    "evaluation.",
    "grpo.checkpoint_every",
    "ste.checkpoint_every",
    "data.test",
)

Images = Mapping[str, NDArray[np.uint8]]


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run folder."""

    root: Path

    @property
    def config(self) -> Path:
        """Resolved configuration."""
        return self.root / "config.yaml"

    @property
    def environment(self) -> Path:
        """Versions, machine and commit of each session."""
        return self.root / "env.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per iteration."""
        return self.root / "metrics.jsonl"

    @property
    def rates(self) -> Path:
        """Rates of the actions over training, drawn at the end."""
        return self.root / "rates.png"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.root / "tb"

    @property
    def logs(self) -> Path:
        """Logs of the processes."""
        return self.root / "logs"

    @property
    def failure(self) -> Path:
        """First cause of a failure; absent otherwise."""
        return self.root / "failure.json"

    @property
    def checkpoints(self) -> Path:
        """Training checkpoints, `step_000100/` and `latest`."""
        return self.root / "checkpoints"

    @property
    def evaluation(self) -> Path:
        """Measured accuracy, compute and time."""
        return self.root / "evaluation"

    @property
    def comparison(self) -> Path:
        """Policies side by side."""
        return self.root / "comparison"

    @property
    def claims(self) -> Path:
        """Checked claims."""
        return self.root / "claims"

    @property
    def export(self) -> Path:
        """Exported gates."""
        return self.root / "export"

    def has_checkpoint(self) -> bool:
        """True if at least one checkpoint was written completely."""
        return any(self.checkpoints.glob("step_*/COMPLETE"))


def check_run_folder(config: Config, *, resume: bool) -> None:
    """Refuses a run that would overwrite checkpoints, or resume what cannot be continued. Writes nothing.

    Raises:
        ConfigError: The folder has checkpoints and `resume` is off, or a key that shapes the results has changed.
        CheckpointError: `resume` is on and there is no complete checkpoint.
    """
    folder = RunFolder(config.run.folder)
    if not resume:
        if folder.has_checkpoint():
            raise ConfigError(
                f"{folder.root} already has checkpoints: continue that run with --resume, choose another run.name, "
                "or delete the folder"
            )
        return
    if not folder.has_checkpoint():
        raise CheckpointError(
            f"nothing to resume in {folder.root}: no complete checkpoint; start without --resume"
        )
    changed = _changed_keys(load_config(folder.config), config)
    if changed:
        hint = " (policy.init_from starts from exported gates)" if config.run.method == "grpo" else ""
        raise ConfigError(
            f"--resume continues {folder.root}, whose results depend on keys that differ now: {'; '.join(changed)}. "
            f"Restore them, or start a new run{hint}"
        )


def _changed_keys(old: Config, new: Config) -> list[str]:
    changed = []
    for key, _ in fields():
        section, _, name = key.partition(".")
        before, after = getattr(getattr(old, section), name), getattr(getattr(new, section), name)
        if before != after and not key.startswith(RESUMABLE):
            changed.append(f"{key} was {before!r}, is {after!r}")
    return changed


class RunLog:
    """Writes the run folder of one training session; a context manager.

    Create it only after configuration, data and backbone have been checked, so that an early error leaves nothing
    behind.

    Args:
        config: Resolved configuration.
        completed: Iterations finished before this session; 0 for a new run. Later lines of `metrics.jsonl` and later
            TensorBoard points of an interrupted session are cut off, since those iterations run again.

    Raises:
        CheckpointError: `metrics.jsonl` lacks an iteration that the resumed checkpoint has finished.
    """

    def __init__(self, config: Config, *, completed: int = 0) -> None:
        self.folder = RunFolder(config.run.folder)
        self.folder.logs.mkdir(parents=True, exist_ok=True)
        if completed == 0:
            self._clear()
        else:
            _truncate_metrics(self.folder.metrics, completed)
        self.folder.failure.unlink(missing_ok=True)
        self.folder.config.write_text(dump_yaml(config))
        self._write_environment(completed)
        self._iterations = config.iterations
        self._open(completed)

    def __enter__(self) -> Self:
        return self

    def rewind(self, completed: int) -> None:
        """Cuts off what was logged after iteration ``completed``: those iterations run again, in this session.

        Raises:
            CheckpointError: as at the start.
        """
        self._close()
        _truncate_metrics(self.folder.metrics, completed)
        self._open(completed)
        self.begin()

    def begin(self) -> None:
        """Starts the progress of the iterations; call it after set-up, which must not count in their rate."""
        self._progress.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _open(self, completed: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, needed only while training

        self._metrics = self.folder.metrics.open("a", encoding="utf-8")
        self._writer: Any = SummaryWriter(str(self.folder.tensorboard), purge_step=completed + 1)
        self.iteration = completed
        self._progress = ProgressReporter("training", self._iterations, unit="iteration", done=completed)

    def _close(self) -> None:
        self._progress.__exit__(None, None, None)
        self._metrics.close()
        self._writer.close()

    def record(self, metrics: Mapping[str, float], *, images: Images | None = None, note: str = "") -> None:
        """Logs the next iteration.

        Args:
            metrics: Scalars by `group/name`, for example `reward/mean`; values that are not finite become null in
                `metrics.jsonl`.
            images: Pictures by `group/name`, uint8 `[height, width, 3]`.
            note: Short text for the progress bar.
        """
        self.iteration += 1
        line: dict[str, object] = {"iteration": self.iteration, "time": _now()}
        line |= {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, self.iteration)
        for name, image in (images or {}).items():
            self._writer.add_image(name, image, self.iteration, dataformats="HWC")
        self._writer.flush()
        self._progress.advance(note=note)

    def draw_rates(self) -> None:
        """Draws how the rates of all actions developed so far, as ``rates.png`` and for TensorBoard."""
        from rlcompute.plots import write_png  # brings matplotlib, needed only here
        from rlcompute.training_plot import rates_over_training

        picture = rates_over_training(read_metrics(self.folder.metrics))
        write_png(self.folder.rates, picture)
        self._writer.add_image("rates/over_training", picture, self.iteration, dataformats="HWC")
        self._writer.flush()

    def message(self, text: str) -> None:
        """Prints a line beside the progress."""
        self._progress.message(text)

    def write_failure(
        self, error: BaseException, *, stage: str, details: Mapping[str, object] | None = None
    ) -> Path:
        """Writes `failure.json` for the first cause and returns its path; a second call changes nothing.

        Args:
            error: The exception; its traceback is kept.
            stage: Name of the stage that failed, for example `sample`.
            details: Further facts by name, such as actor memory in bytes or stacks.
        """
        if not self.folder.failure.exists():
            report = {
                "time": _now(),
                "iteration": self.iteration + 1,
                "stage": stage,
                "error": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exception(error),
                "driver_memory_bytes": environment.process_memory_bytes(),
                **(details or {}),
            }
            _write_atomically(self.folder.failure, json.dumps(report, indent=2) + "\n")
        return self.folder.failure

    def _clear(self) -> None:
        """Removes what an earlier session left that never reached a checkpoint."""
        for path in (self.folder.metrics, self.folder.environment, self.folder.rates):
            path.unlink(missing_ok=True)
        folder = self.folder
        for path in (folder.tensorboard, folder.checkpoints, folder.evaluation, folder.export):
            if path.exists():
                shutil.rmtree(path)

    def _write_environment(self, completed: int) -> None:
        path = self.folder.environment
        sessions = json.loads(path.read_text())["sessions"] if path.is_file() else []
        sessions.append(
            {
                "started": _now(),
                "first_iteration": completed + 1,
                "command": sys.argv,
                "commit": environment.git_commit(Path(__file__).parent),
                "packages": environment.package_versions(),
                "machine": environment.machine(),
            }
        )
        _write_atomically(path, json.dumps({"sessions": sessions}, indent=2) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a `metrics.jsonl`; a last line that was cut off by a crash is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def logged_iterations(path: Path) -> int:
    """How many iterations, counted from the first, a `metrics.jsonl` holds without a gap; 0 if there is no file."""
    found = [row["iteration"] for row in read_metrics(path)] if path.is_file() else []
    return next((count for count, iteration in enumerate(found) if iteration != count + 1), len(found))


def _truncate_metrics(path: Path, completed: int) -> None:
    rows = read_metrics(path) if path.is_file() else []
    kept = [row for row in rows if row["iteration"] <= completed]
    if [row["iteration"] for row in kept] != list(range(1, completed + 1)):
        raise CheckpointError(
            f"{path} does not hold iterations 1 to {completed}, which the resumed checkpoint has finished: restore it"
        )
    _write_lines(path, kept)


def _write_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    _write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
