"""Ranking metrics in fixed-size galleries, with ties against the model, and paired bootstrap intervals.

Shape legend: P pairs, g pairs of one gallery, d embedding size, M modalities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlcompute.errors import ConfigError, DataError

TIE_TOLERANCE = 2e-6
"""Cosines closer than this are a tie, and a tie counts against the model, in evaluation and reward alike. Equal
embeddings give cosines that differ in the last bits of float32 (tiles of a matrix product sum in different
orders), which must not look like a ranking."""

FloatArray = npt.NDArray[np.floating]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RankingMetrics:
    """Accuracy in points of 100 over ``n`` queries."""

    recall_at_1: float
    recall_at_10: float
    ndcg_at_10: float
    n: int


def pairs_used(available: int, gallery: int) -> int:
    """How many of ``available`` pairs, from the first, fill whole galleries; all of them if not even one is
    full.

    A smaller gallery is easier, so a remainder beside full ones is left out.
    """
    return available if available < gallery else available - available % gallery


def gallery_ranks(
    query_Pd: FloatArray, target_Pd: FloatArray, target_ids: Sequence[str], gallery: int
) -> IntArray:
    """Rank of each query's own target in its gallery, from 0.

    Pairs are cut in order into galleries of ``gallery`` targets. The rank is the number of other targets at
    least as similar to the query (within :data:`TIE_TOLERANCE`); targets with the same target id are right
    answers too and are ignored.

    Args:
        query_Pd, target_Pd: unit-norm embeddings, row i of both belongs to pair i.
        target_ids: P strings.
        gallery: targets a gallery.

    Returns:
        int64 [P]; P is what :func:`pairs_used` says of the number of pairs.

    Raises:
        ConfigError: the number of pairs leaves a smaller last gallery.
        DataError: an embedding is not finite.
    """
    pairs = len(query_Pd)
    if pairs_used(pairs, gallery) != pairs:
        raise ConfigError(
            f"{pairs} pairs do not fill galleries of {gallery}: pass {pairs_used(pairs, gallery)} of them, or "
            "change evaluation.gallery"
        )
    finite = np.isfinite(query_Pd).all(1) & np.isfinite(target_Pd).all(1)
    if not finite.all():
        raise DataError(f"the embedding of pair {int(np.argmin(finite))} is not finite, so it has no rank")
    _, codes = np.unique(np.asarray(target_ids, dtype=object).astype(str), return_inverse=True)
    ranks = [
        _ranks_in_one_gallery(query_Pd[start:stop], target_Pd[start:stop], codes[start:stop])
        for start, stop in ((s, min(s + gallery, pairs)) for s in range(0, pairs, gallery))
    ]
    return np.concatenate(ranks) if ranks else np.zeros(0, dtype=np.int64)


def _ranks_in_one_gallery(query_gd: FloatArray, target_gd: FloatArray, codes_g: IntArray) -> IntArray:
    cosines_gg = query_gd.astype(np.float64) @ target_gd.astype(np.float64).T
    own_g1 = np.diagonal(cosines_gg)[:, None]
    competes_gg = codes_g[:, None] != codes_g[None]
    ranks: IntArray = ((cosines_gg >= own_g1 - TIE_TOLERANCE) & competes_gg).sum(1, dtype=np.int64)
    return ranks


def ndcg_at_10(ranks_P: IntArray) -> npt.NDArray[np.float64]:
    """nDCG@10 of each query in [0, 1]; with one right answer the ideal gain is 1."""
    return np.where(ranks_P < 10, 1.0 / np.log2(ranks_P + 2.0), 0.0)


def ranking_metrics(ranks_P: IntArray) -> RankingMetrics:
    """Summarises ranks (from 0) in points of 100.

    Raises:
        DataError: there are no ranks.
    """
    if len(ranks_P) == 0:
        raise DataError("no pairs to rank")
    return RankingMetrics(
        recall_at_1=100.0 * float((ranks_P < 1).mean()),
        recall_at_10=100.0 * float((ranks_P < 10).mean()),
        ndcg_at_10=100.0 * float(ndcg_at_10(ranks_P).mean()),
        n=len(ranks_P),
    )


def bootstrap_interval(
    differences: Sequence[FloatArray], samples: int, seed: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of a mean over modalities of paired per-query differences.

    Every resample draws queries with replacement inside each modality, the same query for both policies (that
    is what makes it paired), takes the mean in each modality and then the mean over modalities.

    Args:
        differences: one array per modality: policy's score minus the reference's, query by query.
        samples: resamples.
        seed: of the draws.
        confidence: coverage.

    Returns:
        Lower and upper bound, in the unit of the differences.
    """
    rng = np.random.default_rng(seed)
    means = np.zeros(samples)
    for values in differences:
        # How often each distinct value is drawn is multinomial: no need to draw single queries.
        distinct, counts = np.unique(values, return_counts=True)
        draws = rng.multinomial(len(values), counts / len(values), size=samples)
        means += draws @ distinct / len(values) / len(differences)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return float(low), float(high)
