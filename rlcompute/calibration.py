"""`rlcompute calibrate costs`: measures the cost table that ``compute.cost=measured`` charges.

Each part of a layer is timed alone, on a pack like a rollout worker's (a micro-batch of the training pairs, all their
rollouts, one CPU thread) and on shares of its tokens, in rounds over all parts and sizes. On a CPU the processor time
counts, on a GPU the wall clock; the median of the rounds. A fit by least squares of relative errors gives the prices;
where one comes out negative, it is set to 0 and the others are fitted again. What no size changes is the fixed cost
that no decision saves. Layers that cost the same FLOPs are measured once. A check predicts whole forwards and times
them.

Shape legend: T tokens of the pack, U tokens of a part of it, d hidden size, k selected experts, N layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rlcompute.backbones import load_configured
from rlcompute.backbones.base import Backbone, BackboneLayer, LayerCost, Selection
from rlcompute.config import Config
from rlcompute.cost_table import CostTable, measured_on
from rlcompute.data import Pair, read_pairs
from rlcompute.decision import Full, Policy
from rlcompute.encoder import LayerSignals, encode
from rlcompute.flops import CostModel
from rlcompute.kernels import registry
from rlcompute.pack import Pack
from rlcompute.policies.baselines import RandomActions
from rlcompute.policies.gates import GateHeads, GreedyGates, init_heads

SHARES = (1.0, 0.75, 0.5, 0.25, 0.125)
"""Shares of the tokens that parts are timed on."""
ROUNDS = 9

Run = Callable[[], object]


@dataclass(frozen=True)
class Check:
    """One forward of the pack: its policy, and seconds by the table and by the clock."""

    name: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class _Size:
    """Some of a layer's tokens: residual stream and expert inputs [U,d], their pack and its counts."""

    h_Ud: Tensor
    x_Ud: Tensor
    pack: Pack

    @property
    def tokens(self) -> float:
        return float(len(self.h_Ud))

    @property
    def pairs(self) -> float:
        """Visible (query, key) pairs."""
        lengths_S = self.pack.lengths_S.double()
        return float((lengths_S * (lengths_S + 1) / 2).sum())


def calibrate(config: Config) -> tuple[CostTable, list[Check]]:
    """Measure the backbone of a configuration on this machine.

    Raises:
        ConfigError, DataError, CheckpointError: backbone or training pairs cannot be used.
    """
    # As rollout workers run.
    torch.set_num_threads(1)
    backbone = load_configured(config)
    sides = [side for pair in _pairs(config) for side in (pair.query, pair.target)]
    inputs = backbone.embed_inputs([backbone.preprocessor(side) for side in sides])
    hidden_Td, pack = backbone.pack([x for x in inputs for _ in range(config.grpo.rollouts)])
    table = measure(backbone, hidden_Td, pack, forced=config.kernels.forced)
    return table, check(backbone, table, hidden_Td, pack)


@torch.no_grad()
def measure(backbone: Backbone, hidden_Td: Tensor, pack: Pack, *, forced: dict[str, str]) -> CostTable:
    """The cost table of a backbone, from one pack; ``forced`` are its forced kernel backends, for the record."""
    known: dict[LayerCost, tuple[LayerCost, float, float]] = {}
    h_Td, layers, gate_tokens, fixed = hidden_Td, [], [], 0.0
    for layer in backbone.layers:
        if layer.cost not in known:
            sizes = _sizes(backbone, layer, h_Td, pack)
            known[layer.cost] = _measure_layer(backbone, layer, sizes)
        seconds, gate_token, constant = known[layer.cost]
        layers.append(seconds)
        gate_tokens.append(gate_token)
        fixed += constant
        h_Td = _forward(backbone, layer, h_Td, pack)
    kernels = {
        op: registry.choose(op, backbone.device, backbone.dtype, forced.get(op)) for op in registry.PROVIDERS
    }
    return CostTable(
        **measured_on(backbone),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        kernels=kernels,
        layers=tuple(layers),
        gate_token=sum(gate_tokens) / len(gate_tokens),
        segment=fixed / pack.num_segments,
    )


