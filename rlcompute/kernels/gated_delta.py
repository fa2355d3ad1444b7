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
from typing import NamedTuple

import torch
from torch import Tensor

from rlcompute.kernels.registry import Backend, runs_anywhere
from rlcompute.kernels.segments import length_buckets, padded_layout, segment_lengths

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
        beta_TH: write strength ``[T, H]``, >= 0. Below 2 ** -87 it counts as zero and has no gradient.
        cu_seqlens: int64 ``[S + 1]`` on the CPU.

    Returns:
        ``[T, H, V]`` in the dtype of the values. Half precision is computed in float32.
    """
    heads = v_THV.shape[1]
    lengths = segment_lengths(cu_seqlens)
    blocks = length_buckets(lengths, lambda longest: BLOCK_ELEMENTS // (heads * _chunks(longest)[1] ** 2))
    if not blocks:
        return torch.zeros_like(v_THV)
    shapes = [(len(b), *_chunks(lengths[b[0]])) for b in blocks]
    layout = padded_layout(cu_seqlens, blocks, [chunks * length for _, chunks, length in shapes])
    rows = layout.rows_P.to(v_THV.device, non_blocking=True).split([math.prod(shape) for shape in shapes])
    # The base-2 logarithms of decay and write strength are float64: see _pairwise_decay.
    log2_decay_TH = g_TH.double() * math.log2(math.e)
    log2_beta_TH = beta_TH.double().clamp_min(2.0**SMALLEST_LOG2_DECAY).log2()
    inputs = _Inputs(q_TKD, k_TKD, v_THV, log2_decay_TH, log2_beta_TH)
    out_PE = torch.cat([_block(inputs, r.view(shape)) for r, shape in zip(rows, shapes, strict=True)])
    places_T = layout.places_T.to(v_THV.device, non_blocking=True)
    return out_PE.index_select(0, places_T).view(v_THV.shape).to(v_THV.dtype)


class _Inputs(NamedTuple):
    q_TKD: Tensor
    k_TKD: Tensor
    v_THV: Tensor
    log2_decay_TH: Tensor
    log2_beta_TH: Tensor


def _chunks(longest: int) -> tuple[int, int]:
    """Number and length of equal chunks of at most ``CHUNK`` tokens: 130 tokens are 2 x 65, not 128 + 2."""
    chunks = -(-longest // CHUNK)
    return chunks, -(-longest // chunks)


def _block(inputs: _Inputs, rows_NCL: Tensor) -> Tensor:
    """All chunks of a block of segments, in order: padded rows ``[N * C * L, H * V]``."""
    last = rows_NCL.shape[1] - 1
    state_KNDRV = None
    outputs = []
    for step, rows_NL in enumerate(rows_NCL.unbind(1)):
        out_NLKRV, state_KNDRV = _chunk(_gather(inputs, rows_NL), state_KNDRV, step < last)
        outputs.append(out_NLKRV.flatten(2))
    return (torch.stack(outputs, dim=1) if last else outputs[0]).view(rows_NCL.numel(), -1)


class _Chunk(NamedTuple):
    """Heads-first copies of a chunk's rows, at least float32; q and k normalised, logarithms float64."""

    q_KNLD: Tensor
    k_KNLD: Tensor
    v_KRNLV: Tensor
    log2_decay_KRNL: Tensor
    log2_beta_KRNL: Tensor


def _gather(inputs: _Inputs, rows_NL: Tensor) -> _Chunk:
    (segments, length), key_heads, width = rows_NL.shape, inputs.q_TKD.shape[1], inputs.v_THV.shape[2]
    dtype = torch.promote_types(inputs.v_THV.dtype, torch.float32)
    q, k, v, log2_decay, log2_beta = (x.index_select(0, rows_NL.reshape(-1)) for x in inputs)
    q_NLKD = (l2_normalize(q.to(dtype)) * q.shape[-1] ** -0.5).view(segments, length, key_heads, -1)
    k_NLKD = l2_normalize(k.to(dtype)).view(segments, length, key_heads, -1)
    v_NLKRV = v.to(dtype).view(segments, length, key_heads, -1, width)
    logs_NLKR = (x.view(segments, length, key_heads, -1) for x in (log2_decay, log2_beta))
    return _Chunk(
        q_NLKD.permute(2, 0, 1, 3),
        k_NLKD.permute(2, 0, 1, 3),
        v_NLKRV.permute(2, 3, 0, 1, 4),
        *(x.permute(2, 3, 0, 1) for x in logs_NLKR),
    )


