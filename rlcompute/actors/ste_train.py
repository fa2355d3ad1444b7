"""Trains straight-through gates on Ray Train and exports them (spec §4).

The driver checks everything that a user can get wrong before Ray starts, then runs ``fit`` in a thread and writes the
run folder from what the workers send (:mod:`rlcompute.actors.mailbox`). Ray Train restarts workers that died; a worker
that raised, and silence until the deadline, end the run with their first cause.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

import ray
from ray import train
from ray.exceptions import RayActorError, RayError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

from rlcompute.actors.batches import BatchPlan
from rlcompute.actors.cluster import check_port, ray_session
from rlcompute.actors.failure import reported
from rlcompute.actors.inputs import (
    BackboneFiles,
    checkpoint_to_resume,
    find_backbone,
    read_training_pairs,
)
from rlcompute.actors.mailbox import Begin, Failure, Letter, Note, Row, Stage, start_mailbox
from rlcompute.actors.messages import Reply
from rlcompute.actors.pictures import Pictures
from rlcompute.actors.ste_loop import STATE_PARTS, Job, train_loop
from rlcompute.actors.teacher import cache_path
from rlcompute.config import Config
from rlcompute.data import Pair
from rlcompute.errors import ConfigError, StageTimeoutError, WorkerError
from rlcompute.export import export_gates, latest_checkpoint
from rlcompute.plan import Shape
from rlcompute.policies.checkpoint import straight_through_of
from rlcompute.policies.ste_layer_skip import LayerSkip
from rlcompute.policies.ste_pruner import TokenPruner
from rlcompute.runlog import RunLog, check_run_folder

MAX_FAILURES = 3
"""Restarts of the workers before the run gives up."""
POLL_S = 0.5
ABORT_S = 15.0
"""How long Ray Train may take to stop its workers; it waits 5 s for each group's goodbye."""
CONTROLLER_SNAPSHOT = "checkpoint_manager_snapshot.json"
"""Ray Train's list of checkpoints; of no use to another session, which goes by what is complete on disk."""
BACKSTOP = 2
"""Collective operations may wait this many times as long as the driver does, so that the driver speaks first."""


@dataclass(frozen=True)
class Inputs:
    """What a run is made of, checked.

    Attributes:
        pairs: training pairs, sorted by id.
        skipped: bad rows that were left out.
        backbone: the frozen model.
        resume: training checkpoint to go on from, if any.
        completed: iterations that earlier sessions have done.
    """

    pairs: list[Pair]
    skipped: list[str]
    backbone: BackboneFiles
    resume: Path | None
    completed: int


def run(config: Config, *, resume: bool) -> Path:
    """As :func:`rlcompute.actors.train.run`, for ``run.method=ste``."""
    inputs = check(config, resume=resume)
    with ray_session(config), RunLog(config, completed=inputs.completed) as log:
        session = Session(config, inputs, log)
        with reported(session, log):
            session.train()
        log.draw_rates()
        export_gates(config)
    return config.run.folder


def check(config: Config, *, resume: bool) -> Inputs:
    """Reads and checks all inputs of a run; writes nothing.

    Raises:
        ConfigError, DataError, CheckpointError: what is wrong, where, and what to do.
    """
    check_run_folder(config, resume=resume)
    backbone = find_backbone(config)
    _check_gates(config, backbone.shape)
    folder, completed = None, 0
    if resume:
        checkpoint = checkpoint_to_resume(config, backbone, STATE_PARTS)
        straight_through_of(checkpoint.gates, config.run.folder)
        folder, completed = latest_checkpoint(config.run.folder).resolve(), checkpoint.state.completed
    check_port(config)
    pairs, skipped = read_training_pairs(config)
    BatchPlan(pairs, seed=0, pairs_per_batch=config.ste.pairs_per_batch, key="ste.pairs_per_batch")
    return Inputs(pairs, skipped, backbone, folder, completed)


