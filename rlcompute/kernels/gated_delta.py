"""Gated delta rule over packed segments: the recurrence of a Gated DeltaNet layer (spec §2).

Per segment and value head, with unit-norm keys, ``a_t = exp(g_t)`` and ``S_0 = 0``:
``S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T`` and ``o_t = S_t^T q_t / sqrt(D)``.

Segments of similar length are computed together in blocks small enough for the cache. Up to ``CHUNK``
tokens a segment is one triangular system and needs no state at all; longer ones are cut into equal chunks
that hand a state on. No chunk ever spans two segments, so no mask between segments is needed and a segment's
result does not depend on its neighbours.

Shape legend: T packed tokens, S segments, K key heads, H = K * R value heads (R a key head), D key width,
V value width, N segments of one block, L the length of its chunks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlcompute.kernels.registry import register, runs_anywhere
from rlcompute.kernels.segments import length_buckets, padded_rows, segment_lengths, unpadding_index

# Added to the squared norm of queries and keys, as in transformers and flash-linear-attention.
NORM_EPS = 1e-6
# Longest chunk. Arithmetic grows with the chunk, dispatch and state traffic shrink; 96 to 128 was fastest for
# head widths 32 and 128, 64 up to a quarter slower.
CHUNK = 128
# Elements of a block's pairwise matrices (heads x segments x chunk^2): a few of them must fit in the L2 cache.
BLOCK_ELEMENTS = 400_000
# Decays below 2 ** -87 (1e-26) count as zero. They cannot change a float32 result, but products with them
# would be denormal, which makes the triangular solve on a CPU ten times slower.
SMALLEST_LOG2_DECAY = -87.0


def l2_normalize(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def naive_gated_delta_rule(
    q_TKD: Tensor, k_TKD: Tensor, v_THV: Tensor, g_TH: Tensor, beta_TH: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """The recurrence, one token at a time. Same contract as :func:`gated_delta_rule`."""
    repeat = v_THV.shape[1] // k_TKD.shape[1]
    q_THD = l2_normalize(q_TKD).repeat_interleave(repeat, dim=1) * q_TKD.shape[-1] ** -0.5
    k_THD = l2_normalize(k_TKD).repeat_interleave(repeat, dim=1)
    outputs = []
    for s in range(len(cu_seqlens) - 1):
        state_HDV = v_THV.new_zeros(v_THV.shape[1], k_TKD.shape[2], v_THV.shape[2])
        for t in range(int(cu_seqlens[s]), int(cu_seqlens[s + 1])):
            state_HDV = state_HDV * g_TH[t].exp()[:, None, None]
            predicted_HV = (state_HDV * k_THD[t][..., None]).sum(1)
            delta_HV = (v_THV[t] - predicted_HV) * beta_TH[t][:, None]
            state_HDV = state_HDV + k_THD[t][..., None] * delta_HV[:, None]
            outputs.append((state_HDV * q_THD[t][..., None]).sum(1))
    return torch.stack(outputs) if outputs else torch.zeros_like(v_THV)


def gated_delta_rule(
    q_TKD: Tensor, k_TKD: Tensor, v_THV: Tensor, g_TH: Tensor, beta_TH: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Gated delta rule, a fresh state for each segment.

    Args:
        q_TKD: queries ``[T, K, D]``, not normalised: the kernel applies the L2 norm and ``D ** -0.5``.
        k_TKD: keys ``[T, K, D]``, not normalised.
        v_THV: values ``[T, H, V]``; H is a multiple of K and value head h reads key head ``h // (H / K)``.
        g_TH: log decay ``[T, H]``, finite and <= 0.
        beta_TH: write strength ``[T, H]``.
        cu_seqlens: int64 ``[S + 1]``.

    Returns:
        ``[T, H, V]`` in the dtype of the values. Half precision is computed in float32.
    """
    heads, width = v_THV.shape[1:]
    lengths = segment_lengths(cu_seqlens)
    blocks = length_buckets(lengths, lambda longest: BLOCK_ELEMENTS // (heads * _chunk_length(longest) ** 2))
    if not blocks:
        return torch.zeros_like(v_THV)
    inputs = (q_TKD, k_TKD, v_THV, g_TH, beta_TH)
    outputs, padded = [], []
    for block in blocks:
        length = _chunk_length(lengths[block[0]])
        chunks = -(-lengths[block[0]] // length)
        padded.append(chunks * length)
        segments = torch.tensor(block, device=cu_seqlens.device)
        rows_NCL = padded_rows(cu_seqlens, segments, padded[-1]).rows_NL.view(len(block), chunks, length)
        outputs.append(_block(inputs, rows_NCL).reshape(heads, -1, width))
    out_HTV = torch.cat(outputs, dim=1).index_select(1, unpadding_index(cu_seqlens, blocks, padded))
    return out_HTV.transpose(0, 1).to(v_THV.dtype)


def _chunk_length(longest: int) -> int:
    """Equal chunks of at most ``CHUNK`` tokens: 130 tokens are 2 x 65, not 128 + 2."""
    return -(-longest // -(-longest // CHUNK))


def _block(inputs: tuple[Tensor, ...], rows_NCL: Tensor) -> Tensor:
    """All chunks of one block of segments, in order: ``[H, N, C, L, V]``."""
    last = rows_NCL.shape[1] - 1
    state_KNDRV = None
    outputs = []
    for step, rows_NL in enumerate(rows_NCL.unbind(1)):
        out_HNLV, state_KNDRV = _chunk(*_gather(inputs, rows_NL), state_KNDRV, step < last)
        outputs.append(out_HNLV)
    return torch.stack(outputs, dim=2) if last else outputs[0]


def _gather(inputs: tuple[Tensor, ...], rows_NL: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Heads-first copies of a chunk's rows: q, k normalised, v, log decay, beta; at least float32."""
    q_TKD, _, v_THV, _, _ = inputs
    (segments, length), key_heads, width = rows_NL.shape, q_TKD.shape[1], v_THV.shape[2]
    dtype = torch.promote_types(v_THV.dtype, torch.float32)
    q, k, v, g, beta = (x.index_select(0, rows_NL.reshape(-1)).to(dtype) for x in inputs)
    q_KNLD = (l2_normalize(q) * q.shape[-1] ** -0.5).view(segments, length, key_heads, -1).permute(2, 0, 1, 3)
    k_KNLD = l2_normalize(k).view(segments, length, key_heads, -1).permute(2, 0, 1, 3)
    v_KRNLV = v.view(segments, length, key_heads, -1, width).permute(2, 3, 0, 1, 4)
    g_KRNL, beta_KRNL = (x.view(segments, length, key_heads, -1).permute(2, 3, 0, 1) for x in (g, beta))
    return q_KNLD, k_KNLD, v_KRNLV, g_KRNL, beta_KRNL


def _chunk(
    q_KNLD: Tensor,
    k_KNLD: Tensor,
    v_KRNLV: Tensor,
    g_KRNL: Tensor,
    beta_KRNL: Tensor,
    state_KNDRV: Tensor | None,
    hand_on: bool,
) -> tuple[Tensor, Tensor | None]:
    """One chunk of every segment of a block.

    With ``D_ij`` the decay from token j to token i and ``d_i`` that from before the chunk to i, the updates u
    solve the unit lower triangular system ``u_i + b_i sum_{j<i} D_ij (k_i k_j) u_j = b_i (v_i - d_i S^T k_i)``,
    the outputs are ``o_i = d_i S^T q_i + sum_{j<=i} D_ij (q_i k_j) u_j``, and the state handed on is
    ``d_L S + sum_j D_Lj k_j u_j^T``.

    Returns:
        Outputs ``[H, N, L, V]`` and, if ``hand_on``, the state ``[K, N, D, R, V]``.
    """
    key_heads, repeat, segments, length, width = v_KRNLV.shape
    beta_KRNL1 = beta_KRNL.unsqueeze(-1)
    # float64, because a difference of two large float32 sums would lose the small decays between neighbours.
    log2_KRNL = g_KRNL.double().mul(math.log2(math.e)).cumsum(-1)
    decay_KRNLL = _pairwise_decay(log2_KRNL, v_KRNLV.dtype)
    # Key heads are shared by R value heads: their dot products are computed once.
    qk_KN2LD = torch.cat([q_KNLD, k_KNLD], dim=2)
    dots_K1N2LL = (qk_KN2LD @ qk_KN2LD[:, :, length:].transpose(-1, -2)).unsqueeze(1)
    system_KRNLL = _times(decay_KRNLL * beta_KRNL1, dots_K1N2LL[..., length:, :])
    scores_KRNLL = _times(decay_KRNLL, dots_K1N2LL[..., :length, :])
    target_KRNLV = v_KRNLV * beta_KRNL1
    if state_KNDRV is not None:
        reads_KN2LRV = (qk_KN2LD @ state_KNDRV.flatten(3)).unflatten(-1, (repeat, width))
        reads_KRN2LV = reads_KN2LRV.permute(0, 3, 1, 2, 4)
        carried_KRNL1 = _decay(log2_KRNL.to(v_KRNLV.dtype)).unsqueeze(-1)
        target_KRNLV = target_KRNLV - reads_KRN2LV[..., length:, :] * (carried_KRNL1 * beta_KRNL1)
    update_MLV = torch.linalg.solve_triangular(
        system_KRNLL.flatten(0, 2), target_KRNLV.flatten(0, 2), upper=False, unitriangular=True
    )
    out_KRNLV = torch.bmm(scores_KRNLL.flatten(0, 2), update_MLV).view(v_KRNLV.shape)
    if state_KNDRV is not None:
        out_KRNLV = out_KRNLV + reads_KRN2LV[..., :length, :] * carried_KRNL1
    out_HNLV = out_KRNLV.reshape(key_heads * repeat, segments, length, width)
    if not hand_on:
        return out_HNLV, None
    to_end_KRNL1 = _decay((log2_KRNL[..., -1:] - log2_KRNL).to(v_KRNLV.dtype)).unsqueeze(-1)
    decayed_KNLRV = (update_MLV.view(v_KRNLV.shape) * to_end_KRNL1).permute(0, 2, 3, 1, 4)
    written_KNDRV = (k_KNLD.transpose(-1, -2) @ decayed_KNLRV.flatten(3)).unflatten(-1, (repeat, width))
    if state_KNDRV is not None:
        written_KNDRV = written_KNDRV + state_KNDRV * carried_KRNL1[..., -1:, :].permute(0, 2, 3, 1, 4)
    return out_HNLV, written_KNDRV


def _pairwise_decay(log2_KRNL: Tensor, dtype: torch.dtype) -> Tensor:
    """``2 ** (log2_i - log2_j)`` for j <= i and 0 for j > i.

    The differences are taken by one matrix product of rank four over the sums' high and low halves, which
    adds the causal mask in the same pass: as fast as a plain subtraction, and exact for neighbours.
    """
    length = log2_KRNL.shape[-1]
    high = log2_KRNL.to(dtype)
    low = (log2_KRNL - high).to(dtype)
    one = torch.ones_like(high)
    left_ML4 = torch.stack([high, one, low, one], dim=-1).flatten(0, 2)
    right_M4L = torch.stack([one, -high, one, -low], dim=-2).flatten(0, 2)
    future_LL = torch.full((length, length), -math.inf, dtype=dtype, device=high.device).triu_(1)
    return _decay(torch.baddbmm(future_LL, left_ML4, right_M4L)).view(*log2_KRNL.shape, length)


def _decay(log2: Tensor) -> Tensor:
    """``2 ** log2``, exactly zero below ``SMALLEST_LOG2_DECAY``. (``exp`` is slow where it underflows.)"""
    return torch.exp2(torch.threshold(log2, SMALLEST_LOG2_DECAY, -math.inf))


def _times(x: Tensor, y: Tensor) -> Tensor:
    """``x * y``; overwrites ``x``, a temporary of the caller, where autograd does not record."""
    return x * y if x.requires_grad or y.requires_grad else x.mul_(y)


register("gated_delta", "torch", gated_delta_rule, probe=runs_anywhere)
