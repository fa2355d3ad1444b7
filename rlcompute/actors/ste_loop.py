"""What each worker of straight-through training runs under Ray Train, from loading the backbone to the last checkpoint.

All workers do the same to the same numbers, each on its slice of the batch; worker 0 also logs, draws and saves. A
worker that dies takes the others with it: Ray Train starts all of them again, and they go on from the last checkpoint.
Batches, noise and schedules follow from the iteration, so the run ends as if nothing had happened.

Shape legend: 2 sides, M pairs of the bank, B pairs of the batch, d embedding size, N layers.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train import CheckpointUploadMode
from ray.train.v2._internal.execution import context as execution_context
from torch import Tensor
from transformers.utils import logging as transformers_logging

from rlcompute.actors.batches import BatchPlan
from rlcompute.actors.checkpoints import TrainerState, load_checkpoint, save_checkpoint
from rlcompute.actors.engine import RolloutEngine
from rlcompute.actors.failure import stack_file, write_stacks_on_signal
from rlcompute.actors.inputs import first_of_each_task
from rlcompute.actors.mailbox import Begin, Note, Row, Sender, Stage
from rlcompute.actors.messages import SIDES
from rlcompute.actors.pictures import Pictures
from rlcompute.actors.ste_engine import SteEngine
from rlcompute.actors.teacher import chunks_of, read_embeddings, write_embeddings
from rlcompute.actors.torch_group import PeerLostError, TorchGroup
from rlcompute.backbones import load_configured, lora
from rlcompute.config import Config
from rlcompute.data.schema import Pair
from rlcompute.errors import CheckpointError, WorkerError
from rlcompute.memory import keep_freed_memory
from rlcompute.policies.checkpoint import straight_through_of
from rlcompute.policies.gates import calibrate
from rlcompute.policies.ste_build import build_gates
from rlcompute.policies.ste_gates import StraightThroughGates

CALIBRATION_PAIRS_PER_TASK = 16
"""Pairs of each task, the first by id, whose hidden states centre and scale the gates' inputs."""
SETTLING_PAIRS_PER_TASK = 64
"""Pairs of each task, the first by id, on which thresholds are set after training."""
FIRST_STAGE = "load backbone"
"""Where every life of a worker begins."""
STATE_PARTS = ("engine",)
"""What the trainer's state holds besides the iteration."""


@dataclass(frozen=True)
class Job:
    """What the driver tells its workers. Paths are absolute: workers have working directories of their own.

    Attributes:
        config: of the run.
        backbone_folder: checkpoint folder of the backbone.
        backbone: its path as gates name it, family and hash.
        pairs: object of the training pairs, sorted by id; workers need no access to the data file.
        teacher: file of their full-compute embeddings.
        checkpoints: folder of the run's checkpoints.
        logs: folder into which stacks are written.
        resume: checkpoint to start from; None for a new run.
        mailbox: the way to the driver.
    """

    config: Config
    backbone_folder: Path
    backbone: dict[str, str]
    pairs: Any
    teacher: Path
    checkpoints: Path
    logs: Path
    resume: Path | None
    mailbox: Any


def train_loop(options: dict[str, Any]) -> None:
    """Ray Train's ``train_loop_per_worker``; ``options["job"]`` is the :class:`Job`."""
    job: Job = options["job"]
    rank = train.get_context().get_world_rank()
    sender = Sender(job.mailbox, rank, job.config.ray.stage_timeout_s)
    _quieten()
    # One thread: there is a worker for every core, and a sum's last bits must not depend on the machine.
    torch.set_num_threads(1)
    keep_freed_memory()
    write_stacks_on_signal(stack_file(job.logs, rank))
    try:
        Worker(job, sender).run()
    except PeerLostError:
        raise
    except Exception as error:
        try:
            sender.fail(error)
        finally:
            # Any error can be pickled as its text, and the controller must not start workers again for it.
            raise WorkerError(str(error)) from None


def _quieten() -> None:
    """Lets only warnings through: every line of a worker is shown by the driver too."""
    transformers_logging.disable_progress_bar()
    # Ray Train's report has a logger of the name of its file.
    for name in ("ray.train", execution_context.__file__, "rlcompute"):
        logging.getLogger(name).setLevel(logging.WARNING)


