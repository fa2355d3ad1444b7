"""Skip whole tiles of expert rows instead of scattered rows (spec §6: an expert with n rows costs ceil(n / M) tiles).

A grouped product runs tiles of M rows, so skipped rows save time only where they empty a tile. Given the rows that a
policy keeps, out of those that full compute would run, the rows of each expert are ranked: kept ones before skipped
ones, and each of the two by gate weight. An expert's tiles are consecutive M ranks. Then

1. every expert gets back the best of its skipped rows, up to the end of the last tile that it needs for the kept
   ones: they cost nothing;
2. the gate mass (sum of gate weights) that this gave back is the budget for dropping more: an expert's last tile is its
   candidate, the candidate of least gate mass goes first, and its expert's next tile takes its place. Of equal masses
   the first expert's goes first. It ends with the first candidate that has more gate mass than is left.

So no more gate mass is skipped than the policy skipped, nothing runs that full compute would not run, and there are
never more tiles than the policy's own choice needs. The result depends on all tokens of the pack.

Shape legend: T tokens, k selected experts a token, R = T * k rows, E experts, L tiles (at most).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcompute.kernels.routing_plan import tiles


def naive_tile_aware_keep(
    expert_ids_Tk: Tensor, weights_Tk: Tensor, keep_Tk: Tensor, rows_per_tile: int, num_experts: int
) -> Tensor:
    """One expert and one tile at a time. Same contract as :func:`tile_aware_keep`."""
    ids, weights, keep = expert_ids_Tk.flatten().tolist(), weights_Tk.flatten().tolist(), keep_Tk.flatten()
    kept = keep.tolist()
    left = 0.0
    stacks: list[list[list[int]]] = []
    for e in range(num_experts):
        rows = [row for row in range(len(ids)) if ids[row] == e]
        rows.sort(key=lambda row: (not kept[row], -weights[row], row))
        needed = -(-sum(kept[row] for row in rows) // rows_per_tile)
        stack = [rows[i * rows_per_tile : (i + 1) * rows_per_tile] for i in range(needed)]
        left += sum(weights[row] for tile in stack for row in tile if not kept[row])
        stacks.append(stack)
    while candidates := [e for e in range(num_experts) if stacks[e]]:
        mass, cheapest = min((sum(weights[row] for row in stacks[e][-1]), e) for e in candidates)
        if mass > left:
            break
        left -= mass
        stacks[cheapest].pop()
    out = torch.zeros_like(keep)
    out[[row for stack in stacks for tile in stack for row in tile]] = True
    return out.view_as(keep_Tk)


def tile_aware_keep(
    expert_ids_Tk: Tensor, weights_Tk: Tensor, keep_Tk: Tensor, rows_per_tile: int, num_experts: int
) -> Tensor:
    """The rows to run so that whole tiles are skipped; see the module for the rule. Nothing waits for the device.

    Args:
        expert_ids_Tk: int64 ``[T, k]``, what full compute would run.
        weights_Tk: ``[T, k]`` router weights, not negative.
        keep_Tk: bool ``[T, k]``, what the policy keeps of it.
        rows_per_tile: M.
        num_experts: E.

    Returns:
        bool ``[T, k]``.
    """
    # Exact sums: the order of equal masses must not depend on the order of a sum.
    weights_R = weights_Tk.flatten().double()
    order_R = _ranked(expert_ids_Tk.flatten(), weights_R, keep_Tk.flatten())
    expert_R, kept_R = expert_ids_Tk.flatten()[order_R], keep_Tk.flatten()[order_R]
    zeros_E = torch.zeros(num_experts, dtype=torch.int64, device=order_R.device)
    rows_E = zeros_E.index_add(0, expert_R, torch.ones_like(expert_R))
    kept_E = zeros_E.index_add(0, expert_R, kept_R.long())
    tiles_E, needed_E = tiles(rows_E, rows_per_tile), tiles(kept_E, rows_per_tile)

    rank_R = torch.arange(len(order_R), device=order_R.device) - (rows_E.cumsum(0) - rows_E)[expert_R]
    place_R = torch.div(rank_R, rows_per_tile, rounding_mode="floor")
    runs_R = place_R < needed_E[expert_R]
    tile_R = (tiles_E.cumsum(0) - tiles_E)[expert_R] + place_R
    # A bound that needs no count from the device.
    zeros_L = zeros_E.new_zeros(len(order_R) // rows_per_tile + num_experts)
    runs_L = zeros_L.index_add(0, tile_R, runs_R.long()) > 0
    mass_L = zeros_L.double().index_add(0, tile_R, weights_R[order_R] * runs_R)
    # Tiles past the last one belong to nobody: to the last expert, so that tiles stay in the experts' order.
    expert_L = (zeros_L + (num_experts - 1)).index_copy(0, tile_R, expert_R)

    sequence_L = _sequence(mass_L, expert_L, runs_L)
    budget = (weights_R[order_R] * (runs_R & ~kept_R)).sum()
    dropped_L = torch.empty_like(runs_L)
    dropped_L[sequence_L] = mass_L[sequence_L].cumsum(0) <= budget
    keep_R = torch.empty_like(kept_R)
    keep_R[order_R] = runs_R & ~dropped_L[tile_R]
    return keep_R.view_as(keep_Tk)


def _ranked(expert_R: Tensor, weight_R: Tensor, kept_R: Tensor) -> Tensor:
    """Rows by expert; an expert's kept rows first, the highest weight first."""
    order = torch.sort(weight_R, descending=True, stable=True).indices
    return order[torch.sort(expert_R[order] * 2 + ~kept_R[order], stable=True).indices]


def _sequence(mass_L: Tensor, expert_L: Tensor, runs_L: Tensor) -> Tensor:
    """Tiles in the order in which they go; those that do not run come last, where they cost nothing.

    A tile waits for all later tiles of its expert, so it goes when the heaviest of them and itself would: the order is
    that of the running maximum of the masses' ranks, from each expert's last tile to its first.
    """
    count = len(mass_L)
    by_mass = torch.sort(mass_L.masked_fill(~runs_L, -1.0), stable=True).indices
    place_L = torch.empty_like(by_mass)
    place_L[by_mass] = torch.arange(count, device=mass_L.device)
    # One running maximum over all experts, the last expert first: each starts above the ones before it.
    start_L = (expert_L[-1] - expert_L) * count
    heaviest_L = (start_L + place_L).flip(0).cummax(0).values.flip(0) - start_L
    turn_L = heaviest_L * count + (count - 1 - torch.arange(count, device=mass_L.device))
    return torch.sort(turn_L.masked_fill(~runs_L, count * count)).indices
