"""What this project adds to Ray Train, and where it depends on Ray Train's private parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _set_torch_distributed_env_vars, _setup_torch_process_group, _TorchBackend
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

from rlcompute.actors.cluster import environment_variables
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


class PrivateTorchConfig(TorchConfig):  # type: ignore[misc]  # ray is not typed
    """The process group of workers on one machine: they meet in a file, and no port is opened to the network.

    Torch's own meeting point, a server, listens on all interfaces.
    """

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        return _PrivateTorchBackend


class _PrivateTorchBackend(_TorchBackend):  # type: ignore[misc]  # ray is not typed
    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        # Every group of workers has a file of its own.
        self._folder = TemporaryDirectory(prefix="rlcompute_", ignore_cleanup_errors=True)
        worker_group.execute(_set_torch_distributed_env_vars)
        ready = [
            worker_group.execute_single_async(
                rank,
                _setup_torch_process_group,
                backend=backend_config.backend,
                world_rank=rank,
                world_size=len(worker_group),
                init_method=f"file://{self._folder.name}/group",  # torch takes the path as it is, unquoted
                timeout_s=backend_config.timeout_s,
            )
            for rank in range(len(worker_group))
        ]
        ray.get(ready, timeout=backend_config.timeout_s)

    def on_shutdown(self, worker_group: Any, backend_config: TorchConfig) -> None:
        try:
            super().on_shutdown(worker_group, backend_config)
        finally:
            self._folder.cleanup()


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
    with environment_variables(settings):
        yield
