"""Attention in which every key has a mass: how training sees that tokens are dropped (spec §4).

Key j counts with the weight ``mass_j * exp(s_ij)`` for all queries but its own, for which it counts with ``exp(s_ii)``.
A mass of 1 is ordinary attention, a mass of 0 attention without that key, and the gradient with respect to the mass is
right at both ends: there is no logarithm of it.

Shape legend: Q packed queries, T packed keys, S segments, H = G * R query heads, G key/value heads, D head width,
N segments of one block, A the queries of each of them, L their keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcompute.kernels.segments import length_buckets

# Scores of a block (heads x queries x keys x segments): more fall out of the cache, fewer cost dispatch.
BLOCK_ELEMENTS = 400_000
# A key without mass may have a score so far above all that count that exp() would overflow, and infinity times the
# mass of 0 would be no number. Its share, and with it the gradient of its mass, is cut off at exp(60) = 1e26.
HIGHEST_EXCESS = 60.0


def naive_masked_attention(
    q_QHD: Tensor, k_TGD: Tensor, v_TGD: Tensor, cu_q: Tensor, cu_k: Tensor, mass_T: Tensor, *, scale: float
) -> Tensor:
    """One query of one head at a time. Same contract as :func:`masked_attention`."""
    group = q_QHD.shape[1] // k_TGD.shape[1]
    rows = []
    for s in range(len(cu_q) - 1):
        first, queries = int(cu_k[s]), int(cu_q[s + 1] - cu_q[s])
        for i in range(queries):
            own = int(cu_k[s + 1]) - queries + i
            weight_B = torch.cat([mass_T[first:own], mass_T.new_ones(1)])
            for h in range(q_QHD.shape[1]):
                k_BD, v_BD = k_TGD[first : own + 1, h // group], v_TGD[first : own + 1, h // group]
                share_B = weight_B * (k_BD @ q_QHD[int(cu_q[s]) + i, h] * scale).exp()
                rows.append(share_B @ v_BD / share_B.sum())
    return torch.stack(rows).view(q_QHD.shape) if rows else torch.zeros_like(q_QHD)


def masked_attention(
    q_QHD: Tensor, k_TGD: Tensor, v_TGD: Tensor, cu_q: Tensor, cu_k: Tensor, mass_T: Tensor, *, scale: float
) -> Tensor:
    """Causal attention inside each segment, keys weighted by their masses.

    Args:
        q_QHD: queries ``[Q, H, D]``: of the last tokens of each segment, of all of them or of fewer.
        k_TGD: keys ``[T, G, D]``; H is a multiple of G and query head h reads key head ``h // (H / G)``.
        v_TGD: values ``[T, G, D]``.
        cu_q: int64 ``[S + 1]`` offsets of the segments' queries, on the CPU.
        cu_k: int64 ``[S + 1]`` offsets of the segments' keys, on the CPU.
        mass_T: ``[T]``, from 0 to 1, any floating dtype.
        scale: factor on the dot products.

    Returns:
        ``[Q, H, D]`` in the dtype of the queries; half precision is computed in float32. Differentiable with respect
        to all four tensors.
    """
    counts_S, lengths_S = cu_q.diff(), cu_k.diff()
    most_queries, heads = int(counts_S.max()) if len(counts_S) else 0, q_QHD.shape[1]
    dtype = torch.promote_types(q_QHD.dtype, torch.float32)
    q, k, v, mass = (x.to(dtype) for x in (q_QHD, k_TGD, v_TGD, mass_T))

    def members(longest: int) -> int:
        return BLOCK_ELEMENTS // (heads * longest * min(longest, most_queries))

    outputs, order = [], []
    asking = torch.where(counts_S > 0, lengths_S, 0)
    for block in length_buckets(asking.tolist(), members):
        starts_Q, starts_K, counts, lengths = (x[block] for x in (cu_q, cu_k, counts_S, lengths_S))
        rows_NA, inside_NA = _rows(starts_Q, counts)
        own_NA = _rows(lengths - counts, counts)[0]
        keys_NL, _ = _rows(starts_K, lengths)
        rows, own, keys = (x.to(q.device, non_blocking=True) for x in (rows_NA, own_NA, keys_NL))
        out_NAHD = _block(q, k, v, mass, rows, own, keys, scale)
        inside_M = inside_NA.flatten()
        kept = None if bool(inside_M.all()) else inside_M.nonzero().squeeze(1)
        out_MHD, rows_M = out_NAHD.flatten(0, 1), rows_NA.flatten()
        outputs.append(out_MHD if kept is None else out_MHD.index_select(0, kept.to(out_MHD.device)))
        order.append(rows_M if kept is None else rows_M[kept])
    if not outputs:
        return torch.zeros_like(q_QHD)
    order_Q = torch.cat(order).argsort().to(q_QHD.device, non_blocking=True)
    return torch.cat(outputs).index_select(0, order_Q).to(q_QHD.dtype)


def _rows(starts_N: Tensor, lengths_N: Tensor) -> tuple[Tensor, Tensor]:
    """Consecutive numbers from each start, padded by the last of them to the longest, and which are no padding."""
    position_1L = torch.arange(int(lengths_N.max()))[None]
    rows_NL = starts_N[:, None] + torch.minimum(position_1L, lengths_N[:, None] - 1)
    return rows_NL, position_1L < lengths_N[:, None]


def _block(
    q_QHD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    mass_T: Tensor,
    rows_NA: Tensor,
    own_NA: Tensor,
    keys_NL: Tensor,
    scale: float,
) -> Tensor:
    """Segments of similar length: ``[N, A, H, D]``.

    Args:
        rows_NA: rows of ``q_QHD``.
        own_NA: place of each query's own key among the keys of its segment.
        keys_NL: rows of the keys; padding comes after the own key of every query and so has no weight.
    """
    (segments, queries), length = rows_NA.shape, keys_NL.shape[1]
    kv_heads, repeat = k_TGD.shape[1], q_QHD.shape[1] // k_TGD.shape[1]
    q_NAHD = (q_QHD.index_select(0, rows_NA.flatten()) * scale).unflatten(0, (segments, queries))
    q_NGRAD = q_NAHD.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    k_NGLD, v_NGLD = (
        x.index_select(0, keys_NL.flatten()).unflatten(0, (segments, length)).transpose(1, 2)
        for x in (k_TGD, v_TGD)
    )
    weight_NAL = _weights(mass_T[keys_NL], own_NA)
    weight_N11AL = weight_NAL[:, None, None]
    scores_NGRAL = (q_NGRAD.flatten(2, 3) @ k_NGLD.mT).unflatten(2, (repeat, queries))
    # The shift cancels out, so it needs no gradient. Taken over the keys that count, it keeps their sum above zero.
    highest = scores_NGRAL.detach().masked_fill(weight_N11AL == 0, -torch.inf).amax(-1, keepdim=True)
    share_NGRAL = (scores_NGRAL - highest).clamp(max=HIGHEST_EXCESS).exp() * weight_N11AL
    out_NGRAD = (share_NGRAL.flatten(2, 3) @ v_NGLD).unflatten(2, (repeat, queries))
    out_NGRAD = out_NGRAD / share_NGRAL.sum(-1, keepdim=True)
    out_NAHD: Tensor = out_NGRAD.permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out_NAHD


def _weights(mass_NL: Tensor, own_NA: Tensor) -> Tensor:
    """``[N, A, L]``: the mass before the query's own key, 1 for that, 0 after it."""
    place_L, own_NA1 = torch.arange(mass_NL.shape[1], device=mass_NL.device), own_NA[..., None]
    earlier_NAL = torch.where(place_L < own_NA1, mass_NL[:, None], 0.0)
    return torch.where(place_L == own_NA1, 1.0, earlier_NAL)
