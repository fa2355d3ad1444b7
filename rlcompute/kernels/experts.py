"""Routed experts with 0..k executed experts a token (spec §2: the routed sum of a mixture-of-experts layer).

Shape legend: T tokens, k selected experts a token, R executed (token, expert) rows, n rows of one expert or group,
E experts, d hidden width, F expert width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcompute.kernels.registry import Backend, runs_anywhere
from rlcompute.kernels.routing_plan import RoutingPlan

# Rows of a group of experts.
GROUP_ROWS = 4096


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
    tensors = (x_Td, weights_Tk, gate_up_E2Fd, down_EdF)
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if recorded or x_Td.dtype not in (torch.float32, torch.float64) or x_Td.device.type != "cpu":
        return _expert_by_expert(x_Td, plan, weights_Tk, gate_up_E2Fd, down_EdF)
    return _in_groups(x_Td, plan, weights_Tk, gate_up_E2Fd, down_EdF)


def _expert_by_expert(
    x_Td: Tensor, plan: RoutingPlan, weights_Tk: Tensor, gate_up_E2Fd: Tensor, down_EdF: Tensor
) -> Tensor:
    """One pair of products an expert, added straight into the result: for autograd, and for half precision, which
    accumulates a token's experts in float32."""
    out_Td = torch.zeros(x_Td.shape, dtype=torch.promote_types(x_Td.dtype, torch.float32), device=x_Td.device)
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
            gate, up = F.linear(x_Td.index_select(0, rows_n), gate_up_2Fd).chunk(2, dim=1)
            inner = F.silu(gate).mul_(up).mul_(weights_n1)  # the weights go to the narrow side
            out_Td.index_add_(0, rows_n, F.linear(inner, down_dF).to(out_Td.dtype))
    return out_Td.to(x_Td.dtype)


def _in_groups(
    x_Td: Tensor, plan: RoutingPlan, weights_Tk: Tensor, gate_up_E2Fd: Tensor, down_EdF: Tensor
) -> Tensor:
    """Products expert by expert, all else for groups of experts at once, and one weighted gather at the end.

    What lies between the products is then done by all threads, which makes few rows an expert a fifth faster on two
    cores than :func:`_expert_by_expert`; a group is small enough to stay in the cache.
    """
    k, width = weights_Tk.shape[1], down_EdF.shape[2]
    counts = plan.counts.tolist()
    rows_R, slots_R = plan.token_rows[: sum(counts)], plan.slots[: sum(counts)]
    y_Rd = x_Td.new_empty(len(rows_R), x_Td.shape[1])
    gate_ups, downs = gate_up_E2Fd.unbind(0), down_EdF.unbind(0)
    start = 0
    for first, end in _groups(counts):
        sizes = counts[first:end]
        stop = start + sum(sizes)
        x_nd = x_Td.index_select(0, rows_R[start:stop])
        gate_up_n2F = x_Td.new_empty(stop - start, 2 * width)
        for x, out, weight in zip(
            x_nd.split(sizes), gate_up_n2F.split(sizes), gate_ups[first:end], strict=True
        ):
            torch.mm(x, weight.t(), out=out)
        inner_nF = F.silu(gate_up_n2F[:, :width]).mul_(gate_up_n2F[:, width:])
        parts = zip(inner_nF.split(sizes), y_Rd[start:stop].split(sizes), downs[first:end], strict=True)
        for inner, out, weight in parts:
            torch.mm(inner, weight.t(), out=out)
        start = stop
    pair_R = rows_R * k + slots_R
    if plan.keep_Tk is None:
        row_Tk = torch.empty(weights_Tk.shape, dtype=torch.int64)
        row_Tk.view(-1)[pair_R] = torch.arange(len(pair_R))
        return F.embedding_bag(row_Tk, y_Rd, mode="sum", per_sample_weights=weights_Tk)
    pair_R, row_R = pair_R.sort()
    kept_T = plan.keep_Tk.sum(dim=1)
    weights_R = weights_Tk.reshape(-1)[pair_R]
    return F.embedding_bag(row_R, y_Rd, kept_T.cumsum(0) - kept_T, mode="sum", per_sample_weights=weights_R)


def _groups(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of experts with at most ``GROUP_ROWS`` rows together, or one expert with more."""
    first = rows = 0
    for expert, count in enumerate(counts):
        if expert > first and rows + count > GROUP_ROWS:
            yield first, expert
            first, rows = expert, 0
        rows += count
    if counts:
        yield first, len(counts)


BACKEND = Backend(ragged_experts, runs_anywhere)
