"""Gate heads that save a wanted share of the FLOPs with a mix of SKIP and DROP, without training.

Shape legend: N layers, d hidden size, F = d + 1 features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from rlcompute.benchmark.bench import Bench
from rlcompute.decision import DROP, SKIP, Policy
from rlcompute.encoder import encode
from rlcompute.pack import Pack
from rlcompute.policies.gates import GateHeads, calibrate, init_heads

SPREAD = 2.0
"""Standard deviation of a logit over tokens: trained gates are sure of most tokens."""
DROP_LAG = 3.0
"""By how much DROP is less likely than SKIP at equal evidence: dropping is for good, and adds up over layers."""
STEPS = 8
SAMPLE = 4
"""Inputs that the search for the bias runs on."""


def heads_saving(bench: Bench, share: float, make: Callable[[GateHeads, Pack], Policy]) -> GateHeads:
    """Heads with random directions, and a common bias of SKIP and DROP such that ``share`` of the FLOPs is saved.

    Args:
        bench: model and inputs.
        share: of full compute's executed FLOPs.
        make: the policy that will run the heads, for a pack.
    """
    backbone, inputs = bench.backbone, bench.uniform[:SAMPLE]
    hidden_Td, pack = backbone.pack(inputs)
    full = bench.full_flops(inputs)
    blank = init_heads(
        *calibrate(backbone, inputs), skip=0.25, drop=0.25, late_skip_bias=0.0, droppable="all"
    )
    generator = torch.Generator().manual_seed(bench.seed)
    weight_N3F = torch.randn(blank.weight_N3F.shape, generator=generator)
    weight_N3F *= SPREAD * weight_N3F.shape[-1] ** -0.5

    def heads(bias: float) -> GateHeads:
        biased_N3F = weight_N3F.clone()
        biased_N3F[:, SKIP, -1] += bias
        biased_N3F[:, DROP, -1] += bias - DROP_LAG
        return replace(blank, weight_N3F=biased_N3F).to(backbone.device)

    def saved(bias: float) -> float:
        policy = make(heads(bias), pack)
        trace = encode(backbone, hidden_Td, pack, policy).trace
        return 1.0 - float(bench.flops.executed(trace, policy.gate_flops_per_token).sum()) / full

    low, high = -10.0, 10.0
    for _ in range(STEPS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if saved(middle) < share else (low, middle)
    return heads(high)
