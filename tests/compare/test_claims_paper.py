"""Every claim on figures like the paper's, where it must agree, and on the opposite, where it must not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rlcompute.compare.claims_evidence import Evidence
from rlcompute.compare.claims_firing import DECIDED, DROPPED, KINDS, RUN, SLOTS, Firing
from rlcompute.compare.claims_model import Claim, Figure, exact
from rlcompute.compare.claims_paper import RULES_AT_A_BUDGET, claims
from rlcompute.compare.claims_paper_combined import combinations
from rlcompute.compare.claims_paper_halting import halting
from rlcompute.compare.claims_paper_ste import single_actions
from rlcompute.compare.claims_training import Training
from rlcompute.compare.points import Point
from rlcompute.compare.strength_study import ALL_KINDS, StrengthStudy
from rlcompute.compare.strength_study import Figure as StudyFigure
from rlcompute.policies.rules import parse
from tests.compare.claims_fakes import SCALE, fake_evidence, fake_point, ranks

CLAIMS = {claim.id: claim for claim in claims(SCALE)}
PRUNED = "prune_experts:saliency={},experts={}"

RECALL = {
    "full": 0.90,
    "uniform_topk:k=2": 0.896,
    "random_topk:k=2": 0.83,
    "uniform_topk:k=1": 0.87,
    "modes:skip=0.5": 0.896,
    "modes:skip=0.75": 0.87,
    "modes:skip=0.571": 0.895,
    "modes:skip=0.775": 0.884,
    "modes:skip=0.3": 0.896,
    "beta_skip:share=0.5": 0.86,
    "otsu_beta": 0.87,
    "otsu_logit": 0.86,
    "beta_skip:share=0.400": 0.87,
    "modes:skip=0.500": 0.896,
    "modes:skip=0.400": 0.896,
    "skip_layers:first=0": 0.5,
    "beta_prune:layer=4,keep=0.75": 0.899,
    "beta_prune:layer=4,keep=0.5": 0.889,
    "beta_prune:layer=4,keep=0.25": 0.857,
    "beta_prune:layer=2,keep=0.75": 0.899,
    "beta_prune:layer=2,keep=0.25": 0.859,
    "random_prune:layer=4,keep=0.5": 0.87,
    "random_prune:layer=4,keep=0.25": 0.80,
    "modes:skip=0.3+beta_prune:layer=4,keep=0.5": 0.884,
    **{
        PRUNED.format(name, experts): recall - (0.0 if experts == 8 else 0.1)
        for experts in (8, 4)
        for name, recall in zip(
            ("reap", "msan", "man", "probability", "frequency"),
            (0.896, 0.889, 0.888, 0.87, 0.86),
            strict=True,
        )
    },
}
SKIPPED = {
    "uniform_topk:k=2": 0.5,
    "uniform_topk:k=1": 0.75,
    "beta_skip:share=0.5": 0.5,
    "otsu_beta": 0.4,
    "otsu_logit": 0.4,
    "beta_skip:share=0.400": 0.4,
}
SAVED = {"beta_prune:layer=4,keep=0.5": 0.22, "modes:skip=0.3+beta_prune:layer=4,keep=0.5": 0.3}
GATES = {"gates:path=a": (0.3, 0.895), "gates:path=b": (0.6, 0.885)}
"""Saving and recall."""
RIVALS = {0.3: 0.88, 0.6: 0.80}


def share_skipped(policy: str) -> float:
    first = policy.split("+")[0]
    return SKIPPED.get(policy, float(first.split("=")[1]) if first.startswith("modes") else 0.0)


class FakeLaboratory:
    """Figures like the paper's, or their opposite."""

    def __init__(self, like_paper: bool) -> None:
        self._like_paper = like_paper

    @property
    def strength(self) -> StrengthStudy:
        ours, theirs = (0.2, 2.3) if self._like_paper else (2.3, 0.2)
        cosine = 0.24 if self._like_paper else -0.24
        spearman, emb = (0.55, 0.3) if self._like_paper else (0.05, 0.9)
        early, late = (0.6, 0.2) if self._like_paper else (0.2, 0.6)
        figures = [
            _study("variation", "strength", "all", ours),
            _study("variation", "received_attention", "all", theirs),
            _study("layer_cosine", "strength - emb_attention", "visual", cosine),
            _study("layer_correlation", "strength - emb_attention", "visual", cosine),
            _study("frame_cosine", "strength - emb_attention", "visual", cosine, kind="video"),
            _study("frame_correlation", "strength - emb_attention", "visual", cosine, kind="video"),
            _study("spearman", "received_attention", "all", spearman),
            _study("spearman", "emb_attention", "all", emb),
            *(_study("mean", "strength", "all", early if i == 0 else late, layers=(i,)) for i in (0, 1, 2)),
        ]
        text, even = (0.05, 0.4) if self._like_paper else (0.01, 0.1)
        for kind in ("image", "video", "visdoc"):
            figures += [
                _study("mean", "strength", "text", even, kind=kind),
                _study("mean", "strength", "visual", 0.4, kind=kind),
                _study("mean", "emb_attention", "text", text, kind=kind),
                _study("mean", "emb_attention", "visual", 0.01, kind=kind),
            ]
        return StrengthStudy("hash", (0, 1, 2), (3,), {"image": 9, "video": 9, "visdoc": 9}, tuple(figures))

    def firing(self, policy: str) -> Firing:
        counts = np.zeros((30, SCALE.num_layers, len(KINDS), 4), dtype=np.int64)
        counts[..., DECIDED], counts[..., SLOTS], counts[..., RUN] = 100, 400, 200
        pictures_layer, other_layer = (0, 4) if self._like_paper else (4, 0)
        counts[:, pictures_layer, 1:3, DROPPED] = 60
        counts[:, other_layer, (0, 3), DROPPED] = 30
        text = 100 if self._like_paper == policy.startswith("gates") else 300
        counts[:, :, 0, RUN] = text
        counts[:, -1, 4, RUN] = 396 if self._like_paper else 100
        return Firing(counts)

    def execution(self, policy: str) -> tuple[Figure, Figure]:
        return exact("masked", 1.0 if self._like_paper else 1.4, "×"), exact("packed", 1.5, "×")

    def expert_bytes(self, policy: str) -> int:
        return 50 if policy.startswith("prune") and self._like_paper else 100

    def training(self, policy: str) -> Training:
        raise AssertionError(f"{policy} was not trained straight through")

    def skip_only(self, policy: str) -> Point:
        return fake_point(policy, ranks(0.87 if self._like_paper else 0.899), skip=0.4)


