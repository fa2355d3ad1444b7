"""Short causal convolution over the survivors of each segment: how training sees that tokens are dropped (spec §4).

Shape legend: T packed tokens, C channels, K taps, S segments, A surviving tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcompute.pack import Alive


def naive_masked_causal_conv_silu(
    x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, cu_seqlens: Tensor, alive: Alive
) -> Tensor:
    """One token at a time. Same contract as :func:`masked_causal_conv_silu`."""
    rows = []
    for s in range(len(cu_seqlens) - 1):
        survivors: list[int] = []
        for t in range(int(cu_seqlens[s]), int(cu_seqlens[s + 1])):
            acc_C = x_TC[t] * weight_CK[:, -1]
            taps = zip(reversed(survivors), reversed(weight_CK[:, :-1].unbind(1)), strict=False)
            for earlier, weight_C in taps:
                acc_C = acc_C + alive.mass_T[earlier] * x_TC[earlier] * weight_C
            rows.append(F.silu(acc_C if bias_C is None else acc_C + bias_C))
            if bool(alive.is_alive_T[t]):
                survivors.append(t)
    return torch.stack(rows) if rows else torch.zeros_like(x_TC)


def masked_causal_conv_silu(
    x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, cu_seqlens: Tensor, alive: Alive
) -> Tensor:
    """``silu(bias + weight[:, K-1] * x[t] + sum_{j>=1} weight[:, K-1-j] * mass[p_j] * x[p_j])``.

    ``p_j`` is the j-th survivor before t in t's segment, so survivors get what a packed convolution without the others
    gives them; a dropped token reads the survivors before it too.

    Args:
        x_TC: ``[T, C]``, any floating dtype; half precision is computed in float32.
        weight_CK: ``[C, K]``, the last tap multiplies the current token.
        bias_C: ``[C]`` or None.
        cu_seqlens: int64 ``[S + 1]`` on the CPU.
        alive: masses and survivors of the T tokens.

    Returns:
        ``[T, C]`` in the dtype of ``x_TC``. Differentiable; which tokens are taps is not.
    """
    dtype = torch.promote_types(x_TC.dtype, torch.float32)
    x, taps_KC = x_TC.to(dtype), weight_CK.t().to(dtype)
    out = x * taps_KC[-1]
    survivors_A = alive.is_alive_T.nonzero().squeeze(1)
    if len(survivors_A):
        before_T, in_segment_T = _survivors_before(alive.is_alive_T, cu_seqlens)
        surviving_AC = (x * alive.mass_T.to(dtype)[:, None]).index_select(0, survivors_A)
        for back in range(1, len(taps_KC)):
            tap_TC = surviving_AC.index_select(0, (before_T - back).clamp_(min=0))
            out = out + tap_TC.masked_fill((in_segment_T < back)[:, None], 0.0) * taps_KC[-1 - back]
    return F.silu(out if bias_C is None else out + bias_C.to(dtype)).to(x_TC.dtype)


def _survivors_before(is_alive_T: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """How many survivors come before each token in the whole pack, and how many of them in its segment."""
    before_T = is_alive_T.cumsum(0) - is_alive_T.long()
    starts_T = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
    return before_T, before_T - before_T[starts_T.to(before_T.device, non_blocking=True)]
