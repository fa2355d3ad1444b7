"""Each sign of collapse stops the run with a message that names it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from rlcompute.envs.collapse import PATIENCE, CollapseMonitor, HealthSigns
from rlcompute.errors import CheckpointError, CollapseError

HEALTHY = HealthSigns(survivors=0.6, reward_spread=0.1, recall=0.9, teacher_recall=0.95, gradient_norm=1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"survivors": 0.0}, "drops every token"),
        ({"reward_spread": 0.0}, "same reward"),
        ({"recall": 0.4}, "less than half"),
    ],
)
def test_signs_need_patience(change: dict[str, float], message: str) -> None:
    monitor = CollapseMonitor()
    sick = dataclasses.replace(HEALTHY, **change)
    for iteration in range(PATIENCE - 1):
        monitor.update(iteration, sick)
    monitor.update(PATIENCE, HEALTHY)
    for iteration in range(PATIENCE - 1):
        monitor.update(iteration, sick)
    resumed = CollapseMonitor()
    resumed.load(json.loads(json.dumps(monitor.state())))
    with pytest.raises(CollapseError, match=f"iteration 77.*{message}"):
        resumed.update(77, sick)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(HealthSigns)])
def test_numbers_that_are_not_finite_stop_at_once(name: str) -> None:
    with pytest.raises(CollapseError, match=f"iteration 3: {name} is nan"):
        CollapseMonitor().update(3, dataclasses.replace(HEALTHY, **{name: float("nan")}))


def test_a_weak_teacher_is_no_collapse() -> None:
    monitor = CollapseMonitor()
    for iteration in range(3 * PATIENCE):
        monitor.update(iteration, dataclasses.replace(HEALTHY, recall=0.1, teacher_recall=0.12))


def test_load_refuses_other_signs() -> None:
    with pytest.raises(CheckpointError, match="collapse monitor"):
        CollapseMonitor().load({"flat": 1})
