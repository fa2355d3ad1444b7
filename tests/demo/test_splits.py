"""Splits of combinations and pools whose pairs can be told apart."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcompute.demo.concepts import SYMBOLS
from rlcompute.demo.splits import MODALITIES, Combination, draw_combination, plan_pool, split_of
from rlcompute.errors import ConfigError


def answers(target: Combination, query: Combination, modality: str) -> bool:
    """Whether a target shows all that a query asks (a page also has to have the title)."""
    if modality == "visdoc" and target.shown[0] != query.asked[0]:
        return False
    return set(query.asked) <= set(target.shown)


@given(st.sets(st.integers(0, len(SYMBOLS) - 1), min_size=2, max_size=4))
def test_split_does_not_depend_on_order(concepts: set[int]) -> None:
    assert len({split_of(order) for order in permutations(concepts)}) == 1


def test_shares_of_the_splits() -> None:
    drawn = [split_of(pair) for pair in combinations(range(len(SYMBOLS)), 2)]
    assert drawn.count("test") > 2000
    assert drawn.count("final") > 2000
    assert drawn.count("train") > 0.6 * len(drawn)


@pytest.mark.parametrize("modality", MODALITIES)
def test_no_target_of_a_pool_answers_another_query(modality) -> None:
    pool = plan_pool(0, "test", modality, 300)
    assert len(pool) == 300
    for query in pool:
        assert [target for target in pool if answers(target, query, modality)] == [query]


@pytest.mark.parametrize("modality", MODALITIES)
def test_pools_are_disjoint_and_prefixes_of_larger_ones(modality) -> None:
    pools = {split: plan_pool(0, split, modality, 100) for split in ("train", "test", "final")}
    asked = [frozenset(c.asked) for pool in pools.values() for c in pool]
    assert len(set(asked)) == 300
    assert plan_pool(0, "test", modality, 40) == pools["test"][:40]
    assert plan_pool(1, "test", modality, 40) != pools["test"][:40]


@pytest.mark.parametrize("modality", MODALITIES)
def test_drawn_combinations_belong_to_their_split(modality) -> None:
    rng = np.random.default_rng(3)
    for split in ("train", "test", "final"):
        for _ in range(20):
            drawn = draw_combination(rng, modality, split)
            assert split_of(drawn.asked) == split
            assert set(drawn.asked) <= set(drawn.shown)
            assert len(set(drawn.shown)) == len(drawn.shown)


def test_every_concept_is_seen_in_training() -> None:
    rng = np.random.default_rng(0)
    seen = {i for _ in range(600) for i in draw_combination(rng, "video", "train").asked}
    assert seen == set(range(len(SYMBOLS)))


@pytest.mark.slow
def test_pools_of_two_thousand_exist() -> None:
    for split in ("test", "final"):
        for modality in MODALITIES:
            assert len(plan_pool(0, split, modality, 2000)) == 2000


def test_asking_for_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcompute.demo.splits.SYMBOLS", SYMBOLS[:6])
    with pytest.raises(ConfigError, match=r"only about \d+ video pairs"):
        plan_pool(0, "test", "video", 20)
