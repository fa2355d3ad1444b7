"""The objective of straight-through gates (spec §4; paper M, §4.1 and App. E.1): pure functions of a batch's sums.

    loss = contrastive + distillation + budgets

The budgets, ``x`` being what an action reaches and ``x*`` its target:

    ============  =====================================  ===========================
    action        alone                                  with others, a budget each
    ============  =====================================  ===========================
    token pruner  w |keep - keep*|                       w (keep - keep*)^2
    expert skip   w (1 - skip)                           w (skip - skip*)^2
    layer skip    w |skip - skip*|                       w (skip - skip*)^2
    null experts  load balance over real and nulls       the same
    halting       w_p E[N] + w_q KL(q || geometric)      never with others
    ============  =====================================  ===========================

    all together under one budget ("shared"):  w max(0, executed / full - (1 - saved*))

Budgets of the pruner, of expert skip and the shared one are warmed up (:func:`~.ste_schedule.budget_factor`).

Everything is a function of sums over the whole batch, which workers add up, and differentiable in them; results have
the dtype of the inputs.

Shape legend: B pairs, 2B inputs (queries, then targets), d embedding size, L layers that gave a sum, E real experts,
E0 null experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcompute.config_ste import HALTING, SteConfig
from rlcompute.policies.ste_schedule import balance_weight, budget_factor


@dataclass(frozen=True)
class Objective:
    """The loss of a batch and what it is made of.

    Attributes:
        loss: scalar; the sum of ``parts``.
        parts: weighted losses by name, without gradient: ``contrastive``, ``distill`` and those of the budgets.
        rates: what the actions did, by ``kind/name``; NaN where they had nothing to act on.
        progress: by kind, the saving reached as a share of the saving wanted, 1 at the target; for actions that have a
            target and something to act on.
    """

    loss: Tensor
    parts: dict[str, Tensor]
    rates: dict[str, float]
    progress: dict[str, float]


@dataclass(frozen=True)
class _Budget:
    """One action's share of the objective; fields as in :class:`Objective`, ``progress`` None without a target."""

    parts: dict[str, Tensor]
    rates: dict[str, Tensor]
    progress: Tensor | None = None


def objective(
    settings: SteConfig,
    share: float,
    embeddings_2Bd: Tensor,
    teacher_2Bd: Tensor,
    same_BB: Tensor,
    terms: Mapping[str, Tensor],
    executed_over_full: Tensor,
    num_real: int,
    top_k: int,
) -> Objective:
    """The loss over a whole batch.

    Args:
        settings: actions, weights, targets and schedules.
        share: progress of the run, iteration / iterations.
        embeddings_2Bd: unit-norm embeddings of the B queries, then of their targets in the same order.
        teacher_2Bd: those of the full-compute forward.
        same_BB: bool; pair j's target also answers pair i's query (as it does for i = j), so it is no negative.
        terms: sums over the batch, each [L,n], by ``kind/name``, of every action in ``settings.actions``.
        executed_over_full: scalar, executed FLOPs of the language model as a share of full compute's.
        num_real: E, real experts of a layer.
        top_k: slots of a token.
    """
    query_Bd, target_Bd = embeddings_2Bd.chunk(2)
    contrastive = info_nce(query_Bd, target_Bd, same_BB, settings.logit_scale)
    parts = {
        "contrastive": settings.contrastive_weight * contrastive,
        "distill": settings.distill_weight * distillation(embeddings_2Bd, teacher_2Bd),
    }
    rates: dict[str, float] = {}
    progress: dict[str, float] = {}
    shared = settings.combination == "shared"
    for kind in settings.actions:
        own = {
            name.removeprefix(f"{kind}/"): sums for name, sums in terms.items() if name.startswith(f"{kind}/")
        }
        budget = _budget(settings, share, kind, own, num_real, top_k)
        rates |= {f"{kind}/{name}": float(rate.detach()) for name, rate in budget.rates.items()}
        if budget.progress is not None and bool(budget.progress.isfinite()):
            progress[kind] = float(budget.progress.detach())
        if not shared:
            # NaN: nothing to act on, so nothing to pay for. Gates that diverge show in the contrastive loss.
            parts |= {name: part.nan_to_num() for name, part in budget.parts.items()}
    if shared:
        excess = shared_budget(executed_over_full, settings.flops_saved)
        parts["flops"] = settings.flops_weight * budget_factor(settings, share) * excess
    loss = torch.stack([*parts.values()]).sum()
    return Objective(loss, {name: part.detach() for name, part in parts.items()}, rates, progress)


def info_nce(query_Bd: Tensor, target_Bd: Tensor, same_BB: Tensor, scale: float) -> Tensor:
    """Contrastive loss over the batch in both directions, the mean of the two (spec §2).

    Negatives are the other side of all other pairs, of whichever task. Those that answer as well (``same_BB`` off the
    diagonal) are masked out.

    Args:
        query_Bd: unit norm.
        target_Bd: unit norm.
        same_BB: bool, True where pair j's target also answers pair i's query.
        scale: factor of the cosines.
    """
    logits_BB = scale * (query_Bd @ target_Bd.T)
    own_B = torch.arange(len(logits_BB), device=logits_BB.device)
    duplicate_BB = same_BB & (own_B[:, None] != own_B)
    logits_BB = logits_BB.masked_fill(duplicate_BB, -torch.inf)
    return 0.5 * (F.cross_entropy(logits_BB, own_B) + F.cross_entropy(logits_BB.T, own_B))


