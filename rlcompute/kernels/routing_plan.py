"""Plan of a ragged expert computation: which token rows each expert reads, in expert order.

Shape legend: T tokens, k selected experts a token, R = T * k (token, slot) pairs, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcompute.kernels.registry import Backend, runs_anywhere


@dataclass(frozen=True)
class RoutingPlan:
    """Rows sorted by expert; the shapes do not depend on how many rows are kept, so nothing waits for the device.

    Attributes:
        expert_ids_Tk: int64 ``[T, k]``, what the plan was made from.
        keep_Tk: bool ``[T, k]`` or None, likewise.
        token_rows: int64 ``[R]`` token of each row: expert 0's rows first, in token order inside an expert; pairs
            that are not kept lie at the end, past ``offsets[-1]``, and must not be computed.
        slots: int64 ``[R]`` which of the token's k selections the row is.
        offsets: int64 ``[E]`` end of each expert's rows; expert e owns ``offsets[e] - counts[e] : offsets[e]``.
        counts: int64 ``[E]`` rows of each expert.
    """

    expert_ids_Tk: Tensor
    keep_Tk: Tensor | None
    token_rows: Tensor
    slots: Tensor
    offsets: Tensor
    counts: Tensor


def naive_plan_routing(expert_ids_Tk: Tensor, keep_Tk: Tensor | None, num_experts: int) -> RoutingPlan:
    """One expert at a time. Same contract as :func:`plan_routing`."""
    tokens, k = expert_ids_Tk.shape
    kept = torch.ones_like(expert_ids_Tk, dtype=torch.bool) if keep_Tk is None else keep_Tk
    rows: list[tuple[int, int]] = []
    counts: list[int] = []
    for e in range(num_experts):
        mine = [
            (t, j) for t in range(tokens) for j in range(k) if kept[t, j] and int(expert_ids_Tk[t, j]) == e
        ]
        rows += mine
        counts.append(len(mine))
    rows += [(t, j) for t in range(tokens) for j in range(k) if not kept[t, j]]
    pairs = torch.tensor(rows, dtype=torch.int64).view(-1, 2)
    counts_E = torch.tensor(counts, dtype=torch.int64)
    return RoutingPlan(expert_ids_Tk, keep_Tk, pairs[:, 0], pairs[:, 1], counts_E.cumsum(0), counts_E)


def plan_routing(expert_ids_Tk: Tensor, keep_Tk: Tensor | None, num_experts: int) -> RoutingPlan:
    """Sort the kept (token, slot) pairs by expert.

    Args:
        expert_ids_Tk: int64 ``[T, k]``, each in ``[0, num_experts)``.
        keep_Tk: bool ``[T, k]``, pairs to execute; None keeps all. A token may keep 0..k of its experts.
        num_experts: E.
    """
    k = expert_ids_Tk.shape[1]
    keys_Tk = expert_ids_Tk if keep_Tk is None else expert_ids_Tk.masked_fill(~keep_Tk, num_experts)
    keys_R = keys_Tk.reshape(-1)
    # Narrow keys sort several times faster, and the expert numbers of every published model fit.
    narrow = keys_R.to(torch.int16 if num_experts < 2**15 else torch.int64)
    order_R = torch.sort(narrow, stable=True).indices
    counts_E = torch.zeros(num_experts + 1, dtype=torch.int64, device=keys_R.device)
    counts_E = counts_E.index_add_(0, keys_R, torch.ones_like(keys_R))[:num_experts]
    token_rows = torch.div(order_R, max(k, 1), rounding_mode="floor")
    slots = order_R - token_rows * k
    return RoutingPlan(expert_ids_Tk, keep_Tk, token_rows, slots, counts_E.cumsum(0), counts_E)


def tiles(counts: Tensor, rows_per_tile: int) -> Tensor:
    """Hardware tiles that a grouped GEMM runs: ``ceil(n_e / M)`` for each expert (spec §6).

    Args:
        counts: int64 ``[..., E]`` rows of each expert.
        rows_per_tile: M.

    Returns:
        int64 of the shape of ``counts``.
    """
    return torch.div(counts + (rows_per_tile - 1), rows_per_tile, rounding_mode="floor")


def naive_tile_map(plan: RoutingPlan, rows_per_tile: int) -> tuple[Tensor, Tensor]:
    """One expert at a time, without the unused entries at the end. Else the contract of :func:`tile_map`."""
    pairs = [
        (expert, start)
        for expert, (stop, count) in enumerate(zip(plan.offsets.tolist(), plan.counts.tolist(), strict=True))
        for start in range(stop - count, stop, rows_per_tile)
    ]
    table = torch.tensor(pairs, dtype=torch.int32).view(-1, 2)
    return table[:, 0], table[:, 1]


def tile_map(plan: RoutingPlan, rows_per_tile: int) -> tuple[Tensor, Tensor]:
    """Tiles of a grouped GEMM: up to ``rows_per_tile`` consecutive rows of one expert, in the order of the rows.

    How many there are depends on the routing and stays on the device. The tables are as long as the largest
    number that R rows of E experts can need, which shapes tell: every tile is full but the last of each expert.

    Args:
        plan: rows that are not kept are in no tile.
        rows_per_tile: M.

    Returns:
        int32 ``tile_expert`` and ``tile_start`` (first row), both -1 past the last tile; both of length
        ``floor((R + min(E, R) * (M - 1)) / M)``.
    """
    rows, experts = len(plan.token_rows), len(plan.counts)
    most = (rows + min(experts, rows) * (rows_per_tile - 1)) // rows_per_tile
    per_expert_E = tiles(plan.counts, rows_per_tile)
    ends_E = per_expert_E.cumsum(0)
    tile_N = torch.arange(most, device=ends_E.device)
    expert_N = torch.searchsorted(ends_E, tile_N, right=True)
    # What lies past the last tile is looked up under the last expert, and then struck out.
    unused_N, row_expert_N = expert_N >= experts, expert_N.clamp(max=experts - 1)
    first_row_E, first_tile_E = plan.offsets - plan.counts, ends_E - per_expert_E
    start_N = first_row_E[row_expert_N] + (tile_N - first_tile_E[row_expert_N]) * rows_per_tile
    return expert_N.masked_fill(unused_N, -1).int(), start_N.masked_fill(unused_N, -1).int()


BACKEND = Backend(plan_routing, runs_anywhere)
