"""What the rollout workers can tell after a failure: memory, and stacks of those on this machine."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

from rlcompute.actors.dispatch import WorkerPool
from rlcompute.actors.rollout import stack_file

STACK_WAIT_S = 0.5


def failure_details(pool: WorkerPool | None, logs: Path) -> dict[str, Any]:
    """Facts for ``failure.json``: host, process, memory in bytes and stacks of each worker, as last heard from.

    Args:
        pool: the workers, None if there are none yet.
        logs: folder into which the workers write their stacks.
    """
    if pool is None:
        return {}
    here = socket.gethostname()
    signalled = [
        worker for worker, reply in pool.replies.items() if reply.host == here and _signal(reply.pid)
    ]
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
            for worker, reply in sorted(pool.replies.items())
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
