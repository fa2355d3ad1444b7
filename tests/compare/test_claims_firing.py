"""Firing rates against what the encoder's own trace counted, and intervals against what they must enclose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcompute.backbones import load_backbone
from rlcompute.compare.claims_firing import DECIDED, DROPPED, KINDS, RUN, SLOTS, Firing, firing
from rlcompute.decision import Bypass, Decision, Signals
from rlcompute.encoder import encode
from rlcompute.pack import IMAGE, TEXT, VIDEO, Pack
from tests.inputs import every_modality

GROUPS = ["image", "visdoc", "video"]


class Scripted:
    """Drops every fifth token, and keeps slots by place: whole tokens in odd layers, two of three slots at most."""

    gate_flops_per_token = 0.0

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        place_T = pack.token_index_T + layer
        drop_T = place_T % 5 == 0
        if layer % 2:
            return Decision(drop_T=drop_T, keep=place_T % 2 == 0, top_k=2, renormalize=True)
        slots_k = torch.arange(3)
        return Decision(drop_T=drop_T if layer else None, keep=(place_T[:, None] + slots_k) % 3 != 0)


def test_counts_are_those_of_the_trace(suite_folder: Path) -> None:
    backbone = load_backbone(suite_folder / "tiny")
    inputs = backbone.embed_inputs(every_modality(backbone.preprocessor))
    batches = [(["a"] * 4, inputs[:4]), (["b"] * 2, inputs[4:])]
    counts = firing(backbone, lambda names: Scripted(), batches, GROUPS).counts_PNY4
    for pair in range(3):
        both = [inputs[pair], inputs[pair + 3]]
        trace = encode(backbone, *backbone.pack(both), Scripted()).trace
        decided, survived, rows = (
            x.sum(1).numpy() for x in (trace.decided_NS, trace.survived_NS, trace.rows_NS)
        )
        total_N4 = counts[pair].sum(1)
        assert np.array_equal(total_N4[:, DECIDED], decided)
        assert np.array_equal(total_N4[:, DROPPED], decided - survived)
        assert np.array_equal(total_N4[:, SLOTS], 3 * survived)
        assert np.array_equal(total_N4[:, RUN], rows)


class Passing(Scripted):
    """The same, of inputs that pass layers: every input with an image one layer, the last one too."""

    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass | None:
        visual_S = torch.zeros(pack.num_segments, dtype=torch.int64)
        visual_S.index_add_(0, pack.segment_ids_T, (pack.modality_T == IMAGE).long())
        return Bypass(visual_S > 0, 0.0) if layer in (1, 3) else None


def test_tokens_that_pass_a_layer_skip_their_experts(suite_folder: Path) -> None:
    backbone = load_backbone(suite_folder / "tiny")
    inputs = backbone.embed_inputs(every_modality(backbone.preprocessor))
    counts = firing(backbone, lambda names: Passing(), [([""] * 6, inputs)], GROUPS).counts_PNY4
    for pair in range(3):
        both = [inputs[pair], inputs[pair + 3]]
        trace = encode(backbone, *backbone.pack(both), Passing()).trace
        passed_NS = trace.bypassed_NS.clone()
        passed_NS[-1] = passed_NS[-1].clamp(max=1)  # <emb> alone is decided about there
        total_N4 = torch.from_numpy(counts[pair].sum(1))
        assert torch.equal(total_N4[:, DECIDED], (trace.decided_NS + passed_NS).sum(1))
        assert torch.equal(total_N4[:, DROPPED], (trace.decided_NS - trace.survived_NS).sum(1))
        assert torch.equal(total_N4[:, SLOTS], 3 * (trace.survived_NS + passed_NS).sum(1))
        assert torch.equal(total_N4[:, RUN], trace.rows_NS.sum(1))
    assert counts[:, 1, 1, DECIDED].sum() > 0 == counts[:, 1, 1, RUN].sum()


def test_kinds_are_those_of_tokens_and_pairs(suite_folder: Path) -> None:
    backbone = load_backbone(suite_folder / "tiny")
    inputs = backbone.embed_inputs(every_modality(backbone.preprocessor))
    counts = firing(backbone, lambda names: Scripted(), [([""] * 6, inputs)], GROUPS).counts_PNY4
    for pair, group in enumerate(GROUPS):
        kinds_L = torch.cat([x.modality_L[:-1] for x in (inputs[pair], inputs[pair + 3])])
        images = int((kinds_L == IMAGE).sum())
        expected = {
            "text": int((kinds_L == TEXT).sum()),
            "image": 0 if group == "visdoc" else images,
            "video": int((kinds_L == VIDEO).sum()),
            "visdoc": images if group == "visdoc" else 0,
            "emb": 2,
        }
        assert dict(zip(KINDS, counts[pair, 0, :, DECIDED].tolist(), strict=True)) == expected
    assert counts[:, -1, :-1].sum() == 0  # only <emb> is left


def test_an_interval_encloses_the_share_and_narrows_with_pairs() -> None:
    rng = np.random.default_rng(0)

    def width(pairs: int) -> float:
        counts = np.zeros((pairs, 1, len(KINDS), 4), dtype=np.int64)
        counts[..., DECIDED] = 50
        counts[..., DROPPED] = rng.binomial(50, 0.3, (pairs, 1, len(KINDS)))
        found = Firing(counts).figure(
            "x", lambda x: x[:, 0, 1, DROPPED] / x[:, 0, 1, DECIDED], samples=400, seed=0
        )
        assert found.low < found.value < found.high
        assert found.value == pytest.approx(counts[:, 0, 1, DROPPED].sum() / (50 * pairs))
        return found.high - found.low

    assert width(400) < 0.5 * width(25)


def test_pairs_are_resampled_not_tokens() -> None:
    """Tokens of a pair share its fate: all or none dropped, which only pairs can average out."""
    counts = np.zeros((40, 1, len(KINDS), 4), dtype=np.int64)
    counts[..., DECIDED] = 10_000
    counts[::2, ..., DROPPED] = 10_000
    found = Firing(counts).figure(
        "x", lambda x: x[:, 0, 1, DROPPED] / x[:, 0, 1, DECIDED], samples=1000, seed=0
    )
    assert found.high - found.low == pytest.approx(4 * 0.5 / np.sqrt(40), rel=0.2)


def test_counts_of_two_policies_add_up() -> None:
    ones = Firing(np.ones((2, 1, len(KINDS), 4), dtype=np.int64))
    assert ((ones + ones).counts_PNY4 == 2).all()
