"""Routed experts with 0..k executed experts a token (spec §2: the routed sum of a mixture-of-experts layer).

Shape legend: T tokens, k selected experts a token, R executed (token, expert) rows, n rows of one expert, E experts,
d hidden width, F expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcompute.kernels.registry import Backend, runs_anywhere
from rlcompute.kernels.routing_plan import RoutingPlan


def naive_ragged_experts(
    x_Td: Tensor,
    expert_ids_Tk: Tensor,
    weights_Tk: Tensor,
    keep_Tk: Tensor | None,
    gate_up_E2Fd: Tensor,
    down_EdF: Tensor,
) -> Tensor:
    """One (token, expert) pair at a time: what :func:`ragged_experts` computes, from the plan's ingredients."""
    out = torch.zeros_like(x_Td)
    for t in range(len(x_Td)):
        for j in range(expert_ids_Tk.shape[1]):
            if keep_Tk is None or bool(keep_Tk[t, j]):
                e = int(expert_ids_Tk[t, j])
                gate_F, up_F = (gate_up_E2Fd[e] @ x_Td[t]).chunk(2)
                out[t] = out[t] + weights_Tk[t, j] * (down_EdF[e] @ (F.silu(gate_F) * up_F))
    return out


def ragged_experts(
    x_Td: Tensor, plan: RoutingPlan, weights_Tk: Tensor, gate_up_E2Fd: Tensor, down_EdF: Tensor
) -> Tensor:
    """``out[t] = sum_j keep[t, j] * weights[t, j] * FFN_{ids[t, j]}(x[t])``, executing kept pairs only.

    ``FFN_e(x) = down_e (silu(gate_e x) * up_e x)``.

    Args:
        x_Td: ``[T, d]``.
        plan: which pairs to execute, from :func:`rlcompute.kernels.routing_plan.plan_routing`; the experts of a
            token are distinct.
        weights_Tk: ``[T, k]`` router weights, applied as they are (renormalise before).
        gate_up_E2Fd: ``[E, 2F, d]``, gate rows first, then up rows (transformers' layout).
        down_EdF: ``[E, d, F]``.

    Returns:
        ``[T, d]`` in the dtype of ``x_Td``; zeros for a token without executed experts.
    """
    width = down_EdF.shape[2]
    # Half precision accumulates a token's experts in float32.
    out_Td = torch.zeros(x_Td.shape, dtype=torch.promote_types(x_Td.dtype, torch.float32), device=x_Td.device)
    # One pair of products an expert, added straight into the result: a quarter faster than grouped_mm on CPU
    # (a loop of the same products, around whole-stream copies) and as fast as one weighted gather at the end,
    # which would need every row at once. The weights go to the narrow side.
    counts = plan.counts.tolist()
    rows_R, slots_R = plan.token_rows[: sum(counts)], plan.slots[: sum(counts)]
    weights_R1 = weights_Tk[rows_R, slots_R].unsqueeze(1)
    parts = zip(
        rows_R.split(counts),
        weights_R1.split(counts),
        gate_up_E2Fd.unbind(0),
        down_EdF.unbind(0),
        strict=True,
    )
    for rows_n, weights_n1, gate_up_2Fd, down_dF in parts:
        if len(rows_n):
            gate, up = F.linear(x_Td.index_select(0, rows_n), gate_up_2Fd).split(width, dim=1)
            inner = F.silu(gate).mul_(up).mul_(weights_n1)
            out_Td.index_add_(0, rows_n, F.linear(inner, down_dF).to(out_Td.dtype))
    return out_Td.to(x_Td.dtype)


BACKEND = Backend(ragged_experts, runs_anywhere)
