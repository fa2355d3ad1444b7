from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcompute.actors.batches import BatchPlan
from rlcompute.data import Pair, Side
from rlcompute.errors import ConfigError

TEXT = Side(text="x")


def pairs_of(sizes: list[int]) -> list[Pair]:
    return [
        Pair(f"{task}-{number}", f"task{task}", "text", f"{task}-{number}", TEXT, TEXT)
        for task, size in enumerate(sizes)
        for number in range(size)
    ]


def plan_of(pairs: list[Pair], *, seed: int, pairs_per_batch: int) -> BatchPlan:
    return BatchPlan(pairs, seed=seed, pairs_per_batch=pairs_per_batch, key="grpo.pairs_per_batch")


@given(
    sizes=st.lists(st.integers(6, 20), min_size=1, max_size=4),
    pairs_per_batch=st.integers(1, 6),
    iteration=st.integers(0, 1000),
    seed=st.integers(0, 3),
)
def test_a_batch_has_distinct_pairs_of_all_tasks_in_equal_shares(
    sizes: list[int], pairs_per_batch: int, iteration: int, seed: int
) -> None:
    batch = plan_of(pairs_of(sizes), seed=seed, pairs_per_batch=pairs_per_batch).pairs(iteration)
    assert len({pair.id for pair in batch}) == len(batch) == pairs_per_batch
    counts = Counter(pair.task for pair in batch)
    shares = [counts[f"task{task}"] for task in range(len(sizes))]
    assert max(shares) - min(shares) <= 1


def test_batches_depend_on_seed_and_iteration_alone() -> None:
    pairs = pairs_of([7, 9])
    plan = plan_of(pairs, seed=3, pairs_per_batch=4)
    forwards = [plan.pairs(i) for i in range(20)]
    assert [
        plan_of(pairs[::-1], seed=3, pairs_per_batch=4).pairs(i) for i in reversed(range(20))
    ] == forwards[::-1]
    assert [plan_of(pairs, seed=4, pairs_per_batch=4).pairs(i) for i in range(20)] != forwards


def test_an_epoch_visits_every_pair_once() -> None:
    plan = plan_of(pairs_of([8, 8]), seed=0, pairs_per_batch=4)
    for epoch in range(3):
        seen = Counter(pair.id for i in range(4) for pair in plan.pairs(4 * epoch + i))
        assert set(seen.values()) == {1}
        assert len(seen) == 16


def test_tasks_take_turns_at_the_extra_places() -> None:
    plan = plan_of(pairs_of([30, 30, 30]), seed=0, pairs_per_batch=4)
    counts = Counter(pair.task for i in range(3) for pair in plan.pairs(i))
    assert set(counts.values()) == {4}


def test_too_few_pairs_of_a_task_are_refused() -> None:
    with pytest.raises(ConfigError, match="'task1' has 2"):
        plan_of(pairs_of([9, 2]), seed=0, pairs_per_batch=6)
