"""Table ii: fewer experts a token. The experts functions of transformers and ours inside the same encoder.

Each is compared with itself at the backbone's own k, so that a slow function gets no credit for its slowness.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlcompute.benchmark.bench import Bench
from rlcompute.benchmark.rows import Row, compared
from rlcompute.benchmark.stock import stock_experts, usable_experts
from rlcompute.benchmark.timing import Timing
from rlcompute.benchmark.variants import MeanExperts, check_agreement, segment_keys, swapped_kernels
from rlcompute.encoder import Encoded, encode
from rlcompute.kernels.registry import Kernel

MEAN_EXPERTS = (8.0, 4.0, 2.35, 1.7, 1.1)
"""Experts a token out of eight; scaled to the top-k of the geometry."""
SELECTED = 8
OURS = "ours"
LABELS = {"eager": "eager loop"}
TABLE = "ii"


def measure(bench: Bench) -> list[Row]:
    """Rows of the table; the embeddings of all functions are checked to agree first."""
    backbone = bench.backbone
    hidden_Td, pack = backbone.pack(bench.uniform)
    keys_S = segment_keys(pack.num_segments, bench.seed, backbone.device)
    swaps: dict[str, dict[str, Kernel]] = {
        LABELS.get(name, name): stock_experts(backbone, name)
        for name in usable_experts(backbone, len(hidden_Td))
    }
    swaps[OURS] = {}

    def run(variant: str, policy: MeanExperts) -> Callable[[], Encoded]:
        def once() -> Encoded:
            with swapped_kernels(backbone, **swaps[variant]):
                return encode(backbone, hidden_Td, pack, policy)

        return once

    variants, flops, worst = {}, {}, {}
    for mean in MEAN_EXPERTS:
        mean *= backbone.top_k / SELECTED
        row = f"mean k {mean:.3g}"
        policy = MeanExperts(keys_S, mean=mean, top_k=backbone.top_k)
        ours = run(OURS, policy)()
        flops[row] = float(bench.flops.executed(ours.trace).sum())
        for name in swaps:
            variants[row, name] = run(name, policy)
            worst[row, name] = _difference(f"{name}, {row}", variants[row, name](), ours, backbone.dtype)
    timings: dict[str, Timing] = {}
    for (
        name
    ) in swaps:  # each is compared with itself: short rounds, in which the machine's speed drifts little
        own = {f"{row}|{name}": variants[row, name] for row in flops}
        timings |= bench.time(own, bench.budget_s / len(swaps))
    first = next(iter(flops))
    return [
        compared(
            TABLE,
            row,
            name,
            timings[f"{row}|{name}"],
            flops[row],
            timings[f"{first}|{name}"],
            flops[first],
            {"difference from ours": f"{worst[row, name]:.1e}"},
        )
        for row, name in variants
    ]


def _difference(what: str, other: Encoded, ours: Encoded, dtype: torch.dtype) -> float:
    return check_agreement(what, other.embeddings_Sd, ours.embeddings_Sd, dtype)