class Worker:
    """One life of one worker."""

    def __init__(self, job: Job, sender: Sender) -> None:
        self._job, self._config, self._sender = job, job.config, sender
        config = job.config
        sender.send(Stage(FIRST_STAGE))
        self._backbone = load_configured(config, job.backbone_folder)
        if self._backbone.hash != job.backbone["hash"]:
            raise CheckpointError(
                f"{job.backbone_folder} has hash {job.backbone['hash'][:16]}… at the driver but "
                f"{self._backbone.hash[:16]}… here: backbone.path must lead to the same files on every node"
            )
        self._group = TorchGroup(torch.device(self._backbone.device))
        self._frozen = RolloutEngine(self._backbone, config, cache_bytes=0)
        self._pairs: list[Pair] = ray.get(job.pairs, timeout=config.ray.stage_timeout_s)
        self._rows = {pair.id: row for row, pair in enumerate(self._pairs)}
        self._plan = BatchPlan(
            self._pairs,
            seed=config.run.seed,
            pairs_per_batch=config.ste.pairs_per_batch,
            key="ste.pairs_per_batch",
        )
        self._pictures = Pictures(config, self._pairs)
        self._adapter: lora.Adapter | None = None

    @property
    def _leads(self) -> bool:
        """Whether this is the worker that logs and saves."""
        return self._group.rank == 0

    def run(self) -> None:
        """Trains from the last checkpoint, or from the start, to the end."""
        teacher_2Md = self._teacher()
        engine, completed = self._engine()
        iterations, every = self._config.ste.iterations, self._config.ste.checkpoint_every
        if self._leads:
            self._sender.send(Begin(completed))
        for iteration in range(completed, iterations):
            self._iterate(engine, iteration, teacher_2Md)
            completed = iteration + 1
            if completed == iterations:
                self._settle(engine)
            if completed % every == 0 or completed == iterations:
                self._save(engine, completed)

    def _iterate(self, engine: SteEngine, iteration: int, teacher_2Md: Tensor) -> None:
        started = time.perf_counter()
        pairs = self._plan.pairs(iteration)
        step = engine.step(iteration, pairs, teacher_2Md[:, [self._rows[pair.id] for pair in pairs]])
        if not self._leads:
            return
        overlays = None
        if self._pictures.due(iteration + 1):
            overlays = [self._frozen.overlay(side, engine.gates) for side in self._pictures.sides]
        metrics = {**step.metrics, "timing/iteration_s": time.perf_counter() - started}
        self._sender.send(Row(iteration + 1, metrics, step.actions_NM3, overlays))

    def _teacher(self) -> Tensor:
        """Full-compute embeddings of all pairs, [2,M,d]: from the cache, or each worker computes its share."""
        group, sender = self._group, self._sender
        sender.send(Stage("teacher embeddings"))
        cached = read_embeddings(self._job.teacher)
        # All or none: a worker that found the file must still take part if another did not.
        if int(group.add(torch.tensor(int(cached is None)))) == 0:
            assert cached is not None
            return cached
        embeddings_2Md = torch.zeros(2, len(self._pairs), self._backbone.hidden_size)
        for number, (start, chunk) in enumerate(chunks_of(self._pairs).items()):
            if number % group.size == group.rank:
                embedded = torch.from_numpy(self._frozen.full_embeddings(chunk))
                embeddings_2Md[:, start : start + len(chunk)] = embedded
                sender.send(Stage("teacher embeddings", start + len(chunk), len(self._pairs)))
        embeddings_2Md = group.add(embeddings_2Md)
        if self._leads:
            write_embeddings(self._job.teacher, embeddings_2Md)
        return embeddings_2Md

    def _engine(self) -> tuple[SteEngine, int]:
        """The engine and how many iterations it has done."""
        folder = self._sender.last_saved() or self._job.resume
        if folder is None:
            self._sender.send(Stage("calibration"))
            gates = self._new_gates()
            return SteEngine(self._backbone, self._config, gates, self._group, self._attach()), 0
        self._sender.send(Stage("load checkpoint"))
        checkpoint = load_checkpoint(folder, STATE_PARTS)
        gates = straight_through_of(checkpoint.gates, folder).to(self._backbone.device)
        adapter = self._attach()
        if adapter is not None:
            adapter.load(lora.read(folder / lora.FOLDER))
        engine = SteEngine(self._backbone, self._config, gates, self._group, adapter)
        engine.optimizer.load(checkpoint.optimizer)
        engine.load_state(checkpoint.state.parts["engine"])
        return engine, checkpoint.state.completed

    def _attach(self) -> lora.Adapter | None:
        """The adapter that is trained with the gates; from here on the backbone is not what the teacher was."""
        ste = self._config.ste
        if ste.lora_rank == 0:
            return None
        self._adapter = lora.attach(
            self._backbone,
            rank=ste.lora_rank,
            alpha=ste.lora_alpha,
            targets=ste.lora_targets,
            seed=self._config.run.seed,
        )
        return self._adapter

    def _new_gates(self) -> StraightThroughGates:
        """Gates near full compute, the same on all workers."""
        pairs = first_of_each_task(self._pairs, CALIBRATION_PAIRS_PER_TASK)
        inputs = [self._frozen.embed(pair, side) for pair in pairs for side in SIDES]
        gates = build_gates(self._config.ste, self._backbone, inputs, *calibrate(self._backbone, inputs))
        gates = gates.to(self._backbone.device)
        for tensor in gates.state_dict().values():
            tensor.copy_(self._group.first(tensor))
        return gates

    def _settle(self, engine: SteEngine) -> None:
        """Sets the thresholds that inference uses."""
        self._sender.send(Stage("settle thresholds"))
        rates = engine.settle(first_of_each_task(self._pairs, SETTLING_PAIRS_PER_TASK))
        if self._leads and rates:
            said = ", ".join(f"{kind} {rate:.1%}" for kind, rate in rates.items())
            self._sender.send(Note(f"thresholds are set; shares of decisions above them: {said}"))

    def _save(self, engine: SteEngine, completed: int) -> None:
        """Writes a checkpoint into its final place and tells Ray Train about it."""
        self._sender.send(Stage("save checkpoint"))
        folder: Path | None = None
        if self._leads:
            folder = save_checkpoint(
                self._job.checkpoints,
                gates=engine.gates,
                optimizer=engine.optimizer.tensors(),
                state=TrainerState(completed, {"engine": engine.state()}),
                backbone=self._job.backbone,
                extra={
                    "iteration": completed,
                    "max_tokens": self._config.data.max_tokens,
                    "combination": self._config.ste.combination,
                },
                adapter=self._adapter,
            )
        # All workers report: it is a barrier, which keeps them from running ahead of the checkpoint.
        train.report(
            {"iteration": completed},
            checkpoint=None if folder is None else train.Checkpoint.from_directory(folder),
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )
        if folder is not None:
            self._sender.saved(folder)
