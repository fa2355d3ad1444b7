"""Combined policies: how decisions merge, and every token rule with every expert rule through the encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.decision import Decision, Full, Policy, Signals
from rlcompute.encoder import encode
from rlcompute.flop_counter import count_flops
from rlcompute.flops import FlopModel
from rlcompute.pack import TEXT, EmbeddedInput, Pack
from rlcompute.policies.combined import Combined
from rlcompute.policies.draws import uniform
from rlcompute.policies.expert_rules import (
    BetaSkip,
    OtsuSkip,
    RandomTopK,
    ScoreThreshold,
    SkipLayers,
    UniformTopK,
)
from rlcompute.policies.token_rules import AttentionPruning, BetaPruning, RandomPruning
from tests.inputs import every_modality
from tests.policies.rule_checks import (
    Recorder,
    SlowDrop,
    SlowRule,
    Token,
    check_trace,
    fake_pack,
    fake_signals,
    slow_beta_skip,
    slow_otsu,
    slow_prune,
    slow_random_topk,
    slow_skip_layers,
    slow_threshold,
    slow_uniform_topk,
)
from tests.tiny import write_tiny_checkpoint

LAYERS = ("linear_attention", "full_attention", "linear_attention", "full_attention")
AT, KEEP = 1, 0.4
TOP_K = 3


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), LAYERS))


@pytest.fixture(scope="module")
def embedded(backbone: Backbone) -> list[EmbeddedInput]:
    return backbone.embed_inputs(every_modality(backbone.preprocessor))


def draw_of(keys: list[int]) -> Callable[[Token], float]:
    return lambda t: float(uniform(torch.tensor([keys[t.segment]]), AT, torch.tensor([t.index])))


Make = Callable[[Backbone, list[int]], Policy]
# Token rules and expert rules, each with itself written slowly; the keys are those of the segments.
TOKEN_RULES: dict[str, tuple[Make, Callable[[list[int]], SlowDrop]]] = {
    "beta_prune": (
        lambda b, keys: BetaPruning(b, layer=AT, keep=KEEP),
        lambda keys: slow_prune(AT, KEEP, lambda t: t.beta),
    ),
    "random_prune": (
        lambda b, keys: RandomPruning(torch.tensor(keys), layer=AT, keep=KEEP, num_layers=b.num_layers),
        lambda keys: slow_prune(AT, KEEP, draw_of(keys)),
    ),
    "attention_prune": (
        lambda b, keys: AttentionPruning(b, layer=AT, keep=KEEP),
        lambda keys: slow_prune(AT, KEEP, lambda t: t.received),
    ),
}
EXPERT_RULES: dict[str, tuple[Make, Callable[[list[int]], SlowRule]]] = {
    "skip_layers": (lambda b, keys: SkipLayers(b, first=2, last=2), lambda keys: slow_skip_layers(2, 2)),
    "beta_skip": (lambda b, keys: BetaSkip(b, share=0.3), lambda keys: slow_beta_skip(0.3)),
    "otsu_beta": (
        lambda b, keys: OtsuSkip(b, score="beta", min_variation=0.0),
        lambda keys: slow_otsu("beta", 0.0, 0.7),
    ),
    "otsu_logit": (
        lambda b, keys: OtsuSkip(b, score="logit", min_variation=0.1),
        lambda keys: slow_otsu("logit", 0.1, 0.7),
    ),
    "uniform_topk": (lambda b, keys: UniformTopK(2, b.top_k), lambda keys: slow_uniform_topk(2)),
    "random_topk": (
        lambda b, keys: RandomTopK(torch.tensor(keys), k=1, top_k=b.top_k),
        lambda keys: slow_random_topk(keys, 1),
    ),
    "threshold": (lambda b, keys: ScoreThreshold(tau=0.3), lambda keys: slow_threshold(0.3)),
}
READ_ROUTER = {"otsu_logit", "threshold"}


@pytest.mark.parametrize("expert_rule", EXPERT_RULES)
@pytest.mark.parametrize("token_rule", TOKEN_RULES)
def test_every_combination_executes_what_slow_loops_count(
    backbone: Backbone, embedded: list[EmbeddedInput], token_rule: str, expert_rule: str
) -> None:
    keys = list(range(7, 7 + len(embedded)))
    make_drop, slow_drop = TOKEN_RULES[token_rule]
    make_keep, slow_keep = EXPERT_RULES[expert_rule]
    recorder = Recorder(Combined([make_drop(backbone, keys), make_keep(backbone, keys)]))
    packed, traces = backbone.pack(embedded), []
    count = count_flops(lambda: traces.append(encode(backbone, *packed, recorder).trace), backbone)
    trace = traces[0]
    check_trace(
        trace,
        recorder,
        [slow_keep(keys)],
        [slow_drop(keys)],
        # The last layer has nothing to split: its router is not read by Otsu, and all of <emb> runs.
        reads_router=expert_rule in READ_ROUTER,
        received=True,
    )
    flops = FlopModel(backbone)
    assert count.total == pytest.approx(float(flops.executed(trace).sum()), rel=1e-6)
    visual_S = torch.tensor([int((x.modality_L != TEXT).sum()) for x in embedded])
    gone_S = trace.decided_NS[AT] - trace.survived_NS[AT]
    assert torch.all((gone_S - (1 - KEEP) * visual_S).abs() <= 0.5 + 1e-9)
    assert torch.equal(trace.decided_NS[AT + 1], trace.survived_NS[AT])
    # Text is never pruned: what leaves is visual, and inputs without visual tokens are whole.
    assert torch.equal(trace.survived_NS[AT, visual_S == 0], trace.decided_NS[AT, visual_S == 0])
    assert float(flops.executed(trace).sum()) < float(flops.full(packed[1].lengths_S).sum())


@pytest.mark.parametrize(
    "names", [("uniform_topk", "threshold", "beta_skip"), ("uniform_topk", "random_topk")]
)
def test_rules_of_one_kind_combine_as_well(
    backbone: Backbone, embedded: list[EmbeddedInput], names: tuple[str, ...]
) -> None:
    keys = list(range(len(embedded)))
    parts = [EXPERT_RULES[name] for name in names]
    drops = [TOKEN_RULES["random_prune"], TOKEN_RULES["beta_prune"]]
    made = [make(backbone, keys) for make, _ in (*parts, *drops)]
    recorder = Recorder(Combined([*made[: len(names)], Combined(made[len(names) :])]))
    trace = encode(backbone, *backbone.pack(embedded), recorder).trace
    check_trace(
        trace,
        recorder,
        [slow(keys) for _, slow in parts],
        [slow(keys) for _, slow in drops],
        reads_router="threshold" in names,
    )


def test_a_signal_that_two_rules_read_is_charged_once(
    backbone: Backbone, embedded: list[EmbeddedInput]
) -> None:
    packed = backbone.pack(embedded)
    alone = encode(backbone, *packed, OtsuSkip(backbone, score="beta", min_variation=9.0)).trace
    both = Combined(
        [OtsuSkip(backbone, score="beta", min_variation=9.0), BetaPruning(backbone, layer=1, keep=1.0)]
    )
    assert float(alone.signal_flops_NS.sum()) > 0
    assert torch.equal(encode(backbone, *packed, both).trace.signal_flops_NS, alone.signal_flops_NS)


@pytest.mark.parametrize("wrap", [lambda p: Combined([p]), lambda p: Combined([Full(), p, Full()])])
def test_full_compute_adds_nothing(
    backbone: Backbone, embedded: list[EmbeddedInput], wrap: Callable[[Policy], Policy]
) -> None:
    packed, rule = backbone.pack(embedded), UniformTopK(1, backbone.top_k)
    expected = encode(backbone, *packed, rule)
    assert torch.equal(encode(backbone, *packed, wrap(rule)).embeddings_Sd, expected.embeddings_Sd)
    full = encode(backbone, *packed, Full())
    assert torch.equal(encode(backbone, *packed, Combined([])).embeddings_Sd, full.embeddings_Sd)


@dataclass(frozen=True)
class Says:
    """A policy that always says the same."""

    decision: Decision
    gate_flops_per_token: float

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        return self.decision


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(
        st.tuples(
            st.booleans(),
            st.sampled_from([None, 1, 2]),
            st.sampled_from([None, None, 1, 2, 3]),
            st.booleans(),
        ),
        max_size=4,
    ),
    seed=st.integers(0, 1000),
)
def test_decisions_merge_token_by_token(
    kinds: list[tuple[bool, int | None, int | None, bool]], seed: int
) -> None:
    count, generator = 9, torch.Generator().manual_seed(seed)

    def mask(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) < 0.6

    decisions = [
        Decision(
            drop_T=mask(count) if drops else None,
            # Slots beyond a policy's own limit may be missing from what it says.
            keep=None if dims is None else mask(*(count, limit or TOP_K)[:dims]),
            top_k=limit,
            renormalize=renormalize,
        )
        for drops, dims, limit, renormalize in kinds
    ]
    before = [tuple(None if x is None else x.clone() for x in (d.drop_T, d.keep)) for d in decisions]
    combined = Combined([Says(decision, 2.0**i) for i, decision in enumerate(decisions)])
    assert combined.gate_flops_per_token == 2.0 ** len(decisions) - 1
    pack = fake_pack([count], generator)
    signals = fake_signals(count, TOP_K, has_beta=True, tied=False, generator=generator, dtype=torch.float32)
    made = combined.decide(0, torch.empty(count, 0), signals, pack)

    def runs(decision: Decision, token: int, slot: int) -> bool:
        if decision.top_k is not None and slot >= decision.top_k:
            return False
        if decision.keep is None:
            return True
        return bool(decision.keep[token] if decision.keep.ndim == 1 else decision.keep[token, slot])

    for token in range(count):
        dropped = [bool(d.drop_T[token]) for d in decisions if d.drop_T is not None]
        assert (made.drop_T is None) == (not dropped)
        assert made.drop_T is None or bool(made.drop_T[token]) == any(dropped)
        for slot in range(TOP_K):
            assert runs(made, token, slot) == all(runs(d, token, slot) for d in decisions)
    assert (made.keep is None) == all(d.keep is None for d in decisions)
    assert made.renormalize == any(d.renormalize for d in decisions)
    for decision, pair in zip(
        decisions, before, strict=True
    ):  # the parts' own decisions are left as they were
        for x, y in zip((decision.drop_T, decision.keep), pair, strict=True):
            assert x is y is None or (x is not None and y is not None and torch.equal(x, y))
