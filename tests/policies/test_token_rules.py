"""Pruning rules against one-token-at-a-time versions, on made-up packs and through the encoder."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.decision import DROP, Decision, Full, Policy, Signals
from rlcompute.encoder import encode
from rlcompute.errors import ConfigError
from rlcompute.kernels.compaction import naive_survivors
from rlcompute.pack import IMAGE, TEXT, VIDEO, EmbeddedInput, Pack
from rlcompute.policies.baselines import RandomActions
from rlcompute.policies.draws import uniform
from rlcompute.policies.token_rules import AttentionPruning, BetaPruning, RandomPruning
from tests.inputs import every_modality, relative_error
from tests.test_encoder import Scripted, oracle
from tests.tiny import write_tiny_checkpoint

DELTA, ATTENTION = "linear_attention", "full_attention"
LAYER_TYPES = (DELTA, ATTENTION, DELTA, DELTA, ATTENTION, DELTA)
VALUE_HEADS = 4
Token = tuple[int, int]
"""Segment, and place in the original input."""


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), LAYER_TYPES))


@pytest.fixture(scope="module")
def embedded(backbone: Backbone) -> list[EmbeddedInput]:
    return backbone.embed_inputs(every_modality(backbone.preprocessor))


def rules(backbone: Backbone, segments: int, layer: int, keep: float) -> dict[str, Policy]:
    """Every rule that can prune in this layer."""
    made: dict[str, Policy] = {
        "beta all": BetaPruning(backbone, layer=layer, keep=keep),
        "beta last": BetaPruning(backbone, layer=layer, keep=keep, average="last"),
        "random": RandomPruning(
            torch.arange(segments) * 7919, layer=layer, keep=keep, num_layers=backbone.num_layers
        ),
    }
    if layer >= LAYER_TYPES.index(ATTENTION):
        made["attention all"] = AttentionPruning(backbone, layer=layer, keep=keep)
        made["attention emb"] = AttentionPruning(backbone, layer=layer, keep=keep, source="emb")
    return made


RULES = ("beta all", "beta last", "random", "attention all", "attention emb")


def tokens(pack: Pack) -> list[Token]:
    return list(zip(pack.segment_ids_T.tolist(), pack.token_index_T.tolist(), strict=True))


class NaivePruning:
    """The same rules, one token at a time: scores in a dictionary, one sort per input."""

    def __init__(self, rule: str, layer: int, keep: float) -> None:
        self.rule, self.layer, self.keep = rule, layer, keep
        self.scores: dict[Token, dict[int, float]] = defaultdict(dict)

    def observe(self, layer: int, signals: Signals, pack: Pack) -> None:
        """Remember what this layer says of every token."""
        attention = LAYER_TYPES[layer] == ATTENTION
        values: Sequence[float] = ()
        if self.rule.startswith("beta") and not attention:
            values = [sum(row) / len(row) for row in signals.write_strength_TV.double().tolist()]
        elif self.rule.startswith("attention") and attention:
            values = signals.received_attention_T(from_emb=self.rule.endswith("emb")).tolist()
        elif self.rule == "random" and layer == self.layer:
            values = [
                float(uniform(torch.tensor([segment * 7919]), layer, torch.tensor([place])))
                for segment, place in tokens(pack)
            ]
        for token, value in zip(tokens(pack), values, strict=False):
            self.scores[token][layer] = value

    def score(self, token: Token) -> float:
        by_layer = self.scores[token]
        if self.rule == "beta all":
            return sum(by_layer.values()) / len(by_layer)
        return by_layer[max(by_layer)]

    def dropped(self, pack: Pack) -> set[Token]:
        gone: set[Token] = set()
        for segment in range(pack.num_segments):
            rows = range(int(pack.cu_seqlens[segment]), int(pack.cu_seqlens[segment + 1]) - 1)
            visual = [tokens(pack)[row] for row in rows if int(pack.modality_T[row]) in (IMAGE, VIDEO)]
            ranked = sorted(visual, key=lambda token: (-self.score(token), token[1]))
            gone.update(ranked[math.floor(self.keep * len(visual) + 0.5) :])
        return gone


@dataclass(frozen=True)
class MadeUp:
    """Signals of one layer that are not computed from anything."""

    expert_ids_Tk: Tensor
    weights_Tk: Tensor
    router_logits_TE: Tensor
    write_strength_TV: Tensor
    received: dict[bool, Tensor]

    def received_attention_T(self, *, from_emb: bool) -> Tensor:
        return self.received[from_emb]


def made_up_signals(count: int, levels: int, generator: torch.Generator) -> MadeUp:
    """Scores on few levels, so that ties are common; sums of them are exact, so that ties stay ties."""

    def draw(*shape: int) -> Tensor:
        return torch.randint(0, levels, shape, generator=generator) / 64.0

    none = torch.empty(count, 0)
    return MadeUp(none, none, none, draw(count, VALUE_HEADS), {True: draw(count), False: draw(count)})


def made_up_pack(lengths: list[int], generator: torch.Generator) -> Pack:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    segment_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    modality = torch.randint(TEXT, VIDEO + 1, (int(bounds[-1]),), generator=generator, dtype=torch.int8)
    modality[bounds[1:] - 1] = TEXT
    rotary = torch.zeros(int(bounds[-1]), 0)
    return Pack(
        bounds, segment_ids, torch.arange(int(bounds[-1])) - bounds[segment_ids], modality, rotary, rotary
    )


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=5),
    keep=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.7, 1.0]) | st.floats(0.0, 1.0),
    layer=st.integers(0, len(LAYER_TYPES) - 2),
    levels=st.sampled_from([1, 3, 64]),
    others_drop=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 10_000),
)
@example(lengths=[14, 1, 13], keep=0.5, layer=4, levels=3, others_drop=0.2, seed=0)
def test_rules_equal_one_token_at_a_time(
    backbone: Backbone,
    lengths: list[int],
    keep: float,
    layer: int,
    levels: int,
    others_drop: float,
    seed: int,
) -> None:
    for name, policy in rules(backbone, len(lengths), layer, keep).items():
        generator = torch.Generator().manual_seed(seed)
        pack, naive = made_up_pack(lengths, generator), NaivePruning(name, layer, keep)
        for index in range(layer + 1):
            count = len(pack.segment_ids_T)
            signals = made_up_signals(count, levels, generator)
            naive.observe(index, signals, pack)
            decision = policy.decide(index, torch.empty(count, 0), signals, pack)
            assert decision.keep is None
            if index < layer:
                assert decision.drop_T is None
                # Somebody else drops tokens of any kind before this rule's turn.
                stays_T = torch.rand(count, generator=generator) >= others_drop
                stays_T |= pack.is_emb_T()
                pack = pack.take(*naive_survivors(stays_T, pack.cu_seqlens))
        assert decision.drop_T is not None
        actual = {token for token, gone in zip(tokens(pack), decision.drop_T.tolist(), strict=True) if gone}
        assert actual == naive.dropped(pack), name


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("name", RULES)
def test_budget_is_met_within_one_token_and_text_stays(
    backbone: Backbone, embedded: list[EmbeddedInput], name: str, keep: float
) -> None:
    layer = 3
    seen: list[Pack] = []
    policy = Watched(rules(backbone, len(embedded), layer, keep)[name], seen.append)
    trace = encode(backbone, *backbone.pack(embedded), policy).trace
    for segment, x in enumerate(embedded):
        visual = int((x.modality_L != TEXT).sum())
        text = x.length - visual
        assert trace.entered_NS[: layer + 1, segment].tolist() == [x.length] * (layer + 1)
        kept = int(trace.survived_NS[layer, segment]) - text
        assert abs(kept - keep * visual) <= 0.5 + 1e-9
        assert trace.entered_NS[layer + 1 :, segment].eq(text + kept).all()
        after = seen[layer + 1]
        left = after.token_index_T[(after.segment_ids_T == segment) & (after.modality_T == TEXT)]
        assert torch.equal(left, (x.modality_L == TEXT).nonzero().squeeze(1))


class Watched:
    """A policy whose packs somebody looks at."""

    def __init__(self, policy: Policy, look: Callable[[Pack], object]) -> None:
        self.gate_flops_per_token, self._policy, self._look = policy.gate_flops_per_token, policy, look

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        self._look(pack)
        return self._policy.decide(layer, x_Td, signals, pack)


@pytest.mark.parametrize("name", RULES)
def test_inputs_of_text_alone_are_computed_in_full(
    backbone: Backbone, embedded: list[EmbeddedInput], name: str
) -> None:
    texts = [x for x in embedded if not bool((x.modality_L != TEXT).any())]
    assert len(texts) >= 2
    packed = backbone.pack(texts)
    pruned = encode(backbone, *packed, rules(backbone, len(texts), 2, 0.0)[name])
    full = encode(backbone, *packed, Full())
    assert torch.equal(pruned.embeddings_Sd, full.embeddings_Sd)
    assert torch.equal(pruned.trace.survived_NS, full.trace.survived_NS)
    assert torch.equal(pruned.trace.rows_NS, full.trace.rows_NS)


class Observer:
    """Lets a naive rule see every layer of a pass in which another policy drops tokens."""

    def __init__(self, naive: NaivePruning, drops: Callable[[int, Pack], set[Token]]) -> None:
        self.naive, self._drops, self.gate_flops_per_token = naive, drops, 0.0
        self.dropped: dict[int, set[Token]] = {}

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        if layer == len(LAYER_TYPES) - 1:
            return Decision()
        self.naive.observe(layer, signals, pack)
        gone = self._drops(layer, pack)
        if layer == self.naive.layer:
            gone = gone | self.naive.dropped(pack)
        self.dropped[layer] = gone
        return Decision(drop_T=torch.tensor([token in gone for token in tokens(pack)]))


def scripted(backbone: Backbone, embedded: list[EmbeddedInput], dropped: dict[int, set[Token]]) -> Scripted:
    longest = max(x.length for x in embedded)
    actions = torch.zeros(backbone.num_layers, len(embedded), longest, dtype=torch.long)
    for layer, gone in dropped.items():
        for segment, place in gone:
            actions[layer, segment, place] = DROP
    return Scripted(actions, None)


@torch.no_grad()
def oracle_embeddings(backbone: Any, embedded: list[EmbeddedInput], script: Scripted) -> Tensor:
    return torch.stack([oracle(backbone, x, script, segment) for segment, x in enumerate(embedded)])


@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_embedding_is_that_of_the_survivors_run_alone(
    backbone: Backbone, embedded: list[EmbeddedInput], name: str, layer: int
) -> None:
    naive = NaivePruning(name, layer, 0.4)
    observer = Observer(naive, lambda layer, pack: set())
    encode(backbone, *backbone.pack(embedded), observer)
    expected = oracle_embeddings(backbone, embedded, scripted(backbone, embedded, observer.dropped))
    policy = rules(backbone, len(embedded), layer, 0.4)[name]
    actual = encode(backbone, *backbone.pack(embedded), policy).embeddings_Sd
    assert relative_error(actual, expected) <= 5e-5
    full = encode(backbone, *backbone.pack(embedded), Full()).embeddings_Sd
    assert relative_error(actual, full) > 1e-3


class Both:
    """Drops what either policy drops."""

    gate_flops_per_token = 0.0

    def __init__(self, *policies: Policy) -> None:
        self._policies = policies

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        drop_T = torch.zeros(len(x_Td), dtype=torch.bool)
        for policy in self._policies:
            decision = policy.decide(layer, x_Td, signals, pack)
            if decision.drop_T is not None:
                drop_T |= decision.drop_T
        return Decision(drop_T=drop_T)


@pytest.mark.parametrize("name", RULES)
def test_scores_follow_their_tokens_when_another_rule_drops(
    backbone: Backbone, embedded: list[EmbeddedInput], name: str
) -> None:
    layer, keep, drop = 4, 0.5, 0.15
    others = RandomActions(
        torch.arange(len(embedded)), skip=0.0, drop=drop, droppable="all", num_layers=backbone.num_layers
    )

    def others_drop(layer: int, pack: Pack) -> set[Token]:
        empty = torch.empty(len(pack.segment_ids_T), 0)
        decision = others.decide(layer, empty, made_up_signals(0, 1, torch.Generator()), pack)
        assert decision.drop_T is not None
        return {token for token, gone in zip(tokens(pack), decision.drop_T.tolist(), strict=True) if gone}

    observer = Observer(NaivePruning(name, layer, keep), others_drop)
    encode(backbone, *backbone.pack(embedded), observer)
    assert all(observer.dropped.values())
    expected = oracle_embeddings(backbone, embedded, scripted(backbone, embedded, observer.dropped))
    policy = rules(backbone, len(embedded), layer, keep)[name]
    actual = encode(backbone, *backbone.pack(embedded), Both(policy, others)).embeddings_Sd
    assert relative_error(actual, expected) <= 5e-5


@pytest.mark.parametrize("name", RULES)
def test_a_pass_leaves_nothing_behind(backbone: Backbone, embedded: list[EmbeddedInput], name: str) -> None:
    used = rules(backbone, len(embedded), 3, 0.5)[name]
    encode(backbone, *backbone.pack(embedded), used)
    some = embedded[2:5]
    fresh = rules(backbone, len(embedded), 3, 0.5)[name]
    again, first = (encode(backbone, *backbone.pack(some), policy) for policy in (used, fresh))
    assert torch.equal(again.embeddings_Sd, first.embeddings_Sd)
    assert int(first.trace.survived_NS[3].sum()) < sum(x.length for x in some)


def test_random_pruning_follows_its_keys_not_its_batch(
    backbone: Backbone, embedded: list[EmbeddedInput]
) -> None:
    def left(inputs: list[EmbeddedInput], keys: list[int]) -> list[list[int]]:
        packs: list[Pack] = []
        rule = RandomPruning(torch.tensor(keys), layer=2, keep=0.5, num_layers=backbone.num_layers)
        encode(backbone, *backbone.pack(inputs), Watched(rule, packs.append))
        return [part.tolist() for part in packs[3].token_index_T.split(packs[3].lengths_S.tolist())]

    keys = [11, 22, 33, 44, 55, 66]
    together = left(embedded, keys)
    alone = [left([x], [key])[0] for x, key in zip(embedded, keys, strict=True)]
    assert together == alone
    assert left(embedded, keys[::-1]) != together


def test_rules_read_and_pay_for_their_layers_only(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    paid = {"beta all": [0, 2, 3], "beta last": [3], "random": [], "attention all": [1], "attention emb": [1]}
    for name, policy in rules(backbone, len(embedded), 3, 0.5).items():
        trace = encode(backbone, *backbone.pack(embedded), policy).trace
        assert trace.signal_flops_NS.sum(1).nonzero().squeeze(1).tolist() == paid[name]
        assert policy.gate_flops_per_token == 0.0
    tokens_S = torch.tensor([x.length for x in embedded])
    trace = encode(
        backbone, *backbone.pack(embedded), BetaPruning(backbone, layer=0, keep=0.5, average="last")
    ).trace
    assert torch.equal(trace.signal_flops_NS[0], tokens_S * backbone.layers[0].cost.strength_token)


@pytest.mark.parametrize("layer", [-1, len(LAYER_TYPES) - 1, 40])
def test_a_layer_that_cannot_prune_is_refused(backbone: Backbone, layer: int) -> None:
    makers: list[Callable[[], object]] = [
        lambda: BetaPruning(backbone, layer=layer, keep=0.5),
        lambda: AttentionPruning(backbone, layer=layer, keep=0.5),
        lambda: RandomPruning(torch.zeros(1, dtype=torch.long), layer=layer, keep=0.5, num_layers=6),
    ]
    for make in makers:
        with pytest.raises(ConfigError, match=rf"layer {layer} .*0\.\.4"):
            make()


@pytest.mark.parametrize("keep", [-0.01, 1.01, math.nan])
def test_a_share_outside_the_unit_interval_is_refused(backbone: Backbone, keep: float) -> None:
    makers: list[Callable[[], object]] = [
        lambda: BetaPruning(backbone, layer=2, keep=keep),
        lambda: AttentionPruning(backbone, layer=2, keep=keep),
        lambda: RandomPruning(torch.zeros(1, dtype=torch.long), layer=2, keep=keep, num_layers=6),
    ]
    for make in makers:
        with pytest.raises(ConfigError, match="keep is the share"):
            make()


def test_a_backbone_without_the_signal_is_named(tmp_path: Path, backbone: Backbone) -> None:
    without = load_backbone(write_tiny_checkpoint(tmp_path, (ATTENTION, ATTENTION, ATTENTION)))
    with pytest.raises(ConfigError, match=f"qwen3_5_moe at {without.path} has no Gated DeltaNet"):
        BetaPruning(without, layer=1, keep=0.5)
    with pytest.raises(ConfigError, match=f"qwen3_5_moe at {backbone.path} has no full attention"):
        AttentionPruning(backbone, layer=0, keep=0.5)
