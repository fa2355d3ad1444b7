"""Rules once more, token by token in plain Python, and what the tests of rules share.

Shape legend: T tokens, V value heads, E experts, k selected experts, S segments, N layers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

import torch
from torch import Tensor

from rlcompute.backbones.base import Backbone
from rlcompute.decision import Decision, Policy, Signals
from rlcompute.errors import BackendError
from rlcompute.kernels.compaction import naive_survivors
from rlcompute.pack import TEXT, Pack
from rlcompute.policies.draws import uniform
from rlcompute.trace import Trace


@dataclass(frozen=True)
class Token:
    """What a slow rule may know of a token in a layer; ``beta`` and ``received`` where the layer has them."""

    segment: int
    index: int
    is_emb: bool
    is_visual: bool
    beta: float | None
    received: float | None
    weights: list[float]
    highest_logit: float


SlowRule = Callable[[int, list[Token]], list[list[bool]]]
"""(layer, tokens of the pack) -> kept slots of each token. Called layer by layer."""
SlowDrop = Callable[[int, list[Token]], list[bool]]
"""(layer, tokens of the pack) -> whether each token leaves."""


def tokens_of(signals: Signals, pack: Pack, *, received: bool = False) -> list[Token]:
    def optional(read: Callable[[], Tensor]) -> Sequence[float | None]:
        try:
            values: list[float] = read().tolist()
        except BackendError:
            return [None] * len(pack.segment_ids_T)
        return values

    def mean_beta() -> Tensor:
        heads_TV = signals.write_strength_TV.tolist()
        return torch.tensor([math.fsum(heads) / len(heads) for heads in heads_TV], dtype=torch.float64)

    betas = optional(mean_beta)
    maps: Sequence[float | None] = [None] * len(betas)
    if received:
        maps = optional(lambda: signals.received_attention_T(from_emb=False))
    segments, indices, modalities = (
        x.tolist() for x in (pack.segment_ids_T, pack.token_index_T, pack.modality_T)
    )
    weights, logits = signals.weights_Tk.tolist(), signals.router_logits_TE.tolist()
    last_rows = set((pack.cu_seqlens[1:] - 1).tolist())
    return [
        Token(
            segment=segments[row],
            index=indices[row],
            is_emb=row in last_rows,
            is_visual=modalities[row] != TEXT,
            beta=betas[row],
            received=maps[row],
            weights=weights[row],
            highest_logit=max(logits[row]),
        )
        for row in range(len(betas))
    ]


def nothing(tokens: list[Token]) -> list[list[bool]]:
    return [[True] * len(token.weights) for token in tokens]


def skip_lowest(
    tokens: list[Token], scores: list[float], count: Callable[[list[float]], int]
) -> list[list[bool]]:
    """In each segment the ``count(its scores)`` lowest of the tokens that are not ``<emb>`` skip."""
    kept = nothing(tokens)
    for segment in {token.segment for token in tokens}:
        rows = [i for i, token in enumerate(tokens) if token.segment == segment and not token.is_emb]
        ranked = sorted(rows, key=lambda i: (scores[i], -tokens[i].index))
        for i in ranked[: count([scores[j] for j in rows])]:
            kept[i] = [False] * len(kept[i])
    return kept


def slow_skip_layers(first: int, last: int) -> SlowRule:
    return lambda layer, tokens: [[not first <= layer <= last] * len(token.weights) for token in tokens]


def slow_beta_skip(share: float) -> SlowRule:
    history: dict[tuple[int, int], list[float]] = {}

    def rule(layer: int, tokens: list[Token]) -> list[list[bool]]:
        if layer == 0:
            history.clear()
        for token in tokens:
            if token.beta is not None:
                history.setdefault((token.segment, token.index), []).append(token.beta)
        if not history:
            return nothing(tokens)
        means = [math.fsum(seen) / len(seen) for seen in (history[t.segment, t.index] for t in tokens)]
        return skip_lowest(tokens, means, lambda scores: int(share * len(scores) + 0.5))

    return rule


def slow_otsu(score: str, min_variation: float, cap: float) -> SlowRule:
    def lower_class(scores: list[float]) -> int:
        if len(set(scores)) < 2:
            return 0
        if statistics.pstdev(scores) <= min_variation * abs(statistics.fmean(scores)):
            return 0
        exact = sorted(map(Fraction, scores))
        cuts = [cut for cut in range(1, len(exact)) if exact[cut - 1] < exact[cut]]

        sums = [*accumulate(exact, initial=Fraction())]

        def within(cut: int) -> Fraction:  # sum of squares inside both classes, less what no split changes
            return -(sums[cut] ** 2) / cut - (sums[-1] - sums[cut]) ** 2 / (len(exact) - cut)

        return min(min(cuts, key=within), math.floor(cap * len(scores)))

    def rule(layer: int, tokens: list[Token]) -> list[list[bool]]:
        scores = [token.beta if score == "beta" else token.highest_logit for token in tokens]
        known = [value for value in scores if value is not None]
        return skip_lowest(tokens, known, lower_class) if known else nothing(tokens)

    return rule


def slow_uniform_topk(k: int) -> SlowRule:
    return lambda layer, tokens: [[slot < k for slot in range(len(token.weights))] for token in tokens]


def slow_threshold(tau: float) -> SlowRule:
    return lambda layer, tokens: [[weight >= tau for weight in token.weights] for token in tokens]


def slow_random_topk(keys: list[int], k: int) -> SlowRule:
    """The draws are the contract here; which slots they pick is computed anew."""

    def rule(layer: int, tokens: list[Token]) -> list[list[bool]]:
        slots, index_T = len(tokens[0].weights), torch.tensor([token.index for token in tokens])
        keys_T = torch.tensor([keys[token.segment] for token in tokens])
        draws = [uniform(keys_T, -2 - layer * slots - slot, index_T).tolist() for slot in range(slots)]
        return [[draw in sorted(mine)[:k] for draw in mine] for mine in zip(*draws, strict=True)]

    return rule


def slow_prune(at: int, keep: float, score: Callable[[Token], float | None]) -> SlowDrop:
    """Visual tokens leave in layer ``at``, all but the highest share by the mean of the known scores so far."""
    history: dict[tuple[int, int], list[float]] = {}

    def rule(layer: int, tokens: list[Token]) -> list[bool]:
        for token in tokens:
            value = score(token)
            if value is not None:
                history.setdefault((token.segment, token.index), []).append(value)
        leaves = [False] * len(tokens)
        for segment in {token.segment for token in tokens} if layer == at else ():
            rows = [i for i, t in enumerate(tokens) if t.segment == segment and t.is_visual and not t.is_emb]
            means = {i: statistics.fmean(history[segment, tokens[i].index]) for i in rows}
            for i in sorted(rows, key=lambda i: (-means[i], tokens[i].index))[int(keep * len(rows) + 0.5) :]:
                leaves[i] = True
        return leaves

    return rule


class Recorder:
    """Another policy, and what it was given and decided; read the signals only after the pass."""

    def __init__(self, inner: Policy) -> None:
        self.inner, self.gate_flops_per_token = inner, inner.gate_flops_per_token
        self.seen: list[tuple[Signals, Pack, Decision]] = []

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        decision = self.inner.decide(layer, x_Td, signals, pack)
        self.seen.append((signals, pack, decision))
        return decision


def check_trace(
    trace: Trace,
    recorder: Recorder,
    rules: Sequence[SlowRule],
    drops: Sequence[SlowDrop] = (),
    *,
    reads_router: bool,
    received: bool = False,
) -> None:
    """Survivors, rows and routed tokens of every layer and segment, as slow loops count them."""
    segments = trace.rows_NS.shape[1]
    for layer, (signals, pack, _) in enumerate(recorder.seen):
        tokens = tokens_of(signals, pack, received=received)
        kept = [[True] * len(token.weights) for token in tokens]
        for rule in rules:
            said = rule(layer, tokens)
            kept = [[a and b for a, b in zip(x, y, strict=True)] for x, y in zip(kept, said, strict=True)]
        leaves = [False] * len(tokens)
        for drop in drops:
            leaves = [a or b for a, b in zip(leaves, drop(layer, tokens), strict=True)]
        survived, rows, routed = [0] * segments, [0] * segments, [0] * segments
        for token, slots, gone in zip(tokens, kept, leaves, strict=True):
            survived[token.segment] += not gone
            rows[token.segment] += 0 if gone else sum(slots)
            routed[token.segment] += reads_router or (not gone and any(slots))
        assert trace.survived_NS[layer].tolist() == survived
        assert trace.rows_NS[layer].tolist() == rows
        assert trace.routed_NS[layer].tolist() == routed


@dataclass(frozen=True)
class FakeSignals:
    """Signals of a layer made up by a test; no β in a layer that should have none."""

    strength_TV: Tensor | None
    router_logits_TE: Tensor
    weights_Tk: Tensor
    expert_ids_Tk: Tensor

    @property
    def write_strength_TV(self) -> Tensor:
        if self.strength_TV is None:
            raise BackendError("no β in this layer")
        return self.strength_TV

    def received_attention_T(self, *, from_emb: bool) -> Tensor:
        raise BackendError("no attention map in this layer")


def fake_signals(
    tokens: int, top_k: int, *, has_beta: bool, tied: bool, generator: torch.Generator, dtype: torch.dtype
) -> FakeSignals:
    """Random signals; tied ones have few different values, whose means are exact."""

    def draw(columns: int) -> Tensor:
        values = torch.rand(tokens, columns, generator=generator)
        return ((values * 4).ceil() / 4 if tied else values).to(dtype)

    logits_TE = draw(8) * 6 - 3
    weights_Tk, ids_Tk = logits_TE.float().softmax(-1).topk(top_k)
    weights_Tk = (weights_Tk / weights_Tk.sum(-1, keepdim=True)).to(dtype)
    return FakeSignals(draw(4) if has_beta else None, logits_TE, weights_Tk, ids_Tk)


def fake_pack(lengths: Sequence[int], generator: torch.Generator) -> Pack:
    """Segments of these lengths with tokens of random modality; nothing rotary."""
    lengths_S = torch.tensor(lengths)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_S.cumsum(0)])
    segment_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths_S)
    index_T = torch.arange(len(segment_T)) - cu_seqlens[segment_T]
    modality_T = torch.randint(0, 3, segment_T.shape, generator=generator).to(torch.int8)
    nothing_Tr = torch.empty(len(segment_T), 0)
    return Pack(cu_seqlens, segment_T, index_T, modality_T, nothing_Tr, nothing_Tr)


def fake_pass(
    policy: Policy,
    slow: SlowRule,
    backbone: Backbone,
    lengths: Sequence[int],
    *,
    seed: int,
    tied: bool = False,
    drop: float = 0.3,
    dtype: torch.dtype = torch.float32,
) -> list[tuple[Decision, list[Token]]]:
    """A policy layer by layer on random signals, random tokens leaving in between, against its slow rule."""
    generator = torch.Generator().manual_seed(seed)
    pack, out = fake_pack(lengths, generator), []
    for layer in range(backbone.num_layers):
        if layer == backbone.num_layers - 1:
            pack = pack.emb_only()
        tokens = len(pack.segment_ids_T)
        signals = fake_signals(
            tokens,
            backbone.top_k,
            has_beta=not backbone.layers[layer].is_attention,
            tied=tied,
            generator=generator,
            dtype=dtype,
        )
        decision = policy.decide(layer, torch.empty(tokens, 0), signals, pack)
        seen = tokens_of(signals, pack)
        assert decision.drop_T is None
        assert slots_of(decision, seen) == slow(layer, seen), f"layer {layer}"
        out.append((decision, seen))
        stays_T = (torch.rand(tokens, generator=generator) >= drop) | pack.is_emb_T()
        pack = pack.take(*naive_survivors(stays_T, pack.cu_seqlens))
    return out


def slots_of(decision: Decision, tokens: list[Token]) -> list[list[bool]]:
    """Kept slots of each token."""
    kept = nothing(tokens)
    if decision.keep is not None:
        assert decision.keep.dtype == torch.bool
        for slots, said in zip(kept, decision.keep.tolist(), strict=True):
            slots[:] = said if isinstance(said, list) else [said] * len(slots)
    limit = len(kept[0]) if decision.top_k is None else decision.top_k
    return [[keep and slot < limit for slot, keep in enumerate(slots)] for slots in kept]
