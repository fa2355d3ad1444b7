"""Which pairs an iteration trains on: a pure function of (seed, iteration) over the sorted pair ids.

Nothing has to be saved to resume: iteration i draws the same pairs whether or not iterations before it ran in this
process. Every batch holds the same number of pairs of each task, as far as the batch size divides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from rlcompute.data.schema import Pair
from rlcompute.errors import ConfigError


class BatchPlan:
    """Shuffled epochs within each task, tasks interleaved within each batch.

    A task's epoch is cut into whole batches and the remainder is left to other epochs, so that a pair never comes
    twice in one batch. Where the batch size does not divide by the number of tasks, the tasks take turns at the
    extra places.
    """

    def __init__(self, pairs: Sequence[Pair], *, seed: int, pairs_per_batch: int, key: str) -> None:
        """Plans the batches of a run.

        Args:
            pairs: all training pairs, in any order.
            seed: seed of the run.
            pairs_per_batch: pairs of one iteration.
            key: the configuration's name for that number.

        Raises:
            ConfigError: a task has fewer pairs than one batch takes from it.
        """
        self._seed = seed
        self._size = pairs_per_batch
        by_task: dict[str, list[Pair]] = {}
        for pair in sorted(pairs, key=lambda pair: pair.id):
            by_task.setdefault(pair.task, []).append(pair)
        self._tasks = sorted(by_task)
        self._pairs = [by_task[task] for task in self._tasks]
        self._share = -(-pairs_per_batch // max(1, len(self._tasks)))
        for task, members in by_task.items():
            if len(members) < self._share:
                raise ConfigError(
                    f"{key}={pairs_per_batch} takes {self._share} pairs of each of {len(self._tasks)} "
                    f"tasks, but task {task!r} has {len(members)}: lower {key} or add training pairs"
                )

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, sorted."""
        return list(self._tasks)

    def pairs(self, iteration: int) -> list[Pair]:
        """The batch of ``iteration`` (from 0), tasks interleaved so that its micro-batches cost about the same."""
        first_task = iteration * self._size % len(self._tasks)
        taken = [0] * len(self._tasks)
        chosen = []
        for place in range(self._size):
            task = (first_task + place) % len(self._tasks)
            chosen.append(self._draw(task, iteration, taken[task]))
            taken[task] += 1
        return chosen

    def _draw(self, task: int, iteration: int, place: int) -> Pair:
        """Pair number ``place`` of those that ``iteration`` takes from ``task``."""
        members = self._pairs[task]
        epoch, step = divmod(iteration, len(members) // self._share)
        order = _permutation(f"{self._seed}/{self._tasks[task]}/{epoch}", len(members))
        return members[order[step * self._share + place]]


def _permutation(key: str, size: int) -> np.ndarray:
    """A permutation of ``range(size)`` that depends on ``key`` alone."""
    entropy = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "big")
    return np.random.Generator(np.random.PCG64(entropy)).permutation(size)
