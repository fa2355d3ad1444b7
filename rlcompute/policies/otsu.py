"""Otsu's split of scores in two classes, exact and one split a segment (spec §5).

The split maximises the variance between the classes over all places between two different scores. No histogram is
made: sorted scores and their running sums give every candidate at once.

Shape legend: T scores, S segments, L scores of the longest segment.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor


def pad_segments(score_T: Tensor, bounds: Tensor, fill: float) -> Tensor:
    """Segments as rows of one float64 matrix [S,L], ``fill`` behind each; L is at least 1.

    Args:
        score_T: scores, segment after segment.
        bounds: int64 [S+1] on the CPU; segment s owns the scores bounds[s]:bounds[s+1] and may be empty.
    """
    lengths_S = bounds.diff()
    longest = max([1, *lengths_S.tolist()])
    padded_SL = score_T.new_full((len(lengths_S), longest), fill, dtype=torch.float64)
    segment_T = torch.repeat_interleave(torch.arange(len(lengths_S)), lengths_S)
    place_T = torch.arange(len(segment_T)) - bounds[:-1][segment_T]
    at = (segment_T.to(score_T.device, non_blocking=True), place_T.to(score_T.device, non_blocking=True))
    padded_SL[at] = score_T.double()
    return padded_SL


def otsu_threshold(score_T: Tensor, bounds: Tensor) -> Tensor:
    """Highest score of the lower class of each segment, float64 [S]; the lower class is ``score <= threshold``.

    Equal scores are never split. Of several best splits the one with the smallest lower class is taken. A segment
    without two different scores has no split: minus infinity, so that its lower class is empty.

    Args:
        score_T: finite scores of any floating dtype, segment after segment.
        bounds: int64 [S+1] on the CPU, from 0 to T; segments may be empty.
    """
    value_SL = pad_segments(score_T, bounds, math.inf).sort(dim=1).values
    count_S1 = bounds.diff().to(score_T.device, non_blocking=True)[:, None]
    lower_L = torch.arange(1, value_SL.shape[1] + 1, device=score_T.device)
    sum_SL = value_SL.where(lower_L <= count_S1, 0.0).cumsum(dim=1)
    # With c of n scores below and their sum P of the total Q: c (n-c) (mean below - mean above)^2, which is
    # (n P - c Q)^2 / (c (n-c)). Scores that tie exactly, tie here too: nothing is divided before the end.
    upper_SL = count_S1 - lower_L
    gap_SL = count_S1 * sum_SL - lower_L * sum_SL[:, -1:]
    between_SL = gap_SL.square() / (lower_L * upper_SL.clamp_min(1))
    next_SL = torch.cat([value_SL[:, 1:], torch.full_like(value_SL[:, :1], math.inf)], dim=1)
    splits_SL = (upper_SL > 0) & (value_SL < next_SL)
    best_S1 = between_SL.where(splits_SL, -1.0).argmax(dim=1, keepdim=True)
    return value_SL.gather(1, best_S1)[:, 0].where(splits_SL.any(dim=1), -math.inf)


def naive_otsu_threshold(score_T: Tensor, bounds: Tensor) -> Tensor:
    """Every split of every segment, in exact fractions. Same contract as :func:`otsu_threshold`."""
    thresholds = []
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        scores: list[float] = score_T[start:stop].tolist()
        threshold, most = -math.inf, Fraction(-1)
        for candidate in sorted(set(scores))[:-1]:
            below = [Fraction(score) for score in scores if score <= candidate]
            above = [Fraction(score) for score in scores if score > candidate]
            apart = sum(below, Fraction()) / len(below) - sum(above, Fraction()) / len(above)
            between = len(below) * len(above) * apart**2
            if between > most:
                threshold, most = candidate, between
        thresholds.append(threshold)
    return torch.tensor(thresholds, dtype=torch.float64, device=score_T.device)
