"""Table v: full compute, our packed pass against transformers' own forward at its fastest.

transformers is tried with each of its experts functions and with each way to batch; the fastest is the reference, and
all are shown. What was far behind in the first pass was not timed again: rows of one round. FLOPs are what our pass
executes for the batch: its last layer computes ``<emb>`` tokens only; padding and a whole last layer come on top for
transformers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from torch import Tensor

from rlcompute.benchmark.bench import Bench
from rlcompute.benchmark.rows import Row, compared
from rlcompute.benchmark.stock import batches, stock_forward, usable_experts
from rlcompute.benchmark.timing import Timing, synchronize
from rlcompute.benchmark.variants import check_agreement
from rlcompute.decision import Full
from rlcompute.encoder import encode
from rlcompute.pack import EmbeddedInput

logger = logging.getLogger(__name__)

OURS = "ours, packed"
HOPELESS = 1.5
"""What takes this many times as long as the fastest of transformers' variants in the first pass is not timed again."""
TABLE = "v"


def measure(bench: Bench) -> list[Row]:
    """Rows of the table; embeddings are checked to agree first."""
    shortest, longest = min(x.length for x in bench.mixed), max(x.length for x in bench.mixed)
    return [
        *_one_batch(bench, bench.uniform, f"{len(bench.uniform)} inputs of {bench.geometry.length} tokens"),
        *_one_batch(bench, bench.mixed, f"{len(bench.mixed)} inputs of {shortest} to {longest} tokens"),
    ]


def _one_batch(bench: Bench, inputs: list[EmbeddedInput], row: str) -> list[Row]:
    backbone = bench.backbone
    lengths = [x.length for x in inputs]

    def ours() -> Tensor:
        return encode(backbone, *backbone.pack(inputs), Full()).embeddings_Sd

    def stock(groups: list[list[int]], experts: str) -> Callable[[], Tensor]:
        return lambda: stock_forward(backbone, inputs, groups, experts)

    variants: dict[str, Callable[[], Tensor]] = {OURS: ours}
    for way, groups in batches(lengths).items():
        largest = max(len(group) * max(lengths[s] for s in group) for group in groups)
        for experts in usable_experts(backbone, largest):
            variants[f"transformers {experts}, {way}"] = stock(groups, experts)
    ours_Sd = ours()
    worst, first = {}, {}
    for name, variant in variants.items():
        start = time.perf_counter()
        out_Sd = variant()
        synchronize(backbone.device)
        first[name] = Timing((time.perf_counter() - start,))
        logger.info("table v, %s, %s: %.2f s in the first pass", row, name, first[name].median)
        worst[name] = check_agreement(f"{name}, {row}", out_Sd, ours_Sd, backbone.dtype)
    limit = HOPELESS * min(timing.median for name, timing in first.items() if name != OURS)
    close = {name: run for name, run in variants.items() if name == OURS or first[name].median <= limit}
    timings = {**first, **bench.time(close, bench.budget_s / 2)}
    fastest = min((name for name in timings if name != OURS), key=lambda name: timings[name].median)
    flops = bench.full_flops(inputs)
    return [
        compared(
            TABLE,
            row,
            name + (" (fastest)" if name == fastest else ""),
            timing,
            flops,
            timings[fastest],
            flops,
            {"difference from ours": f"{worst[name]:.1e}"},
        )
        for name, timing in timings.items()
    ]