def _study(
    name: Any, signal: Any, tokens: Any, value: float, *, kind: str = ALL_KINDS, layers: Any = ()
) -> StudyFigure:
    return StudyFigure(name, signal, tokens, layers, kind, value, value - 0.001, value + 0.001, 9)


def evidence_of(like_paper: bool, *, gates: bool = True) -> Evidence:
    """Evidence like the paper's, or with every recall on the other side of 0.87, where MoDES loses nothing."""

    def recall(value: float, policy: str = "") -> float:
        return value if like_paper else 0.9 if policy == "modes:skip=0.5" else 2 * 0.87 - value

    def measure(policies: Sequence[str], budgets: Sequence[float]) -> list[Point]:
        if budgets:
            (budget,) = budgets
            rival = recall(RIVALS[round(budget, 1)])
            return [fake_point(policy, ranks(rival), saved=budget) for policy in policies]
        found = []
        for policy in policies:
            saved, hit = GATES.get(policy, (SAVED.get(policy, 0.0), RECALL.get(policy, 0.0)))
            share = share_skipped(policy)
            answered = 0.9 if policy == "full" else recall(hit, policy)
            found.append(fake_point(policy, ranks(answered), saved=saved, skip=share))
        return found

    return fake_evidence(
        {},
        measure=measure,
        laboratory=FakeLaboratory(like_paper),
        learned=tuple(GATES) if gates else (),
        free=RULES_AT_A_BUDGET,
    )


