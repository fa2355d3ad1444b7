"""How a failed run ends: its first cause on disk, with memory of all workers and stacks of those on this machine."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rlcompute.actors.messages import Reply
from rlcompute.runlog import RunLog

STACK_WAIT_S = 0.5


class Session(Protocol):
    """One training session, of whichever method."""

    @property
    def stage(self) -> str:
        """The stage that runs or ran last."""
        ...

    @property
    def replies(self) -> Mapping[int, Reply]:
        """What each worker said last."""
        ...

    def stop(self) -> None:
        """Ends whatever still runs."""
        ...


@contextmanager
def reported(session: Session, log: RunLog) -> Iterator[None]:
    """Runs a session's training: a failure goes to ``failure.json``, and the session is stopped in any case."""
    try:
        yield
    except BaseException as error:
        details = failure_details(session.replies, log.folder.logs)
        path = log.write_failure(error, stage=session.stage, details=details)
        log.message(f"the run failed; {path} has the first cause, stage, memory and stacks")
        raise
    finally:
        session.stop()


def stack_file(log_folder: Path, worker: int) -> Path:
    """Where a worker writes its stacks when it receives SIGUSR1."""
    return log_folder / f"worker_{worker}_stacks.txt"


def write_stacks_on_signal(path: Path) -> None:
    """Registers SIGUSR1, unless the run folder is not on this machine."""
    if path.parent.is_dir():
        # Stays open for the life of the process: the handler must not open files.
        faulthandler.register(signal.SIGUSR1, file=path.open("w"), all_threads=True)


def failure_details(replies: Mapping[int, Reply], logs: Path) -> dict[str, Any]:
    """Facts for ``failure.json``: host, process, memory in bytes and stacks of each worker, as last heard from.

    Args:
        replies: what each worker said last.
        logs: folder into which the workers write their stacks.
    """
    here = socket.gethostname()
    signalled = [worker for worker, reply in replies.items() if reply.host == here and _signal(reply.pid)]
    if signalled:
        time.sleep(STACK_WAIT_S)
    return {
        "workers": {
            str(worker): {
                "host": reply.host,
                "pid": reply.pid,
                "memory_bytes": reply.resident_bytes,
                "stacks": _read(stack_file(logs, worker)) if worker in signalled else "",
            }
            for worker, reply in sorted(replies.items())
        }
    }


def _signal(pid: int) -> bool:
    """Asks a process for its stacks; False if it is gone."""
    try:
        os.kill(pid, signal.SIGUSR1)
    except ProcessLookupError:
        return False
    return True


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
