"""Moves the efficiency weight lambda_s so that the user asks for a saving, not for a coefficient.

    target(i) ramps from ramp_start to target_flops_saved over the first ramp_fraction of the iterations
    error     = target(i) - moving average of the saved fraction
    integral += ki * error;   lambda = integral + kp * error                        (never below min_lambda)

A plain integral overshoots the target and never returns: the policy itself integrates, so the proportional
part is what damps. lambda may go negative, which makes the policy buy compute back.

One lambda for all tasks over-prunes some and under-prunes others. Each task therefore has a penalty, a second
controller on ``recall_floor`` minus its recall (as a share of the full-compute recall in the same gallery):

    lambda_task = lambda - penalty_task,   penalty_task >= 0

The saving that a penalised task gives up lowers the average, so the shared integral asks the others for it.
Where every task is penalised, target and floor cannot both be had: recall wins and the shared integral stops
rising.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcompute.errors import CheckpointError, ConfigError

SAVED_AVERAGE = 0.7
RECALL_AVERAGE = 0.9
"""Weights of the past in the two moving averages; recall of one small batch is the noisier one."""
RECALL_GAIN = 5.0
"""Gains on a recall deficit relative to those on a saving error: a deficit of 0.02 matters, an error of 0.02
does not."""
MAX_LAMBDA = 10.0
"""Bound of the shared integral: beyond it nothing else in the reward counts anyway."""


@dataclass(frozen=True)
class ControllerSettings:
    """Keys of the configuration's ``controller`` and ``reward`` sections with the same names, and the length.

    Attributes:
        target_flops_saved: share to save of what full compute is charged for the language model (``compute.cost``,
            executed FLOPs by default), in (0, 1).
        recall_floor: least recall of each task as a share of the full-compute recall, in [0, 1].
        iterations: length of the run, for the ramp.
    """

    target_flops_saved: float
    recall_floor: float
    iterations: int
    kp: float
    ki: float
    start_lambda: float
    min_lambda: float
    ramp_fraction: float
    ramp_start: float

    def __post_init__(self) -> None:
        if not 0.0 < self.target_flops_saved < 1.0:
            raise ConfigError(
                f"reward.target_flops_saved={self.target_flops_saved} is not a share between 0 and 1 "
                "(exclusive): 0.45 asks for 45 % of the language model's FLOPs to be saved"
            )
        if not 0.0 <= self.recall_floor <= 1.0:
            raise ConfigError(
                f"reward.recall_floor={self.recall_floor} is not a share between 0 and 1: 0.97 keeps each "
                "task's recall at 97 % of full compute's"
            )


@dataclass
class _Task:
    """A task's moving average of relative recall, and the integral and value of its penalty."""

    relative_recall: float
    integral: float = 0.0
    penalty: float = 0.0


class LambdaController:
    """PI controller of lambda_s with a ramp, and a penalty per task that keeps its recall above a floor."""

    def __init__(self, settings: ControllerSettings) -> None:
        self.settings = settings
        self._iteration = 0
        self._integral = settings.start_lambda
        self._lambda = settings.start_lambda
        self._saved: float | None = None
        self._tasks: dict[str, _Task] = {}

    @property
    def target(self) -> float:
        """The ramped target saving of the coming iteration."""
        wanted, start = self.settings.target_flops_saved, self.settings.ramp_start
        ramp_iterations = self.settings.ramp_fraction * self.settings.iterations
        progress = min(1.0, (self._iteration + 1) / max(1.0, ramp_iterations))
        return min(wanted, start + (wanted - start) * progress)

    def lambda_for(self, task: str) -> float:
        """lambda_s of one task for the coming iteration."""
        penalty = self._tasks[task].penalty if task in self._tasks else 0.0
        return max(self.settings.min_lambda, self._lambda - penalty)

    def lambdas(self, tasks: Sequence[str]) -> Tensor:
        """lambda_s of each pair of a batch, float64 [B], from the pairs' tasks."""
        return torch.tensor([self.lambda_for(task) for task in tasks], dtype=torch.float64)

    def update(self, saved: float, recall: Mapping[str, float], teacher_recall: Mapping[str, float]) -> None:
        """Takes in what one iteration measured and moves on to the next.

        Args:
            saved: share of the language model's executed FLOPs saved over the whole batch, both sides.
            recall: mean recall@G of each task in the batch.
            teacher_recall: mean recall@G of the full-compute embeddings in the same galleries.
        """
        self._saved = (
            saved if self._saved is None else SAVED_AVERAGE * self._saved + (1 - SAVED_AVERAGE) * saved
        )
        error = self.target - self._saved
        every_task_penalised = bool(self._tasks) and all(task.penalty > 0 for task in self._tasks.values())
        if error < 0 or not every_task_penalised:
            integral = self._integral + self.settings.ki * error
            self._integral = min(MAX_LAMBDA, max(self.settings.min_lambda, integral))
        self._lambda = max(self.settings.min_lambda, self._integral + self.settings.kp * error)
        for name in sorted(recall):
            self._update_task(name, recall[name] / teacher_recall[name] if teacher_recall[name] > 0 else 1.0)
        self._iteration += 1

    def _update_task(self, name: str, relative_recall: float) -> None:
        """Moves one task's penalty; its integral stops where a larger one could not lower lambda any more."""
        if name in self._tasks:
            task = self._tasks[name]
            task.relative_recall = (
                RECALL_AVERAGE * task.relative_recall + (1 - RECALL_AVERAGE) * relative_recall
            )
        else:
            task = self._tasks[name] = _Task(relative_recall)
        deficit = RECALL_GAIN * (self.settings.recall_floor - task.relative_recall)
        largest = max(0.0, self._lambda - self.settings.min_lambda)
        task.integral = min(largest, max(0.0, task.integral + self.settings.ki * deficit))
        task.penalty = min(largest, max(0.0, task.integral + self.settings.kp * deficit))

    def metrics(self) -> dict[str, float]:
        """What to log, by tag."""
        values = {"controller/lambda": self._lambda, "controller/target_saved": self.target}
        if self._saved is not None:
            values["controller/saved_average"] = self._saved
        for name, task in self._tasks.items():
            values[f"controller/lambda_{name}"] = self.lambda_for(name)
            values[f"controller/relative_recall_{name}"] = task.relative_recall
        return values

    def state(self) -> dict[str, Any]:
        """Everything that changes during a run, ready for JSON; floats survive the round trip exactly."""
        return {
            "iteration": self._iteration,
            "integral": self._integral,
            "lambda": self._lambda,
            "saved": self._saved,
            "tasks": {name: dict(vars(task)) for name, task in self._tasks.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved :meth:`state`.

        Raises:
            CheckpointError: the state lacks a key or has one too many.
        """
        expected = set(self.state())
        if set(state) != expected:
            raise CheckpointError(
                f"controller state has keys {sorted(state)}, expected {sorted(expected)}: the checkpoint was "
                "written by another version; start a new run, with policy.init_from set to its exported gates"
            )
        self._iteration = state["iteration"]
        self._integral = state["integral"]
        self._lambda = state["lambda"]
        self._saved = state["saved"]
        self._tasks = {name: _Task(**task) for name, task in state["tasks"].items()}
