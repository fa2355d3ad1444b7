"""Routed experts with 0..k executed experts a token (spec §2: the routed sum of a mixture-of-experts layer).

Shape legend: T tokens, k selected experts a token, E experts, d hidden width, F expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcompute.kernels.registry import register, runs_anywhere
from rlcompute.kernels.routing_plan import plan_routing


def naive_ragged_experts(
    x_Td: Tensor,
    expert_ids_Tk: Tensor,
    weights_Tk: Tensor,
    keep_Tk: Tensor | None,
    gate_up_E2Fd: Tensor,
    down_EdF: Tensor,
) -> Tensor:
    """One (token, expert) pair at a time. Same contract as :func:`ragged_experts`."""
    out = torch.zeros_like(x_Td)
    for t in range(len(x_Td)):
        for j in range(expert_ids_Tk.shape[1]):
            if keep_Tk is None or bool(keep_Tk[t, j]):
                e = int(expert_ids_Tk[t, j])
                gate_F, up_F = (gate_up_E2Fd[e] @ x_Td[t]).chunk(2)
                out[t] = out[t] + weights_Tk[t, j] * (down_EdF[e] @ (F.silu(gate_F) * up_F))
    return out


def ragged_experts(
    x_Td: Tensor,
    expert_ids_Tk: Tensor,
    weights_Tk: Tensor,
    keep_Tk: Tensor | None,
    gate_up_E2Fd: Tensor,
    down_EdF: Tensor,
) -> Tensor:
    """``out[t] = sum_j keep[t, j] * weights[t, j] * FFN_{expert_ids[t, j]}(x[t])``, executing kept pairs only.

    Args:
        x_Td: ``[T, d]``.
        expert_ids_Tk: int64 ``[T, k]``, distinct within a token.
        weights_Tk: ``[T, k]`` router weights, applied as they are (renormalise before).
        keep_Tk: bool ``[T, k]`` pairs to execute; None executes all.
        gate_up_E2Fd: ``[E, 2F, d]``, gate rows first, then up rows (transformers' layout).
        down_EdF: ``[E, d, F]``.

    Returns:
        ``[T, d]`` in the dtype of ``x_Td``; zeros for a token without executed experts.
    """
    plan = plan_routing(expert_ids_Tk, keep_Tk, len(gate_up_E2Fd))
    dtype = torch.promote_types(x_Td.dtype, torch.float32)
    out = torch.zeros(x_Td.shape, dtype=dtype, device=x_Td.device)
    start = 0
    for e, count in enumerate(plan.counts.tolist()):
        if count:
            rows, slots = plan.token_rows[start : start + count], plan.slots[start : start + count]
            gate_up = F.linear(x_Td[rows], gate_up_E2Fd[e])
            gate, up = gate_up.chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, down_EdF[e])
            out.index_add_(0, rows, y.to(dtype) * weights_Tk[rows, slots, None].to(dtype))
        start += count
    return out.to(x_Td.dtype)


register("experts", "torch", ragged_experts, probe=runs_anywhere)
