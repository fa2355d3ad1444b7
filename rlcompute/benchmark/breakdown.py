"""Table iv: where the language model's pass spends its time, under full compute, greedy and sampled gates.

Layers, kernels, policy and pack are wrapped in proxies that tell a stopwatch who is at work; the encoder itself
is what always runs. The totals are timed without proxies. Vision tower and token embedding come before the pass, the
same for every policy; their share is stated in proportion to full compute's pass.

Shape legend: T tokens, S segments, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial

from torch import Tensor

from rlcompute.backbones.base import BackboneLayer, Selection
from rlcompute.benchmark.bench import Bench
from rlcompute.benchmark.gates import heads_saving
from rlcompute.benchmark.rows import Row, compared
from rlcompute.benchmark.timing import Stopwatch, Timing
from rlcompute.benchmark.variants import segment_keys, swapped_kernels
from rlcompute.decision import Bypass, Decision, Full, Policy, Signals, bypass_of
from rlcompute.encoder import encode
from rlcompute.kernels.registry import Kernel
from rlcompute.pack import Pack
from rlcompute.policies.gates import GateHeads, GreedyGates, SampledGates

TARGET_SAVED = 0.45
"""Share of the FLOPs that the gates save: the middle of the range that training aims at."""
TABLE = "iv"
VISION, EVERY = "vision and embedding", "every policy"
GATES, COMPACTION, PLANNER, STATISTIC = "gates", "compaction", "planner", "score statistic"
OVERHEAD = (PLANNER, GATES, COMPACTION, STATISTIC)
"""Components that full compute does not need; the planner is counted although full compute plans as well."""
COMPONENTS = (
    "attention",
    "gated delta",
    "router",
    "routed experts",
    "shared expert",
    "norms",
    *OVERHEAD,
    "other",
)
KERNELS = {
    "experts": "routed experts",
    "routing_plan": PLANNER,
    "compaction": COMPACTION,
    "score_statistic": STATISTIC,
}


class _TimedLayer:
    """A layer that charges its parts to components."""

    def __init__(self, layer: BackboneLayer, watch: Stopwatch) -> None:
        self._layer, self._watch = layer, watch
        self.experts, self.cost, self.is_attention = layer.experts, layer.cost, layer.is_attention
        self._mixer = "attention" if layer.cost.mix_context else "gated delta"

    def mix(self, h_Td: Tensor, pack: Pack) -> Tensor:
        with self._watch(self._mixer):
            return self._layer.mix(h_Td, pack)

    def mix_emb(self, h_Td: Tensor, pack: Pack) -> Tensor:
        with self._watch(self._mixer):
            return self._layer.mix_emb(h_Td, pack)

    def moe_input(self, h_Td: Tensor) -> Tensor:
        with self._watch("norms"):
            return self._layer.moe_input(h_Td)

    def route(self, x_Td: Tensor) -> Selection:
        with self._watch("router"):
            return self._layer.route(x_Td)

    def shared(self, x_Td: Tensor) -> Tensor:
        with self._watch("shared expert"):
            return self._layer.shared(x_Td)

    def write_strength(self, h_Td: Tensor) -> Tensor:
        return self._layer.write_strength(h_Td)

    def received_attention(self, h_Td: Tensor, pack: Pack, *, from_emb: bool) -> tuple[Tensor, Tensor]:
        return self._layer.received_attention(h_Td, pack, from_emb=from_emb)


@dataclass(frozen=True)
class _TimedPack(Pack):
    """A pack whose compaction is charged as such, with that of the hidden states' places."""

    watch: Stopwatch = field(kw_only=True)

    def take(self, index: Tensor, cu_seqlens: Tensor) -> Pack:
        with self.watch(COMPACTION):
            return super().take(index, cu_seqlens)


class _TimedPolicy:
    """A policy whose decisions are charged to the gates."""

    def __init__(self, policy: Policy, watch: Stopwatch) -> None:
        self._policy, self._watch = policy, watch
        self.gate_flops_per_token = policy.gate_flops_per_token

    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass | None:
        with self._watch(GATES):
            return bypass_of(self._policy, layer, emb_Sd, pack)

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        with self._watch(GATES):
            return self._policy.decide(layer, x_Td, signals, pack)