def distillation(embeddings_Sd: Tensor, teacher_Sd: Tensor) -> Tensor:
    """Mean of 1 - cosine to the full-compute embeddings."""
    return (1.0 - F.cosine_similarity(embeddings_Sd, teacher_Sd, dim=1)).mean()


def shared_budget(executed_over_full: Tensor, saved: float) -> Tensor:
    """What is missing to a saving of ``saved``, as a share of full compute."""
    return F.relu(executed_over_full - (1.0 - saved))


def load_balance(counts_LC: Tensor, probs_LP: Tensor, tokens_L1: Tensor, num_real: int, top_k: int) -> Tensor:
    """AdaMoE's load balance, (E + E0) sum_i f_i P_i, mean over layers; 1 at a uniform load.

    f_i is the share of the slots that expert i wins and P_i its mean probability. Null experts are one another's
    equals, so each has their mean f: they are not pushed to be used evenly among themselves.

    Args:
        counts_LC: slots won by each of the E real experts, then by a null expert on average.
        probs_LP: sums of the joint softmax over the tokens, E real then E0 null experts.
        tokens_L1: tokens that chose.
        num_real: E.
        top_k: slots of a token.
    """
    num_null = probs_LP.shape[1] - num_real
    tokens_L1 = tokens_L1.clamp_min(1)
    won_LC, probability_LP = counts_LC / (top_k * tokens_L1), probs_LP / tokens_L1
    real_LE, null_L1 = won_LC.split([num_real, 1], dim=1)
    won_LP = torch.cat([real_LE, null_L1.expand(-1, num_null)], dim=1)
    return (num_real + num_null) * (won_LP * probability_LP).sum(1).mean()


def _budget(
    settings: SteConfig, share: float, kind: str, own: Mapping[str, Tensor], num_real: int, top_k: int
) -> _Budget:
    """The budget of one action from its own sums."""
    if kind in HALTING:
        return _halting(settings, own)
    if kind == "null_experts":
        return _null_experts(settings, share, own, num_real, top_k)
    if kind == "layer_skip":
        skip = _ratio(own["skipped"], own["inputs"])
        penalty = settings.layer_weight * _distance(settings, skip, settings.layer_target)
        return _Budget({kind: penalty}, {"skip": skip}, skip / settings.layer_target)
    factor = budget_factor(settings, share)
    if kind == "token_pruner":
        keep, wanted = _ratio(own["kept"], own["tokens"]), settings.prune_keep
        penalty = settings.prune_weight * factor * _distance(settings, keep, wanted)
        return _Budget({kind: penalty}, {"keep": keep}, (1.0 - keep) / (1.0 - wanted))
    skip, target = _ratio(own["skipped"], own["tokens"]), settings.skip_target
    if target is None or len(settings.actions) == 1:
        penalty, progress = 1.0 - skip, None
    else:
        penalty, progress = _distance(settings, skip, target), skip / target
    return _Budget({kind: settings.resolved_skip_weight * factor * penalty}, {"skip": skip}, progress)


def _null_experts(
    settings: SteConfig, share: float, own: Mapping[str, Tensor], num_real: int, top_k: int
) -> _Budget:
    """Its target is the uniform load, where real experts win E / (E + E0) of the slots."""
    counts_LC, probs_LP = own["counts"], own["probs"]
    balance = load_balance(counts_LC, probs_LP, own["tokens"], num_real, top_k)
    real = _ratio(own["real"], own["tokens"])
    wanted = 1.0 - num_real / probs_LP.shape[1]
    return _Budget(
        {"null_experts": balance_weight(settings, share) * balance},
        {"real": real, "balance": balance},
        (1.0 - real / top_k) / wanted,
    )


def _halting(settings: SteConfig, own: Mapping[str, Tensor]) -> _Budget:
    """E[N] is in layers; ``tokens`` counts in each layer those that began in the first."""
    began = own["tokens"][:1]
    layers, divergence = _ratio(own["steps"], began), _ratio(own["kl"], began)
    parts = {
        "ponder": settings.ponder_weight * layers,
        "prior": settings.prior_weight * divergence,
    }
    return _Budget(parts, {"layers": layers, "kl": divergence})


def _ratio(part_Ln: Tensor, whole_Ln: Tensor) -> Tensor:
    """The sums' ratio over all layers; a NaN without gradient where there was nothing to count."""
    part, whole = part_Ln.sum(), whole_Ln.sum()
    return part / whole if float(whole.detach()) > 0.0 else part.new_full((), math.nan)


def _distance(settings: SteConfig, rate: Tensor, target: float) -> Tensor:
    """From the target: absolute for one action, squared for several."""
    return (rate - target).abs() if len(settings.actions) == 1 else (rate - target).square()
