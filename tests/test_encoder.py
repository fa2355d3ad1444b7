"""The packed loop against transformers' own layers, run one input at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.decision import DROP, ROUTE, SKIP, Decision, Full, Signals
from rlcompute.demo import CHECKPOINT
from rlcompute.encoder import encode
from rlcompute.flops import FlopModel
from rlcompute.pack import EmbeddedInput, Pack
from rlcompute.policies.baselines import RandomActions
from rlcompute.policies.combined import Combined
from rlcompute.policies.expert_rules import UniformTopK
from tests.inputs import every_modality, relative_error, transformers_embedding
from tests.tiny import write_tiny_checkpoint

ATTENTION_LAST = ("linear_attention", "full_attention", "linear_attention", "full_attention")
DELTA_LAST = ("full_attention", "linear_attention", "linear_attention")
TOLERANCE = 5e-5


@pytest.fixture(scope="module", params=[ATTENTION_LAST, DELTA_LAST], ids=["attention_last", "delta_last"])
def backbone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), request.param))


@pytest.fixture(scope="module")
def embedded(backbone: Backbone) -> list[EmbeddedInput]:
    return backbone.embed_inputs(every_modality(backbone.preprocessor))


def full(backbone: Backbone, inputs: list[EmbeddedInput]) -> Tensor:
    return encode(backbone, *backbone.pack(inputs), Full()).embeddings_Sd


def check_against_transformers(backbone: Any) -> None:
    inputs = every_modality(backbone.preprocessor)
    expected = torch.stack([transformers_embedding(backbone.model, x) for x in inputs])
    together = backbone.embed_inputs(inputs)
    alone = [backbone.embed_inputs([x])[0] for x in inputs]
    assert relative_error(full(backbone, together), expected) <= TOLERANCE
    assert relative_error(full(backbone, together[::-1]).flip(0), expected) <= TOLERANCE
    one_by_one = torch.cat([full(backbone, [x]) for x in alone])
    assert relative_error(one_by_one, expected) <= TOLERANCE


def test_full_compute_equals_transformers(backbone: Backbone) -> None:
    check_against_transformers(backbone)


def test_full_compute_equals_transformers_on_the_demo_embedder() -> None:
    check_against_transformers(load_backbone(CHECKPOINT))


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    wide, narrow = load_backbone(folder), load_backbone(folder, dtype="bfloat16")
    inputs = every_modality(wide.preprocessor)
    cosine = (full(wide, wide.embed_inputs(inputs)) * full(narrow, narrow.embed_inputs(inputs))).sum(1)
    assert float(cosine.min()) > 0.99


class Scripted:
    """Actions and kept slots looked up by layer, segment and original token index."""

    gate_flops_per_token = 0.0

    def __init__(self, actions: Tensor, slots: Tensor | None, renormalize: bool = False) -> None:
        self.actions_NSL, self.slots_NSLk, self.renormalize = actions, slots, renormalize
        self.order = torch.arange(actions.shape[1])

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        at = (layer, self.order[pack.segment_ids_T], pack.token_index_T)
        actions_T = self.actions_NSL[at]
        keep = actions_T == ROUTE
        if self.slots_NSLk is not None:
            # A policy that looks at the routing, as score thresholds do, takes the other path in the encoder.
            assert signals.weights_Tk.shape == signals.expert_ids_Tk.shape
            keep = self.slots_NSLk[at] & keep[:, None]
        return Decision(actions_T == DROP, keep, self.renormalize)


def oracle(backbone: Any, x: EmbeddedInput, policy: Scripted, segment: int) -> Tensor:
    """One segment alone through transformers' modules: survivors gathered, zeroed routing weights. [d]"""
    language = backbone.model.language_model
    h, positions = x.hidden_Ld[None], x.position_ids_3L[:, None]
    index_T = torch.arange(x.length)
    for i, layer in enumerate(language.layers):
        rotary = language.rotary_emb(h, positions)
        normed = layer.input_layernorm(h)
        if layer.block_type == "full_attention":
            mixed = layer.self_attn(normed, position_embeddings=rotary, attention_mask=None)[0]
        else:
            mixed = layer.linear_attn(normed)
        h = h + mixed
        moe_in = layer.post_attention_layernorm(h)[0]
        actions_T = policy.actions_NSL[i, segment, index_T]
        _, weights, ids = layer.mlp.gate(moe_in)
        keep = (actions_T == ROUTE)[:, None].expand_as(weights)
        if policy.slots_NSLk is not None:
            keep = keep & policy.slots_NSLk[i, segment, index_T]
        weights = weights * keep
        if policy.renormalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)
        shared = layer.mlp.shared_expert_gate(moe_in).sigmoid() * layer.mlp.shared_expert(moe_in)
        h = h + (layer.mlp.experts(moe_in, ids, weights) + shared)[None]
        if i < len(language.layers) - 1:
            stays = actions_T != DROP
            stays[-1] = True
            h, positions, index_T = h[:, stays], positions[:, :, stays], index_T[stays]
    return F.normalize(language.norm(h)[0, -1], dim=-1)


def scripted(
    backbone: Backbone, inputs: list[EmbeddedInput], seed: int, slots: bool, drop_rate: float
) -> Scripted:
    generator = torch.Generator().manual_seed(seed)
    shape = (backbone.num_layers, len(inputs), max(x.length for x in inputs))
    rates = torch.tensor([(1 - drop_rate) / 2, (1 - drop_rate) / 2, drop_rate])
    actions = torch.multinomial(rates.expand(shape[0] * shape[1] * shape[2], 3), 1, generator=generator).view(
        shape
    )
    kept = torch.rand(*shape, backbone.top_k, generator=generator) < 0.5 if slots else None
    return Scripted(actions, kept, renormalize=slots and seed % 2 == 0)


