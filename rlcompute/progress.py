"""Progress of long work: a bar with rate and remaining time on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_INTERVAL_S = 5.0


class ProgressReporter:
    """Context manager that shows how far a loop has come.

    On a terminal a `rich` bar is redrawn in place. Elsewhere (a log file, `ray job submit`) one line is printed for the
    first and last step and at most every five seconds between them.

    Args:
        label: What is being done, for example `training`.
        total: Steps in all.
        unit: What one step is, in the singular.
        done: Steps finished earlier, as after a resume; they do not count in the rate.
        stream: Where to write; standard error by default.
    """

    def __init__(
        self, label: str, total: int, *, unit: str = "step", done: int = 0, stream: TextIO | None = None
    ) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = self._first = done
        self._console = Console(file=stream, stderr=stream is None)
        self._started = self._printed = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=self._console,
            )
            self._task = self._bar.add_task(
                self._label, total=self._total, completed=self._done, note="", rate=""
            )
            self._bar.start()
        return self

    def advance(self, steps: int = 1, *, note: str = "") -> None:
        """Counts finished steps; `note` is a short text shown beside them."""
        self._done += steps
        elapsed = time.monotonic() - self._started
        seconds_per_step = elapsed / max(self._done - self._first, 1)
        rate = _rate(seconds_per_step, self._unit)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, note=note, rate=rate)
            return
        now = time.monotonic()
        ends = self._done - self._first <= steps or self._done >= self._total
        if ends or now - self._printed >= PLAIN_INTERVAL_S:
            self._printed = now
            remaining = _clock(seconds_per_step * (self._total - self._done))
            self._print(
                f"{self._label} {self._done}/{self._total} | {rate} | {remaining} left{note and ' | ' + note}"
            )

    def message(self, text: str) -> None:
        """Prints a line of its own, above the bar on a terminal."""
        self._print(text)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()


def _rate(seconds_per_step: float, unit: str) -> str:
    if seconds_per_step >= 1.0:
        return f"{seconds_per_step:.1f} s/{unit}"
    return f"{1.0 / max(seconds_per_step, 1e-9):.3g} {unit}s/s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
