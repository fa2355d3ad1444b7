"""Gated delta rule over packed segments: the recurrence of a Gated DeltaNet layer (spec §2).

Per segment and value head, with unit-norm keys, ``a_t = exp(g_t)`` and ``S_0 = 0``:
``S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T`` and ``o_t = S_t^T q_t / sqrt(D)``.

Up to ``CHUNK`` tokens a segment is one triangular system and needs no state at all; longer ones are cut into equal
chunks that hand a state on. Short segments of similar length are computed together. No chunk ever spans two
segments, so no mask between segments is needed and a segment's result does not depend on its neighbours.

Shape legend: T packed tokens, S segments, K key heads, H = K * R value heads (R a key head), D key width,
V value width, N segments of one block, L the length of its chunks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlcompute.kernels.registry import Backend, runs_anywhere
from rlcompute.kernels.segments import length_buckets, segment_lengths

# Added to the squared norm of queries and keys, as in transformers and flash-linear-attention.
NORM_EPS = 1e-6
# Longest chunk. Arithmetic grows with the chunk, dispatch and state traffic shrink; 96 to 128 was fastest for
# head widths 32 and 128, 64 up to a quarter slower.
CHUNK = 128
# A segment whose pairwise matrices (heads x chunk^2) have so many elements runs alone, from slices of the stream: they
# fill the cache, and gathering it with others would cost more than the dispatch that it saves.
ALONE_ELEMENTS = 60_000
# Elements of the pairwise matrices of a block of shorter segments.
BLOCK_ELEMENTS = 800_000
# Decays below 2 ** -87 (1e-26) count as zero. They cannot change a float32 result, but products with them
# would be denormal, which makes the triangular solve on a CPU ten times slower.
SMALLEST_LOG2_DECAY = -87.0


def l2_normalize(x: Tensor, scale: float = 1.0) -> Tensor:
    """``scale * x / sqrt(sum(x^2) + 1e-6)`` over the last dimension."""
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()
    return x * (torch.rsqrt(squares + NORM_EPS) * scale)


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
        beta_TH: write strength ``[T, H]``, >= 0. Below 2 ** -87 it may count as zero; its gradient is right there too.
        cu_seqlens: int64 ``[S + 1]`` on the CPU.

    Returns:
        ``[T, H, V]`` in the dtype of the values. Half precision is computed in float32. A token with g = 0 and beta = 0
        changes nothing for the others.
    """
    heads, dtype = v_THV.shape[1], torch.promote_types(v_THV.dtype, torch.float32)
    lengths, starts = segment_lengths(cu_seqlens), cu_seqlens.tolist()
    # A write strength with a gradient is a factor; without one it is cheaper among the exponents.
    recorded = torch.is_grad_enabled() and beta_TH.requires_grad
    strength_TH = (
        beta_TH.to(dtype) if recorded else beta_TH.double().clamp_min(2.0**SMALLEST_LOG2_DECAY).log2()
    )
    # The base-2 logarithms of decay and write strength are float64: see _pairwise_decay.
    stream = _Stream(
        l2_normalize(q_TKD.to(dtype), q_TKD.shape[-1] ** -0.5),
        l2_normalize(k_TKD.to(dtype)),
        v_THV.to(dtype),
        g_TH.double() * math.log2(math.e),
        strength_TH,
    )
    out_THV = torch.empty_like(v_THV, memory_format=torch.contiguous_format)

    def members(longest: int) -> int:
        elements = heads * _longest_chunk(longest) ** 2
        return 1 if elements >= ALONE_ELEMENTS else BLOCK_ELEMENTS // elements

    for block in length_buckets(lengths, members):
        if len(block) == 1:
            _run_alone(stream, starts[block[0]], lengths[block[0]], out_THV)
        else:
            _run_together(stream, [starts[s] for s in block], [lengths[s] for s in block], out_THV)
    return out_THV


