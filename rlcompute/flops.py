"""Analytic cost of the language model, from what a pass executed (spec §3 and §6).

The arithmetic is one, the unit is that of the prices: :class:`CostModel` multiplies counts of a trace with whatever
one token, pair or row costs in each layer; :class:`FlopModel` takes FLOPs. A multiply-add is 2 FLOPs; norms,
activations and rotary embedding are not counted, and Gated DeltaNet is charged as the recurrence of spec §2, not as
the chunked form that kernels execute. Three figures:

- executed: rows that ran, the cost of gates and of signals that only the policy read included; of a layer that a
  segment passed unchanged, the cost of that decision alone. Full compute is charged the same way, so the free saving of
  the last layer (only ``<emb>`` is computed there) belongs to every policy.
- logical: what the policy decided, as spec §3 writes it: gates, signals and router cost nothing, and a token dropped in
  a layer still pays that layer's shared expert.
- hardware: executed, with every expert's rows rounded up to whole tiles of ``tile`` rows.

Shape legend: N layers, S segments, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlcompute.backbones.base import Backbone, LayerCost
from rlcompute.kernels.routing_plan import tiles
from rlcompute.trace import Trace


class CostModel:
    """Cost of passes through one backbone, in the unit of the prices. All results are float64 on the CPU."""

    def __init__(self, prices: Sequence[LayerCost], top_k: int, *, segment: float = 0.0) -> None:
        """Args:
        prices: what the parts of each layer cost.
        top_k: experts that the backbone selects for a token.
        segment: fixed cost of a segment, which no decision saves.
        """

        def column(name: str) -> Tensor:
            return torch.tensor([getattr(price, name) for price in prices], dtype=torch.float64)[:, None]

        self._token, self._query, self._context = map(column, ("mix_token", "mix_query", "mix_context"))
        self._shared, self._router, self._row = map(column, ("shared_token", "router_token", "expert_row"))
        self._top_k, self._segment = top_k, segment

    def _mixer(self, entered_NS: Tensor, queries_NS: Tensor) -> Tensor:
        # A causal segment of n tokens has n(n+1)/2 visible pairs; the last layer's one query sees all n.
        pairs_NS = entered_NS * (entered_NS + 1) / 2
        pairs_NS[-1] = entered_NS[-1]
        return self._token * entered_NS + self._query * queries_NS + self._context * pairs_NS

    def executed(self, trace: Trace, gate_token: float = 0.0, *, tile: int | None = None) -> Tensor:
        """Cost of what ran, [S].

        Args:
            trace: the counts.
            gate_token: what one decision costs, :attr:`Policy.gate_flops_per_token` where the unit is FLOPs.
            tile: rows of a tile of the grouped product. A segment's rows of a layer are then charged that layer's
                ratio of padded to executed rows, over the whole pack; None charges the rows themselves.
        """
        decided_NS, rows_NS = trace.decided_NS.cpu().double(), trace.rows_NS.cpu().double()
        if tile is not None:
            rows_NS = rows_NS * _padding_ratio(trace.expert_rows_NE.cpu(), tile)
        mixer = self._mixer(trace.entered_NS.cpu().double(), decided_NS)
        shared = self._shared * trace.survived_NS.cpu()
        routed = self._router * trace.routed_NS.cpu() + self._row * rows_NS
        return (mixer + gate_token * decided_NS + shared + routed).sum(0) + self._segment

    def full(self, lengths_S: Tensor) -> Tensor:
        """Executed cost of full compute for segments of these token counts, [S]."""
        return self.executed(self.full_trace(lengths_S))

    def full_trace(self, lengths_S: Tensor, expert_rows_NE: Tensor | None = None) -> Trace:
        """The trace of full compute.

        Args:
            lengths_S: tokens of each segment.
            expert_rows_NE: rows by expert, which depend on the tokens; needed only for a cost in tiles.
        """
        entered_NS = lengths_S.cpu().long().expand(self._row.shape[0], -1)
        decided_NS = entered_NS.clone()
        decided_NS[-1] = 1
        rows_NS = decided_NS * self._top_k
        if expert_rows_NE is None:
            expert_rows_NE = torch.zeros(self._row.shape[0], 0, dtype=torch.long)
        return Trace(
            entered_NS,
            decided_NS,
            survived_NS=decided_NS,
            routed_NS=decided_NS,
            rows_NS=rows_NS,
            expert_rows_NE=expert_rows_NE,
            signal_flops_NS=torch.zeros_like(entered_NS, dtype=torch.float64),
            bypassed_NS=torch.zeros_like(entered_NS),
        )


class FlopModel(CostModel):
    """FLOPs of passes through one backbone."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__([layer.cost for layer in backbone.layers], backbone.top_k)

    def executed(self, trace: Trace, gate_token: float = 0.0, *, tile: int | None = None) -> Tensor:
        """FLOPs of what ran, signals that only the policy read included, [S]."""
        return super().executed(trace, gate_token, tile=tile) + trace.signal_flops_NS.cpu().sum(0)

    def logical(self, trace: Trace) -> Tensor:
        """FLOPs of spec §3's formula, [S]."""
        decided = trace.decided_NS.cpu().double()
        mixer = self._mixer(trace.entered_NS.cpu().double(), decided)
        return (mixer + self._shared * decided + self._row * trace.rows_NS.cpu()).sum(0)

    def hardware(self, trace: Trace, gate_flops_per_token: float, tile: int) -> float:
        """FLOPs of the whole pass when an expert with n rows costs ceil(n / tile) * tile rows."""
        return float(self.executed(trace, gate_flops_per_token, tile=tile).sum())


def _padding_ratio(rows_NE: Tensor, tile: int) -> Tensor:
    """Padded rows by executed rows of each layer, float64 [N,1]; a layer without rows has none to pad."""
    padded_N = tiles(rows_NE, tile).sum(1) * tile
    return (padded_N / rows_NE.sum(1).clamp_min(1).double())[:, None]
