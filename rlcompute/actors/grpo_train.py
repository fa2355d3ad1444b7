"""Trains gates by GRPO on Ray and exports them.

Everything that a user can get wrong is checked first, before Ray starts and before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlcompute.actors.algorithm import GRPO
from rlcompute.actors.algorithm_config import GRPOConfig
from rlcompute.actors.batches import BatchPlan
from rlcompute.actors.checkpoints import Checkpoint, TrainerState, save_checkpoint
from rlcompute.actors.cluster import check_port, ray_session
from rlcompute.actors.failure import reported
from rlcompute.actors.inputs import (
    BackboneFiles,
    checkpoint_to_resume,
    find_backbone,
    first_of_each_task,
    read_training_pairs,
)
from rlcompute.actors.messages import Overlay, Reply
from rlcompute.actors.pictures import Pictures
from rlcompute.actors.scoring import Scorer
from rlcompute.actors.teacher import teacher_bank
from rlcompute.charge import check_cost_table
from rlcompute.config import Config
from rlcompute.data import Pair
from rlcompute.data.schema import Side
from rlcompute.envs.reward import check_negatives
from rlcompute.errors import CheckpointError
from rlcompute.export import export_gates
from rlcompute.policies.checkpoint import check_backbone, heads_of, load_gates
from rlcompute.policies.gates import GateHeads, init_heads
from rlcompute.runlog import RunLog, check_run_folder

CALIBRATION_PAIRS_PER_TASK = 16
"""Pairs of each task, the first by id, whose hidden states centre and scale the gate heads' inputs."""


STATE_PARTS = ("controller", "monitor")
"""What the trainer's state holds besides the iteration."""


@dataclass(frozen=True)
class Inputs:
    """What a run is made of, checked.

    Attributes:
        pairs: training pairs, sorted by id.
        skipped: bad rows that were left out.
        plan: the batches.
        backbone: the frozen model.
        initial: gates to start from, if any were given.
        checkpoint: training checkpoint to resume from, if any.
    """

    pairs: list[Pair]
    skipped: list[str]
    plan: BatchPlan
    backbone: BackboneFiles
    initial: GateHeads | None
    checkpoint: Checkpoint | None

    @property
    def completed(self) -> int:
        """Iterations that earlier sessions have done."""
        return 0 if self.checkpoint is None else self.checkpoint.state.completed


def run(config: Config, *, resume: bool) -> Path:
    """As :func:`rlcompute.actors.train.run`, for ``run.method=grpo``."""
    inputs = check(config, resume=resume)
    # Rewards are computed here. The number of threads must not depend on the machine, or their last bits do.
    torch.set_num_threads(1)
    with ray_session(config), RunLog(config, completed=inputs.completed) as log:
        trainer = Trainer(config, inputs, log)
        with reported(trainer, log):
            trainer.start()
            trainer.train()
        export_gates(config)
    return config.run.folder


def check(config: Config, *, resume: bool) -> Inputs:
    """Reads and checks all inputs of a run; writes nothing.

    Raises:
        ConfigError, DataError, CheckpointError: what is wrong, where, and what to do.
    """
    check_run_folder(config, resume=resume)
    backbone = find_backbone(config)
    check_cost_table(config, backbone.hash)
    initial = None
    if config.policy.init_from is not None:
        saved = load_gates(config.policy.init_from)
        check_backbone(saved, config.policy.init_from, backbone.hash, backbone.folder)
        initial = replace(heads_of(saved, config.policy.init_from), droppable=config.policy.droppable)
    checkpoint = None
    if resume:
        checkpoint = checkpoint_to_resume(config, backbone, STATE_PARTS)
        heads_of(checkpoint.gates, config.run.folder)
    check_port(config)
    pairs, skipped = read_training_pairs(config)
    plan = BatchPlan(
        pairs, seed=config.run.seed, pairs_per_batch=config.grpo.pairs_per_batch, key="grpo.pairs_per_batch"
    )
    smallest_task = min(sum(pair.task == task for pair in pairs) for task in plan.tasks)
    # The bank also holds the pair itself, which is no negative.
    bank_size = smallest_task - 1 if config.reward.bank else 0
    check_negatives(config.reward.negatives, config.grpo.pairs_per_batch, config.grpo.rollouts, bank_size)
    return Inputs(pairs, skipped, plan, backbone, initial, checkpoint)


