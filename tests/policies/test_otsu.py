"""Otsu's split against every split, within-class variance in fractions, and scikit-image."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.filters import threshold_otsu

from rlcompute.policies.otsu import naive_otsu_threshold, otsu_threshold
from tests.kernels.packs import offsets

# Tied often, and told apart often: few integers, and any finite float32.
few = st.integers(-4, 4).map(float)
floats = st.floats(-100, 100, width=32)
segments = st.lists(st.one_of(st.lists(few, max_size=12), st.lists(floats, max_size=12)), max_size=6)


def smallest_within(scores: list[float]) -> float:
    """The last score of the lower class, by the sum of squares within the classes; -inf without a split."""

    def squares(members: list[Fraction]) -> Fraction:
        mean = sum(members, Fraction()) / len(members)
        return sum(((x - mean) ** 2 for x in members), Fraction())

    exact = sorted(map(Fraction, scores))
    cuts = [cut for cut in range(1, len(exact)) if exact[cut - 1] < exact[cut]]
    if not cuts:
        return -math.inf
    return float(exact[min(cuts, key=lambda cut: squares(exact[:cut]) + squares(exact[cut:])) - 1])


@settings(max_examples=80, deadline=None)
@given(parts=segments)
def test_splits_of_a_pack_equal_the_best_of_all_splits(parts: list[list[float]]) -> None:
    bounds = offsets([len(part) for part in parts])
    score_T = torch.tensor([x for part in parts for x in part], dtype=torch.float64)
    naive = naive_otsu_threshold(score_T, bounds)
    assert naive.tolist() == [smallest_within(part) for part in parts]
    fast = otsu_threshold(score_T, bounds)
    assert fast.dtype == torch.float64
    for part, found, best in zip(parts, fast.tolist(), naive.tolist(), strict=True):
        # Splits within rounding of each other may change places; none that is worse may win.
        assert found == best or quality(part, found) >= quality(part, best) * (1 - 1e-9)
    if all(x == int(x) for part in parts for x in part):
        assert torch.equal(fast, naive)


def quality(scores: list[float], threshold: float) -> float:
    below, above = [x for x in scores if x <= threshold], [x for x in scores if x > threshold]
    return len(below) * len(above) * (math.fsum(below) / len(below) - math.fsum(above) / len(above)) ** 2


@pytest.mark.parametrize("seed", range(20))
def test_equals_scikit_image_on_continuous_data(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [
        np.concatenate([rng.normal(0, 1, rng.integers(1, 80)), rng.normal(rng.uniform(0, 5), 0.5, 40)]),
        rng.beta(2, 5, rng.integers(2, 200)),
        rng.exponential(1, 2),
    ]
    bounds = offsets([len(part) for part in parts])
    found = otsu_threshold(torch.from_numpy(np.concatenate(parts)), bounds).tolist()
    for part, threshold in zip(parts, found, strict=True):
        values = np.sort(part)
        # scikit-image's own histogram has bins; with a bin for each value it is exact.
        assert threshold == threshold_otsu(hist=(np.ones(len(values)), values))
        bins = 1 << 20
        binned = threshold_otsu(part, nbins=bins)
        # It answers with the centre of a bin: up to half a bin from the last value of the lower class.
        half = (values[-1] - values[0]) / bins / 2
        assert abs(threshold - binned) <= half * (1 + 1e-6)


def test_equals_scikit_image_on_tied_levels() -> None:
    rng = np.random.default_rng(0)
    levels = rng.integers(0, 12, 300)
    found = otsu_threshold(torch.from_numpy(levels).double(), offsets([300]))
    assert found.tolist() == [threshold_otsu(levels)]


@pytest.mark.parametrize("scores", [[], [3.0], [0.1] * 7])
def test_no_split_without_two_scores(scores: list[float]) -> None:
    parts = [[1.0, 2.0, 9.0], scores, [-5.0, 5.0]]
    score_T = torch.tensor([x for part in parts for x in part])
    expected = [2.0, -math.inf, -5.0]
    assert otsu_threshold(score_T, offsets([len(part) for part in parts])).tolist() == expected


def test_nothing_at_all() -> None:
    assert otsu_threshold(torch.empty(0), offsets([])).shape == (0,)
    assert otsu_threshold(torch.empty(0), offsets([0, 0])).tolist() == [-math.inf] * 2


def test_of_equally_good_splits_the_lowest() -> None:
    assert otsu_threshold(torch.tensor([2.0, 0.0, 1.0]), offsets([3])).tolist() == [0.0]


def test_threshold_is_one_of_the_scores_whatever_their_precision() -> None:
    score_T = torch.rand(50, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = float(otsu_threshold(score_T, offsets([50])))
    assert found in score_T.tolist()


def test_a_segment_is_split_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(n, generator=generator) * 10**n for n in (5, 0, 1, 9, 3)]
    together = otsu_threshold(torch.cat(parts), offsets([len(part) for part in parts]))
    alone = torch.cat([otsu_threshold(part, offsets([len(part)])) for part in parts])
    assert torch.equal(together, alone)