@torch.no_grad()
def check_against_oracle(backbone: Backbone, embedded: list[EmbeddedInput], policy: Scripted) -> None:
    out = encode(backbone, *backbone.pack(embedded), policy)
    expected = torch.stack([oracle(backbone, x, policy, s) for s, x in enumerate(embedded)])
    assert relative_error(out.embeddings_Sd, expected) <= TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("k", [1, 2])
def test_actions_with_fewer_experts_equal_transformers(
    backbone: Backbone, embedded: list[EmbeddedInput], k: int
) -> None:
    made = torch.zeros(backbone.num_layers, len(embedded), max(x.length for x in embedded), dtype=torch.long)
    actions = RandomActions(
        torch.arange(len(embedded)), skip=0.3, drop=0.2, droppable="all", num_layers=backbone.num_layers
    )
    policy = Combined([actions, UniformTopK(k, backbone.top_k)])

    class Watched:
        gate_flops_per_token = 0.0

        def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
            decision = policy.decide(layer, x_Td, signals, pack)
            assert decision.drop_T is not None and decision.keep is not None
            actions_T = torch.where(decision.drop_T, DROP, torch.where(decision.keep, ROUTE, SKIP))
            made[layer, pack.segment_ids_T, pack.token_index_T] = actions_T
            return decision

    out = encode(backbone, *backbone.pack(embedded), Watched())
    slots = (torch.arange(backbone.top_k) < k).expand(*made.shape, -1)
    script = Scripted(made, slots, renormalize=True)
    expected = torch.stack([oracle(backbone, x, script, segment) for segment, x in enumerate(embedded)])
    assert relative_error(out.embeddings_Sd, expected) <= TOLERANCE
    assert int(out.trace.rows_NS.sum()) == k * int(out.trace.routed_NS.sum())


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), slots=st.booleans(), drop_rate=st.sampled_from([0.0, 0.1, 0.5, 0.95]))
def test_random_decisions_equal_survivors_run_alone(
    backbone: Backbone, embedded: list[EmbeddedInput], seed: int, slots: bool, drop_rate: float
) -> None:
    check_against_oracle(backbone, embedded, scripted(backbone, embedded, seed, slots, drop_rate))


@pytest.mark.parametrize("action", [1, 2])
def test_all_skip_and_one_survivor(backbone: Backbone, embedded: list[EmbeddedInput], action: int) -> None:
    policy = scripted(backbone, embedded, 0, False, 0.0)
    policy.actions_NSL.fill_(action)
    check_against_oracle(backbone, embedded, policy)


@pytest.mark.parametrize("slots", [True, False])
def test_trace_counts_what_was_decided(
    backbone: Backbone, embedded: list[EmbeddedInput], slots: bool
) -> None:
    policy = scripted(backbone, embedded, 3, slots, 0.3)
    trace = encode(backbone, *backbone.pack(embedded), policy).trace
    for segment, x in enumerate(embedded):
        alive = torch.arange(x.length)
        for layer in range(backbone.num_layers):
            last = layer == backbone.num_layers - 1
            assert trace.entered_NS[layer, segment] == len(alive)
            decided = alive[-1:] if last else alive
            assert trace.decided_NS[layer, segment] == len(decided)
            actions = policy.actions_NSL[layer, segment, decided]
            stays = (actions != DROP) | (decided == x.length - 1)
            kept = (actions == ROUTE)[:, None].expand(-1, backbone.top_k)
            if policy.slots_NSLk is not None:
                kept = kept & policy.slots_NSLk[layer, segment, decided]
            assert trace.survived_NS[layer, segment] == stays.sum()
            assert trace.rows_NS[layer, segment] == kept.sum()
            # The router ran on every token whose selection the policy read.
            assert trace.routed_NS[layer, segment] == (len(decided) if slots else kept.any(1).sum())
            alive = decided[stays]
    assert torch.equal(trace.expert_rows_NE.sum(1), trace.rows_NS.sum(1))


def test_emb_survives_a_policy_that_drops_everything(
    backbone: Backbone, embedded: list[EmbeddedInput]
) -> None:
    class DropsAll:
        gate_flops_per_token = 0.0

        def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
            return Decision(drop_T=torch.ones(len(pack.segment_ids_T), dtype=torch.bool))

    trace = encode(backbone, *backbone.pack(embedded), DropsAll()).trace
    assert torch.equal(trace.survived_NS, torch.ones_like(trace.survived_NS))
    assert torch.equal(trace.rows_NS, torch.full_like(trace.rows_NS, backbone.top_k))


def test_flops_of_full_compute_come_from_lengths_alone(
    backbone: Backbone, embedded: list[EmbeddedInput]
) -> None:
    flops = FlopModel(backbone)
    trace = encode(backbone, *backbone.pack(embedded), Full()).trace
    lengths = torch.tensor([x.length for x in embedded])
    assert torch.equal(flops.executed(trace), flops.full(lengths))
    assert flops.hardware(trace, 0.0, 1) == pytest.approx(float(flops.full(lengths).sum()))
    assert flops.hardware(trace, 0.0, 128) > flops.hardware(trace, 0.0, 1)
