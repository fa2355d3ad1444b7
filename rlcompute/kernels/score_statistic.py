"""Score statistic of linear gate heads: the gradient of a segment's log-probability, accumulated as it runs.

For a head with logits ``W f`` and sampled action a, ``grad_W log pi(a | f) = (onehot(a) - pi) f^T``; a segment's
statistic is the sum over its tokens (spec §3).

Shape legend: T packed tokens, S segments, A actions, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcompute.kernels.registry import Backend, runs_anywhere
from rlcompute.kernels.segments import segment_lengths


def naive_segment_score_statistic(residual_TA: Tensor, features_TF: Tensor, cu_seqlens: Tensor) -> Tensor:
    """One token at a time. Same contract as :func:`segment_score_statistic`, in the dtype of the inputs."""
    segments = len(cu_seqlens) - 1
    out_SAF = residual_TA.new_zeros(segments, residual_TA.shape[1], features_TF.shape[1])
    for s in range(segments):
        for t in range(int(cu_seqlens[s]), int(cu_seqlens[s + 1])):
            out_SAF[s] += torch.outer(residual_TA[t], features_TF[t])
    return out_SAF


def segment_score_statistic(residual_TA: Tensor, features_TF: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum of outer products ``residual[t] features[t]^T`` over each segment.

    Args:
        residual_TA: ``[T, A]``, one-hot action minus action probabilities.
        features_TF: ``[T, F]``, inputs of the head.
        cu_seqlens: int64 ``[S + 1]`` on the CPU.

    Returns:
        float32 ``[S, A, F]`` (float64 for float64 inputs); zeros for an empty segment.
    """
    dtype = torch.promote_types(residual_TA.dtype, torch.float32)
    residual_AT, features_TF = residual_TA.to(dtype).t().contiguous(), features_TF.to(dtype)
    lengths = segment_lengths(cu_seqlens)
    out_SAF = torch.empty(
        len(lengths), residual_TA.shape[1], features_TF.shape[1], dtype=dtype, device=features_TF.device
    )
    parts = zip(residual_AT.split(lengths, dim=1), features_TF.split(lengths), out_SAF.unbind(0), strict=True)
    for residual, features, out in parts:
        torch.mm(residual, features, out=out)
    return out_SAF


BACKEND = Backend(segment_score_statistic, runs_anywhere)
