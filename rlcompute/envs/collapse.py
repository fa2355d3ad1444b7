"""Watches a run for the ways in which this kind of training dies, and says which one it saw."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlcompute.errors import CheckpointError, CollapseError

DROPPED_SURVIVORS = 0.002
"""Share of surviving tokens under which everything counts as dropped."""
LOST_RECALL = 0.5
"""Share of the full-compute recall under which the ranking counts as lost."""
FLAT_SPREAD = 1e-6
"""Largest reward spread inside a group that gives no gradient."""
PATIENCE = 5
"""Iterations in a row before a sign counts: one odd batch is no collapse."""

_ADVICE = {
    "dropped": "the policy drops every token but <emb> in the first half of the layers. Lower "
    "reward.target_flops_saved or policy.init_drop, or set policy.droppable=visual",
    "flat": "all rollouts of every input earn the same reward, so there is nothing to learn from. Raise "
    "policy.temperature or grpo.rollouts, or start again with init_skip and init_drop further from 0",
    "lost": "recall is less than half of what full compute reaches in the same gallery. Lower "
    "reward.target_flops_saved, raise reward.recall_floor, or lower grpo.lr",
}


@dataclass(frozen=True)
class HealthSigns:
    """What one iteration tells about the policy's health.

    Attributes:
        survivors: share of the tokens other than ``<emb>`` that enter the middle layer.
        reward_spread: largest difference of two rewards inside a group, over all groups.
        recall, teacher_recall: mean recall@G of the rollouts and of full compute in the same galleries.
        gradient_norm: norm of the gradient that is about to be applied.
    """

    survivors: float
    reward_spread: float
    recall: float
    teacher_recall: float
    gradient_norm: float


class CollapseMonitor:
    """Counts for how many iterations in a row each sign of collapse was seen."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(_ADVICE, 0)

    def update(self, iteration: int, signs: HealthSigns) -> None:
        """Takes in one iteration, before its update is applied.

        Raises:
            CollapseError: a number is not finite, or a sign of collapse was seen PATIENCE times in a row.
        """
        for name, value in vars(signs).items():
            if not math.isfinite(value):
                raise CollapseError(
                    f"iteration {iteration}: {name} is {value}. Resume from the last checkpoint with a lower "
                    "grpo.lr; if it happens in the first iteration, check the backbone's dtype and the data"
                )
        seen = {
            "dropped": signs.survivors < DROPPED_SURVIVORS,
            "flat": signs.reward_spread <= FLAT_SPREAD,
            "lost": signs.recall < LOST_RECALL * signs.teacher_recall,
        }
        for sign, advice in _ADVICE.items():
            self._counts[sign] = self._counts[sign] + 1 if seen[sign] else 0
            if self._counts[sign] >= PATIENCE:
                raise CollapseError(
                    f"iteration {iteration}, for the {PATIENCE}th time in a row: {advice} "
                    f"(survivors {signs.survivors:.3f}, reward spread {signs.reward_spread:.2e}, "
                    f"recall {signs.recall:.3f}, full-compute recall {signs.teacher_recall:.3f})"
                )

    def state(self) -> dict[str, int]:
        """The counts, ready for JSON."""
        return dict(self._counts)

    def load(self, state: Mapping[str, int]) -> None:
        """Continues from a saved :meth:`state`.

        Raises:
            CheckpointError: the state names other signs.
        """
        if set(state) != set(_ADVICE):
            raise CheckpointError(
                f"collapse monitor state has keys {sorted(state)}, expected {sorted(_ADVICE)}: the "
                "checkpoint was written by another version; start a new run, with policy.init_from set to "
                "its exported gates"
            )
        self._counts = dict(state)
