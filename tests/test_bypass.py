"""Segments that pass layers unchanged, against layers called one segment at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.decision import DROP, ROUTE, Bypass, BypassingPolicy, Decision, Full, Policy, Signals
from rlcompute.encoder import encode
from rlcompute.flop_counter import count_flops
from rlcompute.flops import FlopModel
from rlcompute.pack import EmbeddedInput, Pack
from rlcompute.policies.combined import Combined
from rlcompute.policies.expert_rules import OtsuSkip, UniformTopK
from rlcompute.policies.token_rules import AttentionPruning, BetaPruning
from tests.inputs import every_modality, relative_error
from tests.tiny import write_tiny_checkpoint

ATTENTION_LAST = ("linear_attention", "full_attention", "linear_attention", "full_attention")
DELTA_LAST = ("full_attention", "linear_attention", "full_attention", "linear_attention")
TOLERANCE = 5e-5
BYPASS_FLOPS = 64.0


@pytest.fixture(scope="module", params=[ATTENTION_LAST, DELTA_LAST], ids=["attention_last", "delta_last"])
def backbone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), request.param))


@pytest.fixture(scope="module")
def embedded(backbone: Backbone) -> list[EmbeddedInput]:
    """Every modality, with segments of one token first, inside and last."""
    inputs = backbone.embed_inputs(every_modality(backbone.preprocessor))
    single = EmbeddedInput(
        inputs[0].hidden_Ld[-1:], inputs[0].position_ids_3L[:, -1:], inputs[0].modality_L[-1:], 0.0
    )
    return [single, *inputs[:3], single, *inputs[3:], single]


@dataclass
class Scripted:
    """What to do by layer and segment, and by the place in the original input; charges as much as it is told."""

    skip_NS: Tensor
    actions_NSL: Tensor
    slots_NSLk: Tensor
    charge: float = 0.0

    gate_flops_per_token = 0.0

    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass | None:
        assert emb_Sd.shape[0] == pack.num_segments == self.skip_NS.shape[1]
        return Bypass(self.skip_NS[layer], BYPASS_FLOPS)

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        at = (layer, pack.segment_ids_T, pack.token_index_T)
        assert not bool(self.skip_NS[layer].all())
        assert torch.equal(pack.segment_ids_T.unique(), (~self.skip_NS[layer]).nonzero().squeeze(1))
        assert len(x_Td) == len(pack.segment_ids_T) == int(pack.cu_seqlens[-1])
        if self.charge:
            signals.charge(self.charge * (layer + 1))
        actions_T = self.actions_NSL[at]
        return Decision(actions_T == DROP, self.slots_NSLk[at] & (actions_T == ROUTE)[:, None])


def script(
    backbone: Backbone, inputs: list[EmbeddedInput], seed: int, bypass: float, drop: float
) -> Scripted:
    generator = torch.Generator().manual_seed(seed)
    shape = (backbone.num_layers, len(inputs), max(x.length for x in inputs))
    draw_NSL = torch.rand(shape, generator=generator)
    actions_NSL = (draw_NSL < 0.4).long() + (draw_NSL < drop).long()
    return Scripted(
        torch.rand(shape[:2], generator=generator) < bypass,
        actions_NSL,
        torch.rand(*shape, backbone.top_k, generator=generator) < 0.7,
    )


@torch.no_grad()
def one_segment(
    backbone: Backbone, x: EmbeddedInput, policy: Scripted, segment: int
) -> tuple[Tensor, Tensor]:
    """A loop over the backbone's layers that does not call those that are skipped: embedding [d], counts [N,5].

    The counts are tokens that enter, are decided, survive, and rows that run, then tokens that pass.
    """
    h_Ld, pack = backbone.pack([x])
    counts = []
    for index, layer in enumerate(backbone.layers):
        is_last = index == backbone.num_layers - 1
        if policy.skip_NS[index, segment]:
            counts.append([0, 0, 0, 0, len(h_Ld)])
            continue
        entered = len(h_Ld)
        h_Ld = layer.mix(h_Ld, pack)
        places_L = pack.token_index_T
        if is_last:
            h_Ld, places_L = h_Ld[-1:], places_L[-1:]
        decided = len(h_Ld)
        stays_L = policy.actions_NSL[index, segment, places_L] != DROP
        stays_L[-1] = True
        rows = stays_L.nonzero().squeeze(1)
        h_Ld, places_L = h_Ld[rows], places_L[rows]
        if not is_last:
            pack = pack.take(rows, torch.tensor([0, len(rows)]))
        x_Ld = layer.moe_input(h_Ld)
        ids_Lk, weights_Lk, _ = layer.route(x_Ld)
        routes_L = policy.actions_NSL[index, segment, places_L] == ROUTE
        keep_Lk = policy.slots_NSLk[index, segment, places_L] & routes_L[:, None]
        h_Ld = h_Ld + layer.shared(x_Ld)
        for token, slot in keep_Lk.nonzero().tolist():
            expert = int(ids_Lk[token, slot])
            gate, up = (layer.experts.gate_up_E2Fd[expert] @ x_Ld[token]).chunk(2)
            h_Ld[token] += weights_Lk[token, slot] * (layer.experts.down_EdF[expert] @ (F.silu(gate) * up))
        counts.append([entered, decided, len(rows), int(keep_Lk.sum()), 0])
    return F.normalize(backbone.final_norm(h_Ld[-1:])[0], dim=-1), torch.tensor(counts)


def check_against_segments_alone(backbone: Backbone, inputs: list[EmbeddedInput], policy: Scripted) -> None:
    out = encode(backbone, *backbone.pack(inputs), policy)
    alone = [one_segment(backbone, x, policy, segment) for segment, x in enumerate(inputs)]
    assert relative_error(out.embeddings_Sd, torch.stack([embedding for embedding, _ in alone])) <= TOLERANCE
    trace = out.trace
    found = (trace.entered_NS, trace.decided_NS, trace.survived_NS, trace.rows_NS, trace.bypassed_NS)
    assert torch.equal(torch.stack(found, dim=2), torch.stack([counts for _, counts in alone], dim=1))
    assert torch.equal(trace.expert_rows_NE.sum(1), trace.rows_NS.sum(1))
    assert bool((trace.routed_NS <= trace.survived_NS).all())


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    bypass=st.sampled_from([0.1, 0.5, 0.9]),
    drop=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_the_others_run_as_if_alone(
    backbone: Backbone, embedded: list[EmbeddedInput], seed: int, bypass: float, drop: float
) -> None:
    check_against_segments_alone(backbone, embedded, script(backbone, embedded, seed, bypass, drop))


@pytest.mark.parametrize("layer", range(4))
def test_a_layer_that_all_pass(backbone: Backbone, embedded: list[EmbeddedInput], layer: int) -> None:
    policy = script(backbone, embedded, layer, 0.3, 0.2)
    policy.skip_NS[layer] = True
    check_against_segments_alone(backbone, embedded, policy)


def test_segments_of_one_token(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    inputs = [embedded[0]] * 3
    check_against_segments_alone(backbone, inputs, script(backbone, inputs, 1, 0.5, 0.5))


def test_without_layers_the_embedding_is_the_input(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    policy = script(backbone, embedded, 0, 1.1, 0.0)
    hidden_Td, pack = backbone.pack(embedded)
    out = encode(backbone, hidden_Td, pack, policy)
    expected = F.normalize(backbone.final_norm(hidden_Td[pack.emb_index_S]), dim=-1)
    assert torch.equal(out.embeddings_Sd, expected)
    assert torch.equal(out.trace.bypassed_NS, pack.lengths_S.expand(backbone.num_layers, -1))
    # Nothing is left to pay but the decisions themselves.
    paid_S = FlopModel(backbone).executed(out.trace)
    assert torch.equal(paid_S, torch.full_like(paid_S, BYPASS_FLOPS * backbone.num_layers))


class RunsAll:
    """A policy that may bypass and never does, around one that does not."""

    def __init__(self, policy: Policy, says: Bypass | None) -> None:
        self._policy, self._says = policy, says
        self.gate_flops_per_token = policy.gate_flops_per_token

    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass | None:
        return self._says

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        return self._policy.decide(layer, x_Td, signals, pack)


class ScriptedTokens:
    """The decisions about tokens alone."""

    gate_flops_per_token = 0.0

    def __init__(self, script: Scripted) -> None:
        self._script = script

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        return self._script.decide(layer, x_Td, signals, pack)


@pytest.mark.parametrize("asks", [True, False])
def test_bypassing_nothing_changes_no_bit(
    backbone: Backbone, embedded: list[EmbeddedInput], asks: bool
) -> None:
    tokens = ScriptedTokens(script(backbone, embedded, 5, 0.0, 0.2))
    assert not isinstance(tokens, BypassingPolicy)
    packed = backbone.pack(embedded)
    plain = encode(backbone, *packed, tokens)
    says = Bypass(torch.zeros(len(embedded), dtype=torch.bool), BYPASS_FLOPS) if asks else None
    other = encode(backbone, *packed, RunsAll(tokens, says))
    assert torch.equal(plain.embeddings_Sd, other.embeddings_Sd)
    assert torch.equal(plain.trace.rows_NS, other.trace.rows_NS)
    assert torch.equal(other.trace.bypassed_NS, torch.zeros_like(plain.trace.entered_NS))
    extra_NS = other.trace.signal_flops_NS - plain.trace.signal_flops_NS
    assert torch.equal(extra_NS, torch.full_like(extra_NS, BYPASS_FLOPS if asks else 0.0))


def test_the_others_embeddings_are_those_of_a_pack_of_their_own(
    backbone: Backbone, embedded: list[EmbeddedInput]
) -> None:
    policy = script(backbone, embedded, 2, 0.0, 0.2)
    passes_S = torch.arange(len(embedded)) % 3 == 1
    policy.skip_NS[:] = passes_S
    mixed = encode(backbone, *backbone.pack(embedded), policy).embeddings_Sd[~passes_S]
    rows = (~passes_S).nonzero().squeeze(1)
    own = Scripted(policy.skip_NS[:, rows], policy.actions_NSL[:, rows], policy.slots_NSLk[:, rows])
    apart = encode(backbone, *backbone.pack([embedded[row] for row in rows.tolist()]), own).embeddings_Sd
    assert torch.equal(mixed, apart)


def test_flops_by_hand(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    policy = replace(script(backbone, embedded, 7, 0.4, 0.2), charge=3.0)
    executed_S = FlopModel(backbone).executed(encode(backbone, *backbone.pack(embedded), policy).trace)
    for segment, x in enumerate(embedded):
        _, counts = one_segment(backbone, x, policy, segment)
        expected = 0.0
        for index, (layer, counted) in enumerate(zip(backbone.layers, counts.tolist(), strict=True)):
            entered, decided, survived, rows, _ = counted
            pairs = entered if index == backbone.num_layers - 1 else entered * (entered + 1) // 2
            cost = layer.cost
            expected += cost.mix_token * entered + cost.mix_query * decided + cost.mix_context * pairs
            expected += cost.shared_token * survived + cost.expert_row * rows
            expected += BYPASS_FLOPS + 3.0 * (index + 1) * decided
        routed = float(executed_S[segment]) - expected
        # The router runs on tokens with at least one row: between none and all of those that survived.
        assert 0.0 <= routed <= backbone.layers[0].cost.router_token * int(counts[:, 2].sum())
        assert routed % backbone.layers[0].cost.router_token == 0.0


def test_flops_are_those_that_torch_executes(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    packed, traces = backbone.pack(embedded), []
    policy = script(backbone, embedded, 11, 0.5, 0.2)
    count = count_flops(lambda: traces.append(encode(backbone, *packed, policy).trace), backbone)
    decisions = BYPASS_FLOPS * backbone.num_layers * len(embedded)  # that this script does not really compute
    executed = float(FlopModel(backbone).executed(traces[0]).sum()) - decisions
    assert count.total == pytest.approx(executed, rel=1e-6)
    assert executed < 0.7 * float(FlopModel(backbone).full(packed[1].lengths_S).sum())


class OnlyBypasses:
    """Full compute but for the segments and layers of a script; each keeps its own fate in any pack."""

    gate_flops_per_token = 0.0

    def __init__(self, skip_NS: Tensor) -> None:
        self._skip_NS = skip_NS

    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass | None:
        return Bypass(self._skip_NS[layer], BYPASS_FLOPS) if layer else None

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        return Decision()


@pytest.mark.parametrize("rule", ["otsu", "attention", "beta"])
def test_rules_see_the_running_segments_as_they_would_alone(
    backbone: Backbone, embedded: list[EmbeddedInput], rule: str
) -> None:
    """Rules that rank tokens of an input, or sum up over layers, work on packs in which some inputs have no tokens."""

    def make() -> Policy:
        if rule == "otsu":
            return OtsuSkip(backbone, cap=0.9, min_variation=0.0, score="logit")
        if rule == "attention":
            return AttentionPruning(backbone, layer=2, keep=0.4)
        return BetaPruning(backbone, layer=2, keep=0.4)

    skip_NS = torch.rand(backbone.num_layers, len(embedded), generator=torch.Generator().manual_seed(3)) < 0.4
    together = encode(backbone, *backbone.pack(embedded), Combined([OnlyBypasses(skip_NS), make()]))
    for segment, x in enumerate(embedded):
        policy = Combined([OnlyBypasses(skip_NS[:, segment : segment + 1]), make()])
        alone = encode(backbone, *backbone.pack([x]), policy)
        assert relative_error(together.embeddings_Sd[segment : segment + 1], alone.embeddings_Sd) <= TOLERANCE
        for name in ("entered_NS", "survived_NS", "rows_NS", "routed_NS", "bypassed_NS", "signal_flops_NS"):
            found, expected = getattr(together.trace, name)[:, segment], getattr(alone.trace, name)[:, 0]
            assert torch.equal(found, expected), name


@pytest.mark.parametrize("from_emb", [True, False])
def test_attention_maps_of_the_running_segments(
    backbone: Backbone, embedded: list[EmbeddedInput], from_emb: bool
) -> None:
    class Reads(OnlyBypasses):
        def __init__(self, skip_NS: Tensor) -> None:
            super().__init__(skip_NS)
            self.seen: list[Tensor] = []

        def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
            if backbone.layers[layer].is_attention:
                self.seen.append(signals.received_attention_T(from_emb=from_emb))
            return Decision()

    skip_NS = torch.zeros(backbone.num_layers, len(embedded), dtype=torch.bool)
    skip_NS[:, ::2] = True
    skip_NS[:2] = False
    reads, rows = Reads(skip_NS), range(1, len(embedded), 2)
    trace = encode(backbone, *backbone.pack(embedded), reads).trace
    expected = Reads(torch.zeros(backbone.num_layers, len(rows), dtype=torch.bool))
    own = encode(backbone, *backbone.pack([embedded[row] for row in rows]), expected).trace
    torch.testing.assert_close(reads.seen[-1], expected.seen[-1])
    torch.testing.assert_close(trace.signal_flops_NS[2:, 1::2], own.signal_flops_NS[2:])
    bypass_only = torch.full_like(trace.signal_flops_NS[2:, ::2], BYPASS_FLOPS)
    assert torch.equal(trace.signal_flops_NS[2:, ::2], bypass_only)


def test_combined_policies_bypass_what_any_of_them_bypasses(
    backbone: Backbone, embedded: list[EmbeddedInput]
) -> None:
    scripts = [script(backbone, embedded, seed, 0.3, 0.1) for seed in (1, 2)]
    merged = OnlyBypasses(scripts[0].skip_NS | scripts[1].skip_NS)
    apart = Combined([*(OnlyBypasses(x.skip_NS) for x in scripts), UniformTopK(1, backbone.top_k)])
    packed = backbone.pack(embedded)
    one = encode(backbone, *packed, Combined([merged, UniformTopK(1, backbone.top_k)]))
    two = encode(backbone, *packed, apart)
    assert torch.equal(one.embeddings_Sd, two.embeddings_Sd)
    assert torch.equal(one.trace.bypassed_NS, two.trace.bypassed_NS)
    extra_NS = two.trace.signal_flops_NS - one.trace.signal_flops_NS
    assert torch.equal(extra_NS[1:], torch.full_like(extra_NS[1:], BYPASS_FLOPS))
    assert Combined([Full()]).bypass(0, packed[0][packed[1].emb_index_S], packed[1]) is None


def test_charges_add_up_with_what_was_read(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    class Charges:
        gate_flops_per_token = 0.0

        def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
            signals.charge(10.0 * layer)
            signals.charge(1.0)
            if not backbone.layers[layer].is_attention:
                assert len(signals.write_strength_TV) == len(signals.write_strength_TV) == len(x_Td)
            return Decision()

    trace = encode(backbone, *backbone.pack(embedded), Charges()).trace
    each_N1 = torch.tensor(
        [[10.0 * i + 1.0 + layer.cost.strength_token] for i, layer in enumerate(backbone.layers)]
    )
    assert torch.equal(trace.signal_flops_NS, each_N1 * trace.decided_NS.double())
