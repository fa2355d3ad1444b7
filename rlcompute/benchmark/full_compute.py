"""Table v: full compute, our packed pass against transformers' own forward at its fastest.

transformers is tried with each of its experts functions and with each way to batch; the fastest is the reference, and
all are shown. FLOPs are what our pass executes for the batch: its last layer computes ``<emb>`` tokens only, the
others' padding and last layer come on top for transformers.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rlcompute.benchmark.bench import Bench
from rlcompute.benchmark.rows import Row, compared
from rlcompute.benchmark.stock import batches, stock_forward, usable_experts
from rlcompute.benchmark.variants import check_agreement
from rlcompute.decision import Full
from rlcompute.encoder import encode
from rlcompute.pack import EmbeddedInput

OURS = "ours, packed"
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
    worst = {
        name: check_agreement(f"{name}, {row}", variant(), ours_Sd, backbone.dtype)
        for name, variant in variants.items()
    }
    timings = bench.time(variants, bench.budget_s / 2)
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
