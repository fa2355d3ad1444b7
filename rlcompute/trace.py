"""What one encoder pass executed, counted per layer and segment.

Shape legend: N layers, S segments, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Trace:
    """Counts of executed work, int64 where not stated. Tokens are counted on the CPU, rows on the device of the pass.

    Attributes:
        entered_NS: tokens that went through the layer's mixer (its keys and values, in the last layer).
        decided_NS: tokens that reached the layer's mixture-of-experts block, where the policy decides. Equal to
            ``entered_NS`` except in the last layer, where only ``<emb>`` is left.
        survived_NS: tokens that stayed after the decision and ran the shared expert.
        routed_NS: tokens that went through the router: those that run an expert; all of ``decided_NS`` if the policy
            reads the router's choice; on other devices than a CPU all survivors, which costs less than waiting for
            the number of those that run one.
        rows_NS: (token, expert) rows that ran.
        expert_rows_NE: the same rows by expert, over all segments.
        signal_flops_NS: float64 FLOPs of what was computed only because the policy read it: write strength and
            attention maps (the router's choice is in ``routed_NS``); and of decisions that differ by layer
            (:meth:`rlcompute.decision.Signals.charge`) or are about segments (:class:`rlcompute.decision.Bypass`).
        bypassed_NS: tokens that passed the layer unchanged; they are in none of the other counts.
    """

    entered_NS: Tensor
    decided_NS: Tensor
    survived_NS: Tensor
    routed_NS: Tensor
    rows_NS: Tensor
    expert_rows_NE: Tensor
    signal_flops_NS: Tensor
    bypassed_NS: Tensor


def experts_per_token(rows: IntArray, survived: IntArray) -> float:
    """Routed experts that ran, mean over layers and the tokens that survived the decision there; 0 if none did."""
    return float(rows.sum()) / max(1.0, float(survived.sum()))


def layers_run(entered: IntArray, bypassed: IntArray) -> float:
    """Share of the tokens that came to a layer and were not led past it, over all layers."""
    return float(entered.sum()) / float(entered.sum() + bypassed.sum())
