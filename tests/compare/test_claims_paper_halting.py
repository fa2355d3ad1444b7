"""Claims on the paper's negative results: where the failure shows, where training works, and without curves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlcompute.compare.claims_model import Claim
from rlcompute.compare.claims_paper_halting import halting
from tests.compare.claims_fakes import SCALE
from tests.compare.straight_fakes import FakeGates, reason, straight_evidence, verdict

CLAIMS = {claim.id: claim for claim in halting(SCALE)}


def curves(
    kind: str, layers: tuple[float, float], **changed: tuple[float, float]
) -> dict[str, tuple[float, float]]:
    found = {
        f"rate/{kind}/layers": layers,
        f"rate/{kind}/kl": (1.0, 2.0),
        "recall/mean": (0.9, 0.9),
        "recall/teacher": (0.92, 0.92),
        "distill/cosine": (0.99, 0.9),
        "policy/gradient_norm": (1.0, 0.5),
    }
    return found | {name.replace("__", "/"): values for name, values in changed.items()}


COLLAPSE = curves("halt_avit", (7.9, 1.0), recall__mean=(0.95, 0.1), policy__gradient_norm=(2.0, 0.0))
AVIT = FakeGates({"halt_avit": {"rate": 0.2}}, recall=0.2, saved=0.8, curves=COLLAPSE)
CUMULATIVE = FakeGates(
    {"halt_cumulative": {"rate": 0.2}},
    recall=0.7,
    saved=0.6,
    dropping=(0.85, 0.1, 0.0, 0, 0, 0, 0, 0),
    curves=curves("halt_cumulative", (7.9, 1.2)),
)
BETA = FakeGates(
    {"halt_beta": {"rate": 0.2}},
    saved=0.002,
    dropping=(0.01, 0.01, 0, 0, 0, 0, 0, 0),
    curves=curves("halt_beta", (7.5, 7.9)),
)
EXIT = FakeGates(
    {"early_exit": {"rate": 0.2}},
    saved=0.005,
    skipping=(0, 0, 0, 0, 0, 0, 0, 0.2),
    curves=curves("early_exit", (7.0, 7.8)),
)
LIKE_PAPER = {"avit": AVIT, "cumulative": CUMULATIVE, "beta": BETA, "exit": EXIT}


def healthy(**changed: tuple[float, float]) -> FakeGates:
    """A-ViT gates of which one thing differs from collapse."""
    return replace(AVIT, curves=COLLAPSE | {name.replace("__", "/"): x for name, x in changed.items()})


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: claim.id)
def test_a_claim_agrees_where_the_failure_shows(claim: Claim) -> None:
    finding = claim.check(straight_evidence(LIKE_PAPER))
    assert finding.judgement.verdict == "agrees", finding.judgement.reason


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: claim.id)
def test_without_such_gates_a_claim_says_what_to_train(claim: Claim) -> None:
    finding = claim.check(straight_evidence({"grpo": FakeGates({})}))
    assert finding.judgement.verdict == "undecided"
    assert "run.method=ste" in finding.judgement.reason


@pytest.mark.parametrize(
    ("name", "gates"),
    [
        ("avit_collapses", healthy(recall__mean=(0.5, 0.1))),
        ("avit_collapses", healthy(recall__mean=(0.95, 0.9))),
        ("avit_collapses", healthy(policy__gradient_norm=(2.0, 2.0))),
        ("avit_collapses", healthy(rate__halt_avit__layers=(7.9, 3.0))),
        ("cumulative_halts_first", replace(CUMULATIVE, dropping=(0.2,) * 4 + (0.0,) * 4)),
        ("cumulative_halts_first", replace(CUMULATIVE, dropping=(0.3,) + (0.0,) * 7)),
        ("cumulative_halts_first", replace(CUMULATIVE, dropping=(0.0,) * 8)),
        ("beta_halting_inert", replace(BETA, saved=0.05)),
        ("beta_halting_inert", replace(BETA, dropping=(0.1,) * 4 + (0.0,) * 4)),
        ("early_exit_exits_late", replace(EXIT, saved=0.05)),
        ("early_exit_exits_late", replace(EXIT, recall=0.8)),
        ("early_exit_exits_late", replace(EXIT, skipping=(0.0,) * 4 + (0.5,) * 4)),
    ],
)
def test_a_claim_disagrees_where_training_works(name: str, gates: FakeGates) -> None:
    assert verdict(CLAIMS[name], straight_evidence({"run": gates})) == "disagrees"


def test_without_curves_only_what_is_about_training_stays_open() -> None:
    bare = straight_evidence({name: replace(x, curves=None) for name, x in LIKE_PAPER.items()})
    assert "metrics.jsonl" in reason(CLAIMS["avit_collapses"], bare)
    assert [verdict(x, bare) for x in CLAIMS.values()] == ["undecided", "agrees", "agrees", "agrees"]


def test_the_course_of_training_is_told() -> None:
    finding = CLAIMS["beta_halting_inert"].check(straight_evidence({"run": BETA}))
    found = {x.name: x.value for x in finding.figures}
    start, end = (100.0 * (1.0 - (layers - 1.0) / 7.0) for layers in (7.52, 7.88))
    assert found["layers missed at the start of training, run"] == pytest.approx(start, abs=0.1)
    assert found["layers missed at the end, run"] == pytest.approx(end, abs=0.1)
    prior = CLAIMS["cumulative_halts_first"].check(straight_evidence({"run": CUMULATIVE})).figures[2]
    assert prior.value == pytest.approx(100.0 * (0.2 + 0.16) / (1.0 - 0.8**8))
