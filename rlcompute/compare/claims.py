"""`rlcompute claims`: the paper's claims on adaptive computation, checked on a backbone and its held-out pairs.

claims -> policies they need -> points of the comparison (cached) -> checks -> claims.json, claims.md, a table
          trained policies of compare.policies -> rules at the same saving, curves of their training
          a sample of the pairs -> write strength, firing rates, masked execution
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Group

from rlcompute.compare import claims_report
from rlcompute.compare.claims_evidence import Evidence, Scale
from rlcompute.compare.claims_laboratory import PairLaboratory
from rlcompute.compare.claims_model import Claim
from rlcompute.compare.claims_paper import RULES_AT_A_BUDGET, claims
from rlcompute.compare.claims_report import Result
from rlcompute.compare.run import Comparison
from rlcompute.config import Config
from rlcompute.errors import ConfigError
from rlcompute.evaluation_report import print_wide
from rlcompute.held_out import suite_name
from rlcompute.policies.rules import parse

logger = logging.getLogger(__name__)


def run(config: Config, out: Path) -> dict[str, Any]:
    """Checks every claim; prints a table and writes ``claims.json`` and ``claims.md`` into ``out``.

    Trained policies are those of ``compare.policies``; its training-free ones with a free knob join the paper's rules
    that they are held against. Without trained policies the claims on them stay undecided.

    Args:
        config: backbone, held-out pairs, calibration, clock and cache.
        out: folder for the files; made if it is missing.

    Returns:
        What ``claims.json`` holds.

    Raises:
        ConfigError: a policy does not fit the backbone: it has no Gated DeltaNet, or fewer layers than the claims name.
        CheckpointError: backbone or gates cannot be loaded, or do not belong together.
        DataError: pairs cannot be used, or a cache entry is damaged.
    """
    comparison = Comparison(config)
    backbone, pairs = comparison.backbone, comparison.suite.pairs
    if comparison.strength is None:
        raise ConfigError(
            f"{backbone.path} ({backbone.family}): the claims hold write strength against attention, so they need a "
            "backbone with Gated DeltaNet and attention layers"
        )
    laboratory = PairLaboratory(config, backbone, comparison.builder, pairs, comparison.strength)
    evidence = Evidence(
        Scale(backbone.num_layers, backbone.num_experts, backbone.top_k),
        lambda policies, budgets: comparison.collect(policies, budgets)[0],
        laboratory,
        learned=[text for text in config.compare.policies if parse(text).learned],
        free=free_rules(config.compare.policies),
        samples=config.evaluation.bootstrap_samples,
        seed=config.run.seed,
    )
    results = check_all(claims(evidence.scale), evidence)
    suite = suite_name(config, {modality: len(group) for modality, group in pairs.items()})
    facts = {
        "suite": suite,
        "backbone": f"{backbone.path} ({backbone.family}, {backbone.hash[:16]})",
        "layers, experts, experts a token": f"{backbone.num_layers}, {backbone.num_experts}, {backbone.top_k}",
        "full compute": str(evidence.full_recall),
        "policies trained by GRPO": ", ".join(evidence.learned) or "none",
        "policies trained straight through": ", ".join(x.name for x in evidence.straight_through) or "none",
    }
    found = claims_report.content(facts, results)
    claims_report.write(out, found)
    print_wide(Group(claims_report.table(found["claims"])))
    return found


def free_rules(configured: Iterable[str]) -> list[str]:
    """The paper's rules with a free knob, and the configured ones that were not trained."""
    own = [text for text in configured if (spec := parse(text)).free is not None and not spec.learned]
    return list(dict.fromkeys([*RULES_AT_A_BUDGET, *own]))


def check_all(found: Iterable[Claim], evidence: Evidence) -> list[Result]:
    """Measures what all claims need, then checks them in order."""
    found = list(found)
    evidence.prefetch([policy for claim in found for policy in claim.policies])
    results = []
    for claim in found:
        logger.info("claim %s", claim.id)
        results.append(Result(claim, claim.check(evidence)))
    return results
