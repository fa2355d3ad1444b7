"""Softmax attention over packed segments of different lengths, with grouped key/value heads.

Shape legend: Q packed queries, T packed keys, S segments, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcompute.kernels.registry import Backend, runs_anywhere
from rlcompute.kernels.segments import segment_lengths


def naive_varlen_attention(
    q_QHD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    *,
    scale: float,
    causal: bool = True,
) -> Tensor:
    """One query of one head at a time, softmax written out. Same contract as :func:`varlen_attention`."""
    group = q_QHD.shape[1] // k_TGD.shape[1]
    rows = []
    for s in range(len(cu_q) - 1):
        keys = slice(int(cu_k[s]), int(cu_k[s + 1]))
        n_queries, n_keys = int(cu_q[s + 1] - cu_q[s]), keys.stop - keys.start
        for i in range(n_queries):
            visible = max(0, i + 1 + n_keys - n_queries) if causal else n_keys
            for h in range(q_QHD.shape[1]):
                k_BD, v_BD = k_TGD[keys, h // group][:visible], v_TGD[keys, h // group][:visible]
                scores_B = k_BD @ q_QHD[int(cu_q[s]) + i, h] * scale
                rows.append(torch.softmax(scores_B, dim=0) @ v_BD)
    return torch.stack(rows).view(q_QHD.shape) if rows else torch.zeros_like(q_QHD)


def varlen_attention(
    q_QHD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    *,
    scale: float,
    causal: bool = True,
) -> Tensor:
    """Attention inside each segment only.

    Causal masking is aligned at the bottom right: a segment's last query sees all its keys. So one query a
    segment against all its keys is what the last token would have computed. A query that sees no key
    yields zeros.

    One fused call a segment: measured against length-bucketed padded batches (fused, or by explicit matrix
    products), it is never slower, from 256 short segments to one of 4,000 tokens, and pads nothing.

    Args:
        q_QHD: queries ``[Q, H, D]``.
        k_TGD: keys ``[T, G, D]``; H is a multiple of G and query head h reads key head ``h // (H / G)``.
        v_TGD: values ``[T, G, D]``.
        cu_q: int64 ``[S + 1]`` offsets of the segments' queries, on the CPU.
        cu_k: int64 ``[S + 1]`` offsets of the segments' keys, on the CPU.
        scale: factor on the dot products.
        causal: mask later keys.

    Returns:
        ``[Q, H, D]`` in the dtype of the queries.
    """
    lengths_q, lengths_k = segment_lengths(cu_q), segment_lengths(cu_k)
    q_1HQD, k_1GTD, v_1GTD = (x.transpose(0, 1).unsqueeze(0) for x in (q_QHD, k_TGD, v_TGD))
    outputs = [
        _segment_attention(q_1HAD, k_1GBD, v_1GBD, scale, causal)
        for q_1HAD, k_1GBD, v_1GBD in zip(
            torch.split(q_1HQD, lengths_q, dim=2),
            torch.split(k_1GTD, lengths_k, dim=2),
            torch.split(v_1GTD, lengths_k, dim=2),
            strict=True,
        )
        if q_1HAD.shape[2]
    ]
    if not outputs:
        return torch.zeros_like(q_QHD)
    return torch.cat([out_1HAD[0].transpose(0, 1) for out_1HAD in outputs])


def _segment_attention(q_1HAD: Tensor, k_1GBD: Tensor, v_1GBD: Tensor, scale: float, causal: bool) -> Tensor:
    """Attention of one segment with A >= 1 queries and B >= 0 keys: ``[1, H, A, D]``."""
    queries, keys = q_1HAD.shape[2], k_1GBD.shape[2]
    blind = max(0, queries - keys) if causal and keys else 0 if keys else queries
    if blind:
        # The fused call would return NaN for a query without keys.
        nothing = torch.zeros_like(q_1HAD[:, :, :blind])
        if blind == queries:
            return nothing
        seeing = _segment_attention(q_1HAD[:, :, blind:], k_1GBD, v_1GBD, scale, causal)
        return torch.cat([nothing, seeing], dim=2)
    mask_AB = None
    if causal and 1 < queries < keys:
        # The fused call's own causal mask is aligned at the top left.
        mask_AB = torch.ones(queries, keys, dtype=torch.bool, device=q_1HAD.device).tril(keys - queries)
    return F.scaled_dot_product_attention(
        q_1HAD,
        k_1GBD,
        v_1GBD,
        attn_mask=mask_AB,
        is_causal=causal and queries == keys,
        scale=scale,
        enable_gqa=q_1HAD.shape[1] != k_1GBD.shape[1],
    )


BACKEND = Backend(varlen_attention, runs_anywhere)
