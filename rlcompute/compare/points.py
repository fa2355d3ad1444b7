"""One measured policy: the figures that the comparison, its pictures and the claims are made of.

FLOPs are the language model's if the name says nothing else. Shares saved are of full compute of the unpruned backbone
on the same inputs, queries and targets.

Shape legend: P pairs of one modality, G modalities of pairs in the order of ``ranks``, N layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from rlcompute.compare.cache import Entry
from rlcompute.metrics import RankingMetrics, ranking_metrics
from rlcompute.policies.rules import parse
from rlcompute.trace import experts_per_token, layers_run

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

FULL = "full"
"""The policy that all others are measured against."""
LEAST_CONVERTED = 0.01
"""Share of FLOPs saved below which their ratio to time is noise of the clock."""


@dataclass(frozen=True)
class Speed:
    """What the clock said of a policy; attributes as in :class:`Point`."""

    speedup: float
    speedup_low: float
    speedup_high: float
    inputs_per_second: float


@dataclass(frozen=True)
class Point:
    """A policy at one setting, measured on the held-out pairs.

    Attributes:
        spec: the policy as configured: with ``*`` where a knob was solved, with the pattern where a path has one.
        resolved: the policy as it ran.
        budget: share of the language model's FLOPs that the knob was solved to save; None without a knob.
        knob: the solved value; None without a knob.
        top_k: experts that the backbone selects for a token.
        num_experts: routed experts of a layer.
        ranks: of each query's target, from 0, by modality: int64 [P].
        executed_G, logical_G, hardware_G: FLOPs (:mod:`rlcompute.flops`) of both sides of each modality's pairs.
        full_executed_G, full_logical_G, full_hardware_G: those of full compute.
        vision_G: FLOPs of the vision tower, which no policy saves.
        full_vision_G: those of the unpruned backbone; a checkpoint of its own may have another tower.
        entered_NG, decided_NG, survived_NG, rows_NG, bypassed_NG: counts of :class:`rlcompute.trace.Trace` by modality,
            int64.
        speedup: inputs per second over those of full compute, both timed in the same rounds; the median round.
        speedup_low, speedup_high: the slowest and the fastest round. Of six rounds they enclose the true median in
            97 of 100 cases, whatever the distribution.
        inputs_per_second: queries or targets, from pixels and token ids to embeddings.
        method: what trained it, in words (:data:`rlcompute.policies.checkpoint.METHODS`); None if nothing was trained.
    """

    spec: str
    resolved: str
    budget: float | None
    knob: float | None
    top_k: int
    num_experts: int
    ranks: Mapping[str, IntArray]
    executed_G: FloatArray
    logical_G: FloatArray
    hardware_G: FloatArray
    full_executed_G: FloatArray
    full_logical_G: FloatArray
    full_hardware_G: FloatArray
    vision_G: FloatArray
    full_vision_G: FloatArray
    entered_NG: IntArray
    decided_NG: IntArray
    survived_NG: IntArray
    rows_NG: IntArray
    bypassed_NG: IntArray
    speedup: float
    speedup_low: float
    speedup_high: float
    inputs_per_second: float
    method: str | None

    @property
    def modalities(self) -> tuple[str, ...]:
        """Modalities of the pairs, the G of the arrays."""
        return tuple(self.ranks)

    @property
    def is_full(self) -> bool:
        """Whether this is the reference."""
        return self.resolved == FULL

    @property
    def learned(self) -> bool:
        """Whether a part of the policy was trained."""
        return parse(self.resolved).learned

    @property
    def lm_saved(self) -> float:
        """Executed FLOPs saved, as a share of the language model's."""
        return _saved(self.executed_G, self.full_executed_G)

    @property
    def executed_saved(self) -> float:
        """Executed FLOPs saved, as a share of the whole forward, the vision tower included."""
        return self._with_vision(self.executed_G, self.full_executed_G)

    @property
    def logical_saved(self) -> float:
        """Logical FLOPs saved, as a share of the whole forward."""
        return self._with_vision(self.logical_G, self.full_logical_G)

    @property
    def hardware_saved(self) -> float:
        """Tile-padded FLOPs saved, as a share of the whole forward."""
        return self._with_vision(self.hardware_G, self.full_hardware_G)

    @property
    def conversion(self) -> float | None:
        """Share of the wall clock saved for each share of executed FLOPs; None below :data:`LEAST_CONVERTED`."""
        saved = self.executed_saved
        return (1.0 - 1.0 / self.speedup) / saved if saved >= LEAST_CONVERTED else None

    @property
    def drop_rate_NG(self) -> FloatArray:
        """Tokens dropped, as a share of those that reached the layer's decision; NaN where none did."""
        return 1.0 - _ratio(self.survived_NG, self.decided_NG)

    @property
    def skip_rate_NG(self) -> FloatArray:
        """(Token, expert) rows left out, as a share of k for each survivor; NaN where no token survived."""
        return 1.0 - _ratio(self.rows_NG, self.top_k * self.survived_NG)

    @property
    def experts_per_token(self) -> float:
        """Routed experts that ran, mean over layers and the tokens that survived the decision there."""
        return experts_per_token(self.rows_NG, self.survived_NG)

    @property
    def layers_run(self) -> float:
        """Share of the tokens that came to a layer and were not led past it, over all layers."""
        return layers_run(self.entered_NG, self.bypassed_NG)

    @property
    def metrics(self) -> dict[str, RankingMetrics]:
        """Accuracy by modality."""
        return {modality: ranking_metrics(ranks_P) for modality, ranks_P in self.ranks.items()}

    @property
    def recall_at_1(self) -> float:
        """Mean over modalities, points of 100."""
        return float(np.mean([100.0 * hits_P.mean() for hits_P in self.hits().values()]))

    def hits(self) -> dict[str, FloatArray]:
        """1 for each query whose target came first, otherwise 0, by modality."""
        return {modality: (ranks_P < 1).astype(np.float64) for modality, ranks_P in self.ranks.items()}

    @property
    def words(self) -> str:
        """The main figures, for a line of progress."""
        saved, recall = 100.0 * self.lm_saved, self.recall_at_1
        return f"{saved:.1f} % of LM FLOPs saved, recall@1 {recall:.1f}, {self.speedup:.2f}x as fast"

    def _with_vision(self, spent_G: FloatArray, full_G: FloatArray) -> float:
        return _saved(spent_G + self.vision_G, full_G + self.full_vision_G)


