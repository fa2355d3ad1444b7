"""Decisions with gradients: how gates are trained through the frozen backbone (spec §4).

A decision is a mass: 1 to keep, 0 to leave out. Its value is what the packed forward would execute, its gradient that
of the gate's probability (:func:`straight_through`), or, in a soft fade, the probability itself.

Shape legend: T tokens of the pack, S segments, k selected experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from rlcompute.decision import Signals
from rlcompute.pack import Pack

Terms = Mapping[str, Tensor]
"""Sums over the tokens or segments of a layer, by name, each [n]: what the objective reads besides embeddings and cost.
Sums, not means, so that workers can add theirs up."""
Carry = Mapping[str, Tensor]
"""What a gate hands to its next layer, by name: one row for each token, or for each segment."""


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The value of ``hard`` (bool or floating) with the gradient of ``soft``, in soft's dtype."""
    return hard.to(soft.dtype) + (soft - soft.detach())


@dataclass(frozen=True)
class SoftDecision:
    """What to do with each token in one layer.

    Attributes:
        stay: mass [T] with which a token lives on after this layer; None keeps all. ``<emb>`` tokens must have 1.
        experts: mass [T] of a token's routed output, or [T,k] of its slots, highest weight first; None runs all.
        renormalize: divide the weights of the slots by their sum, masses included (of a token without any, nothing).
        terms: of this layer.
        tokens: what the gate wants to find in the next layer, a row for each token.
    """

    stay: Tensor | None = None
    experts: Tensor | None = None
    renormalize: bool = False
    terms: Terms = field(default_factory=dict)
    tokens: Carry = field(default_factory=dict)


@dataclass(frozen=True)
class SoftBypass:
    """Which segments run a layer at all.

    Attributes:
        run_S: mass with which the segment's tokens go through the layer; otherwise they pass it unchanged.
        flops_per_segment: cost of the decision.
        terms: of this layer.
        segments: what the gate wants to find in the next layer, a row for each segment.
    """

    run_S: Tensor
    flops_per_segment: float
    terms: Terms = field(default_factory=dict)
    segments: Carry = field(default_factory=dict)


class SoftPolicy(Protocol):
    """Whoever decides in training. Pure: a layer may be computed twice, and must then decide the same."""

    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack, segments: Carry) -> SoftBypass | None:
        """Before layer ``layer``, from the ``<emb>`` rows that enter it; None: all segments run it."""
        ...

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack, tokens: Carry) -> SoftDecision:
        """As :meth:`rlcompute.decision.Policy.decide`, for all tokens, also those whose mass is 0 by now.

        ``pack.alive`` holds the masses with which tokens reach the decision: 0 also where the segment bypasses the
        layer. In the last layer the T tokens are the ``<emb>`` tokens alone.
        """
        ...
