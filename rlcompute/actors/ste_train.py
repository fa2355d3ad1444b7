"""Trains straight-through gates on Ray Train and exports them (spec §4).

The driver checks configuration, data and checkpoints before Ray starts, then runs ``fit`` in a thread and writes the
run folder from what the workers send (:mod:`rlcompute.actors.mailbox`). Ray Train restarts workers that died; a worker
that raised, and silence until the deadline, end the run with their first cause.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import ray
from ray import train
from ray.exceptions import RayError
from ray.train.torch import TorchConfig

from rlcompute.actors.batches import BatchPlan
from rlcompute.actors.cluster import check_port, is_on_loopback, ray_session
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
from rlcompute.actors.ray_train import (
    BACKSTOP,
    POLL_S,
    PrivateTorchConfig,
    Watch,
    WatchedTrainer,
    abort,
    train_settings,
)
from rlcompute.actors.ste_loop import FIRST_STAGE, STATE_PARTS, Job, train_loop
from rlcompute.actors.teacher import cache_path
from rlcompute.config import Config
from rlcompute.config_ste import SteConfig
from rlcompute.data import Pair
from rlcompute.errors import StageTimeoutError, WorkerError
from rlcompute.export import export_gates
from rlcompute.plan_ste import check_gates
from rlcompute.policies.checkpoint import straight_through_of
from rlcompute.runlog import RunLog, check_run_folder, read_metrics

MAX_FAILURES = 3
"""Restarts of the workers before the run gives up."""
ABORT_S = 15.0
"""How long Ray Train may take to stop its workers; it waits 5 s for each group's goodbye."""
TOLERANCE = 0.01
"""How far below a shared budget a run may end before it says so, as a share of the language model's FLOPs."""
CONTROLLER_SNAPSHOT = "checkpoint_manager_snapshot.json"
"""Ray Train's list of checkpoints; of no use to another session, which goes by what is complete on disk."""


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
        missing = shortfall(config.ste, read_metrics(log.folder.metrics))
        if missing is not None:
            log.message(missing)
        export_gates(config)
        log.draw_rates()
    return config.run.folder


def shortfall(ste: SteConfig, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """What to say if a shared budget was not met; None if it was, or if there is none.

    Args:
        ste: of the run.
        rows: its metrics; the last tenth counts.
    """
    if ste.combination != "shared":
        return None
    last = rows[-ceil(len(rows) / 10) :]
    saved = sum(row["compute/lm_saved"] for row in last) / len(last)
    if saved > ste.flops_saved - TOLERANCE:
        return None
    return (
        f"{saved:.1%} of the language model's FLOPs were saved at the end, {ste.flops_saved:.1%} were asked for: raise "
        f"ste.flops_weight (now {ste.flops_weight:g}) or ste.iterations"
    )


def check(config: Config, *, resume: bool) -> Inputs:
    """Reads and checks all inputs of a run; writes nothing.

    Raises:
        ConfigError, DataError, CheckpointError: what is wrong, where, and what to do.
    """
    check_run_folder(config, resume=resume)
    backbone = find_backbone(config)
    check_gates(config, backbone.shape)
    folder, completed = None, 0
    if resume:
        checkpoint = checkpoint_to_resume(config, backbone, STATE_PARTS)
        straight_through_of(checkpoint.gates, config.run.folder)
        folder, completed = checkpoint.folder.resolve(), checkpoint.state.completed
    check_port(config)
    pairs, skipped = read_training_pairs(config)
    BatchPlan(pairs, seed=0, pairs_per_batch=config.ste.pairs_per_batch, key="ste.pairs_per_batch")
    return Inputs(pairs, skipped, backbone, folder, completed)


class Session:
    """One training session: Ray Train, what its workers say, and the log."""

    def __init__(self, config: Config, inputs: Inputs, log: RunLog) -> None:
        self._config, self._inputs, self._log = config, inputs, log
        self._timeout_s = config.ray.stage_timeout_s
        self._pictures = Pictures(config, inputs.pairs)
        self._mailbox: Any = start_mailbox()
        self._outcome: BaseException | None = None
        self._lives = 0
        self._begun = False
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
            for letter in ray.get(self._mailbox.take.remote(), timeout=ABORT_S):
                if isinstance(letter.message, Row):  # a checkpoint of it may be on disk already
                    self._record(letter.message)
            controller = ray.get(self._mailbox.controller.remote(), timeout=ABORT_S)
            if controller is not None:
                abort(controller, ABORT_S)
            ray.kill(self._mailbox)
        except RayError as error:  # the cluster is gone, and the workers with it
            self._log.message(f"the workers could not be stopped: {error}")

    def _trainer(self) -> WatchedTrainer:
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
        return WatchedTrainer(
            train_loop,
            train_loop_config={"job": job},
            torch_config=(PrivateTorchConfig if is_on_loopback() else TorchConfig)(
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
                callbacks=[Watch(self._mailbox)],
                logging_config=train.LoggingConfig(log_level="ERROR"),
            ),
        )

    def _fit(self, trainer: WatchedTrainer) -> None:
        """In the thread: runs Ray Train to its end, and keeps what it raised."""
        try:
            with train_settings(self._timeout_s):
                trainer.fit()
        except BaseException as error:
            self._outcome = error

    def _read(self) -> None:
        """Takes in what the workers sent."""
        letters: list[Letter] = ray.get(self._mailbox.take.remote(), timeout=self._timeout_s)
        # What a worker raised ends the session, but not before what all of them had to say is taken in.
        for letter in sorted(letters, key=lambda letter: isinstance(letter.message, Failure)):
            self._heard = time.monotonic()
            self.replies[letter.worker] = Reply(
                letter.worker, host=letter.host, pid=letter.pid, resident_bytes=letter.resident_bytes
            )
            self._take(letter)

    def _take(self, letter: Letter) -> None:
        message = letter.message
        match message:
            case Stage(name, done, total):
                self._lives += name == FIRST_STAGE and letter.worker == 0
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
        if not self._begun:
            self._begun = True
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
