"""The retrieval reward of spec §3 over the whole batch's gallery, for both directions of every pair.

    R = recall@G * [(s_pos - s_neg) + lambda_s * S] + lambda_d * cos(e, e_full)

The gallery of a query rollout is every target rollout of the batch, of whichever task, plus the cached
full-compute targets of its own task (the bank); for a target rollout it is the queries, likewise. Multiplying
the efficiency term by recall is what prevents reward hacking: a rollout that loses its positives earns
nothing for being cheap.

Shape legend: B pairs, G rollouts a pair, R = B*G rollouts, M bank rows, m bank rows of the largest task,
N = R + m gallery items, d embedding size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcompute.errors import CollapseError, ConfigError
from rlcompute.metrics import TIE_TOLERANCE


@dataclass(frozen=True)
class RewardSettings:
    """Weights of the reward; the keys of the configuration's ``reward`` section with the same names.

    Attributes:
        distill_weight: lambda_d, weight of the cosine to the full-compute embedding.
        negative_temperature: softmax temperature of the weighted mean of the negatives' cosines.
        negatives: keep only this many most similar negatives; None keeps all.
    """

    distill_weight: float
    negative_temperature: float
    negatives: int | None = None


@dataclass(frozen=True)
class TeacherBank:
    """Cached full-compute embeddings of training pairs, used as extra negatives.

    Attributes:
        query_Md, target_Md: float [M, d], unit norm, row m of both belongs to one pair.
        tasks, target_ids: M strings each.
    """

    query_Md: Tensor
    target_Md: Tensor
    tasks: Sequence[str]
    target_ids: Sequence[str]


@dataclass(frozen=True)
class RolloutBatch:
    """What the reward needs to know of one batch of rollouts.

    Attributes:
        query_BGd, target_BGd: float [B, G, d], unit-norm embeddings of the rollouts.
        teacher_query_Bd, teacher_target_Bd: float [B, d], full-compute embeddings.
        query_saved_BG, target_saved_BG: float [B, G], S, saved fraction of what full compute is charged for the
            language model, in the currency of ``compute.cost`` (executed FLOPs by default).
        tasks, target_ids: B strings each; pairs with equal target id have interchangeable targets.
    """

    query_BGd: Tensor
    target_BGd: Tensor
    teacher_query_Bd: Tensor
    teacher_target_Bd: Tensor
    query_saved_BG: Tensor
    target_saved_BG: Tensor
    tasks: Sequence[str]
    target_ids: Sequence[str]


@dataclass(frozen=True)
class DirectionReward:
    """Reward of one side's rollouts and its parts; every field is [B, G] except ``teacher_recall`` [B].

    ``margin`` is s_pos - s_neg, ``saved`` is S, ``cosine`` is cos(e, e_full). ``teacher_recall`` is the
    recall@G that the full-compute embedding reaches in the same gallery with full-compute embeddings on
    the other side.
    """

    reward: Tensor
    recall: Tensor
    margin: Tensor
    saved: Tensor
    cosine: Tensor
    teacher_recall: Tensor


@dataclass(frozen=True)
class RetrievalRewards:
    """Rewards of the query rollouts and of the target rollouts."""

    query: DirectionReward
    target: DirectionReward


def retrieval_rewards(
    batch: RolloutBatch, lambda_B: Tensor, settings: RewardSettings, bank: TeacherBank | None = None
) -> RetrievalRewards:
    """Rewards every rollout of a batch in both directions (spec §3).

    Args:
        batch: embeddings, savings and identities of B pairs x G rollouts a side.
        lambda_B: float [B], the efficiency weight lambda_s of each pair.
        settings: the other weights.
        bank: extra negatives, or None.

    Returns:
        Rewards and their parts, in the embeddings' dtype.

    Raises:
        CollapseError: an embedding, saving or weight is not finite.
        ConfigError: there are no negatives, or ``settings.negatives`` asks for more than the gallery has.
    """
    _check_finite(batch, lambda_B)
    num_pairs, rollouts, _ = batch.query_BGd.shape
    device = batch.query_BGd.device
    other_BB = ~_equal(batch.target_ids, batch.target_ids, device)
    by_task: list[tuple[Tensor, Tensor]] = []
    bank_mask_Bm, bank_size = torch.zeros(num_pairs, 0, dtype=torch.bool, device=device), 0
    bank_query = bank_target = batch.query_BGd.new_zeros(0, batch.query_BGd.shape[-1])
    if bank is not None:
        by_task = [
            (_where(batch.tasks, task, device), _where(bank.tasks, task, device))
            for task in dict.fromkeys(batch.tasks)
        ]
        other_BM = ~_equal(batch.target_ids, bank.target_ids, device)
        bank_mask_Bm = other_BM.new_zeros(num_pairs, max(len(rows) for _, rows in by_task))
        for pairs, rows in by_task:
            bank_mask_Bm[pairs, : len(rows)] = other_BM[pairs][:, rows]
        bank_size = min(len(rows) for _, rows in by_task)
        bank_query, bank_target = bank.query_Md, bank.target_Md
    check_negatives(settings.negatives, num_pairs, rollouts, bank_size)

    gallery = _Gallery(other_BB, by_task, bank_mask_Bm, rollouts)

    def direction(
        own_BGd: Tensor,
        other_BGd: Tensor,
        own_Bd: Tensor,
        other_Bd: Tensor,
        bank_Md: Tensor,
        saved_BG: Tensor,
    ) -> DirectionReward:
        positives, negatives = gallery.split(own_BGd.flatten(0, 1), other_BGd, bank_Md)
        recall = recall_at_g(positives, negatives).view(num_pairs, rollouts)
        teacher_recall = recall_at_g(*gallery.split(own_Bd, other_Bd[:, None].expand_as(other_BGd), bank_Md))
        if settings.negatives is not None:
            negatives = negatives.topk(min(settings.negatives, negatives.shape[1]), dim=1).values
        soft_maximum = _soft_maximum(negatives, settings.negative_temperature)
        margin = (positives.mean(1) - soft_maximum).view(num_pairs, rollouts)
        cosine = (own_BGd * own_Bd[:, None]).sum(-1)
        reward = recall * (margin + lambda_B.to(margin)[:, None] * saved_BG)
        reward = reward + settings.distill_weight * cosine
        return DirectionReward(reward, recall, margin, saved_BG, cosine, teacher_recall)

    query, target = batch.query_BGd, batch.target_BGd
    query_full, target_full = batch.teacher_query_Bd, batch.teacher_target_Bd
    return RetrievalRewards(
        query=direction(query, target, query_full, target_full, bank_target, batch.query_saved_BG),
        target=direction(target, query, target_full, query_full, bank_query, batch.target_saved_BG),
    )


def check_negatives(negatives: int | None, pairs: int, rollouts: int, bank_size: int) -> None:
    """Checks that a gallery can hold the requested number of negatives, before any duplicate is masked out.

    Args:
        negatives: ``reward.negatives``.
        pairs, rollouts: pairs a batch and rollouts a pair.
        bank_size: rows of the bank that other pairs of a task have, in the task with the fewest.

    Raises:
        ConfigError: the gallery has none, or fewer than asked.
    """
    available = (pairs - 1) * rollouts + bank_size
    if available < 1:
        raise ConfigError(
            "a batch of one pair without a bank has no negatives: raise grpo.pairs_per_batch or set "
            "reward.bank=true"
        )
    if negatives is not None and not 1 <= negatives <= available:
        raise ConfigError(
            f"reward.negatives={negatives} but a gallery has {available}: {pairs - 1} other pairs x "
            f"{rollouts} rollouts plus {bank_size} bank rows. Use reward.negatives between 1 and "
            f"{available}, or null for all"
        )


def recall_at_g(positives_RG: Tensor, negatives_RN: Tensor) -> Tensor:
    """Share of each row's G positives that rank among its top G, ties against (spec §3).

    The i-th best positive (from 0) has i positives above it, so it is in the top G exactly if fewer than
    G - i negatives are at or above it, that is if it beats the (G - i)-th best negative.

    Args:
        positives_RG: cosines to the positives.
        negatives_RN: cosines to the negatives, -inf where masked.

    Returns:
        float [R] in [0, 1].
    """
    rollouts = positives_RG.shape[1]
    missing = max(0, rollouts - negatives_RN.shape[1])
    padded = torch.nn.functional.pad(negatives_RN, (0, missing), value=float("-inf"))
    hardest_RG = padded.topk(rollouts, dim=1).values.flip(1)
    best_RG = positives_RG.sort(dim=1, descending=True).values
    return (best_RG > hardest_RG + TIE_TOLERANCE).to(positives_RG.dtype).mean(1)


@dataclass(frozen=True)
class _Gallery:
    """Which gallery items are negatives of which pair.

    Attributes:
        other_BB: over the batch.
        by_task: int64 pairs of a task, and the bank's rows of the same task.
        bank_mask_Bm: over those rows, in their order.
        rollouts: G.
    """

    other_BB: Tensor
    by_task: Sequence[tuple[Tensor, Tensor]]
    bank_mask_Bm: Tensor
    rollouts: int

    def split(self, rows_Rd: Tensor, other_BGd: Tensor, bank_Md: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines of rows to their positives [R, G] and negatives [R, N] (-inf: masked); R = B or B*G."""
        num_pairs = other_BGd.shape[0]
        repeats = rows_Rd.shape[0] // num_pairs
        pair_R = torch.arange(num_pairs, device=rows_Rd.device).repeat_interleave(repeats)
        batch_RBG = torch.einsum("rd,bgd->rbg", rows_Rd, other_BGd)
        positives_RG = batch_RBG[torch.arange(len(pair_R), device=rows_Rd.device), pair_R]
        mask_RN = torch.cat([self.other_BB.repeat_interleave(self.rollouts, 1), self.bank_mask_Bm], 1)[pair_R]
        rows_Brd = rows_Rd.view(num_pairs, repeats, -1)
        bank_Brm = rows_Rd.new_zeros(num_pairs, repeats, self.bank_mask_Bm.shape[1])
        for pairs, rows in self.by_task:
            bank_Brm[pairs, :, : len(rows)] = rows_Brd[pairs] @ bank_Md[rows].to(rows_Rd).T
        cosines_RN = torch.cat([batch_RBG.flatten(1), bank_Brm.flatten(0, 1)], 1)
        return positives_RG, cosines_RN.masked_fill(~mask_RN, float("-inf"))


