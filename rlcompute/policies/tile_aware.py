"""A policy whose skips are rounded to whole tiles of expert rows (:mod:`rlcompute.kernels.tile_skip`).

Shape legend: T tokens, k selected experts.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from rlcompute.decision import Bypass, Decision, Policy, Signals, bypass_of
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

    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass | None:
        """The policy's."""
        return bypass_of(self.policy, layer, emb_Sd, pack)

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """The policy's drops; its skips at no more gate mass in no more tiles. Reads the routing of all tokens."""
        decision = self.policy.decide(layer, x_Td, signals, pack)
        if decision.keep is None:
            return decision
        keep, experts = decision.keep, self._num_experts
        ids_Tk, weights_Tk = (x[:, : decision.top_k] for x in (signals.expert_ids_Tk, signals.weights_Tk))
        keep_Tk = keep[:, None].expand_as(ids_Tk) if keep.ndim == 1 else keep[:, : decision.top_k]
        if decision.drop_T is not None:
            # Rows of dropped tokens are neither there to be skipped nor to be run instead: they go to an expert of
            # their own, of which nothing is kept.
            leaves_T = decision.drop_T.clone()
            leaves_T[pack.emb_index_S] = False
            ids_Tk, keep_Tk = ids_Tk.masked_fill(leaves_T[:, None], experts), keep_Tk & ~leaves_T[:, None]
            experts += 1
        rounded_Tk = tile_aware_keep(ids_Tk, weights_Tk, keep_Tk, self._rows_per_tile, experts)
        return replace(decision, keep=rounded_Tk)
