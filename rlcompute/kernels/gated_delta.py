"""Gated delta rule over packed segments: the recurrence of a Gated DeltaNet layer (spec §2).

Per segment and value head, with unit-norm keys and ``alpha_t = exp(g_t)``:
``S_t = alpha_t S_{t-1} + beta_t k_t (v_t - alpha_t S_{t-1}^T k_t)^T`` and ``o_t = S_t^T q_t / sqrt(Dk)``, ``S_0 = 0``.

Shape legend: T packed tokens, S segments, K key heads, H value heads, D key width, V value width,
N segments of one bucket, L its padded length, C chunk length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcompute.kernels.registry import register, runs_anywhere
from rlcompute.kernels.segments import length_buckets, padded_rows, segment_lengths, unpadding_index

# Added to the squared norm of queries and keys, as in transformers and flash-linear-attention.
NORM_EPS = 1e-6
CHUNK = 64


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
    dtype = torch.promote_types(v_THV.dtype, torch.float32)
    repeat = v_THV.shape[1] // k_TKD.shape[1]
    q = (l2_normalize(q_TKD.to(dtype)) * q_TKD.shape[-1] ** -0.5).transpose(0, 1)
    k = l2_normalize(k_TKD.to(dtype)).transpose(0, 1)
    v, g, beta = (x.to(dtype).transpose(0, 1) for x in (v_THV, g_TH, beta_TH))
    lengths = segment_lengths(cu_seqlens)
    buckets = length_buckets(lengths)
    if not buckets:
        return torch.zeros_like(v_THV)
    padded = [-(-lengths[b[0]] // CHUNK) * CHUNK if lengths[b[0]] > CHUNK else lengths[b[0]] for b in buckets]
    outs = []
    for bucket, length in zip(buckets, padded, strict=True):
        rows_NL = padded_rows(cu_seqlens, torch.tensor(bucket, device=cu_seqlens.device), length).rows_NL
        out_HNLV = _bucket(
            q[:, rows_NL].repeat_interleave(repeat, 0),
            k[:, rows_NL].repeat_interleave(repeat, 0),
            v[:, rows_NL],
            g[:, rows_NL],
            beta[:, rows_NL],
        )
        outs.append(out_HNLV.flatten(1, 2))
    flat = torch.cat(outs, dim=1)
    return flat[:, unpadding_index(cu_seqlens, buckets, padded)].transpose(0, 1).to(v_THV.dtype)


def _bucket(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Chunked form for segments of one padded length, each from a zero state: ``[H, N, L, V]``."""
    heads, count, length, width = v.shape
    size = min(CHUNK, length)
    q, k, v = (x.unflatten(2, (-1, size)) for x in (q, k, v))
    cum, beta = g.unflatten(2, (-1, size)).cumsum(-1), beta.unflatten(2, (-1, size))[..., None]
    lower = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    decay = (cum[..., :, None] - cum[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    system = (k * beta) @ k.transpose(-1, -2) * decay
    scores = q @ k.transpose(-1, -2) * decay
    rhs = torch.cat([v * beta, k * beta * cum.exp()[..., None]], dim=-1)
    new_v, read_k = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True).split(
        [width, k.shape[-1]], dim=-1
    )
    q_read = q * cum.exp()[..., None]
    k_write = k * (cum[..., -1:] - cum).exp()[..., None]
    chunk_decay = cum[..., -1].exp()[..., None, None]
    state = v.new_zeros(heads, count, k.shape[-1], width)
    outs = []
    for i in range(v.shape[2]):
        correction = new_v[:, :, i] - read_k[:, :, i] @ state
        outs.append(q_read[:, :, i] @ state + scores[:, :, i] @ correction)
        state = state * chunk_decay[:, :, i] + k_write[:, :, i].transpose(-1, -2) @ correction
    return torch.stack(outs, dim=2).flatten(2, 3)


register("gated_delta", "torch", gated_delta_rule, probe=runs_anywhere)
