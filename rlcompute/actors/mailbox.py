"""How the workers of Ray Train talk to the driver while they train.

Ray Train tells its driver nothing before training ends. Workers put messages into an actor, and the driver takes them
out; neither waits longer than its deadline.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rlcompute.actors.messages import Array, Overlay
from rlcompute.environment import process_memory_bytes
from rlcompute.errors import CollapseError, StageTimeoutError


@dataclass(frozen=True)
class Stage:
    """A worker has come to a stage, or further within it."""

    name: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class Begin:
    """Iterations start, after ``completed`` of them; rows after that one are void."""

    completed: int


@dataclass(frozen=True)
class Row:
    """What an iteration leaves for the log.

    Attributes:
        iteration: from 1.
        metrics: scalars by tag.
        actions_NM3: int64, decisions by layer, token modality and action.
        overlays: of the inputs that are drawn, when it is time to.
    """

    iteration: int
    metrics: Mapping[str, float]
    actions_NM3: Array
    overlays: Sequence[Overlay] | None = None


@dataclass(frozen=True)
class Note:
    """A line for the user."""

    text: str


@dataclass(frozen=True)
class Failure:
    """What a worker raised: an error that is made to travel, or else the traceback."""

    error: StageTimeoutError | CollapseError | None
    traceback: str


@dataclass(frozen=True)
class Letter:
    """A message and who sent it."""

    worker: int
    message: Stage | Begin | Row | Note | Failure
    host: str
    pid: int
    resident_bytes: int


class Mailbox:
    """Holds messages until the driver takes them, and the actor that runs the workers."""

    def __init__(self) -> None:
        self._letters: list[Letter] = []
        self._controller: Any = None
        self._checkpoint: Path | None = None

    def put(self, letter: Letter) -> None:
        """Adds a message."""
        self._letters.append(letter)

    def take(self) -> list[Letter]:
        """All messages that came since the last call, in order."""
        letters, self._letters = self._letters, []
        return letters

    def set_checkpoint(self, folder: Path) -> None:
        """Remembers the last checkpoint of this session."""
        self._checkpoint = folder

    def checkpoint(self) -> Path | None:
        """The last checkpoint of this session; None before the first.

        Ray Train keeps a list of its own in the run folder, but workers of a driver that was killed may still write it
        when the next session has begun.
        """
        return self._checkpoint

    def set_controller(self, controller: Any) -> None:
        """Remembers Ray Train's controller."""
        self._controller = controller

    def controller(self) -> Any:
        """Ray Train's controller; None before it runs."""
        return self._controller


def start_mailbox() -> Any:
    """A mailbox in an actor of its own, which takes no worker's room."""
    return ray.remote(num_cpus=0)(Mailbox).remote()


class Sender:
    """One worker's way to the driver."""

    def __init__(self, mailbox: Any, worker: int, timeout_s: float) -> None:
        self._mailbox, self._worker, self._timeout_s = mailbox, worker, timeout_s

    def send(self, message: Stage | Begin | Row | Note | Failure) -> None:
        """Sends a message and waits until it has arrived."""
        letter = Letter(self._worker, message, socket.gethostname(), os.getpid(), process_memory_bytes())
        ray.get(self._mailbox.put.remote(letter), timeout=self._timeout_s)

    def saved(self, folder: Path) -> None:
        """Says that a checkpoint is complete, and Ray Train knows of it."""
        ray.get(self._mailbox.set_checkpoint.remote(folder), timeout=self._timeout_s)

    def last_saved(self) -> Path | None:
        """The last checkpoint that a worker of this session saved."""
        folder: Path | None = ray.get(self._mailbox.checkpoint.remote(), timeout=self._timeout_s)
        return folder

    def fail(self, error: Exception) -> None:
        """Sends what this worker raised."""
        known = error if isinstance(error, StageTimeoutError | CollapseError) else None
        self.send(Failure(known, "".join(traceback.format_exception(error))))
