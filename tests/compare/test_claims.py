"""The command's work from configuration to files, and the report's forms."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlcompute.compare import claims as command
from rlcompute.compare.claims_evidence import Evidence, Scale
from rlcompute.compare.claims_model import Claim, Figure, Finding, Judgement, at_most, exact
from rlcompute.compare.claims_report import Result, content, markdown, table
from tests.compare.measured import make_config


def a_claim(check: Any, policies: tuple[str, ...] = ()) -> Claim:
    return Claim("one|two", "It holds.", "−0.5 (Tab. 6)", "a loss", "agrees if it is small", check, policies)


def test_a_claim_goes_from_configuration_to_files(
    suite_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Scale] = []

    def check(evidence: Evidence) -> Finding:
        (ours,) = evidence.learned.values()
        assert len(ours) == 2
        loss = evidence.loss("top-1", "uniform_topk:k=1")
        rivals = evidence.rivals(0.1)
        assert {point.spec for point in rivals} == {"beta_skip:share=*"}
        return Finding(at_most(loss, 100.0), (loss, exact("rows", float(ours[0].rows_NG.sum()))))

    def listed(scale: Scale) -> list[Claim]:
        seen.append(scale)
        return [a_claim(check, ("full", "uniform_topk:k=1"))]

    monkeypatch.setattr(command, "claims", listed)
    monkeypatch.setattr(command, "RULES_AT_A_BUDGET", ())
    policies = ["full", f"gates:path={suite_folder}/gates_*", "beta_skip:share=*"]
    config = make_config(suite_folder, tmp_path / "cache", policies=policies)
    found = command.run(config, tmp_path / "out")
    assert seen == [Scale(num_layers=4, num_experts=8, top_k=3)]
    assert json.loads((tmp_path / "out" / "claims.json").read_text()) == found
    assert found["claims"][0]["verdict"] == "agrees"
    assert "12 image, 12 text pairs" in found["facts"]["suite"]
    assert "It holds." in (tmp_path / "out" / "claims.md").read_text()
    assert "agrees" in capsys.readouterr().out


def test_configured_rules_join_the_papers() -> None:
    configured = ["full", "modes:skip=*", "gates:path=x", "threshold:tau=*", "uniform_topk:k=1"]
    rules = command.free_rules(configured)
    assert "threshold:tau=*" in rules
    assert rules.count("modes:skip=*") == 1
    assert not {"full", "gates:path=x", "uniform_topk:k=1"} & set(rules)


def test_the_report_keeps_every_verdict_and_survives_what_is_not_defined() -> None:
    nothing = Figure("|x|", math.nan, math.nan, math.nan, "points")
    results = [
        Result(a_claim(None), Finding(Judgement(verdict, f"why [{verdict}]"), (nothing, exact("n", 3.0))))
        for verdict in ("agrees", "disagrees", "undecided")
    ]
    found = content({"suite": "demo"}, results)
    assert found["claims"][0]["figures"][0]["value"] is None
    json.dumps(found, allow_nan=False)
    page = markdown(found)
    assert "3 claims: 1 agrees, 1 disagrees, 1 undecided" in page
    assert page.count("agrees if it is small") == 3
    console = Console(width=120, record=True)
    console.print(table(found["claims"]))
    assert "why [disagrees]" in console.export_text()
