"""GRPO on RLlib.

    training_step (driver, RLlib Algorithm)                 rollout workers (RLlib EnvRunner actors, one frozen
                                                            embedder each)
    1  micro-batches, weights version        -------->      pack pairs x G rollouts, sample, execute; keep each
                                                            rollout's score statistic (vision tower and token
                                                            embeddings run once per input, not G times)
    2  rewards over the batch's gallery and  <--------      embeddings, FLOPs, action counts (small)
       group advantages (scoring.py, envs/)
    3  advantages                            -------->      advantage-weighted sum of the kept statistics
    4  gradients added in the batch's order  <--------      one float64 gradient per micro-batch
       (float64), learner (learner.py),
       weight sync that later calls wait for

The unit of execution is a fixed micro-batch of pairs and every draw comes from (seed, iteration, pair, side, rollout),
so the result does not depend on how many workers there are. If a worker dies, its micro-batches are sampled again by
another one, with the same result, and the iteration goes on from there.

Shape legend: 2 sides, B pairs, G rollouts, N layers, F gate features.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.policy.sample_batch import MultiAgentBatch
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME

from rlcompute.actors.algorithm_config import GRPOConfig
from rlcompute.actors.batches import BatchPlan
from rlcompute.actors.dispatch import Done, WorkerPool
from rlcompute.actors.learner import (
    ITERATION,
    UPDATE,
    GRPOLearner,
    decision_batch,
    gradient_batch,
)
from rlcompute.actors.messages import Array, Decisions, GradientRequest, MicroBatch, Normaliser
from rlcompute.actors.scoring import Scored, Scorer
from rlcompute.data.schema import Pair
from rlcompute.errors import WorkerError
from rlcompute.policies.gates import GateHeads


@dataclass(frozen=True)
class Iteration:
    """What one iteration leaves for the log: scalars by tag, and decisions by layer, token modality and action."""

    metrics: dict[str, float]
    actions_NM3: Array


class GRPO(Algorithm):  # type: ignore[misc]  # ray is not typed
    """Trains gate heads by group-relative policy optimisation (spec §3).

    After construction: :meth:`start`, then :meth:`prepare`, then :meth:`train` once per iteration.
    """

    pool: WorkerPool
    last: Iteration

    @classmethod
    def get_default_config(cls) -> GRPOConfig:
        """RLlib's hook."""
        return GRPOConfig()

    def setup(self, config: AlgorithmConfig) -> None:
        """Creates workers and learner, without their backbones and values."""
        try:
            super().setup(config)
        except IndexError as error:
            # RLlib logs the constructor's error, carries on without workers, and fails where it needs the first one.
            raise WorkerError(
                "no rollout worker could be created; Ray's log above has the error. The usual reason is that rlcompute "
                "or one of its dependencies is not installed on the workers' nodes (see configs/runtime_env.yaml)"
            ) from error
        self.pool = WorkerPool(
            self.env_runner_group,
            restore=lambda: self.restore_env_runners(self.env_runner_group),
            sync=self.sync_weights,
            timeout_s=self.config.settings.ray.stage_timeout_s,
        )
        self.completed = 0
        self._updates = 0

    def cleanup(self) -> None:
        """Ends the workers without asking: one that hangs would not answer, and they have nothing to release."""
        if self.env_runner_group is not None:
            self.env_runner_group.reset([])
        super().cleanup()

    def start(self) -> str:
        """Loads the backbone on every worker and returns its hash.

        Raises:
            WorkerError: loading failed, or the workers read different checkpoints.
            StageTimeoutError: it took too long.
        """
        done = self.pool.tell_all("load backbone", "start")
        hashes = {finished.result for finished in done.values()}
        if len(hashes) != 1:
            raise WorkerError(
                f"the workers loaded {len(hashes)} different checkpoints from {self.config.backbone_folder} "
                f"(hashes {', '.join(sorted(hashes))}): the path must lead to the same files on every node"
            )
        return str(hashes.pop())

    def calibrate(self, pairs: list[Pair]) -> Normaliser:
        """Mean and scale of the heads' inputs over ``pairs``; computed by one worker, always in the same order."""
        normaliser: Normaliser = self.pool.scatter("calibrate", "calibrate", {0: pairs})[0].result
        return normaliser

    def prepare(self, plan: BatchPlan, scorer: Scorer, heads: GateHeads, *, completed: int) -> None:
        """Sets what to train on, from where.

        Args:
            plan: the batches.
            scorer: rewards, controller and collapse monitor.
            heads: gate heads to start from.
            completed: iterations that are already done.
        """
        self._plan, self._scorer, self.completed = plan, scorer, completed
        self.learner.load_heads(heads)
        self.sync_weights()

    @property
    def learner(self) -> GRPOLearner:
        """The learner, which lives in this process."""
        learner: GRPOLearner = (
            self.learner_group.foreach_learner(lambda learner: learner).result_or_errors[0].get()
        )
        return learner

    @property
    def weights_version(self) -> int:
        """Version of the learner's weights: RLlib counts its updates."""
        return self._updates

    def sync_weights(self) -> None:
        """Sends the learner's weights to the workers; their later calls run after it."""
        self.env_runner_group.sync_weights(
            from_worker_or_learner_group=self.learner_group, timeout_seconds=None, inference_only=True
        )

    def training_step(self) -> None:
        """One iteration of the dataflow above."""
        clock = _Clock()
        pairs = self._plan.pairs(self.completed)
        batches = self._micro_batches(pairs)
        with clock.measure("sample"):
            sampled = self._sample(batches)
        with clock.measure("score"):
            scored = self._scorer.score(pairs, [sampled[index].result for index in batches])
        with clock.measure("gradient"):
            shipped = self._collect(batches, sampled, scored)
        with clock.measure("update"):
            update_metrics = self._update(scored, shipped)
            self.sync_weights()
        controller_metrics = self._scorer.finish(scored)
        self.completed += 1
        busy = sum(done.result.seconds for done in sampled.values()) / self.config.settings.ray.num_workers
        self.last = Iteration(
            metrics={
                **scored.metrics,
                **update_metrics,
                **controller_metrics,
                **clock.seconds(),
                "timing/worker_sample_s": busy,
                "progress/pairs_seen": float(self.completed * len(pairs)),
                "progress/worker_deaths": float(self.pool.deaths),
            },
            actions_NM3=scored.actions_NM3,
        )

    def _micro_batches(self, pairs: Sequence[Pair]) -> dict[int, MicroBatch]:
        size = self.config.settings.grpo.micro_batch_pairs
        return {
            index: MicroBatch(self.completed, index, tuple(pairs[start : start + size]))
            for index, start in enumerate(range(0, len(pairs), size))
        }

    def _sample(self, batches: dict[int, MicroBatch]) -> dict[int, Done]:
        """Phase 1."""
        return self.pool.scatter("sample", "sample", batches, weights_version=self.weights_version)

    def _collect(self, batches: dict[int, MicroBatch], sampled: dict[int, Done], scored: Scored) -> list[Any]:
        """Phases 3 and 4: each micro-batch's gradient or decisions, in order.

        A micro-batch whose worker died since phase 1 is sampled again first; its rollouts come out the same, so what
        phase 2 made of them still holds.
        """
        settings = self.config.settings.grpo
        requests = {
            index: GradientRequest(
                batch.iteration,
                index,
                scored.advantages_2BG[:, index * settings.micro_batch_pairs :][:, : len(batch.pairs)],
                ship_decisions=settings.updates_per_batch > 1,
            )
            for index, batch in batches.items()
        }
        owners = {index: done.worker for index, done in sampled.items()}
        results: dict[int, Any] = {}
        while True:
            missing = [index for index in batches if index not in results]
            assignment: dict[int, dict[int, GradientRequest]] = {}
            for index in missing:
                assignment.setdefault(owners[index], {})[index] = requests[index]
            done = self.pool.call("gradients", "gradients", assignment)
            results.update({index: finished.result for index, finished in done.items()})
            lost = {index: batches[index] for index in batches if index not in results}
            if not lost:
                return [results[index] for index in batches]
            owners.update({index: finished.worker for index, finished in self._sample(lost).items()})

    def _update(self, scored: Scored, shipped: list[Any]) -> dict[str, float]:
        """The learner's part; returns what to log of it."""
        settings = self.config.settings.grpo
        batch, gradient_norm = self._learner_batch(scored, shipped)
        self._scorer.check_health(self.completed + 1, scored, gradient_norm)
        for update in range(settings.updates_per_batch):
            self.learner_group.update(
                batch=batch,
                timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: 0, ITERATION: self.completed, UPDATE: update},
            )
            self._updates += 1
        # With several updates the learner's gradients are its own; there is no one norm to log.
        on_policy = {"policy/gradient_norm": gradient_norm} if settings.updates_per_batch == 1 else {}
        return {**on_policy, **self.learner.policy_metrics()}

    def _learner_batch(self, scored: Scored, shipped: list[Any]) -> tuple[MultiAgentBatch, float]:
        """The learner's batch, and the norm of the gradient in it (0 if decisions were shipped instead)."""
        size = self.config.settings.grpo.micro_batch_pairs
        if isinstance(shipped[0], Decisions):
            parts = [
                scored.advantages_2BG[:, size * index : size * (index + 1)].ravel()
                for index in range(len(shipped))
            ]
            return decision_batch(shipped, parts), 0.0
        gradient_N3F = sum(shipped) / scored.advantages_2BG.size
        return gradient_batch(gradient_N3F), float(np.linalg.norm(gradient_N3F))


class _Clock:
    """Seconds spent in named phases."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Times the block as ``phase``."""
        started = time.perf_counter()
        yield
        self._seconds[phase] = time.perf_counter() - started

    def seconds(self) -> dict[str, float]:
        """Seconds by tag, and since construction."""
        phases = {f"timing/{phase}_s": seconds for phase, seconds in self._seconds.items()}
        return {**phases, "timing/iteration_s": time.perf_counter() - self._started}
