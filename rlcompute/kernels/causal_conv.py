"""Depthwise causal convolution with SiLU over packed segments (the short convolution of a Gated DeltaNet).

Shape legend: T packed tokens, C channels, K taps, S segments.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcompute.kernels.registry import Backend, runs_anywhere
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
            acc_C = torch.zeros_like(x_TC[t]) if bias_C is None else bias_C.to(x_TC.dtype)
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
        cu_seqlens: int64 ``[S + 1]`` on the CPU.

    Returns:
        ``[T, C]`` in the dtype of ``x_TC``.
    """
    dtype = torch.promote_types(x_TC.dtype, torch.float32)
    taps_KC = weight_CK.t().to(dtype).contiguous()
    bias = None if bias_C is None else bias_C.to(dtype)
    recorded = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x_TC, weight_CK, bias_C)
    )
    if recorded or x_TC.device.type != "cpu":
        return _masked_taps(x_TC, taps_KC, bias, cu_seqlens)
    return _shifted_taps(x_TC, taps_KC, bias, cu_seqlens)


def _masked_taps(x_TC: Tensor, taps_KC: Tensor, bias_C: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """Whole-stream shifts with a mask where a tap would cross a boundary: for autograd, and few launches."""
    x = x_TC.to(taps_KC.dtype)
    position_T1 = positions_in_segment(cu_seqlens)[:, None].to(x.device, non_blocking=True)
    out = x * taps_KC[-1]
    for back in range(1, len(taps_KC)):
        shifted = F.pad(x, (0, 0, back, 0))[: len(x)]
        out = out + shifted.masked_fill(position_T1 < back, 0.0) * taps_KC[-1 - back]
    return F.silu(out if bias_C is None else out + bias_C).to(x_TC.dtype)


def _shifted_taps(x_TC: Tensor, taps_KC: Tensor, bias_C: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """Whole-stream shifts without a mask, in place, then the first K-1 rows of each segment again.

    A quarter of the time of the masked form and of a depthwise ``conv2d`` over channels-last memory, and faster than
    blocks of rows that stay in the cache: K passes over memory cost less than dispatching them for every block.
    """
    x = x_TC.to(taps_KC.dtype)
    out_TC = x * taps_KC[-1]
    for back in range(1, min(len(taps_KC), len(x))):  # a stream may be shorter than the kernel
        out_TC[back:].addcmul_(x[:-back], taps_KC[-1 - back])
    if bias_C is not None:
        out_TC += bias_C
    out_TC = F.silu(out_TC, inplace=True).to(x_TC.dtype)
    _redo_segment_starts(out_TC, x_TC, taps_KC, bias_C, cu_seqlens)
    return out_TC


def _redo_segment_starts(
    out_TC: Tensor, x_TC: Tensor, taps_KC: Tensor, bias_C: Tensor | None, cu_seqlens: Tensor
) -> None:
    """Overwrite the rows whose taps reached into the segment before."""
    starts_S, lengths_S = cu_seqlens[:-1], cu_seqlens.diff()
    for position in range(len(taps_KC) - 1):
        rows = starts_S[lengths_S > position] + position
        acc = x_TC[rows].to(taps_KC.dtype) * taps_KC[-1]
        for back in range(1, position + 1):
            acc.addcmul_(x_TC[rows - back].to(taps_KC.dtype), taps_KC[-1 - back])
        if bias_C is not None:
            acc += bias_C
        out_TC[rows] = F.silu(acc, inplace=True).to(out_TC.dtype)


BACKEND = Backend(causal_conv_silu, runs_anywhere)