def check(backbone: Backbone, table: CostTable, hidden_Td: Tensor, pack: Pack) -> list[Check]:
    """Whole forwards by the table and by the clock: full compute, and random actions with and without drops."""
    prices = CostModel(table.layers, backbone.top_k, segment=table.segment)
    keys_S = torch.arange(pack.num_segments, device=backbone.device)

    def random(skip: float, drop: float) -> Policy:
        return RandomActions(keys_S, skip=skip, drop=drop, droppable="all", num_layers=backbone.num_layers)

    # The random policies have no gates, but drawing and removing tokens costs them about what it costs gates.
    contenders: dict[str, tuple[Policy, float]] = {
        "full compute": (Full(), 0.0),
        "half of the experts skipped": (random(0.5, 0.0), table.gate_token),
        "a tenth of the tokens dropped in each layer": (random(0.0, 0.1), table.gate_token),
    }
    predicted, runs = [], []
    for policy, gate_token in contenders.values():
        trace = encode(backbone, hidden_Td, pack, policy).trace
        predicted.append(float(prices.executed(trace, gate_token).sum()))
        runs.append(partial(encode, backbone, hidden_Td, pack, policy))
    return list(map(Check, contenders, predicted, _time(runs, backbone.device)))


def fit(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients, none negative, with which the columns add up to the seconds; least squares of relative errors."""
    target = torch.tensor(seconds, dtype=torch.float64)
    design = torch.tensor(columns, dtype=torch.float64).t() / target[:, None]
    scale = design.abs().amax(0).clamp_min(1e-300)
    design, ones = design / scale, torch.ones(len(target), 1, dtype=torch.float64)
    active = list(range(len(columns)))
    out = torch.zeros(len(columns), dtype=torch.float64)
    while active:
        solution = torch.linalg.lstsq(design[:, active], ones, driver="gelsd").solution[:, 0]
        if float(solution.min()) >= 0:
            out[active] = solution
            break
        active.pop(int(solution.argmin()))
    return [float(x) for x in out / scale]


def _measure_layer(
    backbone: Backbone, layer: BackboneLayer, sizes: Sequence[_Size]
) -> tuple[LayerCost, float, float]:
    """Seconds of a layer's parts, of a decision in it, and its fixed seconds."""
    gates = GreedyGates(_neutral_heads(backbone))
    parts: dict[str, list[Run]] = {}
    for size in sizes:
        selection = layer.route(size.x_Ud)
        for name, run in _part_runs(backbone, layer, size, selection, gates).items():
            parts.setdefault(name, []).append(run)
    seconds = iter(_time([run for runs in parts.values() for run in runs], backbone.device))
    medians = {name: [next(seconds) for _ in runs] for name, runs in parts.items()}

    tokens = [size.tokens for size in sizes]
    ones = [1.0] * len(sizes)
    # All tokens are queries of a whole layer's mixer, one a segment of the last layer's.
    segments = [float(size.pack.num_segments) for size in sizes]
    mixer = [tokens * 2, tokens + segments, ones * 2, [size.pairs for size in sizes] + tokens]
    token, query, mix_fixed, *context = fit(
        mixer if layer.cost.mix_context else mixer[:3], medians["mix"] + medians["mix_emb"]
    )
    shared, shared_fixed = fit([tokens, ones], medians["shared"])
    router, router_fixed = fit([tokens, ones], medians["route"])
    rows = [count * backbone.top_k for count in tokens]
    row, row_fixed = fit([rows, ones], medians["experts"])
    (gate_token,) = fit([tokens], medians["gate"])
    prices = LayerCost(token, query, context[0] if context else 0.0, shared, router, row)
    return prices, gate_token, mix_fixed + shared_fixed + router_fixed + row_fixed


def _part_runs(
    backbone: Backbone, layer: BackboneLayer, size: _Size, selection: Selection, gates: GreedyGates
) -> dict[str, Run]:
    """What is timed of one size, by part."""
    h_Ud, x_Ud, pack = size.h_Ud, size.x_Ud, size.pack
    rows = torch.arange(len(h_Ud), device=h_Ud.device)
    out_Ud = h_Ud.clone()

    def experts() -> object:
        # Executing tokens are gathered and their outputs added to the stream, as in a pass that skips some.
        return out_Ud.index_add_(0, rows, _run_experts(backbone, layer, x_Ud[rows], selection))

    signals = LayerSignals(layer, x_Ud, h_Ud, pack, is_last=False)

    def gate() -> object:
        decision = gates.decide(0, x_Ud, signals, pack)
        assert decision.drop_T is not None
        index, cu_seqlens = backbone.kernels.compaction(~decision.drop_T, pack.cu_seqlens)
        return h_Ud[index], x_Ud[index], pack.take(index, cu_seqlens), decision.take(index)

    return {
        "mix": lambda: layer.moe_input(layer.mix(h_Ud, pack)),
        "mix_emb": lambda: layer.moe_input(layer.mix_emb(h_Ud, pack)),
        "shared": lambda: h_Ud + layer.shared(x_Ud),
        "route": lambda: layer.route(x_Ud),
        "experts": experts,
        "gate": gate,
    }


def _run_experts(backbone: Backbone, layer: BackboneLayer, x_Ud: Tensor, selection: Selection) -> Tensor:
    kernels, weights = backbone.kernels, layer.experts
    plan = kernels.routing_plan(selection.expert_ids_Tk, None, backbone.num_experts)
    out: Tensor = kernels.experts(x_Ud, plan, selection.weights_Tk, weights.gate_up_E2Fd, weights.down_EdF)
    return out


def _forward(backbone: Backbone, layer: BackboneLayer, h_Td: Tensor, pack: Pack) -> Tensor:
    """One layer of full compute, all rows of it."""
    h_Td = layer.mix(h_Td, pack)
    x_Td = layer.moe_input(h_Td)
    return h_Td + layer.shared(x_Td) + _run_experts(backbone, layer, x_Td, layer.route(x_Td))


def _sizes(backbone: Backbone, layer: BackboneLayer, h_Td: Tensor, pack: Pack) -> list[_Size]:
    """The layer's tokens and random parts of them; every segment keeps its ``<emb>``."""
    x_Td = layer.moe_input(layer.mix(h_Td, pack))
    draw_T = torch.rand(len(h_Td), generator=torch.Generator().manual_seed(0)).to(h_Td.device)
    sizes = []
    for share in SHARES:
        index, cu_seqlens = backbone.kernels.compaction((draw_T < share) | pack.is_emb_T(), pack.cu_seqlens)
        sizes.append(_Size(h_Td[index], x_Td[index], pack.take(index, cu_seqlens)))
    return sizes


def _neutral_heads(backbone: Backbone) -> GateHeads:
    """Heads that route every token: what they cost does not depend on what they say."""
    num_layers, d = backbone.num_layers, backbone.hidden_size
    heads = init_heads(
        torch.zeros(num_layers, d),
        torch.ones(num_layers),
        skip=0.1,
        drop=0.1,
        late_skip_bias=0.0,
        droppable="all",
    )
    return heads.to(device=backbone.device)


def _time(runs: Sequence[Run], device: torch.device) -> list[float]:
    """Median seconds of each, over rounds that run all of them; a first round is not timed."""
    # With one thread, processor time is what the wall clock shows where nothing else runs.
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds = torch.zeros(ROUNDS, len(runs), dtype=torch.float64)
    for number in range(-1, ROUNDS):
        for column, run in enumerate(runs):
            _wait(device)
            start = clock()
            run()
            _wait(device)
            if number >= 0:
                seconds[number, column] = clock() - start
    return [float(x) for x in seconds.median(0).values]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _pairs(config: Config) -> list[Pair]:
    """As many training pairs as a micro-batch has, the tasks in turn."""
    size = config.grpo.micro_batch_pairs
    pairs = read_pairs(config.data.train, limit_per_task=size, on_bad_row=config.data.on_bad_row).pairs
    turns: dict[str, int] = {}
    order = []
    for pair in pairs:
        turns[pair.task] = turns.get(pair.task, -1) + 1
        order.append((turns[pair.task], pair.task))
    return [pair for _, pair in sorted(zip(order, pairs, strict=True), key=lambda item: item[0])][:size]
