"""Softmax attention over packed segments of different lengths, with grouped key/value heads.

Shape legend: Q packed queries, T packed keys, S segments, H query heads, G key/value heads, D head width,
N segments of one bucket, A its padded queries, B its padded keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcompute.kernels.registry import register, runs_anywhere
from rlcompute.kernels.segments import length_buckets, padded_rows, segment_lengths


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
    """One segment, one head at a time, softmax written out. Same contract as :func:`varlen_attention`."""
    group = q_QHD.shape[1] // k_TGD.shape[1]
    out_QHD = torch.zeros_like(q_QHD)
    for s in range(len(cu_q) - 1):
        queries, keys = slice(int(cu_q[s]), int(cu_q[s + 1])), slice(int(cu_k[s]), int(cu_k[s + 1]))
        n_queries, n_keys = queries.stop - queries.start, keys.stop - keys.start
        for h in range(q_QHD.shape[1]):
            for i in range(n_queries):
                visible = n_keys if not causal else max(0, i + 1 + n_keys - n_queries)
                if visible:
                    k = k_TGD[keys, h // group][:visible]
                    weights = torch.softmax(k @ q_QHD[queries.start + i, h] * scale, dim=0)
                    out_QHD[queries.start + i, h] = weights @ v_TGD[keys, h // group][:visible]
    return out_QHD


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

    Args:
        q_QHD: queries ``[Q, H, D]``.
        k_TGD: keys ``[T, G, D]``; H is a multiple of G and query head h reads key head ``h // (H / G)``.
        v_TGD: values ``[T, G, D]``.
        cu_q: int64 ``[S + 1]`` offsets of the segments' queries.
        cu_k: int64 ``[S + 1]`` offsets of the segments' keys.
        scale: factor on the dot products.
        causal: mask later keys.

    Returns:
        ``[Q, H, D]`` in the dtype of the queries.
    """
    lengths_q, lengths_k = segment_lengths(cu_q), segment_lengths(cu_k)
    out_QHD = torch.zeros_like(q_QHD)
    for bucket in length_buckets(
        [n_k if n_q else 0 for n_q, n_k in zip(lengths_q, lengths_k, strict=True)], lambda longest: 64
    ):
        segments = torch.tensor(bucket, device=cu_q.device)
        longest_q, longest_k = max(lengths_q[s] for s in bucket), lengths_k[bucket[0]]
        queries, keys = padded_rows(cu_q, segments, longest_q), padded_rows(cu_k, segments, longest_k)
        q_NHAD = q_QHD[queries.rows_NL].transpose(1, 2)
        k_NGBD, v_NGBD = k_TGD[keys.rows_NL].transpose(1, 2), v_TGD[keys.rows_NL].transpose(1, 2)
        position_A = torch.arange(longest_q, device=cu_q.device)
        position_B = torch.arange(longest_k, device=cu_q.device)
        same_length = all(lengths_q[s] == lengths_k[s] for s in bucket)
        mask_NAB = (position_B < keys.length_N[:, None])[:, None].expand(-1, longest_q, -1)
        if causal:
            last_key_NA = position_A + (keys.length_N - queries.length_N)[:, None]
            mask_NAB = mask_NAB & (position_B <= last_key_NA[:, :, None])
        out_NHAD = F.scaled_dot_product_attention(
            q_NHAD,
            k_NGBD,
            v_NGBD,
            attn_mask=None if causal and same_length else mask_NAB[:, None],
            is_causal=causal and same_length,
            scale=scale,
            enable_gqa=True,
        )
        if not (causal and same_length):
            out_NHAD = torch.where(mask_NAB.any(-1)[:, None, :, None], out_NHAD, 0.0)
        valid_NA = position_A < queries.length_N[:, None]
        out_QHD = out_QHD.index_put((queries.rows_NL[valid_NA],), out_NHAD.transpose(1, 2)[valid_NA])
    return out_QHD


register("attention", "torch", varlen_attention, probe=runs_anywhere)
