"""Masked execution: the same decisions without compaction, the baseline that saves nothing.

Dropped tokens go through every layer to the end, and are kept from everything that survives: attention does not see
their keys, the delta rule neither writes nor decays at their places, and the short convolution runs over
survivors only. So its embeddings are those of the packed pass (spec §4.3), at full compute's price.

Shape legend: T tokens, Q queries, S segments, N segments of one shape, A queries and B keys of each, H query heads,
G key/value heads, D head width, C channels, d hidden size, k selected experts.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcompute.backbones.base import Backbone
from rlcompute.benchmark.variants import swapped_kernels
from rlcompute.decision import Policy
from rlcompute.encoder import LayerSignals
from rlcompute.kernels.registry import Kernels
from rlcompute.kernels.segments import segment_lengths
from rlcompute.pack import Pack


class _MaskedKernels:
    """Mixer operations that leave out the tokens that are not alive."""

    def __init__(self, own: Kernels, alive_T: Tensor) -> None:
        self._own, self.alive_T = own, alive_T

    def attention(
        self,
        q_QHD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        *,
        scale: float,
        causal: bool = True,
    ) -> Tensor:
        """Fused attention with a mask; segments of one shape share a call."""
        assert causal
        starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for s, shape in enumerate(zip(segment_lengths(cu_q), segment_lengths(cu_k), strict=True)):
            groups[shape].append(s)
        out_QHD = torch.empty_like(q_QHD)
        for (queries, keys), members in groups.items():
            rows_NA = _rows(starts_q, members, queries, q_QHD.device)
            rows_NB = _rows(starts_k, members, keys, q_QHD.device)
            place_A1 = torch.arange(keys - queries, keys, device=q_QHD.device)[:, None]
            place_B = torch.arange(keys, device=q_QHD.device)
            # A dropped query may see itself: without any key its row would be NaN, and spread.
            visible_NAB = (self.alive_T[rows_NB][:, None] | (place_B == place_A1)) & (place_B <= place_A1)
            out_NHAD = F.scaled_dot_product_attention(
                q_QHD[rows_NA].transpose(1, 2),
                k_TGD[rows_NB].transpose(1, 2),
                v_TGD[rows_NB].transpose(1, 2),
                attn_mask=visible_NAB[:, None],
                scale=scale,
                enable_gqa=q_QHD.shape[1] != k_TGD.shape[1],
            )
            out_QHD[rows_NA] = out_NHAD.transpose(1, 2)
        return out_QHD

    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, g_TH: Tensor, beta_TH: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        """No decay and no write at dropped tokens."""
        dropped_T1 = ~self.alive_T[:, None]
        out: Tensor = self._own.gated_delta(
            q, k, v, g_TH.masked_fill(dropped_T1, 0.0), beta_TH.masked_fill(dropped_T1, 0.0), cu_seqlens
        )
        return out

    def causal_conv(
        self, x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, cu_seqlens: Tensor
    ) -> Tensor:
        """Survivors are gathered, convolved and put back."""
        index, bounds = self._own.compaction(self.alive_T, cu_seqlens)
        out_TC = x_TC.new_zeros(x_TC.shape)
        out_TC[index] = self._own.causal_conv(x_TC[index], weight_CK, bias_C, bounds)
        return out_TC


def _rows(starts: list[int], members: list[int], length: int, device: torch.device) -> Tensor:
    first_N = torch.tensor([starts[s] for s in members], device=device)
    return first_N[:, None] + torch.arange(length, device=device)


@torch.no_grad()
def encode_masked(backbone: Backbone, hidden_Td: Tensor, pack: Pack, policy: Policy) -> Tensor:
    """Embeddings [S,d] of :func:`rlcompute.encoder.encode` under the same policy, nothing compacted.

    As there, the last layer computes ``<emb>`` tokens only.

    Args:
        backbone: the frozen model.
        hidden_Td: inputs of the first layer, [T,d].
        pack: where the tokens belong.
        policy: decides for every token, the dropped ones included (which is ignored); its decision about a token
            must not depend on which others are there.
    """
    h_Td = hidden_Td
    masked = _MaskedKernels(backbone.kernels, torch.ones(len(h_Td), dtype=torch.bool, device=h_Td.device))
    own = backbone.kernels
    with swapped_kernels(
        backbone, attention=masked.attention, gated_delta=masked.gated_delta, causal_conv=masked.causal_conv
    ):
        for index, layer in enumerate(backbone.layers):
            entering_Td, entering, is_last = h_Td, pack, index == backbone.num_layers - 1
            if is_last:
                h_Td, pack = layer.mix_emb(h_Td, pack), pack.emb_only()
            else:
                h_Td = layer.mix(h_Td, pack)
            x_Td = layer.moe_input(h_Td)
            signals = LayerSignals(layer, x_Td, entering_Td, entering, is_last)
            decision = policy.decide(index, x_Td, signals, pack)
            ids_Tk, weights_Tk = signals.expert_ids_Tk, signals.weights_Tk
            if decision.top_k is not None:
                weights_Tk = weights_Tk * (
                    torch.arange(ids_Tk.shape[1], device=ids_Tk.device) < decision.top_k
                )
            if decision.keep is not None:
                weights_Tk = weights_Tk * (
                    decision.keep if decision.keep.ndim == 2 else decision.keep[:, None]
                )
            if decision.renormalize:
                weights_Tk = weights_Tk / weights_Tk.sum(dim=-1, keepdim=True)
            plan = own.routing_plan(ids_Tk, None, backbone.num_experts)
            experts = layer.experts
            h_Td = h_Td + layer.shared(x_Td)
            h_Td = h_Td + own.experts(x_Td, plan, weights_Tk, experts.gate_up_E2Fd, experts.down_EdF)
            if decision.drop_T is not None and not is_last:
                masked.alive_T = masked.alive_T & (~decision.drop_T | pack.is_emb_T())
        normed = backbone.final_norm(h_Td)
    return F.normalize(normed.to(torch.promote_types(normed.dtype, torch.float32)), dim=-1)