def _soft_maximum(negatives_RN: Tensor, temperature: float) -> Tensor:
    """Softmax-weighted mean of each row [R].

    A row without negatives (all of its batch are duplicates) gives 0; its whole group does, so that no
    rollout gains by it.
    """
    present = negatives_RN > float("-inf")
    empty_R1 = ~present.any(1, keepdim=True)
    weights = (negatives_RN / temperature).masked_fill(empty_R1, 0.0).softmax(1)
    return (weights * negatives_RN.masked_fill(~present, 0.0)).sum(1)


def _where(names: Sequence[str], name: str, device: torch.device) -> Tensor:
    """int64, the places of ``name``."""
    return torch.tensor([i for i, x in enumerate(names) if x == name], dtype=torch.int64, device=device)


def _equal(left: Sequence[str], right: Sequence[str], device: torch.device) -> Tensor:
    """bool [len(left), len(right)]: which strings are equal."""
    codes = {name: code for code, name in enumerate(dict.fromkeys([*left, *right]))}
    left_codes = torch.tensor([codes[name] for name in left], device=device)
    right_codes = torch.tensor([codes[name] for name in right], dtype=torch.int64, device=device)
    return left_codes[:, None] == right_codes[None]


def _check_finite(batch: RolloutBatch, lambda_B: Tensor) -> None:
    """Raises CollapseError with the first pair whose numbers are not finite."""
    named = {
        "query embedding": batch.query_BGd,
        "target embedding": batch.target_BGd,
        "full-compute query embedding": batch.teacher_query_Bd,
        "full-compute target embedding": batch.teacher_target_Bd,
        "saved fraction of a query": batch.query_saved_BG,
        "saved fraction of a target": batch.target_saved_BG,
        "lambda_s": lambda_B,
    }
    for name, values in named.items():
        bad_B = ~torch.isfinite(values).flatten(1).all(1) if values.ndim > 1 else ~torch.isfinite(values)
        if bool(bad_B.any()):
            pair = int(bad_B.nonzero()[0])
            raise CollapseError(
                f"NaN or infinity in the {name} of batch pair {pair} (task {batch.tasks[pair]}, target id "
                f"{batch.target_ids[pair]}): lower grpo.lr or resume from an earlier checkpoint; if it is a "
                "full-compute embedding, check the backbone's dtype and this row's input"
            )
