"""Ranking metrics against a per-item loop and hand computations; the bootstrap against theory."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcompute.errors import ConfigError, DataError
from rlcompute.metrics import (
    bootstrap_interval,
    gallery_ranks,
    ndcg_at_10,
    pairs_used,
    ranking_metrics,
)


def loop_ranks(query: np.ndarray, target: np.ndarray, ids: list[str], gallery: int) -> list[int]:
    ranks = []
    for i in range(len(query)):
        start = i // gallery * gallery
        own = float(query[i] @ target[i])
        better = 0
        for j in range(start, min(start + gallery, len(query))):
            if ids[j] != ids[i] and float(query[i] @ target[j]) >= own - 2e-6:
                better += 1
        ranks.append(better)
    return ranks


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000), galleries=st.integers(1, 3), gallery=st.integers(2, 7), ids=st.integers(2, 9)
)
def test_equals_a_loop_with_ties_and_duplicates(seed: int, galleries: int, gallery: int, ids: int) -> None:
    rng = np.random.default_rng(seed)
    pairs = galleries * gallery
    # Small integer vectors: exact ties are common.
    query, target = (rng.integers(-1, 2, (pairs, 3)).astype(np.float32) for _ in range(2))
    names = [f"t{rng.integers(ids)}" for _ in range(pairs)]
    ranks = gallery_ranks(query, target, names, gallery)
    assert ranks.tolist() == loop_ranks(query, target, names, gallery)


def test_a_collapsed_embedder_finds_nothing() -> None:
    one = np.random.default_rng(0).normal(size=129).astype(np.float32)
    one /= np.linalg.norm(one)
    same = np.tile(one, (40, 1))
    noisy = same + np.random.default_rng(1).normal(scale=1e-7, size=same.shape).astype(np.float32)
    for query in (same, noisy):
        ranks = gallery_ranks(query, noisy, [str(i) for i in range(40)], 20)
        assert ranks.tolist() == [19] * 40
        assert ranking_metrics(ranks).recall_at_10 == 0.0


def test_metrics_by_hand() -> None:
    out = ranking_metrics(np.array([0, 0, 1, 9, 10, 400]))
    assert out.recall_at_1 == pytest.approx(100 * 2 / 6)
    assert out.recall_at_10 == pytest.approx(100 * 4 / 6)
    assert out.ndcg_at_10 == pytest.approx(100 * (1 + 1 + 1 / math.log2(3) + 1 / math.log2(11)) / 6)
    assert out.n == 6
    assert ndcg_at_10(np.array([9, 10])).tolist() == [pytest.approx(1 / math.log2(11)), 0.0]


def test_galleries_do_not_see_each_other() -> None:
    eye = np.eye(4, dtype=np.float32)
    query = np.concatenate([eye[:2], eye[:2]])
    ids = ["a", "b", "c", "d"]
    assert gallery_ranks(query, query, ids, 2).tolist() == [0, 0, 0, 0]
    assert gallery_ranks(query, query, ids, 4).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("available", "gallery", "used"), [(1200, 500, 1000), (500, 500, 500), (300, 500, 300)]
)
def test_only_whole_galleries_are_used(available: int, gallery: int, used: int) -> None:
    assert pairs_used(available, gallery) == used


def test_errors() -> None:
    vectors = np.ones((5, 2), dtype=np.float32)
    with pytest.raises(ConfigError, match="pass 4 of them"):
        gallery_ranks(vectors, vectors, list("abcde"), 2)
    broken = vectors.copy()
    broken[3, 1] = np.nan
    with pytest.raises(DataError, match="pair 3"):
        gallery_ranks(vectors, broken, list("abcde"), 5)
    with pytest.raises(DataError, match="no pairs"):
        ranking_metrics(np.zeros(0, dtype=np.int64))


def test_bootstrap_matches_the_normal_approximation_and_is_reproducible() -> None:
    rng = np.random.default_rng(0)
    differences = [rng.choice([-100.0, 0.0, 100.0], size=n, p=[0.05, 0.9, 0.05]) for n in (2000, 800)]
    low, high = bootstrap_interval(differences, samples=4000, seed=3)
    mean = np.mean([d.mean() for d in differences])
    error = np.sqrt(sum(d.var() / len(d) for d in differences)) / 2
    assert low == pytest.approx(mean - 1.96 * error, abs=0.08)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.08)
    assert (low, high) == bootstrap_interval(differences, samples=4000, seed=3)


def test_bootstrap_equals_resampling_queries_one_by_one() -> None:
    values = [np.array([0.0, 100.0, 100.0, -100.0, 0.0, 100.0, 37.5])]
    rng = np.random.default_rng(1)
    naive = [values[0][rng.integers(7, size=7)].mean() for _ in range(20000)]
    low, high = bootstrap_interval(values, samples=20000, seed=0)
    assert low == pytest.approx(np.quantile(naive, 0.025), abs=3.0)
    assert high == pytest.approx(np.quantile(naive, 0.975), abs=3.0)


def test_no_difference_gives_no_interval() -> None:
    assert bootstrap_interval([np.zeros(10), np.zeros(4)], samples=50, seed=0) == (0.0, 0.0)
