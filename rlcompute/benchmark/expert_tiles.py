"""Table iii: the experts operation alone, rows per expert against tiles and time, as the batch grows.

A grouped product runs whole tiles of rows, so skipped rows save time on such hardware only where they empty a
tile (the paper's "Tile-Bound Constraints"). Blind skipping removes the rows of least gate weight; tile-aware skipping
gives up the same gate mass in whole tiles.

Shape legend: T tokens, k selected experts, E experts, d hidden size.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcompute.benchmark.bench import Bench
from rlcompute.benchmark.rows import Row, compared
from rlcompute.benchmark.timing import synchronize
from rlcompute.kernels.routing_plan import tiles
from rlcompute.kernels.tile_skip import tile_aware_keep
from rlcompute.passes import TILE

logger = logging.getLogger(__name__)

SKIPPED = 0.5
"""Share of the rows that blind skipping removes."""
POPULARITY = 0.5
"""Standard deviation of the experts' log popularity: some are asked for several times as often as others."""
TABLE = "iii"


@dataclass(frozen=True)
class _Routing:
    """Selected experts [T,k], their weights [T,k], and what a variant keeps of them, None for all."""

    ids_Tk: Tensor
    weights_Tk: Tensor
    keep_Tk: Tensor | None

    def to(self, device: torch.device) -> _Routing:
        keep_Tk = None if self.keep_Tk is None else self.keep_Tk.to(device)
        return _Routing(self.ids_Tk.to(device), self.weights_Tk.to(device), keep_Tk)


def measure(bench: Bench) -> list[Row]:
    """Rows of the table, from few tokens to many as far as the budget reaches."""
    backbone = bench.backbone
    counts = bench.geometry.expert_tokens
    rows: list[Row] = []
    left_s = bench.budget_s
    for place, tokens in enumerate(counts):
        if left_s < 0.0:
            logger.warning("benchmark: table iii ends before %d tokens: its time is used up", tokens)
            break
        start = time.perf_counter()
        rows += _one_size(bench, tokens, left_s / (len(counts) - place))
        synchronize(backbone.device)
        left_s -= time.perf_counter() - start
    return rows


def _one_size(bench: Bench, tokens: int, budget_s: float) -> list[Row]:
    backbone = bench.backbone
    layer = backbone.layers[0]
    generator = torch.Generator().manual_seed(bench.seed)
    x_Td = torch.randn(tokens, backbone.hidden_size, generator=generator).to(backbone.device, backbone.dtype)
    routings = {
        name: routing.to(backbone.device)
        for name, routing in _routings(backbone.num_experts, backbone.top_k, tokens, generator).items()
    }

    def run(routing: _Routing) -> Callable[[], Tensor]:
        weights_Tk = routing.weights_Tk.to(backbone.dtype)

        def once() -> Tensor:
            plan = backbone.kernels.routing_plan(routing.ids_Tk, routing.keep_Tk, backbone.num_experts)
            experts = layer.experts
            out: Tensor = backbone.kernels.experts(
                x_Td, plan, weights_Tk, experts.gate_up_E2Fd, experts.down_EdF
            )
            return out

        return once

    timings = bench.time({name: run(routing) for name, routing in routings.items()}, budget_s)
    full = timings["full"]
    out = []
    for name, routing in routings.items():
        counts_E = _rows_by_expert(routing, backbone.num_experts)
        executed = float(counts_E.sum()) * layer.cost.expert_row
        extra = {
            "rows per expert": f"{float(counts_E.double().mean()):.0f}",
            f"tiles of {TILE}": f"{int(tiles(counts_E, TILE).sum())}",
            "gate mass": f"{_gate_mass(routing):.2f}",
        }
        full_flops = tokens * backbone.top_k * layer.cost.expert_row
        out.append(
            compared(TABLE, f"{tokens} tokens", name, timings[name], executed, full, full_flops, extra)
        )
    return out


def _routings(num_experts: int, k: int, tokens: int, generator: torch.Generator) -> dict[str, _Routing]:
    """Full, blind and tile-aware, over the same selection by lognormal popularity."""
    popularity_E = POPULARITY * torch.randn(num_experts, generator=generator)
    logits_TE = popularity_E + torch.randn(tokens, num_experts, generator=generator)
    weights_Tk, ids_Tk = logits_TE.softmax(dim=1).topk(k, dim=1)
    weights_Tk = weights_Tk / weights_Tk.sum(dim=1, keepdim=True)
    least = weights_Tk.flatten().kthvalue(max(1, int(SKIPPED * weights_Tk.numel()))).values
    blind_Tk = weights_Tk > least
    aware_Tk = tile_aware_keep(ids_Tk, weights_Tk, blind_Tk, TILE, num_experts)
    percent = f"{100 * SKIPPED:.0f} %"
    return {
        "full": _Routing(ids_Tk, weights_Tk, None),
        f"blind, {percent} skipped": _Routing(ids_Tk, weights_Tk, blind_Tk),
        "tile-aware, same gate mass": _Routing(ids_Tk, weights_Tk, aware_Tk),
    }


def _rows_by_expert(routing: _Routing, num_experts: int) -> Tensor:
    executed = routing.ids_Tk.flatten() if routing.keep_Tk is None else routing.ids_Tk[routing.keep_Tk]
    return torch.bincount(executed, minlength=num_experts)


def _gate_mass(routing: _Routing) -> float:
    """Share of the gate weight that still runs."""
    kept = routing.weights_Tk if routing.keep_Tk is None else routing.weights_Tk * routing.keep_Tk
    return float(kept.sum() / routing.weights_Tk.sum())
