"""Expert rules against themselves written token by token, on made-up signals and through the encoder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.decision import Full, Policy
from rlcompute.encoder import encode
from rlcompute.errors import ConfigError
from rlcompute.flop_counter import count_flops
from rlcompute.flops import FlopModel
from rlcompute.pack import EmbeddedInput
from rlcompute.policies.expert_rules import (
    BetaSkip,
    OtsuSkip,
    RandomTopK,
    ScoreThreshold,
    SkipLayers,
    UniformTopK,
)
from tests.inputs import every_modality
from tests.policies.rule_checks import (
    Recorder,
    SlowRule,
    check_trace,
    fake_pack,
    fake_pass,
    fake_signals,
    slots_of,
    slow_beta_skip,
    slow_otsu,
    slow_random_topk,
    slow_skip_layers,
    slow_threshold,
    slow_uniform_topk,
)
from tests.tiny import write_tiny_checkpoint

DELTA_FIRST = ("linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention")
DELTA_LATER = ("full_attention", "linear_attention", "full_attention", "linear_attention")


@pytest.fixture(scope="module", params=[DELTA_FIRST, DELTA_LATER], ids=["delta_first", "delta_later"])
def backbone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), request.param))


@pytest.fixture(scope="module")
def embedded(backbone: Backbone) -> list[EmbeddedInput]:
    return backbone.embed_inputs(every_modality(backbone.preprocessor))


@dataclass(frozen=True)
class Rule:
    """A rule for a backbone and the keys of a pack's segments, and the same rule written slowly."""

    make: Callable[[Backbone, list[int]], Policy]
    slow: Callable[[list[int]], SlowRule]
    reads_router: bool = False


def otsu(score: str, min_variation: float, cap: float) -> Rule:
    return Rule(
        lambda b, keys: OtsuSkip(b, score=score, min_variation=min_variation, cap=cap),  # type: ignore[arg-type]
        lambda keys: slow_otsu(score, min_variation, cap),
        reads_router=score == "logit",
    )


RULES = {
    "skip_layers": Rule(lambda b, keys: SkipLayers(b, first=1, last=2), lambda keys: slow_skip_layers(1, 2)),
    "skip_all_layers": Rule(
        lambda b, keys: SkipLayers(b, first=0, last=b.num_layers - 1), lambda keys: slow_skip_layers(0, 99)
    ),
    "beta_skip": Rule(lambda b, keys: BetaSkip(b, share=0.35), lambda keys: slow_beta_skip(0.35)),
    "beta_skip_all": Rule(lambda b, keys: BetaSkip(b, share=1.0), lambda keys: slow_beta_skip(1.0)),
    "otsu_beta": otsu("beta", 0.0, 0.7),
    "otsu_beta_capped": otsu("beta", 0.0, 0.2),
    "otsu_logit": otsu("logit", 0.1, 0.7),
    "otsu_logit_strict": otsu("logit", 0.3, 1.0),
    "uniform_topk": Rule(lambda b, keys: UniformTopK(2, b.top_k), lambda keys: slow_uniform_topk(2)),
    "random_topk": Rule(
        lambda b, keys: RandomTopK(torch.tensor(keys), k=2, top_k=b.top_k),
        lambda keys: slow_random_topk(keys, 2),
    ),
    "threshold": Rule(
        lambda b, keys: ScoreThreshold(tau=0.34), lambda keys: slow_threshold(0.34), reads_router=True
    ),
    "threshold_none": Rule(
        lambda b, keys: ScoreThreshold(tau=1.0), lambda keys: slow_threshold(1.0), reads_router=True
    ),
}


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    seed=st.integers(0, 10_000),
    tied=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rules_equal_slow_loops(
    backbone: Backbone, name: str, lengths: list[int], seed: int, tied: bool, dtype: torch.dtype
) -> None:
    keys = [seed * 100 + segment for segment in range(len(lengths))]
    policy, slow = RULES[name].make(backbone, keys), RULES[name].slow(keys)
    for again in range(2):  # a policy serves pass after pass
        fake_pass(policy, slow, backbone, lengths, seed=seed + again, tied=tied, dtype=dtype)


