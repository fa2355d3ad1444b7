"""The claims of the paper on adaptive computation that can be tested at the scale of a backbone.

None is left out because it does not hold.
"""

from __future__ import annotations

from rlcompute.compare.claims_evidence import Scale
from rlcompute.compare.claims_model import Claim
from rlcompute.compare.claims_paper_combined import combinations
from rlcompute.compare.claims_paper_experts import adaptive_top_k, combined, expert_skipping
from rlcompute.compare.claims_paper_firing import where_policies_fire
from rlcompute.compare.claims_paper_halting import halting
from rlcompute.compare.claims_paper_learned import learned
from rlcompute.compare.claims_paper_pruning import beta, expert_pruning, token_pruning
from rlcompute.compare.claims_paper_ste import single_actions
from rlcompute.compare.claims_paper_strength import write_strength

RULES_AT_A_BUDGET = (
    "beta_prune:layer=4,keep=*",
    "modes:skip=*",
    f"modes:skip=*+{beta(0.5)}",
    "beta_skip:share=*",
)
"""The paper's rules with a free knob, to hold against trained policies at their own saving."""


def claims(scale: Scale) -> list[Claim]:
    """All claims, by kind of action."""
    return [
        *adaptive_top_k(scale),
        *expert_skipping(scale),
        *token_pruning(scale),
        *expert_pruning(scale),
        *combined(scale),
        *learned(),
        *single_actions(scale),
        *combinations(),
        *halting(scale),
        *where_policies_fire(scale),
        *write_strength(),
    ]
