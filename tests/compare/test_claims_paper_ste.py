"""Claims on gates of one action: on figures like the paper's, on their opposite, and where something is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlcompute.compare.claims_model import Claim, Figure
from rlcompute.compare.claims_paper_ste import single_actions
from tests.compare.claims_fakes import SCALE
from tests.compare.straight_fakes import FakeGates, reason, straight_evidence, verdict

CLAIMS = {claim.id: claim for claim in single_actions(SCALE)}
RULES = {
    "random_prune:layer=4,keep=0.25": 0.80,
    "random_prune:layer=2,keep=0.25": 0.78,
    "beta_prune:layer=2,keep=0.25": 0.85,
    "random_topk:k=2": 0.83,
    "modes:skip=0.500": 0.897,
    "modes:skip=0.625": 0.89,
}
PRUNER = FakeGates(
    {"token_pruner": {"layer": 2}},
    recall=0.894,
    saved=0.32,
    moved=0.889,
    dropping=(0, 0, 0.7, 0, 0, 0, 0, 0),
)
SKIP = FakeGates({"expert_skip": {}}, recall=0.894, saved=0.2, skip=0.5)
LAYERS = FakeGates(
    {"layer_skip": {"first": 3}},
    recall=0.893,
    saved=0.2,
    skipping=(0, 0, 0, 0, 0.9, 0.1, 0, 0),
    curves={"rate/layer_skip/skip": (0.05, 0.205)},
)
NULLS = FakeGates(
    {"null_experts": {}}, recall=0.87, saved=0.3, skip=0.625, curves={"rate/null_experts/real": (3.8, 1.5)}
)
LIKE_PAPER = {"pruner": PRUNER, "skip": SKIP, "layers": LAYERS, "nulls": NULLS}


def figure(claim: Claim, gates: dict[str, FakeGates], word: str) -> Figure:
    return next(x for x in claim.check(straight_evidence(gates, RULES)).figures if word in x.name)


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: claim.id)
def test_a_claim_agrees_with_figures_like_the_papers(claim: Claim) -> None:
    finding = claim.check(straight_evidence(LIKE_PAPER, RULES))
    assert finding.judgement.verdict == "agrees", finding.judgement.reason
    assert finding.figures


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: claim.id)
def test_without_such_gates_a_claim_says_what_to_train(claim: Claim) -> None:
    others = {"grpo": FakeGates({}), "both": FakeGates({"token_pruner": {}, "expert_skip": {}})}
    finding = claim.check(straight_evidence(others, RULES))
    assert finding.judgement.verdict == "undecided"
    assert "ste.actions=[" in finding.judgement.reason


@pytest.mark.parametrize(
    ("name", "gates"),
    [
        ("pruner_little_loss", replace(PRUNER, recall=0.86)),
        ("pruner_beats_rules", replace(PRUNER, moved=0.84)),
        ("skip_gate_little_loss", replace(SKIP, recall=0.86)),
        ("skip_gate_little_loss", replace(SKIP, skip=0.1)),
        ("skip_gate_behind_modes", replace(SKIP, recall=0.899)),
        ("layer_skip_concentrates", replace(LAYERS, skipping=(0, 0, 0, 0.2, 0.2, 0.2, 0.2, 0.2))),
        ("layer_skip_concentrates", replace(LAYERS, skipping=(0, 0, 0, 0, 0.4, 0, 0, 0))),
        ("layer_skip_concentrates", replace(LAYERS, skipping=(0.0,) * 8)),
        ("layer_skip_concentrates", replace(LAYERS, curves={"rate/layer_skip/skip": (0.05, 0.4)})),
        ("layer_skip_little_loss", replace(LAYERS, recall=0.86)),
        ("null_experts_few_real", replace(NULLS, skip=0.4)),
        ("null_experts_few_real", replace(NULLS, skip=0.8)),
        ("null_experts_behind_modes", replace(NULLS, recall=0.895)),
    ],
)
def test_a_claim_disagrees_with_the_opposite(name: str, gates: FakeGates) -> None:
    assert verdict(CLAIMS[name], straight_evidence({"run": gates}, RULES)) == "disagrees"


def test_other_budgets_than_the_papers_decide_nothing() -> None:
    half = straight_evidence({"run": replace(PRUNER, dropping=(0, 0, 0.5, 0, 0, 0, 0, 0))}, RULES)
    assert "set ste.prune_keep" in reason(CLAIMS["pruner_little_loss"], half)
    stuck = straight_evidence({"run": replace(PRUNER, moved=None)}, RULES)
    assert "no threshold saves 30 %" in reason(CLAIMS["pruner_beats_rules"], stuck)
    apart = straight_evidence({"run": SKIP}, RULES, off=0.06)
    assert "too far apart" in reason(CLAIMS["skip_gate_behind_modes"], apart)
    idle = straight_evidence({"run": replace(SKIP, skip=0.0)}, RULES)
    assert verdict(CLAIMS["skip_gate_behind_modes"], idle) == "undecided"


def test_every_entry_counts() -> None:
    two = straight_evidence({"one": PRUNER, "two": replace(PRUNER, recall=0.86)}, RULES)
    assert verdict(CLAIMS["pruner_little_loss"], two) == "disagrees"


def test_layers_that_carry_the_skips_are_counted() -> None:
    claim = CLAIMS["layer_skip_concentrates"]
    assert figure(claim, {"run": LAYERS}, "carry").value == 1.0
    even = replace(LAYERS, skipping=(0.5, 0.5, 0.5, 0.2, 0.2, 0.2, 0.2, 0.2))
    assert figure(claim, {"run": even}, "carry").value == 5.0
    assert figure(claim, {"run": even}, "eligible").value == pytest.approx(20.0)
    assert verdict(claim, straight_evidence({"run": replace(LAYERS, curves=None)}, RULES)) == "agrees"


def test_null_experts_leave_a_number_of_experts() -> None:
    claim = CLAIMS["null_experts_few_real"]
    assert figure(claim, {"run": NULLS}, "that is").value == pytest.approx(1.5)
    assert figure(claim, {"run": NULLS}, "halfway").value == pytest.approx(2.65, abs=0.02)
