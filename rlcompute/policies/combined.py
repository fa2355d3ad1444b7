"""Several policies at once, such as a rule for tokens and a rule for experts (spec §5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlcompute.decision import Bypass, Decision, Policy, Signals, bypass_of
from rlcompute.pack import Pack


class Combined:
    """What any of the policies drops is dropped; of the rest, a slot runs if all of them keep it.

    All of them see every token that reaches the layer, also those that another one drops in it. The lowest limit on
    experts holds, and weights are renormalised if one of them asks for it. A signal that several read is computed once.
    A segment passes a layer if any of the policies says so.
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        self.policies = tuple(policies)
        self.gate_flops_per_token = sum((policy.gate_flops_per_token for policy in self.policies), 0.0)

    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass | None:
        """The union of what is skipped, at the cost of all who were asked."""
        asked = [bypass_of(policy, layer, emb_Sd, pack) for policy in self.policies]
        made = [bypass for bypass in asked if bypass is not None]
        if not made:
            return None
        skip_S = torch.stack([bypass.skip_S for bypass in made]).any(dim=0)
        return Bypass(skip_S, sum((bypass.flops_per_segment for bypass in made), 0.0))

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """The union of drops and the intersection of what is kept."""
        made = [policy.decide(layer, x_Td, signals, pack) for policy in self.policies]
        limits = [decision.top_k for decision in made if decision.top_k is not None]
        top_k = min(limits, default=None)
        drop_T: Tensor | None = None
        keep: Tensor | None = None
        for decision in made:
            drop_T = _merge(drop_T, decision.drop_T, any_of=True)
            # A token whose kept slots all lie beyond the limit runs nothing, and need not be routed.
            keep = _merge(keep, _within(decision.keep, top_k), any_of=False)
        renormalize = any(decision.renormalize for decision in made)
        return Decision(drop_T=drop_T, keep=keep, top_k=top_k, renormalize=renormalize)


def _within(keep: Tensor | None, top_k: int | None) -> Tensor | None:
    """The slots up to a limit of a [T,k] mask; [T] says the same of all."""
    return keep if keep is None or keep.ndim == 1 else keep[:, :top_k]


def _merge(a: Tensor | None, b: Tensor | None, *, any_of: bool) -> Tensor | None:
    """Logical or / and of [T] or [T,k] masks; None says nothing."""
    if a is None or b is None:
        return b if a is None else a
    if a.ndim != b.ndim:
        a, b = (mask[:, None] if mask.ndim == 1 else mask for mask in (a, b))
    return a | b if any_of else a & b
