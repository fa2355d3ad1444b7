"""Depthwise causal convolution with SiLU over packed segments (the short convolution of a Gated DeltaNet).

Shape legend: T packed tokens, C channels, K taps, S segments, R rows near a segment's start.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcompute.kernels.registry import register, runs_anywhere
from rlcompute.kernels.segments import positions_in_segment


def naive_causal_conv_silu(
    x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, cu_seqlens: Tensor
) -> Tensor:
    """One token at a time. Same contract as :func:`causal_conv_silu`."""
    taps = weight_CK.shape[1]
    out_TC = torch.zeros_like(x_TC)
    for s in range(len(cu_seqlens) - 1):
        start = int(cu_seqlens[s])
        for t in range(start, int(cu_seqlens[s + 1])):
            acc_C = torch.zeros_like(x_TC[t]) if bias_C is None else bias_C.to(x_TC.dtype).clone()
            for back in range(min(taps, t - start + 1)):
                acc_C = acc_C + x_TC[t - back] * weight_CK[:, taps - 1 - back]
            out_TC[t] = F.silu(acc_C)
    return out_TC


def causal_conv_silu(x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """``silu(bias + sum_j weight[:, K-1-j] * x[t-j])`` with taps that never leave the segment.

    Args:
        x_TC: ``[T, C]``, any floating dtype; half precision is computed in float32.
        weight_CK: ``[C, K]``, the last tap multiplies the current token (layout of ``nn.Conv1d`` squeezed).
        bias_C: ``[C]`` or None.
        cu_seqlens: int64 ``[S + 1]``.

    Returns:
        ``[T, C]`` in the dtype of ``x_TC``.
    """
    dtype = torch.promote_types(x_TC.dtype, torch.float32)
    x, weight = x_TC.to(dtype), weight_CK.to(dtype)
    taps = weight.shape[1]
    position_T = positions_in_segment(cu_seqlens)
    out = x * weight[:, -1]
    for back in range(1, taps):
        shifted = F.pad(x, (0, 0, back, 0))[: len(x)]
        out = torch.addcmul(
            out, shifted.masked_fill((position_T < back)[:, None], 0.0), weight[:, taps - 1 - back]
        )
    if bias_C is not None:
        out = out + bias_C.to(dtype)
    return F.silu(out).to(x_TC.dtype)


register("causal_conv", "torch", causal_conv_silu, probe=runs_anywhere)
