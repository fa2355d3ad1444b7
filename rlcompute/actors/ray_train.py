"""What this project adds to Ray Train, and where it depends on Ray Train's private parts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

from rlcompute.errors import WorkerError

POLL_S = 0.5
BACKSTOP = 2
"""Collective operations may wait this many times as long as the driver does, so that the driver speaks first."""


class Watch(ControllerCallback, WorkerGroupCallback):  # type: ignore[misc]  # ray is not typed
    """Runs in Ray Train's controller: says where it is, and lets no worker that raised be started again."""

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox

    def after_controller_start(self, train_run_context: Any) -> None:
        self._mailbox.set_controller.remote(ray.get_runtime_context().current_actor)

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        for error in worker_group_status.errors.values():
            if isinstance(error, WorkerError):
                raise error


class WatchedTrainer(TorchTrainer):  # type: ignore[misc]  # ray is not typed
    """Without the actor that frees the workers' room after the controller: it needs Ray's dashboard, and polls it.

    :meth:`Session.stop` has the controller free it; if even the driver dies, Ray does so as the job ends.
    """

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        return [callback for callback in callbacks if not isinstance(callback, PlacementGroupCleanerCallback)]


def abort(controller: Any, timeout_s: float) -> None:
    """Has Ray Train's controller stop its workers and itself, and kills it if it does not."""
    try:
        ray.get(controller.abort.remote(), timeout=timeout_s)
    except RayActorError:
        return  # it is gone: training is over, or it has just stopped itself
    except RayError:
        ray.kill(controller)


@contextmanager
def train_settings(timeout_s: float) -> Iterator[None]:
    """Ray Train's settings that exist as environment variables only; it reads them when training starts."""
    settings = {
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(POLL_S),  # a report waits for the next check
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(timeout_s),
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": str(BACKSTOP * timeout_s),
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": str(BACKSTOP * timeout_s),
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
