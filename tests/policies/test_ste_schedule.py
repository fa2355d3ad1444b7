"""Schedules at named shares of a run, and which gates are trainable when."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcompute.config_ste import SteConfig
from rlcompute.errors import CheckpointError
from rlcompute.policies.ste_schedule import (
    LAST_LR_FACTOR,
    Stages,
    balance_weight,
    budget_factor,
    learning_rate_factor,
    temperature,
)

THREE = ("token_pruner", "expert_skip", "layer_skip")


def settings(combination: str = "sequential", iterations: int = 300, **values: object) -> SteConfig:
    return SteConfig.model_validate(
        {
            "actions": THREE,
            "combination": combination,
            "iterations": iterations,
            "skip_target": 0.4,
            **values,
        }
    )


@pytest.mark.parametrize(("share", "value"), [(0.0, 4.0), (0.2, 3.125), (0.4, 2.25), (0.8, 0.5), (0.99, 0.5)])
def test_temperature_falls_linearly_then_stays(share: float, value: float) -> None:
    assert temperature(SteConfig(), share) == pytest.approx(value)


@pytest.mark.parametrize(
    ("share", "value"),
    [(0.0, 0.0), (0.149, 0.0), (0.15, 0.0), (0.1625, 0.25), (0.175, 0.5), (0.2001, 1.0), (0.9, 1.0)],
)
def test_budgets_weigh_nothing_then_rise(share: float, value: float) -> None:
    assert budget_factor(SteConfig(), share) == pytest.approx(value)


def test_without_a_ramp_budgets_begin_at_once() -> None:
    at_once = SteConfig(warmup_share=0.3, ramp_share=0.0)
    assert budget_factor(at_once, 0.2999) == 0.0
    assert budget_factor(at_once, 0.3) == 1.0
    assert budget_factor(SteConfig(warmup_share=0.0, ramp_share=0.0), 0.0) == 1.0


def test_load_balance_is_dropped_after_half_of_the_run() -> None:
    assert [balance_weight(SteConfig(), share) for share in (0.0, 0.499, 0.5, 1.0)] == [
        0.02,
        0.02,
        1e-4,
        1e-4,
    ]
    assert balance_weight(SteConfig(balance_weight=0.0), 0.7) == 0.0


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_the_learning_rate_never_rises(first: float, second: float) -> None:
    early, late = sorted((first, second))
    assert 1.0 >= learning_rate_factor(early) >= learning_rate_factor(late) >= LAST_LR_FACTOR
    assert learning_rate_factor(0.0) == 1.0
    assert learning_rate_factor(0.5) == pytest.approx((1.0 + LAST_LR_FACTOR) / 2)


@pytest.mark.parametrize("combination", ["simultaneous", "shared"])
def test_all_gates_are_trained_at_once(combination: str) -> None:
    stages = Stages(settings(combination))
    for iteration in range(4):
        assert stages.trainable(iteration) == THREE
        stages.update(iteration, dict.fromkeys(THREE, 1.0))


def test_alternating_gates_take_turns_wherever_the_run_resumes() -> None:
    stages = Stages(settings("alternating"))
    assert [stages.trainable(i)[0] for i in range(5)] == [*THREE, "token_pruner", "expert_skip"]
    assert all(len(stages.trainable(i)) == 1 for i in range(5))
    stages.load(json.loads(json.dumps(stages.state())))
    assert stages.trainable(5) == ("layer_skip",)


def test_a_gate_is_frozen_for_good_once_its_average_is_at_the_target() -> None:
    stages = Stages(settings())
    for iteration in range(10):
        stages.update(iteration, {"token_pruner": 0.0, "expert_skip": 1.0, "layer_skip": 1.0})
        assert stages.trainable(iteration + 1) == ("token_pruner",)
    # 1 - 0.9^n passes 0.95 at n = 29.
    reached = 10
    while stages.trainable(reached) == ("token_pruner",):
        stages.update(reached, {"token_pruner": 1.0})
        reached += 1
    assert reached - 10 == 29
    assert stages.state() == {"stage": 1, "progress": None}
    stages.update(reached, {"token_pruner": 0.0, "expert_skip": 0.2})
    assert stages.trainable(reached + 1) == ("expert_skip",)


def test_one_lucky_batch_does_not_freeze_a_gate() -> None:
    stages = Stages(settings())
    for iteration, progress in enumerate([0.1, 0.1, 3.0, 0.1]):
        stages.update(iteration, {"token_pruner": progress})
    assert stages.trainable(4) == ("token_pruner",)


def test_a_batch_without_anything_to_prune_says_nothing() -> None:
    stages = Stages(settings())
    stages.update(0, {"token_pruner": 0.5})
    before = stages.state()
    stages.update(1, {"expert_skip": 1.0})
    assert stages.state() == before


def test_an_action_that_misses_its_target_leaves_the_others_their_part() -> None:
    stages = Stages(settings(iterations=10))
    seen = []
    for iteration in range(10):
        seen += stages.trainable(iteration)
        stages.update(iteration, dict.fromkeys(THREE, 0.1))
    assert seen == ["token_pruner"] * 4 + ["expert_skip"] * 3 + ["layer_skip"] * 3


def test_the_last_action_is_trained_to_the_end() -> None:
    stages = Stages(settings())
    for iteration in range(6):
        stages.update(iteration, dict.fromkeys(THREE, 1.0))
    assert stages.trainable(6) == ("layer_skip",)


@given(st.lists(st.floats(0.0, 1.5), min_size=1, max_size=60), st.integers(0, 59))
def test_a_resumed_run_goes_through_the_same_stages(progress: list[float], stop: int) -> None:
    def run(stages: Stages, first: int, last: int) -> list[tuple[str, ...]]:
        seen = []
        for iteration in range(first, last):
            seen.append(stages.trainable(iteration))
            stages.update(iteration, dict.fromkeys(THREE, progress[iteration]))
        return seen

    length, stop = len(progress), min(stop, len(progress))
    first, resumed = (Stages(settings(iterations=60)) for _ in range(2))
    seen = run(first, 0, stop)
    resumed.load(json.loads(json.dumps(first.state())))
    seen += run(resumed, stop, length)
    whole = Stages(settings(iterations=60))
    assert seen == run(whole, 0, length)
    assert resumed.state() == whole.state()


@pytest.mark.parametrize(
    ("state", "part"),
    [
        ({"stage": 0}, "expected ['progress', 'stage']"),
        ({"stage": 3, "progress": None}, "at action 3, but ste.actions has 3"),
    ],
)
def test_a_state_of_another_run_is_refused(state: dict[str, object], part: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Stages(settings()).load(state)
    assert part in str(caught.value)