def _check_gates(config: Config, shape: Shape) -> None:
    """Makes the gates that are tied to a layer, which complain if there is no such layer; looks for peft."""
    if "token_pruner" in config.ste.actions:
        TokenPruner(config.ste.prune_layer, shape.layers, shape.hidden)
    if "layer_skip" in config.ste.actions:
        LayerSkip(config.ste.layer_first, shape.layers, shape.hidden)
    if config.ste.lora_rank and find_spec("peft") is None:
        raise ConfigError(
            f"ste.lora_rank={config.ste.lora_rank} trains an adapter with peft, which is not installed: "
            "pip install 'rlcompute[lora]', or set ste.lora_rank=0"
        )


class _Watch(ControllerCallback, WorkerGroupCallback):  # type: ignore[misc]  # ray is not typed
    """Runs in Ray Train's controller: says where it is, and lets no worker that raised be started again."""

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox

    def after_controller_start(self, train_run_context: Any) -> None:
        self._mailbox.set_controller.remote(ray.get_runtime_context().current_actor)

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        for error in worker_group_status.errors.values():
            if isinstance(error, WorkerError):
                raise error


class _Trainer(TorchTrainer):  # type: ignore[misc]  # ray is not typed
    """Without the actor that frees the workers' room after the controller: it needs Ray's dashboard, and polls it.

    :meth:`Session.stop` has the controller free it; if even the driver dies, Ray does so as the job ends.
    """

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        return [callback for callback in callbacks if not isinstance(callback, PlacementGroupCleanerCallback)]


