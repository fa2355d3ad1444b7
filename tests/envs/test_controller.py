"""The controller on a simulated policy, and its state."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from rlcompute.envs.controller import ControllerSettings, LambdaController
from rlcompute.errors import CheckpointError, ConfigError


@dataclass
class Plant:
    """A stand-in for the policy: each task's saving drifts up where lambda exceeds its marginal cost.

    The drift is bounded, as Adam's steps are, so the plant integrates. ``fragility`` is how steeply a task
    loses recall, 1 - fragility * saving^3; as in training, the reward's other terms do not see the
    difference.
    """

    fragility: dict[str, float]
    noise: float = 0.0
    rate: float = 0.015
    saving: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.saving = dict.fromkeys(self.fragility, 0.05)
        self.rng = np.random.default_rng(0)

    def step(self, controller: LambdaController) -> None:
        for task in self.fragility:
            cost = 0.3 * self.saving[task] + self.saving[task] ** 2
            drift = self.rate * math.tanh(3 * (controller.lambda_for(task) - cost))
            self.saving[task] = min(0.98, max(0.0, self.saving[task] + drift))
        saved = float(np.mean(list(self.saving.values()))) + self.rng.normal(0, self.noise)
        recall = {task: 0.9 * self.recall(task) + self.rng.normal(0, self.noise) for task in self.fragility}
        controller.update(saved, recall, dict.fromkeys(self.fragility, 0.9))

    def recall(self, task: str) -> float:
        return 1 - self.fragility[task] * self.saving[task] ** 3

    @property
    def mean_saving(self) -> float:
        return float(np.mean(list(self.saving.values())))


def settings(target: float, floor: float, iterations: int) -> ControllerSettings:
    """Gains that suit the simulated plant."""
    return ControllerSettings(
        target_flops_saved=target,
        recall_floor=floor,
        iterations=iterations,
        kp=2.0,
        ki=0.15,
        start_lambda=0.3,
        min_lambda=-1.0,
        ramp_fraction=0.5,
        ramp_start=0.1,
    )


def simulate(
    plant: Plant, target: float, floor: float = 0.0, iterations: int = 150, hold: int = 0
) -> list[float]:
    controller = LambdaController(settings(target, floor, iterations))
    path = []
    for _ in range(iterations + hold):
        plant.step(controller)
        path.append(plant.mean_saving)
    return path


@pytest.mark.parametrize("target", [0.15, 0.3, 0.45, 0.6, 0.75])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_reaches_the_target_without_overshoot(target: float, noise: float) -> None:
    path = simulate(Plant({"a": 0.05, "b": 0.2}, noise), target)
    assert max(path) < target + 0.05
    assert np.mean(path[-20:]) == pytest.approx(target, abs=0.02)


def test_follows_the_ramp() -> None:
    controller = LambdaController(settings(0.5, 0.9, 100))
    targets = []
    for _ in range(100):
        targets.append(controller.target)
        controller.update(0.1, {}, {})
    assert targets[0] == pytest.approx(0.1 + 0.4 / 50)
    assert targets[24] == pytest.approx(0.3)
    assert targets[50:] == [0.5] * 50


def test_a_fragile_task_is_protected_and_the_others_make_up_for_it() -> None:
    fragile = {"sturdy": 0.02, "middle": 0.05, "fragile": 0.6}
    free = Plant(fragile)
    simulate(free, 0.5, floor=0.0, hold=50)
    assert free.recall("fragile") < 0.97, "the case would prove nothing"
    kept = Plant(fragile, noise=0.005)
    path = simulate(kept, 0.5, floor=0.97, hold=50)
    assert kept.recall("fragile") > 0.96
    assert kept.saving["sturdy"] > free.saving["sturdy"] + 0.03
    assert np.mean(path[-20:]) == pytest.approx(0.5, abs=0.03)


def test_recall_wins_where_target_and_floor_exclude_each_other() -> None:
    plant = Plant({"a": 0.5, "b": 0.6}, noise=0.005)
    path = simulate(plant, 0.8, floor=0.97, hold=100)
    assert min(plant.recall("a"), plant.recall("b")) > 0.95
    assert 0.3 < np.mean(path[-20:]) < 0.5


def test_a_penalty_goes_away_when_recall_recovers() -> None:
    controller = LambdaController(settings(0.4, 0.95, 10))
    for _ in range(40):
        controller.update(0.4, {"a": 0.8, "b": 1.0}, {"a": 1.0, "b": 1.0})
    assert controller.lambda_for("a") < controller.lambda_for("b")
    for _ in range(80):
        controller.update(0.4, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0})
    assert controller.lambda_for("a") == controller.lambda_for("b")


def test_floor_and_bounds_of_lambda() -> None:
    controller = LambdaController(settings(0.2, 0.95, 10))
    for _ in range(200):
        controller.update(0.9, {"a": 0.1}, {"a": 1.0})
    assert controller.lambda_for("a") == controller.lambda_for("unseen") == -1.0
    # Neither integral wound up: lambda is back above zero some iterations after both averages are.
    for _ in range(60):
        controller.update(0.0, {"a": 1.0}, {"a": 1.0})
    assert controller.lambda_for("a") > 0
    assert controller.lambdas(["a", "unseen"]).shape == (2,)


def test_recall_without_a_teacher_to_compare_with_is_no_deficit() -> None:
    controller = LambdaController(settings(0.4, 0.95, 10))
    controller.update(0.1, {"a": 0.0}, {"a": 0.0})
    assert controller.lambda_for("a") == controller.lambda_for("unseen")


def test_state_round_trips_through_json_and_continues_identically() -> None:
    first, second = (LambdaController(settings(0.5, 0.97, 60)) for _ in range(2))
    one, two = (Plant({"a": 0.1, "b": 0.6}, noise=0.01) for _ in range(2))
    for _ in range(40):
        one.step(first)
    for _ in range(20):
        two.step(second)
    resumed = LambdaController(second.settings)
    resumed.load(json.loads(json.dumps(second.state())))
    for _ in range(20):
        two.step(resumed)
    assert resumed.state() == first.state()
    assert resumed.metrics() == first.metrics()
    assert resumed.metrics()["controller/lambda_b"] == resumed.lambda_for("b")


def test_load_refuses_another_shape_of_state() -> None:
    controller = LambdaController(settings(0.5, 0.9, 10))
    state = controller.state()
    del state["integral"]
    with pytest.raises(CheckpointError, match="controller state"):
        controller.load(state)


@pytest.mark.parametrize("target", [0.0, 1.0, 1.2, -0.3, math.nan])
def test_target_outside_the_unit_interval(target: float) -> None:
    with pytest.raises(ConfigError, match="target_flops_saved"):
        settings(target, 0.9, 10)


def test_recall_floor_outside_the_unit_interval() -> None:
    with pytest.raises(ConfigError, match="recall_floor"):
        settings(0.5, 97.0, 10)
