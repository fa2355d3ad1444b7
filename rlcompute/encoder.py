"""The one loop that every policy runs through.

Packed tokens go through the layers; in each, the policy decides which tokens leave and which routed experts
run, and only what is left is computed. In the last layer nothing but the ``<emb>`` rows is computed, for every
policy alike, because nothing else is read.

Shape legend: T tokens before the decision, U tokens after it, R tokens that run routed experts, S segments,
N layers, d hidden size, k selected experts, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcompute.backbones.base import Backbone, BackboneLayer
from rlcompute.decision import Decision, Policy
from rlcompute.kernels import registry
from rlcompute.pack import Pack
from rlcompute.trace import Trace


@dataclass(frozen=True)
class Encoded:
    """Result of one pass: unit-norm embeddings, float32 at least, [S,d], and what was executed."""

    embeddings_Sd: Tensor
    trace: Trace


class _LayerRouting:
    """The layer's expert selection, computed for all tokens only if a policy reads it."""

    def __init__(self, layer: BackboneLayer, x_Td: Tensor) -> None:
        self._layer, self._x_Td = layer, x_Td

    @cached_property
    def _routed(self) -> tuple[Tensor, Tensor]:
        return self._layer.route(self._x_Td)

    @property
    def expert_ids_Tk(self) -> Tensor:
        return self._routed[0]

    @property
    def weights_Tk(self) -> Tensor:
        return self._routed[1]

    def of_rows(self, rows_R: Tensor, x_Rd: Tensor) -> tuple[Tensor, Tensor]:
        """Selection of some rows; a skipped token's routing is dead work unless the policy asked for it."""
        if "_routed" in self.__dict__:
            return self._routed[0][rows_R], self._routed[1][rows_R]
        return self._layer.route(x_Rd)


def _executing_rows(decision: Decision, x_Td: Tensor) -> Tensor:
    """int64 [R], tokens that stay and run at least one routed expert."""
    keep = decision.keep
    if keep is None:
        runs_T = torch.ones(x_Td.shape[0], dtype=torch.bool, device=x_Td.device)
    else:
        runs_T = keep if keep.ndim == 1 else keep.any(dim=1)
    if decision.drop_T is not None:
        runs_T = runs_T & ~decision.drop_T
    return runs_T.nonzero().squeeze(1)


def _routed_experts(
    backbone: Backbone,
    layer: BackboneLayer,
    x_Rd: Tensor,
    ids_Rk: Tensor,
    weights_Rk: Tensor,
    keep_Rk: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of the kept experts [R,d], kept experts per token [R], and rows per expert [E]."""
    experts = registry.select("experts", x_Rd.device)
    out_Rd = experts(x_Rd, ids_Rk, weights_Rk, keep_Rk, layer.experts.gate_up_E2Fd, layer.experts.down_EdF)
    if keep_Rk is None:
        per_token_R, executed_ids = ids_Rk.new_full(ids_Rk.shape[:1], backbone.top_k), ids_Rk.flatten()
    else:
        per_token_R, executed_ids = keep_Rk.sum(dim=1), ids_Rk[keep_Rk]
    return out_Rd, per_token_R, torch.bincount(executed_ids, minlength=backbone.num_experts)


def _step(
    backbone: Backbone, index: int, h_Td: Tensor, pack: Pack, policy: Policy
) -> tuple[Tensor, Pack, Trace]:
    """One layer; its trace lacks the layer dimension."""
    layer = backbone.layers[index]
    entered_S = pack.lengths_S
    if index == backbone.num_layers - 1:
        h_Td, pack = layer.mix_emb(h_Td, pack), pack.emb_only()
    else:
        h_Td = layer.mix(h_Td, pack)
    x_Td = layer.moe_input(h_Td)
    decided_S = pack.lengths_S
    routing = _LayerRouting(layer, x_Td)
    decision = policy.decide(index, x_Td, routing, pack)
    if decision.drop_T is not None:
        decision = replace(decision, drop_T=decision.drop_T & ~pack.is_emb_T())

    rows_R = _executing_rows(decision, x_Td)
    x_Rd, segments_R = x_Td[rows_R], pack.segment_ids_T[rows_R]
    ids_Rk, weights_Rk = routing.of_rows(rows_R, x_Rd)
    keep_Rk = decision.keep[rows_R] if decision.keep is not None and decision.keep.ndim == 2 else None
    if keep_Rk is not None and decision.renormalize:
        weights_Rk = weights_Rk * keep_Rk
        weights_Rk = weights_Rk / weights_Rk.sum(dim=-1, keepdim=True)
    out_Rd, per_token_R, expert_rows_E = _routed_experts(backbone, layer, x_Rd, ids_Rk, weights_Rk, keep_Rk)

    if decision.drop_T is not None:
        # Dropped tokens leave before the shared expert too: their output of this layer is never read.
        stays_T = ~decision.drop_T
        index_U, cu_seqlens = registry.select("compaction", h_Td.device)(stays_T, pack.cu_seqlens)
        h_Td, x_Td, pack = h_Td[index_U], x_Td[index_U], pack.take(index_U, cu_seqlens)
        rows_R = (stays_T.cumsum(0) - 1)[rows_R]
    h_Td = (h_Td + layer.shared(x_Td)).index_add_(0, rows_R, out_Rd)

    zeros_S = per_token_R.new_zeros(pack.num_segments)
    executed = Trace(
        entered_S,
        decided_S,
        pack.lengths_S,
        zeros_S.index_add(0, segments_R, torch.ones_like(segments_R)),
        zeros_S.index_add(0, segments_R, per_token_R),
        expert_rows_E,
    )
    return h_Td, pack, executed


@torch.no_grad()
def encode(backbone: Backbone, hidden_Td: Tensor, pack: Pack, policy: Policy) -> Encoded:
    """Embed every segment of a packed batch under a policy.

    With :class:`rlcompute.decision.Full` the result equals transformers' own forward followed by L2
    normalisation of the ``<emb>`` row (spec §1).

    Args:
        backbone: the frozen model.
        hidden_Td: inputs of the first layer, [T,d], from :meth:`Backbone.pack`.
        pack: where the tokens belong.
        policy: decides per layer; ``<emb>`` tokens stay whatever it says.
    """
    h_Td, steps = hidden_Td, []
    for index in range(backbone.num_layers):
        h_Td, pack, executed = _step(backbone, index, h_Td, pack, policy)
        steps.append(executed)
    normed = backbone.final_norm(h_Td)
    wide = torch.promote_types(normed.dtype, torch.float32)
    trace = Trace(**{f.name: torch.stack([getattr(step, f.name) for step in steps]) for f in fields(Trace)})
    return Encoded(F.normalize(normed.to(wide), dim=-1), trace)