class Trainer:
    """One training session: workers, learner, log and checkpoints."""

    def __init__(self, config: Config, inputs: Inputs, log: RunLog) -> None:
        self._config = config
        self._inputs = inputs
        self._log = log
        self._algorithm: GRPO | None = None

    @property
    def pool(self) -> Any:
        """The workers; None before they exist."""
        return getattr(self._algorithm, "pool", None)

    @property
    def replies(self) -> Mapping[int, Reply]:
        """The last reply of each worker."""
        return {} if self.pool is None else self.pool.replies

    @property
    def stage(self) -> str:
        """The stage that runs or ran last."""
        return "start workers" if self.pool is None else str(self.pool.stage)

    @property
    def algorithm(self) -> GRPO:
        """What iterates; there once the workers are started."""
        assert self._algorithm is not None
        return self._algorithm

    def start(self) -> None:
        """Starts the workers, embeds the teacher's bank and sets the heads."""
        config, inputs = self._config, self._inputs
        for reason in inputs.skipped:
            self._log.message(f"skipped bad row {reason}")
        if inputs.skipped:
            self._log.message(f"{len(inputs.skipped)} bad rows of {config.data.train} were skipped")
        self._log.message(f"starting {config.ray.num_workers} rollout workers")
        grpo_config = GRPOConfig.of_run(
            config,
            backbone_folder=inputs.backbone.folder,
            num_layers=inputs.backbone.shape.layers,
            hidden_size=inputs.backbone.shape.hidden,
            log_folder=self._log.folder.logs,
        )
        algorithm = GRPO(config=grpo_config)
        self._algorithm = algorithm
        loaded = algorithm.start()
        if loaded != inputs.backbone.hash:
            raise CheckpointError(
                f"{inputs.backbone.folder} has hash {inputs.backbone.hash[:16]}… here but {loaded[:16]}… on the "
                "workers: backbone.path must lead to the same files on every node"
            )
        heads = self._initial_heads(algorithm)
        bank = teacher_bank(config, inputs.pairs, loaded, algorithm.pool)
        self._scorer = Scorer(config, bank, [pair.id for pair in inputs.pairs])
        if inputs.checkpoint is not None:
            self._scorer.controller.load(inputs.checkpoint.state.parts["controller"])
            self._scorer.monitor.load(inputs.checkpoint.state.parts["monitor"])
            algorithm.learner.load_optimizer_tensors(inputs.checkpoint.optimizer)
        algorithm.prepare(inputs.plan, self._scorer, heads, completed=inputs.completed)

    def train(self) -> None:
        """Runs the iterations that are left, with logs, pictures and checkpoints."""
        algorithm, settings = self.algorithm, self._config.grpo
        pictures = Pictures(self._config, self._inputs.pairs)
        self._log.begin()
        while algorithm.completed < settings.iterations:
            algorithm.train()
            last = algorithm.last
            pictures.add(last.actions_NM3)
            images = {}
            if pictures.due(algorithm.completed):
                images = pictures.draw(self._overlays(pictures.sides))
            note = (
                f"reward {last.metrics['reward/mean']:.3f}, recall {last.metrics['recall/mean']:.3f}, "
                f"LM FLOPs saved {last.metrics['compute/lm_saved']:.1%}"
            )
            self._log.record(last.metrics, images=images, note=note)
            if (
                algorithm.completed % settings.checkpoint_every == 0
                or algorithm.completed == settings.iterations
            ):
                self._save()

    def stop(self) -> None:
        """Stops the workers."""
        if self._algorithm is not None:
            self._algorithm.stop()

    def _overlays(self, sides: Sequence[Side]) -> list[Overlay]:
        """What the workers' current weights drop from some inputs."""
        algorithm = self.algorithm
        done = algorithm.pool.scatter(
            "overlays", "overlay", dict(enumerate(sides)), weights_version=algorithm.weights_version
        )
        return [done[number].result for number in range(len(sides))]

    def _initial_heads(self, algorithm: GRPO) -> GateHeads:
        inputs, policy = self._inputs, self._config.policy
        if inputs.checkpoint is not None:
            return heads_of(inputs.checkpoint.gates, self._config.run.folder)
        if inputs.initial is not None:
            return inputs.initial
        normaliser = algorithm.calibrate(first_of_each_task(inputs.pairs, CALIBRATION_PAIRS_PER_TASK))
        return init_heads(
            torch.tensor(normaliser.mean),
            torch.tensor(normaliser.scale),
            skip=policy.init_skip,
            drop=policy.init_drop,
            late_skip_bias=policy.late_skip_bias,
            droppable=policy.droppable,
        )

    def _save(self) -> None:
        learner, completed = self.algorithm.learner, self.algorithm.completed
        save_checkpoint(
            self._log.folder.checkpoints,
            gates=learner.heads(),
            optimizer=learner.optimizer_tensors(),
            state=TrainerState(
                completed,
                {"controller": self._scorer.controller.state(), "monitor": self._scorer.monitor.state()},
            ),
            backbone=self._inputs.backbone.described,
            extra={"iteration": completed, "max_tokens": self._config.data.max_tokens},
        )
