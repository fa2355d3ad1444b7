"""Tile-aware skipping around other policies: which rows run, and what depends on batchmates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.decision import Decision, Full, Policy, Signals
from rlcompute.encoder import encode
from rlcompute.kernels.routing_plan import tiles
from rlcompute.kernels.tile_skip import naive_tile_aware_keep
from rlcompute.pack import EmbeddedInput, Pack
from rlcompute.policies.baselines import RandomActions
from rlcompute.policies.combined import Combined
from rlcompute.policies.expert_rules import RandomTopK, UniformTopK
from rlcompute.policies.tile_aware import TileAware
from tests.inputs import every_modality
from tests.tiny import write_tiny_checkpoint

ROWS = 16


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def embedded(backbone: Backbone) -> list[EmbeddedInput]:
    return backbone.embed_inputs(every_modality(backbone.preprocessor))


def random_actions(backbone: Backbone, segments: int, drop: float = 0.2) -> RandomActions:
    return RandomActions(
        torch.arange(segments), skip=0.4, drop=drop, droppable="all", num_layers=backbone.num_layers
    )


class Spy:
    """Remembers what a tile-aware policy was given and what it made of it."""

    gate_flops_per_token = 0.0

    def __init__(self, inner: Policy, num_experts: int) -> None:
        self.seen: list[tuple[Decision, Decision, Tensor, Tensor, Tensor]] = []
        self._inner = inner
        self._outer = TileAware(self, rows_per_tile=ROWS, num_experts=num_experts)
        self._given = Decision()

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        self._given = self._inner.decide(layer, x_Td, signals, pack)
        return self._given

    def watched(self) -> Policy:
        spy = self

        class Watched:
            gate_flops_per_token = 0.0

            def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
                made = spy._outer.decide(layer, x_Td, signals, pack)
                stays_T = torch.ones(len(x_Td), dtype=torch.bool)
                if made.drop_T is not None:
                    stays_T = ~made.drop_T | pack.is_emb_T()
                spy.seen.append((spy._given, made, stays_T, signals.expert_ids_Tk, signals.weights_Tk))
                return made

        return Watched()


@pytest.mark.parametrize("rule", ["actions", "actions of two experts", "slots"])
def test_decisions_are_rounded_among_the_tokens_that_stay(
    backbone: Backbone, embedded: list[EmbeddedInput], rule: str
) -> None:
    inner: Policy = random_actions(backbone, len(embedded))
    if rule == "actions of two experts":
        inner = Combined([inner, UniformTopK(2, backbone.top_k)])
    if rule == "slots":
        inner = RandomTopK(torch.arange(len(embedded)), k=1, top_k=backbone.top_k)
    spy = Spy(inner, backbone.num_experts)
    trace = encode(backbone, *backbone.pack(embedded), spy.watched()).trace
    fewer = 0
    for layer, (given, made, stays_T, ids_Tk, weights_Tk) in enumerate(spy.seen):
        assert given.keep is not None and made.keep is not None
        assert (made.renormalize, made.top_k) == (given.renormalize, given.top_k)
        ids_Tk, weights_Tk = ids_Tk[:, : given.top_k], weights_Tk[:, : given.top_k]
        assert given.drop_T is None or torch.equal(given.drop_T, made.drop_T)
        keep_Tk = given.keep if given.keep.ndim == 2 else given.keep[:, None].expand_as(ids_Tk)
        expected = naive_tile_aware_keep(
            ids_Tk[stays_T], weights_Tk[stays_T], keep_Tk[stays_T], ROWS, backbone.num_experts
        )
        assert torch.equal(made.keep[stays_T], expected)
        blind_E = torch.bincount(ids_Tk[stays_T][keep_Tk[stays_T]], minlength=backbone.num_experts)
        aware_E = trace.expert_rows_NE[layer]
        assert torch.equal(torch.bincount(ids_Tk[stays_T][expected], minlength=len(aware_E)), aware_E)
        fewer += int((tiles(blind_E, ROWS) - tiles(aware_E, ROWS)).sum())
        assert tiles(aware_E, ROWS).sum() <= tiles(blind_E, ROWS).sum()
    assert fewer > 0


def test_without_skips_nothing_changes(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    hidden_Td, pack = backbone.pack(embedded)
    aware = TileAware(Full(), rows_per_tile=ROWS, num_experts=backbone.num_experts)
    full = encode(backbone, hidden_Td, pack, Full()).embeddings_Sd
    assert torch.equal(encode(backbone, hidden_Td, pack, aware).embeddings_Sd, full)


def test_tiles_of_one_row_leave_every_decision(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    hidden_Td, pack = backbone.pack(embedded)
    policy = random_actions(backbone, len(embedded))
    aware = TileAware(policy, rows_per_tile=1, num_experts=backbone.num_experts)
    blind = encode(backbone, hidden_Td, pack, policy)
    rounded = encode(backbone, hidden_Td, pack, aware)
    assert torch.equal(rounded.trace.rows_NS, blind.trace.rows_NS)
    torch.testing.assert_close(rounded.embeddings_Sd, blind.embeddings_Sd)


@pytest.mark.parametrize("aware", [False, True])
def test_only_tile_aware_embeddings_depend_on_batchmates(
    backbone: Backbone, embedded: list[EmbeddedInput], aware: bool, tmp_path: Path
) -> None:
    def embed(inputs: list[EmbeddedInput]) -> Tensor:
        policy: Policy = random_actions(backbone, len(inputs), drop=0.0)
        if aware:
            policy = TileAware(policy, rows_per_tile=ROWS, num_experts=backbone.num_experts)
        return encode(backbone, *backbone.pack(inputs), policy).embeddings_Sd

    alone, together = embed(embedded[:1]), embed(embedded)[:1]
    assert torch.allclose(alone, together, atol=1e-5) != aware
