"""Named calls to the rollout workers with a deadline, and re-dispatch of what a lost worker was working on.

RLlib drops the results of an actor that died and swallows what an actor raised. Here a death means that its tasks
go to whoever is left, an exception on a worker ends the run with its first traceback, and silence until the deadline
ends it with the name of the stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rlcompute.actors.messages import Reply
from rlcompute.errors import StageTimeoutError, WorkerError

MAX_FRUITLESS_ROUNDS = 5
"""Rounds in a row in which workers died or were out of date and nothing was finished, before the run gives up."""
POLL_S = 0.2


@dataclass(frozen=True)
class Done:
    """A finished task: who did it, and the result."""

    worker: int
    result: Any


class WorkerPool:
    """Calls methods of the rollout workers; every call has a stage name and a deadline."""

    def __init__(
        self,
        group: EnvRunnerGroup,
        *,
        restore: Callable[[], Any],
        sync: Callable[[], Any],
        timeout_s: float,
    ) -> None:
        """Wraps a group of RLlib env runners.

        Args:
            group: the workers.
            restore: brings restarted workers back into service, without waiting for those that are not up yet.
            sync: sends the current weights to the workers.
            timeout_s: deadline of one call.
        """
        self._group = group
        self._restore = restore
        self._sync = sync
        self._timeout_s = timeout_s
        self._fruitless = 0
        self.stage = "start"
        self.replies: dict[int, Reply] = {}
        self.deaths = 0

    def scatter(
        self,
        stage: str,
        method: str,
        tasks: Mapping[int, Any],
        *,
        weights_version: int | None = None,
        tasks_per_call: int | None = None,
        progress: Callable[[Iterable[int]], None] = lambda finished: None,
    ) -> dict[int, Done]:
        """Runs every task on some worker and returns the results by task number.

        Args:
            stage: name for messages.
            method: method of the worker, called with ``tasks`` and ``weights_version``.
            tasks: what to do, by number.
            weights_version: weights that the workers must hold; None if the stage does not use them.
            tasks_per_call: most tasks sent to one worker at once (None: all of its share).
            progress: called after every round with the numbers of the tasks that it finished.

        Raises:
            StageTimeoutError: a worker did not answer in time, or none came back after a crash.
            WorkerError: a worker raised, or workers keep dying.
        """
        done: dict[int, Done] = {}
        while len(done) < len(tasks):
            workers = self._available(stage)
            pending = [number for number in tasks if number not in done]
            if tasks_per_call is not None:
                pending = pending[: tasks_per_call * len(workers)]
            shares = {worker: pending[place :: len(workers)] for place, worker in enumerate(workers)}
            assignment = {w: {n: tasks[n] for n in share} for w, share in shares.items() if share}
            finished = self.call(stage, method, assignment, weights_version=weights_version)
            done.update(finished)
            progress(finished)
        return done

    def call(
        self,
        stage: str,
        method: str,
        assignment: Mapping[int, Mapping[int, Any]],
        *,
        weights_version: int | None = None,
    ) -> dict[int, Done]:
        """One round: each worker gets its tasks, and what comes back in time is returned by task number.

        Tasks of workers that died, or that lost their state by an earlier death, are not in the result.

        Raises:
            StageTimeoutError, WorkerError: as :meth:`scatter`.
        """
        self.stage = stage
        workers = [w for w in self._group.healthy_env_runner_ids() if w in assignment]
        replies: list[Reply] = (
            self._group.foreach_env_runner(
                method,
                kwargs=[{"tasks": dict(assignment[w]), "weights_version": weights_version} for w in workers],
                local_env_runner=False,
                remote_worker_ids=workers,
                timeout_seconds=self._timeout_s,
            )
            if workers
            else []
        )
        self._check_failures(stage, replies)
        self._check_silence(stage, workers, replies)
        if any(reply.stale for reply in replies):
            self._sync()
        done = {n: Done(reply.worker, result) for reply in replies for n, result in reply.results.items()}
        self._count_fruitless(stage, len(assignment) - len(workers), done)
        return done

    def tell_all(self, stage: str, method: str) -> dict[int, Done]:
        """Calls ``method`` with one empty task on every worker, all of which must be alive and answer."""
        workers = self._available(stage)
        return self.call(stage, method, {w: {w: None} for w in workers})

    def _available(self, stage: str) -> list[int]:
        """Ids of the workers in service, at least one; waits for a restart if there is none."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            if self._group.num_healthy_remote_env_runners() < self._group.num_remote_env_runners():
                self._restore()
            workers = self._group.healthy_env_runner_ids()
            if workers:
                return list(workers)
            if time.monotonic() > deadline:
                raise StageTimeoutError(
                    f"stage {stage!r}: no rollout worker came back within {self._timeout_s:g} s after a crash. See the "
                    "worker logs for why they died (out of memory?); ray.stage_timeout_s sets this deadline"
                )
            time.sleep(POLL_S)

    def _check_failures(self, stage: str, replies: Iterable[Reply]) -> None:
        for reply in replies:
            self.replies[reply.worker] = replace(reply, results={})
            if reply.failure is not None:
                raise WorkerError(
                    f"stage {stage!r}: rollout worker {reply.worker} (process {reply.pid} on {reply.host}) raised:\n"
                    f"{reply.failure}"
                )

    def _check_silence(self, stage: str, workers: list[int], replies: list[Reply]) -> None:
        """A worker that neither answered nor died has missed the deadline."""
        answered = {reply.worker for reply in replies}
        silent = sorted(set(self._group.healthy_env_runner_ids()) & set(workers) - answered)
        if silent:
            raise StageTimeoutError(
                f"stage {stage!r}: rollout worker(s) {', '.join(map(str, silent))} did not answer within "
                f"{self._timeout_s:g} s. If the stage is just slow, raise ray.stage_timeout_s or lower "
                "grpo.micro_batch_pairs; otherwise see the stacks in failure.json"
            )
        self.deaths += len(set(workers) - answered)

    def _count_fruitless(self, stage: str, lost_before: int, done: Mapping[int, Done]) -> None:
        if done or lost_before:
            self._fruitless = 0 if done else self._fruitless
            return
        self._fruitless += 1
        if self._fruitless >= MAX_FRUITLESS_ROUNDS:
            raise WorkerError(
                f"stage {stage!r}: workers died in {self._fruitless} attempts in a row and nothing was finished. "
                "The usual reason is memory: lower grpo.micro_batch_pairs, grpo.rollouts or ray.num_workers, and see "
                "the worker logs"
            )
