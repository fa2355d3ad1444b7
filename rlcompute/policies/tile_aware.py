"""A policy whose skips are rounded to whole tiles of expert rows (:mod:`rlcompute.kernels.tile_skip`).

Shape legend: T tokens, U tokens that stay, k selected experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlcompute.decision import Decision, Policy, Routing
from rlcompute.kernels.tile_skip import tile_aware_keep
from rlcompute.pack import Pack


class TileAware:
    """Another policy's decisions, with skipped rows moved so that they empty tiles of the grouped product.

    An embedding then depends on what else is in the pack. It is therefore for serving only: evaluation would measure
    the batches, and training would credit actions that were not executed.
    """

    def __init__(self, policy: Policy, *, rows_per_tile: int, num_experts: int) -> None:
        """Args:
        policy: decides what to drop and how much to skip.
        rows_per_tile: rows of a tile of the experts' kernel.
        num_experts: experts of the backbone.
        """
        self.policy = policy
        self.gate_flops_per_token = policy.gate_flops_per_token
        self._rows_per_tile, self._num_experts = rows_per_tile, num_experts

    def decide(self, layer: int, x_Td: Tensor, routing: Routing, pack: Pack) -> Decision:
        """The policy's drops; its skips at no more gate mass in no more tiles. Reads the routing of all tokens."""
        decision = self.policy.decide(layer, x_Td, routing, pack)
        if decision.keep is None:
            return decision
        ids_Tk, weights_Tk, keep = routing.expert_ids_Tk, routing.weights_Tk, decision.keep
        keep_Tk = keep[:, None].expand_as(ids_Tk) if keep.ndim == 1 else keep
        if decision.drop_T is None:
            return replace(decision, keep=self._rounded(ids_Tk, weights_Tk, keep_Tk))
        # Rows of dropped tokens run nowhere: they are neither there to be skipped nor a budget.
        stays_T = ~decision.drop_T
        stays_T[pack.emb_index_S] = True
        index_U = stays_T.nonzero().squeeze(1)
        rounded_Tk = torch.zeros_like(ids_Tk, dtype=torch.bool)
        rounded_Tk[index_U] = self._rounded(ids_Tk[index_U], weights_Tk[index_U], keep_Tk[index_U])
        return replace(decision, keep=rounded_Tk)

    def _rounded(self, ids_Uk: Tensor, weights_Uk: Tensor, keep_Uk: Tensor) -> Tensor:
        return tile_aware_keep(ids_Uk, weights_Uk, keep_Uk, self._rows_per_tile, self._num_experts)
