"""Table i: a share of the tokens leaves in one early layer. Full compute, masked execution, packed execution.

The masked variant's FLOPs are those that its decisions leave, although it computes the dropped tokens all the same: its
conversion says what masking makes of the decisions.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rlcompute.benchmark.bench import Bench
from rlcompute.benchmark.masked import encode_masked
from rlcompute.benchmark.rows import Row, compared
from rlcompute.benchmark.variants import KeepShare, check_agreement, segment_keys
from rlcompute.decision import Full
from rlcompute.encoder import encode

KEEP = (1.0, 0.75, 0.5, 0.25)
TABLE = "i"


def measure(bench: Bench) -> list[Row]:
    """Rows of the table; the masked and the packed embeddings are checked to agree first."""
    backbone = bench.backbone
    hidden_Td, pack = backbone.pack(bench.uniform)
    keys_S = segment_keys(pack.num_segments, bench.seed, backbone.device)
    variants: dict[tuple[str, str], Callable[[], object]] = {
        (f"keep {KEEP[0]:g}", "full"): lambda: encode(backbone, hidden_Td, pack, Full())
    }

    def runs(policy: KeepShare) -> tuple[Callable[[], Tensor], Callable[[], object]]:
        return (
            lambda: encode_masked(backbone, hidden_Td, pack, policy),
            lambda: encode(backbone, hidden_Td, pack, policy),
        )

    full_flops = bench.full_flops(bench.uniform)
    flops = {"keep 1": full_flops}
    extra: dict[str, dict[str, str]] = {}
    for keep in KEEP:
        row = f"keep {keep:g}"
        policy = KeepShare(keys_S, layer=bench.geometry.prune_layer, keep=keep)
        variants[row, "masked"], variants[row, "packed"] = runs(policy)
        packed = encode(backbone, hidden_Td, pack, policy)
        masked_Sd = encode_masked(backbone, hidden_Td, pack, policy)
        worst = check_agreement(f"masked, {row}", masked_Sd, packed.embeddings_Sd, backbone.dtype)
        flops[row] = float(bench.flops.executed(packed.trace, policy.gate_flops_per_token).sum())
        extra[row] = {"masked against packed": f"{worst:.1e}"}
    timings = bench.time({f"{row}|{name}": run for (row, name), run in variants.items()})
    reference = timings["keep 1|full"]
    return [
        compared(TABLE, row, name, timings[f"{row}|{name}"], flops[row], reference, full_flops, extra[row])
        for row, name in variants
    ]