def _timed_kernel(kernel: Kernel, component: str, watch: Stopwatch) -> Kernel:
    def run(*args: object, **kwargs: object) -> object:
        with watch(component):
            return kernel(*args, **kwargs)

    return run


@contextmanager
def _timed_backbone(bench: Bench, watch: Stopwatch) -> Iterator[None]:
    """Proxies in place of the layers and of the encoder's kernels, for a while."""
    backbone = bench.backbone
    own = backbone.layers
    kernels = {
        op: _timed_kernel(getattr(backbone.kernels, op), component, watch)
        for op, component in KERNELS.items()
    }
    backbone.layers = [_TimedLayer(layer, watch) for layer in own]
    try:
        with swapped_kernels(backbone, **kernels):
            yield
    finally:
        backbone.layers = own


MakePolicy = Callable[[Pack], Policy]


def _policies(bench: Bench) -> dict[str, MakePolicy]:
    backbone, device = bench.backbone, bench.backbone.device

    def sampled(heads: GateHeads, pack: Pack) -> Policy:
        keys_S = segment_keys(pack.num_segments, bench.seed, device)
        return SampledGates(heads, keys_S, score_statistic=backbone.kernels.score_statistic)

    greedy = heads_saving(bench, TARGET_SAVED, lambda heads, pack: GreedyGates(heads))
    random = heads_saving(bench, TARGET_SAVED, sampled)
    return {
        "full": lambda pack: Full(),
        "greedy gates": lambda pack: GreedyGates(greedy),
        "sampled gates": partial(sampled, random),
    }


def measure(bench: Bench) -> list[Row]:
    """Rows of the table: a total for each policy, then its components."""
    policies = _policies(bench)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in policies}

    hidden_Td, pack = bench.backbone.pack(bench.uniform)

    def apart(name: str) -> None:
        samples[name].append(_components(bench, hidden_Td, pack, policies[name]))

    variants: dict[str, Callable[[], object]] = {
        VISION: lambda: bench.backbone.embed_inputs(bench.model_inputs)
    }
    for name, make in policies.items():
        variants[name] = partial(_encode, bench, hidden_Td, pack, make)
        variants[f"{name}, apart"] = partial(apart, name)
    timings = bench.time(variants)
    flops = {name: _encode(bench, hidden_Td, pack, make) for name, make in policies.items()}

    full, vision = timings["full"], timings[VISION]
    rows = [Row(TABLE, VISION, EVERY, vision.median, vision.iqr, extra=_percent(vision.median, full.median))]
    for name in policies:
        counted = samples[name][-len(full.samples) :]  # without the warm-up
        parts = {
            component: Timing(tuple(sample.get(component, 0.0) for sample in counted))
            for component in COMPONENTS
        }
        whole = sum(part.median for part in parts.values())
        overhead = sum(parts[component].median for component in OVERHEAD)
        extra = {"share": f"planner, gates, compaction and statistic: {100 * overhead / whole:.1f} %"}
        rows.append(compared(TABLE, "total", name, timings[name], flops[name], full, flops["full"], extra))
        rows += [
            Row(TABLE, component, name, part.median, part.iqr, extra=_percent(part.median, whole))
            for component, part in parts.items()
        ]
    return rows


def _percent(part: float, whole: float) -> dict[str, str]:
    return {"share": f"{100 * part / whole:.1f} %"}


def _components(bench: Bench, hidden_Td: Tensor, pack: Pack, make: MakePolicy) -> dict[str, float]:
    """Seconds by component of one pass."""
    watch = Stopwatch(bench.backbone.device)
    timed_pack = _TimedPack(**{f.name: getattr(pack, f.name) for f in fields(Pack)}, watch=watch)
    with watch("other"), _timed_backbone(bench, watch):
        encode(bench.backbone, hidden_Td, timed_pack, _TimedPolicy(make(pack), watch))
    return watch.seconds


def _encode(bench: Bench, hidden_Td: Tensor, pack: Pack, make: MakePolicy) -> float:
    """One pass; its executed FLOPs."""
    policy = make(pack)
    trace = encode(bench.backbone, hidden_Td, pack, policy).trace
    return float(bench.flops.executed(trace, policy.gate_flops_per_token).sum())
