"""Analytic FLOPs of the language model, from what a pass executed (spec §3 and §6).

A multiply-add is 2 FLOPs; norms, activations and rotary embedding are not counted. Three figures:

- executed: rows that ran, the gates' own cost included. Full compute is charged the same way, so the free
  saving of the last layer (only ``<emb>`` is computed there) belongs to every policy.
- logical: what the policy decided, as spec §3 writes it: gates and router cost nothing, and a token dropped in
  a layer still pays that layer's shared expert.
- hardware: executed, with every expert's rows rounded up to whole tiles of ``tile`` rows.

Shape legend: N layers, S segments, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcompute.backbones.base import Backbone
from rlcompute.trace import Trace


class FlopModel:
    """FLOPs of passes through one backbone. All results are float64 on the CPU."""

    def __init__(self, backbone: Backbone) -> None:
        costs = [layer.cost for layer in backbone.layers]

        def column(name: str) -> Tensor:
            return torch.tensor([getattr(cost, name) for cost in costs], dtype=torch.float64)[:, None]

        self._token, self._query, self._context = map(column, ("mix_token", "mix_query", "mix_context"))
        self._shared, self._router, self._row = map(column, ("shared_token", "router_token", "expert_row"))
        self._top_k = backbone.top_k

    def _mixer(self, entered_NS: Tensor, queries_NS: Tensor) -> Tensor:
        # A causal segment of n tokens has n(n+1)/2 visible pairs; the last layer's one query sees all n.
        pairs_NS = entered_NS * (entered_NS + 1) / 2
        pairs_NS[-1] = entered_NS[-1]
        return self._token * entered_NS + self._query * queries_NS + self._context * pairs_NS

    def executed(self, trace: Trace, gate_flops_per_token: float = 0.0) -> Tensor:
        """FLOPs that ran, [S]. ``gate_flops_per_token`` is :attr:`Policy.gate_flops_per_token`."""
        return self._executed_NS(trace, gate_flops_per_token).sum(0)

    def _executed_NS(self, trace: Trace, gate_flops_per_token: float) -> Tensor:
        decided = trace.decided_NS.cpu().double()
        mixer = self._mixer(trace.entered_NS.cpu().double(), decided)
        shared = self._shared * trace.survived_NS.cpu()
        routed = self._router * trace.routed_NS.cpu() + self._row * trace.rows_NS.cpu()
        return mixer + gate_flops_per_token * decided + shared + routed

    def logical(self, trace: Trace) -> Tensor:
        """FLOPs of spec §3's formula, [S]."""
        decided = trace.decided_NS.cpu().double()
        mixer = self._mixer(trace.entered_NS.cpu().double(), decided)
        return (mixer + self._shared * decided + self._row * trace.rows_NS.cpu()).sum(0)

    def hardware(self, trace: Trace, gate_flops_per_token: float, tile: int) -> float:
        """FLOPs of the whole pass when an expert with n rows costs ceil(n / tile) * tile rows."""
        rows_NE = trace.expert_rows_NE.cpu()
        padded_NE = (rows_NE + tile - 1) // tile * tile
        padding = (self._row * (padded_NE - rows_NE)).sum()
        return float(self.executed(trace, gate_flops_per_token).sum() + padding)

    def full(self, lengths_S: Tensor) -> Tensor:
        """Executed FLOPs of full compute for segments of these token counts, [S]."""
        return self.executed(self.full_trace(lengths_S))

    def full_trace(self, lengths_S: Tensor) -> Trace:
        """The trace of full compute, without the rows by expert (they depend on the tokens)."""
        entered_NS = lengths_S.cpu().long().expand(self._row.shape[0], -1)
        decided_NS = entered_NS.clone()
        decided_NS[-1] = 1
        rows_NS = decided_NS * self._top_k
        empty_NE = torch.zeros(self._row.shape[0], 0, dtype=torch.long)
        return Trace(entered_NS, decided_NS, decided_NS, decided_NS, rows_NS, empty_NE)