class _Stream(NamedTuple):
    """The whole packed stream, float32 at least; q and k normalised, logarithms float64.

    ``strength_TH`` is the write strength where autograd records it, else its base-2 logarithm.
    """

    q_TKD: Tensor
    k_TKD: Tensor
    v_THV: Tensor
    log2_decay_TH: Tensor
    strength_TH: Tensor

    def rows(self, index: slice | Tensor, segments: int) -> _Chunk:
        """The chunk of N segments at the N * L rows ``index``, heads first; a slice copies nothing."""
        key_heads = self.q_TKD.shape[1]
        taken = (x[index] if isinstance(index, slice) else x.index_select(0, index) for x in self)
        q_NLKD, k_NLKD, v_NLHV, *gates_NLH = (x.unflatten(0, (segments, -1)) for x in taken)
        log2_decay, strength = (x.permute(2, 0, 1).unflatten(0, (key_heads, -1)) for x in gates_NLH)
        v_KRNLV = v_NLHV.permute(2, 0, 1, 3).unflatten(0, (key_heads, -1))
        return _Chunk(q_NLKD.permute(2, 0, 1, 3), k_NLKD.permute(2, 0, 1, 3), v_KRNLV, log2_decay, strength)


class _Chunk(NamedTuple):
    """One chunk of every segment of a block."""

    q_KNLD: Tensor
    k_KNLD: Tensor
    v_KRNLV: Tensor
    log2_decay_KRNL: Tensor
    strength_KRNL: Tensor


