"""How the training of straight-through gates changes over a run (spec §4; paper M, App. E.1).

``share`` is the progress of the run: iteration / iterations, from 0.

Several actions are trained together, in turns, or one after another (:class:`Stages`). Every gate takes part in the
forward pass at all times; a gate that is not trainable in an iteration is left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlcompute.config_ste import SteConfig
from rlcompute.errors import CheckpointError

LATER_BALANCE_WEIGHT = 1e-4
"""Of null experts in the second half of a run, when they may leave the uniform load."""
LAST_LR_FACTOR = 0.05
PROGRESS_AVERAGE = 0.9
"""Weight of the past in the moving average of what an action has reached."""
REACHED = 0.95
"""Share of its target at which an action counts as done: a budget in balance with the other losses stays just short."""


def temperature(settings: SteConfig, share: float) -> float:
    """Temperature of the relaxed decisions: linear over ``anneal_share``, constant after."""
    start, end = settings.temperature_start, settings.temperature_end
    return start + (end - start) * min(1.0, share / settings.anneal_share)


def budget_factor(settings: SteConfig, share: float) -> float:
    """Weight of a budget that is warmed up: 0 for ``warmup_share``, then linear to 1 over ``ramp_share``."""
    since = share - settings.warmup_share
    if since < 0.0:
        return 0.0
    return 1.0 if since >= settings.ramp_share else since / settings.ramp_share


def balance_weight(settings: SteConfig, share: float) -> float:
    """Weight of the load balance of null experts: it holds them to its target in the first half of the run only."""
    return settings.balance_weight if share < 0.5 else min(settings.balance_weight, LATER_BALANCE_WEIGHT)


def learning_rate_factor(share: float) -> float:
    """Half a cosine from 1 to :data:`LAST_LR_FACTOR`."""
    return LAST_LR_FACTOR + (1.0 - LAST_LR_FACTOR) * 0.5 * (1.0 + math.cos(math.pi * share))


class Stages:
    """Which actions are trainable in each iteration (paper M, App. E.1, "Action Combination Strategies").

    - simultaneous, shared: all.
    - alternating: one, the next in the next iteration.
    - sequential: one, until the moving average of its progress has reached its target, but no longer than to the end
      of its equal part of the iterations; then the next. The one before is frozen for good. The last one is trained to
      the end of the run.

    It knows nothing but what it is told, so workers that tell it the same agree.
    """

    def __init__(self, settings: SteConfig) -> None:
        """Args:
        settings: actions, their combination and the length of the run.
        """
        self._actions, self._combination = settings.actions, settings.combination
        self._iterations = settings.iterations
        self._stage = 0
        self._progress: float | None = None

    def trainable(self, iteration: int) -> tuple[str, ...]:
        """Kinds of the gates that ``iteration`` (from 0) updates."""
        if self._combination == "alternating":
            return (self._actions[iteration % len(self._actions)],)
        if self._combination == "sequential":
            return (self._actions[self._stage],)
        return self._actions

    def update(self, iteration: int, progress: Mapping[str, float]) -> None:
        """Takes in what ``iteration`` measured, after its update.

        Args:
            iteration: from 0.
            progress: what each action has reached over the whole batch, as a share of its target; an action that had
                nothing to act on is absent.
        """
        if self._combination != "sequential":
            return
        now = progress.get(self._actions[self._stage])
        if now is not None:
            past = now if self._progress is None else self._progress
            self._progress = PROGRESS_AVERAGE * past + (1.0 - PROGRESS_AVERAGE) * now
        reached = self._progress is not None and self._progress >= REACHED
        part_is_over = (iteration + 1) * len(self._actions) >= (self._stage + 1) * self._iterations
        if (reached or part_is_over) and self._stage + 1 < len(self._actions):
            self._stage += 1
            self._progress = None

    def state(self) -> dict[str, Any]:
        """What changes during a run, ready for JSON; floats survive the round trip exactly."""
        return {"stage": self._stage, "progress": self._progress}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved :meth:`state`.

        Raises:
            CheckpointError: The state is not one of this version, or of a run with other actions.
        """
        if set(state) != set(self.state()):
            raise CheckpointError(
                f"state of the stages has keys {sorted(state)}, expected {sorted(self.state())}: the checkpoint was "
                "written by another version; start a new run"
            )
        stage = state["stage"]
        if not 0 <= stage < len(self._actions):
            raise CheckpointError(
                f"state of the stages is at action {stage}, but ste.actions has {len(self._actions)}: resume with the "
                "configuration that the run was started with"
            )
        self._stage, self._progress = stage, state["progress"]