MACHINE = {"topk_converts", "packed_converts", "half_the_tokens_time", "pruning_memory_not_flops"}
"""Claims whose figures are those of the clock or of counts, not of recall."""
STRAIGHT_THROUGH = {claim.id for claim in (*single_actions(SCALE), *combinations(), *halting(SCALE))}
"""Claims on gates that these fakes do not have; they are tested with gates of their own."""
RECALLED = [claim for claim in CLAIMS.values() if claim.id not in MACHINE | STRAIGHT_THROUGH]


@pytest.mark.parametrize("claim", RECALLED, ids=lambda claim: claim.id)
def test_a_claim_agrees_with_figures_like_the_papers(claim: Claim) -> None:
    finding = claim.check(evidence_of(like_paper=True))
    assert finding.judgement.verdict == "agrees", finding.judgement.reason
    assert finding.figures


@pytest.mark.parametrize("claim", RECALLED, ids=lambda claim: claim.id)
def test_a_claim_does_not_agree_with_the_opposite(claim: Claim) -> None:
    assert claim.check(evidence_of(like_paper=False)).judgement.verdict != "agrees"


def test_claims_on_clock_and_memory() -> None:
    evidence = evidence_of(like_paper=True)
    assert CLAIMS["half_the_tokens_time"].check(evidence).judgement.verdict == "agrees"
    assert CLAIMS["pruning_memory_not_flops"].check(evidence).judgement.verdict == "agrees"
    opposite = evidence_of(like_paper=False)
    assert CLAIMS["pruning_memory_not_flops"].check(opposite).judgement.verdict == "disagrees"


def test_nothing_is_claimed_of_gates_that_were_not_trained() -> None:
    evidence = evidence_of(like_paper=True, gates=False)
    untested = {
        name
        for name, claim in CLAIMS.items()
        if "no gates trained by GRPO" in claim.check(evidence).judgement.reason
    }
    assert {"grpo_beats_rules", "drops_early", "last_layer_keeps_experts", "learned_skip"} <= untested
    assert len(untested) < len(CLAIMS) / 2
    assert all(CLAIMS[x].check(evidence).judgement.verdict == "undecided" for x in STRAIGHT_THROUGH)


def test_a_budget_that_no_rule_reaches_is_undecided() -> None:
    evidence = fake_evidence(
        {},
        measure=lambda policies, budgets: (
            [] if budgets else [fake_point(policy, ranks(0.9), saved=0.7) for policy in policies]
        ),
        learned=["gates:path=a"],
        free=RULES_AT_A_BUDGET,
    )
    judgement = CLAIMS["grpo_beats_rules"].check(evidence).judgement
    assert judgement.verdict == "undecided"
    assert "no rule saves 70 %" in judgement.reason


def test_the_best_rule_is_the_one_to_beat() -> None:
    def measure(policies: Sequence[str], budgets: Sequence[float]) -> list[Point]:
        if not budgets:
            return [fake_point(policy, ranks(0.88), saved=0.5) for policy in policies]
        recalls = dict(zip(policies, (0.80, 0.89, 0.82, 0.99), strict=True))
        # The last one is best because it does not save as much.
        savings = dict(zip(policies, (0.5, 0.5, 0.5, 0.4), strict=True))
        return [fake_point(x, ranks(recalls[x]), saved=savings[x]) for x in policies]

    evidence = fake_evidence({}, measure=measure, learned=["gates:path=a"], free=RULES_AT_A_BUDGET)
    finding = CLAIMS["grpo_beats_rules"].check(evidence)
    assert finding.judgement.verdict == "disagrees"
    assert "modes:skip=*" in finding.figures[0].name
    assert finding.figures[0].value == pytest.approx(-1.0)


def test_claims_are_written_out_and_their_policies_are_policies() -> None:
    assert len(CLAIMS) == len(claims(SCALE)) >= 12
    for claim in CLAIMS.values():
        assert all((claim.statement, claim.paper, claim.measured, claim.rule.startswith("agrees if")))
        for policy in claim.policies:
            assert parse(policy).free is None
    assert all(parse(policy).free is not None for policy in RULES_AT_A_BUDGET)