def _longest_chunk(longest: int) -> int:
    """Length of a chunk: equal ones of at most ``CHUNK`` tokens, so that 130 tokens are 2 x 65, not 128 + 2."""
    return -(-longest // -(-longest // CHUNK))


def _run_alone(stream: _Stream, start: int, length: int, out_THV: Tensor) -> None:
    """One segment: its chunks are slices of the stream."""
    stop, step, state = start + length, _longest_chunk(length), None
    for first in range(start, stop, step):
        last = min(first + step, stop)
        out_KRNLV, state = _chunk(stream.rows(slice(first, last), 1), state, last < stop)
        out_THV[first:last] = out_KRNLV.flatten(0, 2).transpose(0, 1)


def _run_together(stream: _Stream, starts: list[int], lengths: list[int], out_THV: Tensor) -> None:
    """Segments of similar length, the longest first, padded to its length by their own last rows: what is computed
    there comes after all that counts, and can neither read nor disturb another segment."""
    start_N1, length_N1 = torch.tensor(starts)[:, None], torch.tensor(lengths)[:, None]
    step, state = _longest_chunk(lengths[0]), None
    for first in range(0, lengths[0], step):
        position_1L = torch.arange(first, min(first + step, lengths[0]))
        inside_M = (position_1L < length_N1).flatten()
        rows_M = (start_N1 + torch.minimum(position_1L, length_N1 - 1)).flatten()
        rows_M = rows_M.to(out_THV.device, non_blocking=True)
        more = first + step < lengths[0]
        out_KRNLV, state = _chunk(stream.rows(rows_M, len(starts)), state, more)
        out_MHV = out_KRNLV.flatten(0, 1).flatten(1, 2).transpose(0, 1)
        if not bool(inside_M.all()):
            kept = inside_M.nonzero().squeeze(1).to(out_THV.device, non_blocking=True)
            rows_M, out_MHV = rows_M.index_select(0, kept), out_MHV.index_select(0, kept)
        out_THV.index_copy_(0, rows_M, out_MHV.to(out_THV.dtype))


def _chunk(x: _Chunk, state_KNDRV: Tensor | None, hand_on: bool) -> tuple[Tensor, Tensor | None]:
    """One chunk of every segment of a block.

    With ``D_ij`` the decay from token j to token i times ``b_j``, and ``d_i`` the decay from before the chunk to i,
    the undamped updates w solve the unit lower triangular system
    ``w_i + sum_{j<i} D_ij (k_i k_j) w_j = v_i - d_i S^T k_i``, the outputs are
    ``o_i = d_i S^T q_i + sum_{j<=i} D_ij (q_i k_j) w_j``, and the state handed on is ``d_L S + sum_j D_Lj k_j w_j^T``.

    Returns:
        Outputs ``[K, R, N, L, V]`` and, if ``hand_on``, the state ``[K, N, D, R, V]``.
    """
    q_KNLD, k_KNLD, v_KRNLV, log2_decay_KRNL, strength_KRNL = x
    dtype, (key_heads, repeat, segments, length, width) = v_KRNLV.dtype, v_KRNLV.shape
    reach_KRNL = log2_decay_KRNL.cumsum(-1)
    factor = strength_KRNL.requires_grad
    write_KRNL = -reach_KRNL if factor else strength_KRNL - reach_KRNL
    decay_KRNLL = _pairwise_decay(reach_KRNL, write_KRNL, dtype)
    if factor:
        decay_KRNLL = decay_KRNLL * strength_KRNL.unsqueeze(-2)
    # Key heads are shared by R value heads: their dot products are computed once.
    q_MLD, k_MLD = q_KNLD.flatten(0, 1), k_KNLD.flatten(0, 1)
    k_MDL = k_MLD.transpose(1, 2)
    kk_K1NLL, qk_K1NLL = (
        torch.bmm(a, k_MDL).view(key_heads, 1, segments, length, length) for a in (k_MLD, q_MLD)
    )
    system_BLL = (decay_KRNLL * kk_K1NLL).flatten(0, 2)
    scores_BLL = _times(decay_KRNLL, qk_K1NLL).flatten(0, 2)
    target_KRNLV = v_KRNLV.clone(memory_format=torch.contiguous_format)
    if state_KNDRV is not None:
        state_MDE = state_KNDRV.flatten(0, 1).flatten(2)
        read_k, read_q = (
            torch.bmm(a, state_MDE).view(key_heads, segments, length, repeat, width).permute(0, 3, 1, 2, 4)
            for a in (k_MLD, q_MLD)
        )
        carried_KRNL1 = _decay(reach_KRNL.clone()).to(dtype).unsqueeze(-1)
        target_KRNLV.addcmul_(read_k, carried_KRNL1, value=-1.0)
    update_BLV = _solve(system_BLL, target_KRNLV.flatten(0, 2))
    if state_KNDRV is None:
        out_BLV = torch.bmm(scores_BLL, update_BLV)
    else:
        out_BLV = _times(read_q, carried_KRNL1).flatten(0, 2).baddbmm_(scores_BLL, update_BLV)
    out_KRNLV = out_BLV.view(v_KRNLV.shape)
    if not hand_on:
        return out_KRNLV, None
    to_end_KRNL1 = _decay(reach_KRNL[..., -1:] + write_KRNL).to(dtype).unsqueeze(-1)
    if factor:
        to_end_KRNL1 = to_end_KRNL1 * strength_KRNL.unsqueeze(-1)
    decayed_BLD = (k_KNLD.unsqueeze(1) * to_end_KRNL1).flatten(0, 2)
    written_BDV = torch.bmm(decayed_BLD.transpose(1, 2), update_BLV)
    written_KNDRV = written_BDV.view(key_heads, repeat, segments, -1, width).permute(0, 2, 3, 1, 4)
    if state_KNDRV is not None:
        written_KNDRV = written_KNDRV + state_KNDRV * carried_KRNL1[..., -1:, :].permute(0, 2, 3, 1, 4)
    return out_KRNLV, written_KNDRV


def _solve(system_BLL: Tensor, target_BLV: Tensor) -> Tensor:
    """``system^-1 target``, unit lower triangular; overwrites the target as :func:`_times` does.

    Solved as ``w^T system^T = target^T``, for which nothing has to be copied into column order.
    """
    recorded = system_BLL.requires_grad or target_BLV.requires_grad
    result_BVL: Tensor = torch.linalg.solve_triangular(
        system_BLL.mT,
        target_BLV.mT,
        upper=True,
        left=False,
        unitriangular=True,
        out=None if recorded else target_BLV.mT,
    )
    return result_BVL.mT


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