@settings(max_examples=25, deadline=None)
@given(
    share=st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1)),
    min_variation=st.sampled_from([0.0, 0.05, 0.2, 0.5]),
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=4),
    seed=st.integers(0, 10_000),
)
def test_any_setting_equals_slow_loops_and_meets_its_budget(
    backbone: Backbone, share: float, min_variation: float, lengths: list[int], seed: int
) -> None:
    first_beta = [layer.is_attention for layer in backbone.layers].index(False)
    seen = fake_pass(BetaSkip(backbone, share=share), slow_beta_skip(share), backbone, lengths, seed=seed)
    for layer, (decision, tokens) in enumerate(seen):
        skipped = [not any(slots) for slots in slots_of(decision, tokens)]
        assert not any(skips for skips, token in zip(skipped, tokens, strict=True) if token.is_emb)
        for segment in range(len(lengths)):
            mine = [i for i, token in enumerate(tokens) if token.segment == segment and not token.is_emb]
            budget = share * len(mine) if layer >= first_beta else 0.0
            assert abs(sum(skipped[i] for i in mine) - budget) <= 0.5 + 1e-9
    for score in ("beta", "logit"):
        rule = otsu(score, min_variation, share)
        seen = fake_pass(rule.make(backbone, []), rule.slow([]), backbone, lengths, seed=seed)
        for decision, tokens in seen:
            skipped = [not any(slots) for slots in slots_of(decision, tokens)]
            for segment in range(len(lengths)):
                mine = [i for i, token in enumerate(tokens) if token.segment == segment]
                assert sum(skipped[i] for i in mine) <= share * (len(mine) - 1)
                assert not any(skipped[i] for i in mine if tokens[i].is_emb)


@pytest.mark.parametrize("name", RULES)
def test_packed_passes_execute_what_slow_loops_count(
    backbone: Backbone, embedded: list[EmbeddedInput], name: str
) -> None:
    keys, rule = list(range(40, 40 + len(embedded))), RULES[name]
    recorder, packed, traces = Recorder(rule.make(backbone, keys)), backbone.pack(embedded), []
    count = count_flops(lambda: traces.append(encode(backbone, *packed, recorder).trace), backbone)
    trace, flops = traces[0], FlopModel(backbone)
    check_trace(trace, recorder, [rule.slow(keys)], reads_router=rule.reads_router)
    assert count.total == pytest.approx(float(flops.executed(trace).sum()), rel=1e-6)
    full = flops.full_trace(packed[1].lengths_S)
    assert torch.equal(trace.survived_NS, full.survived_NS)
    assert trace.rows_NS.sum() < full.rows_NS.sum()
    # What a segment runs does not depend on the others.
    for segment, x in enumerate(embedded[:3]):
        alone = encode(backbone, *backbone.pack([x]), rule.make(backbone, keys[segment : segment + 1])).trace
        assert torch.equal(alone.rows_NS[:, 0], trace.rows_NS[:, segment])


def test_weights_are_renormalised_by_the_top_k_rules_alone(
    backbone: Backbone, embedded: list[EmbeddedInput]
) -> None:
    keys = list(range(len(embedded)))
    for name, rule in RULES.items():
        recorder = Recorder(rule.make(backbone, keys))
        encode(backbone, *backbone.pack(embedded), recorder)
        asked = {decision.renormalize for _, _, decision in recorder.seen}
        assert asked == {name in ("uniform_topk", "random_topk")}
        assert recorder.gate_flops_per_token == 0.0