def _chunk(x: _Chunk, state_KNDRV: Tensor | None, hand_on: bool) -> tuple[Tensor, Tensor | None]:
    """One chunk of every segment of a block.

    With ``D_ij`` the decay from token j to token i times ``b_j``, and ``d_i`` the decay from before the chunk to i,
    the undamped updates w solve the unit lower triangular system
    ``w_i + sum_{j<i} D_ij (k_i k_j) w_j = v_i - d_i S^T k_i``, the outputs are
    ``o_i = d_i S^T q_i + sum_{j<=i} D_ij (q_i k_j) w_j``, and the state handed on is ``d_L S + sum_j D_Lj k_j w_j^T``.

    Returns:
        Outputs ``[N, L, K, R, V]`` and, if ``hand_on``, the state ``[K, N, D, R, V]``.
    """
    q_KNLD, k_KNLD, v_KRNLV, log2_decay_KRNL, log2_beta_KRNL = x
    dtype, (repeat, _, length, width) = v_KRNLV.dtype, v_KRNLV.shape[1:]
    reach_KRNL = log2_decay_KRNL.cumsum(-1)
    write_KRNL = log2_beta_KRNL - reach_KRNL
    decay_KRNLL = _pairwise_decay(reach_KRNL, write_KRNL, dtype)
    # Key heads are shared by R value heads: their dot products are computed once.
    qk_KN2LD = torch.cat([q_KNLD, k_KNLD], dim=2)
    dots_K1N2LL = (qk_KN2LD @ qk_KN2LD[:, :, length:].transpose(-1, -2)).unsqueeze(1)
    system_KRNLL = decay_KRNLL * dots_K1N2LL[..., length:, :]
    scores_KRNLL = _times(decay_KRNLL, dots_K1N2LL[..., :length, :])
    target_KRNLV = v_KRNLV
    if state_KNDRV is not None:
        reads_KN2LRV = (qk_KN2LD @ state_KNDRV.flatten(3)).unflatten(-1, (repeat, width))
        reads_KRN2LV = reads_KN2LRV.permute(0, 3, 1, 2, 4)
        carried_KRNL1 = _decay(reach_KRNL.clone()).to(dtype).unsqueeze(-1)
        target_KRNLV = target_KRNLV - reads_KRN2LV[..., length:, :] * carried_KRNL1
    update_MLV = torch.linalg.solve_triangular(
        system_KRNLL.flatten(0, 2), target_KRNLV.flatten(0, 2), upper=False, unitriangular=True
    )
    out_KRNLV = torch.bmm(scores_KRNLL.flatten(0, 2), update_MLV).view(v_KRNLV.shape)
    if state_KNDRV is not None:
        out_KRNLV = out_KRNLV + reads_KRN2LV[..., :length, :] * carried_KRNL1
    out_NLKRV = out_KRNLV.permute(2, 3, 0, 1, 4)
    if not hand_on:
        return out_NLKRV, None
    to_end_KRNL1 = _decay(reach_KRNL[..., -1:] + write_KRNL).to(dtype).unsqueeze(-1)
    decayed_KNLRV = (update_MLV.view(v_KRNLV.shape) * to_end_KRNL1).permute(0, 2, 3, 1, 4)
    written_KNDRV = (k_KNLD.transpose(-1, -2) @ decayed_KNLRV.flatten(3)).unflatten(-1, (repeat, width))
    if state_KNDRV is not None:
        written_KNDRV = written_KNDRV + state_KNDRV * carried_KRNL1[..., -1:, :].permute(0, 2, 3, 1, 4)
    return out_NLKRV, written_KNDRV


def _pairwise_decay(reach_KRNL: Tensor, write_KRNL: Tensor, dtype: torch.dtype) -> Tensor:
    """``2 ** (reach_i + write_j)`` for j <= i and 0 for j > i, from float64 exponents.

    The sums of a chunk's logarithms reach thousands where float32 has no digits left for the small difference
    between neighbours. One matrix product of rank four adds the high and low halves of both exponents and
    the causal mask in one pass: as fast as a plain subtraction of float32 sums, and exact.
    """
    reach_high, write_high = reach_KRNL.to(dtype), write_KRNL.to(dtype)
    reach_low, write_low = (reach_KRNL - reach_high).to(dtype), (write_KRNL - write_high).to(dtype)
    one = torch.ones_like(reach_high)
    left_ML4 = torch.stack([reach_high, one, reach_low, one], dim=-1).flatten(0, 2)
    right_M4L = torch.stack([one, write_high, one, write_low], dim=-2).flatten(0, 2)
    length = reach_KRNL.shape[-1]
    future_LL = torch.full((length, length), -math.inf, dtype=dtype, device=one.device).triu_(1)
    return _decay(torch.baddbmm(future_LL, left_ML4, right_M4L)).view(*reach_KRNL.shape, length)


def _decay(log2: Tensor) -> Tensor:
    """``2 ** log2``, exactly zero below ``SMALLEST_LOG2_DECAY``; overwrites its argument as :func:`_times` does.

    Not ``exp``, which is an order of magnitude slower on CPU where its result underflows.
    """
    if log2.requires_grad:
        return torch.exp2(torch.threshold(log2, SMALLEST_LOG2_DECAY, -math.inf))
    return torch.threshold_(log2, SMALLEST_LOG2_DECAY, -math.inf).exp2_()


def _times(x: Tensor, y: Tensor) -> Tensor:
    """``x * y``; overwrites ``x``, a temporary of the caller, where autograd does not record."""
    return x * y if x.requires_grad or y.requires_grad else x.mul_(y)


BACKEND = Backend(gated_delta_rule, runs_anywhere)