@dataclass(frozen=True)
class Missed:
    """A policy that no setting of its knob brings to a budget.

    Attributes:
        spec: as configured.
        budget: share of the language model's FLOPs.
        least, most: what its settings save.
    """

    spec: str
    budget: float
    least: float
    most: float

    @property
    def words(self) -> str:
        """What was found, for a line of progress."""
        return f"out of reach, saves {100.0 * self.least:.1f} to {100.0 * self.most:.1f} %"


_RANKS = "ranks_"
"""Before the modality in the name of a stored array of ranks."""


def to_entry(point: Point) -> Entry:
    """A point as the cache stores it; its times, which belong to a machine, are kept apart, and its gates know what
    trained them."""
    left_out = {"ranks", "method", *(field.name for field in fields(Speed))}
    content = {
        field.name: getattr(point, field.name) for field in fields(Point) if field.name not in left_out
    }
    arrays = {name: value for name, value in content.items() if isinstance(value, np.ndarray)}
    arrays |= {_RANKS + modality: ranks_P for modality, ranks_P in point.ranks.items()}
    values = {name: value for name, value in content.items() if name not in arrays}
    return Entry(values | {"modalities": list(point.ranks)}, arrays)


def from_entry(entry: Entry, speed: Speed) -> Point:
    """The point of :func:`to_entry`, with its times."""
    content: dict[str, Any] = entry.values | entry.arrays
    # Entries of versions whose policies could not bypass a layer lack the count.
    content.setdefault("bypassed_NG", np.zeros_like(content["entered_NG"]))
    ranks = {modality: content.pop(_RANKS + modality) for modality in content.pop("modalities")}
    return Point(**content, **asdict(speed), ranks=ranks, method=None)


def _saved(spent_G: FloatArray, full_G: FloatArray) -> float:
    return 1.0 - float(spent_G.sum()) / float(full_G.sum())


def _ratio(part_NG: IntArray, whole_NG: IntArray) -> FloatArray:
    ratio_NG = np.full(part_NG.shape, np.nan)
    np.divide(part_NG, whole_NG, out=ratio_NG, where=whole_NG > 0)
    return ratio_NG