@pytest.mark.parametrize(
    "make", [UniformTopK, lambda k, top_k: RandomTopK(torch.arange(6), k=k, top_k=top_k)]
)
def test_all_of_the_selected_is_full_compute(
    backbone: Backbone, embedded: list[EmbeddedInput], make: Callable[[int, int], Policy]
) -> None:
    packed = backbone.pack(embedded)
    full = encode(backbone, *packed, Full())
    every = encode(backbone, *packed, make(backbone.top_k, backbone.top_k))
    assert torch.equal(every.trace.rows_NS, full.trace.rows_NS)
    torch.testing.assert_close(every.embeddings_Sd, full.embeddings_Sd, atol=1e-5, rtol=0)


def test_random_slots_are_equally_likely(backbone: Backbone) -> None:
    generator, tokens, top_k = torch.Generator().manual_seed(0), 1500, backbone.top_k
    pack, rule = fake_pack([tokens], generator), RandomTopK(torch.tensor([7]), k=1, top_k=top_k)
    signals = fake_signals(
        tokens, top_k, has_beta=False, tied=False, generator=generator, dtype=torch.float32
    )
    kept = [rule.decide(layer, torch.empty(tokens, 0), signals, pack).keep for layer in (0, 1)]
    first, second = (x.float() for x in kept if x is not None)
    assert torch.allclose(first.mean(0), torch.full((top_k,), 1 / top_k), atol=0.05)
    agree = float((first * second).sum(1).mean())
    assert agree == pytest.approx(1 / top_k, abs=0.05)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda b: SkipLayers(b, first=-1, last=1), r"skip_layers: layers -1\.\.1"),
        (lambda b: SkipLayers(b, first=2, last=1), r"skip_layers: layers 2\.\.1"),
        (lambda b: SkipLayers(b, first=0, last=b.num_layers), r"skip_layers: .* within 0\.\."),
        (lambda b: BetaSkip(b, share=1.01), "beta_skip: share"),
        (lambda b: BetaSkip(b, share=-0.1), "beta_skip: share"),
        (lambda b: BetaSkip(b, share=math.nan), "beta_skip: share"),
        (lambda b: OtsuSkip(b, score="beta", cap=1.2), "otsu_beta: cap"),
        (lambda b: OtsuSkip(b, score="logit", min_variation=-0.1), "otsu_logit: min_variation"),
        (lambda b: OtsuSkip(b, score="logit", min_variation=math.inf), "otsu_logit: min_variation"),
        (lambda b: OtsuSkip(b, score="entropy"), "otsu: score must be one of beta, logit"),
        (lambda b: UniformTopK(0, b.top_k), r"uniform_topk: k must lie in 1\.\.3"),
        (lambda b: UniformTopK(4, b.top_k), r"uniform_topk: k must lie in 1\.\.3"),
        (lambda b: RandomTopK(torch.arange(2), k=4, top_k=b.top_k), r"random_topk: k must lie in 1\.\.3"),
        (lambda b: ScoreThreshold(tau=1.5), "threshold: tau"),
        (lambda b: ScoreThreshold(tau=math.nan), "threshold: tau"),
    ],
)
def test_bad_values_are_refused(backbone: Backbone, make: Callable[[Backbone], Policy], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make(backbone)


@pytest.mark.parametrize(
    "layer_types",
    [("full_attention",) * 2, ("full_attention", "linear_attention")],
    ids=["none", "last_only"],
)
def test_beta_rules_need_a_layer_with_beta(
    tmp_path_factory: pytest.TempPathFactory, layer_types: tuple[str, ...]
) -> None:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("attention"), layer_types)
    attention = load_backbone(folder)
    for make in (lambda: BetaSkip(attention, share=0.5), lambda: OtsuSkip(attention, score="beta")):
        with pytest.raises(ConfigError, match=r"no Gated DeltaNet layer before its last") as caught:
            make()
        assert str(folder) in str(caught.value)
        assert "qwen3_5_moe" in str(caught.value)
    OtsuSkip(attention, score="logit")