class Session:
    """One training session: Ray Train, what its workers say, and the log."""

    def __init__(self, config: Config, inputs: Inputs, log: RunLog) -> None:
        self._config, self._inputs, self._log = config, inputs, log
        self._timeout_s = config.ray.stage_timeout_s
        self._pictures = Pictures(config, inputs.pairs)
        self._mailbox: Any = start_mailbox()
        self._outcome: BaseException | None = None
        self._lives = 0
        self._places: dict[int, str] = {}
        self._heard = time.monotonic()
        self.stage = "start workers"
        self.replies: dict[int, Reply] = {}

    def train(self) -> None:
        """Runs the iterations that are left.

        Raises:
            StageTimeoutError: no worker got any further within the deadline.
            WorkerError: a worker raised, or workers keep dying.
            CollapseError: training diverged.
        """
        for reason in self._inputs.skipped:
            self._log.message(f"skipped bad row {reason}")
        if self._inputs.skipped:
            self._log.message(
                f"{len(self._inputs.skipped)} bad rows of {self._config.data.train} were skipped"
            )
        self._log.message(f"starting {self._config.ray.num_workers} training workers")
        trainer = self._trainer()
        fit = threading.Thread(target=self._fit, args=(trainer,), name="ray-train", daemon=True)
        self._heard = time.monotonic()
        fit.start()
        while fit.is_alive():
            self._read()
            self._check_silence()
            fit.join(POLL_S)
        self._read()
        if self._outcome is not None:
            raise WorkerError(
                f"stage {self.stage!r}: Ray Train gave up after {self._lives} starts of the workers. If they died, the "
                "usual reason is memory: lower ste.pairs_per_batch, set ste.activation_checkpointing, or use more "
                f"workers, and see the worker logs. It says:\n{self._outcome}"
            ) from self._outcome

    def stop(self) -> None:
        """Ends whatever still runs."""
        try:
            controller = ray.get(self._mailbox.controller.remote(), timeout=ABORT_S)
            if controller is not None:
                _abort(controller)
            ray.kill(self._mailbox)
        except RayError as error:  # the cluster is gone, and the workers with it
            self._log.message(f"the workers could not be stopped: {error}")

    def _trainer(self) -> _Trainer:
        config, folder = self._config, self._log.folder
        checkpoints = folder.checkpoints.resolve()
        checkpoints.mkdir(exist_ok=True)
        (checkpoints / CONTROLLER_SNAPSHOT).unlink(missing_ok=True)
        on_gpu = config.backbone.device == "cuda"
        job = Job(
            config=config,
            backbone_folder=self._inputs.backbone.folder.resolve(),
            backbone=self._inputs.backbone.described,
            pairs=ray.put(self._inputs.pairs),
            teacher=cache_path(config, self._inputs.pairs, self._inputs.backbone.hash).resolve(),
            checkpoints=checkpoints,
            logs=folder.logs.resolve(),
            resume=self._inputs.resume,
            mailbox=self._mailbox,
        )
        return _Trainer(
            train_loop,
            train_loop_config={"job": job},
            torch_config=TorchConfig(
                backend="nccl" if on_gpu else "gloo",
                timeout_s=ceil(BACKSTOP * self._timeout_s),
            ),
            scaling_config=train.ScalingConfig(
                num_workers=config.ray.num_workers,
                use_gpu=on_gpu,
                resources_per_worker={"CPU": 1} | ({"GPU": 1} if on_gpu else {}),
            ),
            run_config=train.RunConfig(
                name=checkpoints.name,
                storage_path=str(checkpoints.parent),
                failure_config=train.FailureConfig(
                    max_failures=MAX_FAILURES, controller_failure_limit=MAX_FAILURES
                ),
                callbacks=[_Watch(self._mailbox)],
                logging_config=train.LoggingConfig(log_level="ERROR"),
            ),
        )

    def _fit(self, trainer: _Trainer) -> None:
        """In the thread: runs Ray Train to its end, and keeps what it raised."""
        try:
            with _train_settings(self._timeout_s):
                trainer.fit()
        except BaseException as error:
            self._outcome = error

    def _read(self) -> None:
        """Takes in what the workers sent."""
        letters: list[Letter] = ray.get(self._mailbox.take.remote(), timeout=self._timeout_s)
        for letter in letters:
            self._heard = time.monotonic()
            self.replies[letter.worker] = Reply(
                letter.worker, host=letter.host, pid=letter.pid, resident_bytes=letter.resident_bytes
            )
            self._take(letter)

    def _take(self, letter: Letter) -> None:
        message = letter.message
        match message:
            case Stage(name, done, total):
                self.stage = name
                self._places[letter.worker] = f"{name} ({done} of {total})" if total else name
            case Begin(completed):
                self._begin(completed)
            case Row():
                self._record(message)
            case Note(text):
                self._log.message(text)
            case Failure(error, traceback):
                worker = f"training worker {letter.worker} (process {letter.pid} on {letter.host})"
                self.replies[letter.worker] = replace(self.replies[letter.worker], failure=traceback)
                if error is not None:
                    raise error
                raise WorkerError(f"stage {self.stage!r}: {worker} raised:\n{traceback}")

    def _begin(self, completed: int) -> None:
        """Iterations start, or start again after a death."""
        self._lives += 1
        if self._lives == 1:
            self._log.begin()
        else:
            self._log.message(f"workers were lost and started again; going on after iteration {completed}")
            self._log.rewind(completed)
            self._pictures.forget()
        self._stage_of_all("train")

    def _stage_of_all(self, name: str) -> None:
        self.stage = name
        self._places = dict.fromkeys(self._places, name)

    def _record(self, row: Row) -> None:
        assert row.iteration == self._log.iteration + 1
        self._stage_of_all("train")
        self._pictures.add(row.actions_NM3)
        images = self._pictures.draw(row.overlays) if row.overlays is not None else {}
        metrics = {**row.metrics, "progress/worker_restarts": float(self._lives - 1)}
        note = (
            f"loss {metrics['loss/total']:.4f}, recall {metrics['recall/mean']:.3f}, "
            f"LM FLOPs saved {metrics['compute/lm_saved']:.1%}"
        )
        self._log.record(metrics, images=images, note=note)

    def _check_silence(self) -> None:
        if time.monotonic() - self._heard > self._timeout_s:
            places = "; ".join(f"worker {worker}: {stage}" for worker, stage in sorted(self._places.items()))
            raise StageTimeoutError(
                f"stage {self.stage!r}: no training worker got any further within {self._timeout_s:g} s (last heard: "
                f"{places or 'nothing'}). If the stage is just slow, raise ray.stage_timeout_s or lower "
                "ste.pairs_per_batch; otherwise see the stacks in failure.json"
            )


def _abort(controller: Any) -> None:
    """Has Ray Train's controller stop its workers and itself, and kills it if it does not."""
    try:
        ray.get(controller.abort.remote(), timeout=ABORT_S)
    except RayActorError:
        return  # it is gone: training is over, or it has just stopped itself
    except RayError:
        ray.kill(controller)


@contextmanager
def _train_settings(timeout_s: float) -> Iterator[None]:
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
