"""Claims on several actions trained together: on figures like the paper's, their opposite, and with runs missing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlcompute.compare.claims_model import Claim
from rlcompute.compare.claims_paper_combined import SEPARATE, SHARED, combinations
from tests.compare.straight_fakes import ITERATIONS, FakeGates, reason, straight_evidence, verdict

CLAIMS = {claim.id: claim for claim in combinations()}
RULES = {"random_prune:layer=2,keep=0.25": 0.78}
ACTIONS = {"token_pruner": {"layer": 2}, "expert_skip": {}, "layer_skip": {"first": 3}}
MOVED = dict(zip((*SEPARATE, SHARED), (0.868, 0.860, 0.852, 0.834), strict=True))
CURVES = {
    "compute/lm_saved": (0.0, 0.3),
    "rate/token_pruner/keep": (1.0, 0.4),
    "rate/expert_skip/skip": (0.0, 0.1),
    "rate/layer_skip/skip": (0.0, 0.1),
}


def gates(moved: dict[str, float]) -> dict[str, FakeGates]:
    """The four combinations, and GRPO."""
    found = {
        name: FakeGates(ACTIONS, 0.87, saved=0.4, moved=recall, combination=name, curves=CURVES)
        for name, recall in moved.items()
    }
    return {**found, "grpo": FakeGates({}, 0.893, saved=0.45), "grpo_far": FakeGates({}, 0.5, saved=0.9)}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: claim.id)
def test_a_claim_agrees_with_figures_like_the_papers(claim: Claim) -> None:
    finding = claim.check(straight_evidence(gates(MOVED), RULES))
    assert finding.judgement.verdict == "agrees", finding.judgement.reason


def test_a_claim_disagrees_with_the_opposite() -> None:
    turned = gates(dict(zip(MOVED, reversed(MOVED.values()), strict=True)))
    evidence = straight_evidence({**turned, "grpo": FakeGates({}, 0.84, saved=0.45)}, RULES)
    for name in ("separate_budgets_better", "combination_order", "grpo_beats_straight_through"):
        assert verdict(CLAIMS[name], evidence) == "disagrees"


def test_grpo_is_held_against_the_best_combination_at_the_nearest_budget() -> None:
    finding = CLAIMS["grpo_beats_straight_through"].check(straight_evidence(gates(MOVED), RULES))
    assert finding.figures[0].name == "GRPO − simultaneous at 45 % of LM FLOPs"
    assert finding.figures[0].value == pytest.approx(2.5)


def test_of_several_shared_budgets_that_nearest_to_the_others_is_taken() -> None:
    near = gates(MOVED)
    far = {
        name: replace(near[SHARED], saved=saved, moved=0.99) for name, saved in (("far", 0.7), ("low", 0.2))
    }
    finding = CLAIMS["separate_budgets_better"].check(straight_evidence({**far, **near}, RULES))
    assert finding.judgement.verdict == "agrees", finding.judgement.reason
    assert finding.figures[0].value == pytest.approx(100 * (MOVED[SEPARATE[0]] - MOVED[SHARED]))


def test_without_separate_budgets_the_shared_one_nearest_to_grpo_is_taken() -> None:
    near = gates(MOVED)
    some = {
        name: replace(near[SHARED], saved=saved, moved=x)
        for name, saved, x in (("a", 0.6, 0.8), ("b", 0.3, 0.7))
    }
    claim = CLAIMS["grpo_beats_straight_through"]
    finding = claim.check(straight_evidence({**some, "grpo": FakeGates({}, 0.893, saved=0.5)}, RULES))
    assert finding.figures[0].value == pytest.approx(9.3)


def test_every_run_under_one_budget_has_to_drop() -> None:
    runs = {"some": with_curves(), "few": with_curves(keep=(1.0, 0.8))}
    finding = CLAIMS["global_budget_drops"].check(straight_evidence(runs, RULES))
    assert finding.judgement.verdict == "disagrees"
    names = [figure.name for figure in finding.figures]
    assert len(set(names)) == len(names)


def test_missing_combinations_are_named() -> None:
    some = {name: x for name, x in gates(MOVED).items() if name not in ("alternating", "shared")}
    evidence = straight_evidence(some, RULES)
    assert "alternating or shared" in reason(CLAIMS["separate_budgets_better"], evidence)
    assert "trained alternating:" in reason(CLAIMS["combination_order"], evidence)
    assert "trained shared:" in reason(CLAIMS["global_budget_drops"], evidence)
    assert verdict(CLAIMS["grpo_beats_straight_through"], evidence) == "agrees"
    alone = straight_evidence({"grpo": FakeGates({}, 0.893, saved=0.45)}, RULES)
    assert "ste.combination" in reason(CLAIMS["grpo_beats_straight_through"], alone)


def test_gates_that_do_not_reach_the_saving_decide_nothing() -> None:
    stuck = {name: replace(x, moved=None) for name, x in gates(MOVED).items()}
    evidence = straight_evidence(stuck, RULES)
    for name in ("separate_budgets_better", "combination_order", "grpo_beats_straight_through"):
        assert verdict(CLAIMS[name], evidence) == "undecided"


def with_curves(**changed: tuple[float, ...]) -> FakeGates:
    names = {"saved": "compute/lm_saved", "keep": "rate/token_pruner/keep"}
    curves = CURVES | {names[key]: values for key, values in changed.items()}
    return FakeGates(ACTIONS, saved=0.3, combination=SHARED, curves=curves)


def test_what_dropping_explains_of_the_saving() -> None:
    """Random pruning saves 30 % where it drops 75 %: 0.4 for each token dropped."""
    claim = CLAIMS["global_budget_drops"]
    finding = claim.check(straight_evidence({"run": with_curves()}, RULES))
    assert [x.value for x in finding.figures[:2]] == pytest.approx([80.0, 80.0], abs=0.1)
    few = straight_evidence({"run": with_curves(keep=(1.0, 0.8))}, RULES)
    assert verdict(claim, few) == "disagrees"
    steps = np.arange(ITERATIONS) / ITERATIONS
    # Dropping explains all of it until half is saved, and then does not grow.
    early = with_curves(saved=tuple(0.4 * steps), keep=tuple(1.0 - np.minimum(steps, 0.45)))
    early_only = claim.check(straight_evidence({"run": early}, RULES))
    assert early_only.figures[0].value > 90.0
    assert early_only.figures[1].value < 50.0
    assert early_only.judgement.verdict == "disagrees"


def test_a_share_of_nothing_and_curves_that_are_missing_decide_nothing() -> None:
    claim = CLAIMS["global_budget_drops"]
    assert "no saving to divide" in reason(
        claim, straight_evidence({"run": with_curves(saved=(0.0, 0.01))}, RULES)
    )
    bare = straight_evidence({"run": replace(with_curves(), curves=None)}, RULES)
    assert "metrics.jsonl" in reason(claim, bare)
