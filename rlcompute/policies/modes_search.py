"""The search for MoDES' thresholds: the smallest loss at which a target share of the routed rows is left out.

    scores of full compute -> grid of thresholds for each kind of token
    grid, target           -> the best pair on the grid: both shares and losses grow with both thresholds, so that
                              every executed point bounds others, and only points that can still win are executed
    the pair               -> lowered between its grid lines until the share is just above the target

Every point is executed on the sample once, however many targets ask for it.

Shape legend: I text thresholds, J visual thresholds, N layers, M kinds of token, T tokens, k selected experts,
S inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlcompute.backbones.base import Backbone
from rlcompute.decision import Decision, Signals
from rlcompute.encoder import encode
from rlcompute.errors import ConfigError
from rlcompute.pack import EmbeddedInput, Pack
from rlcompute.policies.modes import TOKEN_KINDS, Modes, cosine_loss, scaled_weights, token_kind

TOLERANCE = 0.002
"""How far above the target the share of skipped rows may end (share of the rows)."""
REFINEMENTS = 5
"""Most points executed to lower a pair of thresholds between grid lines."""

FloatArray = npt.NDArray[np.float64]
Thresholds = tuple[float, float]
"""Thresholds of text and visual tokens."""


class Outcome(NamedTuple):
    """What a pair of thresholds does on the sample.

    Attributes:
        skip: share of the (token, expert) rows of all tokens in all layers that is left out.
        loss: mean of 1 - cos to the embedding of full compute.
    """

    skip: float
    loss: float


Evaluate = Callable[[Thresholds], Outcome]


def frontier_search(
    evaluate: Evaluate,
    grid_text: FloatArray,
    grid_visual: FloatArray,
    target: float,
    known: Mapping[Thresholds, Outcome],
) -> Thresholds:
    """The pair on a grid with the smallest loss among those that skip at least ``target``.

    Equal to trying all pairs where skip and loss fall nowhere as a threshold rises. An executed point then bounds
    those above it in loss and, if it misses the target, rules out those below. The next point is the one that rules
    out most whichever way it turns out.

    Args:
        evaluate: executes a pair of thresholds.
        grid_text, grid_visual: ascending thresholds.
        target: share to skip; the highest pair must reach it.
        known: points that were executed before, on the grid or off it.
    """
    least_loss_IJ = np.zeros((len(grid_text), len(grid_visual)))
    misses_IJ = np.zeros_like(least_loss_IJ, dtype=bool)

    def learn(at: Thresholds, outcome: Outcome) -> None:
        above_IJ = (grid_text >= at[0])[:, None] & (grid_visual >= at[1])
        np.maximum(least_loss_IJ, outcome.loss, out=least_loss_IJ, where=above_IJ)
        if outcome.skip < target:
            misses_IJ[(grid_text <= at[0])[:, None] & (grid_visual <= at[1])] = True

    for at, outcome in known.items():
        learn(at, outcome)
    highest = (float(grid_text[-1]), float(grid_visual[-1]))
    on_grid = {at: known[at] for at in known if at[0] in grid_text and at[1] in grid_visual}
    reach = {at: outcome.loss for at, outcome in on_grid.items() if outcome.skip >= target}
    best, best_loss = min(reach.items(), key=lambda item: item[1], default=(highest, np.inf))
    while (open_IJ := ~misses_IJ & (least_loss_IJ < best_loss)).any():
        at = _most_telling(open_IJ, grid_text, grid_visual)
        outcome = evaluate(at)
        learn(at, outcome)
        if outcome.skip >= target and outcome.loss < best_loss:
            best, best_loss = at, outcome.loss
    return best


def _most_telling(
    open_IJ: npt.NDArray[np.bool_], grid_text: FloatArray, grid_visual: FloatArray
) -> Thresholds:
    """The open point with most open points above it or below it, whichever are fewer."""
    below_IJ = open_IJ.cumsum(0).cumsum(1)
    above_IJ = open_IJ[::-1, ::-1].cumsum(0).cumsum(1)[::-1, ::-1]
    i, j = np.unravel_index(np.where(open_IJ, np.minimum(below_IJ, above_IJ), 0).argmax(), open_IJ.shape)
    return float(grid_text[i]), float(grid_visual[j])


def refine(evaluate: Evaluate, low: Thresholds, high: Thresholds, target: float) -> Thresholds:
    """A pair between two others that skips ``target`` and at most :data:`TOLERANCE` more, by regula falsi.

    Args:
        evaluate: executes a pair of thresholds.
        low: a pair that skips less than the target, as a rule.
        high: a pair above it that skips at least the target.
        target: share to skip.

    Returns:
        Of the executed pairs that reach the target, the one with the smallest loss.
    """
    below, above = evaluate(low).skip, evaluate(high).skip
    reach, left, right = ([low, high] if below >= target else [high]), 0.0, 1.0
    for _ in range(REFINEMENTS):
        if above - target <= TOLERANCE or below >= target:
            break
        wanted = (target + TOLERANCE / 2 - below) / (above - below)
        # A curved piece of the way would otherwise be eaten from one end only.
        place = left + (right - left) * min(max(wanted, 0.1), 0.9)
        at = (low[0] + place * (high[0] - low[0]), low[1] + place * (high[1] - low[1]))
        skip = evaluate(at).skip
        if skip >= target:
            right, above = place, skip
            reach.append(at)
        else:
            left, below = place, skip
    return min(reach, key=lambda at: evaluate(at).loss)


class _Recorder:
    """Full compute that keeps every scaled weight it sees, by kind of token."""

    gate_flops_per_token = 0.0

    def __init__(self, scales_NM: Tensor) -> None:
        self._scales_NM = scales_NM
        self.scores_M: tuple[list[Tensor], ...] = tuple([] for _ in TOKEN_KINDS)

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        kind_T = token_kind(pack)
        scores_Tk = scaled_weights(self._scales_NM, layer, signals, kind_T)
        for kind, scores in enumerate(self.scores_M):
            scores.append(scores_Tk[kind_T == kind].flatten().cpu())
        return Decision()


class ModesSearch:
    """Finds thresholds for any number of targets on one sample.

    Attributes:
        grids: candidate thresholds, ascending, for text and visual tokens.
        known: every point executed so far.
    """

    def __init__(
        self,
        backbone: Backbone,
        scales_NM: Tensor,
        batches: Sequence[Sequence[EmbeddedInput]],
        points: int,
        known: Mapping[Thresholds, Outcome],
    ) -> None:
        """Args:
        backbone: the frozen model.
        scales_NM: scales of layers (:func:`rlcompute.policies.modes.layer_scales`).
        batches: the sample, as it is packed.
        points: candidate thresholds of each kind of token.
        known: points that were executed before on the same sample.
        """
        self._backbone, self._scales_NM = backbone, scales_NM
        self._packs = [backbone.pack(batch) for batch in batches]
        recorder = _Recorder(scales_NM)
        self._full = [encode(backbone, h_Td, pack, recorder).embeddings_Sd for h_Td, pack in self._packs]
        scores_M = [torch.cat(scores).numpy() for scores in recorder.scores_M]
        # A router weight is at most 1, so a threshold above the largest scale skips everything.
        over_M = np.nextafter(scales_NM.amax(0).numpy(), np.inf)
        text, visual = (
            threshold_grid(x, points, float(over)) for x, over in zip(scores_M, over_M, strict=True)
        )
        self.grids = (text, visual)
        self.known = dict(known)

    def thresholds(self, target: float) -> Thresholds:
        """Thresholds that skip at least ``target`` of the rows, and hardly more, at the smallest loss.

        Raises:
            ConfigError: the target is outside [0, 1].
        """
        check_target(target)
        text, visual = self.grids
        high = frontier_search(self.evaluate, text, visual, target, self.known)
        low = (_next_lower(text, high[0]), _next_lower(visual, high[1]))
        return refine(self.evaluate, low, high, target)

    def evaluate(self, at: Thresholds) -> Outcome:
        """Execute the sample under a pair of thresholds, unless that was done before."""
        if at not in self.known:
            self.known[at] = self._execute(Modes(self._scales_NM, at))
        return self.known[at]

    def _execute(self, policy: Modes) -> Outcome:
        rows = possible = 0
        losses = []
        for (hidden_Td, pack), full_Sd in zip(self._packs, self._full, strict=True):
            encoded = encode(self._backbone, hidden_Td, pack, policy)
            rows += int(encoded.trace.rows_NS.sum())
            possible += int(encoded.trace.survived_NS.sum()) * self._backbone.top_k
            losses.append(cosine_loss(encoded.embeddings_Sd, full_Sd))
        return Outcome(1.0 - rows / possible, float(torch.cat(losses).mean()))


def threshold_grid(scores: FloatArray, points: int, over: float) -> FloatArray:
    """Ascending thresholds: one that skips nothing, quantiles of the scores, one that skips everything.

    Args:
        scores: scaled weights under full compute, in any shape.
        points: thresholds; equal ones are left out, and for no scores there is one threshold, 0.
        over: above all that the scores can be.
    """
    if not scores.size:
        return np.zeros(1)
    inner = np.quantile(scores, np.linspace(0.0, 1.0, points)[1:-1])
    return np.unique(np.concatenate([[0.0], inner, [over]]))


def _next_lower(grid: FloatArray, threshold: float) -> float:
    """The threshold before another one of the grid; the lowest has none and stays."""
    return float(grid[max(0, int(np.searchsorted(grid, threshold)) - 1)])


def check_target(target: float) -> None:
    """Raises ConfigError if a share of rows to skip is outside [0, 1]."""
    if not 0.0 <= target <= 1.0:
        raise ConfigError(f"modes: skip={target:g} is not a share of the routed rows: give 0 to 1")
