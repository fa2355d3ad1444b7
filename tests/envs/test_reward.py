"""The reward against a per-rollout loop, hand-computed cases, and the hacks it must not pay for."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcompute.envs.reward import (
    RetrievalRewards,
    RewardSettings,
    RolloutBatch,
    TeacherBank,
    check_negatives,
    recall_at_g,
    retrieval_rewards,
)
from rlcompute.errors import CollapseError, ConfigError

SETTINGS = RewardSettings(distill_weight=0.2, negative_temperature=0.05)


def unit(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.nn.functional.normalize(
        torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1
    )


def make_batch(seed: int, pairs: int = 5, rollouts: int = 3, ids: list[str] | None = None) -> RolloutBatch:
    generator = torch.Generator().manual_seed(seed)
    teacher = unit(pairs, 6, generator=generator)
    noisy = [
        torch.nn.functional.normalize(
            teacher[:, None] + 0.7 * unit(pairs, rollouts, 6, generator=generator), dim=-1
        )
        for _ in range(2)
    ]
    return RolloutBatch(
        query_BGd=noisy[0],
        target_BGd=noisy[1],
        teacher_query_Bd=teacher,
        teacher_target_Bd=unit(pairs, 6, generator=generator),
        query_saved_BG=torch.rand(pairs, rollouts, generator=generator, dtype=torch.float64),
        target_saved_BG=torch.rand(pairs, rollouts, generator=generator, dtype=torch.float64),
        tasks=["a", "b"] * (pairs // 2) + ["a"] * (pairs % 2),
        target_ids=ids or [f"t{row}" for row in range(pairs)],
    )


def make_bank(seed: int, rows: int = 9) -> TeacherBank:
    generator = torch.Generator().manual_seed(seed + 1000)
    return TeacherBank(
        unit(rows, 6, generator=generator),
        unit(rows, 6, generator=generator),
        tasks=["a", "b", "c"] * (rows // 3),
        target_ids=[f"t{row}" for row in range(rows)],
    )


def loop_reward(
    batch: RolloutBatch,
    bank: TeacherBank | None,
    lam: list[float],
    how: RewardSettings,
    side: str,
    pair: int,
    g: int,
) -> float:
    """One rollout's reward, item by item."""
    query = side == "query"
    own = (batch.query_BGd if query else batch.target_BGd)[pair, g]
    others = batch.target_BGd if query else batch.query_BGd
    positives, negatives = [], []
    for p in range(others.shape[0]):
        for r in range(others.shape[1]):
            cosine = float(own @ others[p, r])
            if p == pair:
                positives.append(cosine)
            elif batch.target_ids[p] != batch.target_ids[pair]:
                negatives.append(cosine)
    if bank is not None:
        for row, embedding in enumerate(bank.target_Md if query else bank.query_Md):
            if bank.tasks[row] == batch.tasks[pair] and bank.target_ids[row] != batch.target_ids[pair]:
                negatives.append(float(own @ embedding))
    group = len(positives)
    labelled = [(c, 1) for c in negatives] + [(c, 0) for c in positives]
    top = sorted(labelled, reverse=True)[:group]  # a negative precedes a positive of the same cosine
    recall = sum(kind == 0 for _, kind in top) / group
    kept = sorted(negatives, reverse=True)[: how.negatives]
    weights = [math.exp(c / how.negative_temperature) for c in kept]
    soft = sum(w * c for w, c in zip(weights, kept, strict=True)) / sum(weights) if kept else 0.0
    saved = (batch.query_saved_BG if query else batch.target_saved_BG)[pair, g]
    full = (batch.teacher_query_Bd if query else batch.teacher_target_Bd)[pair]
    gated = recall * (sum(positives) / group - soft + lam[pair] * float(saved))
    return gated + how.distill_weight * float(own @ full)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    pairs=st.integers(2, 5),
    rollouts=st.integers(1, 4),
    with_bank=st.booleans(),
    negatives=st.sampled_from([None, 1, 2]),
    ids=st.lists(st.sampled_from(["t0", "t1", "t2", "t9"]), min_size=5, max_size=5),
)
def test_equals_a_loop_over_items(
    seed: int, pairs: int, rollouts: int, with_bank: bool, negatives: int | None, ids: list[str]
) -> None:
    batch = make_batch(seed, pairs, rollouts, ids[:pairs])
    bank = make_bank(seed) if with_bank else None
    how = RewardSettings(0.3, 0.1, negatives=negatives if with_bank or rollouts > 1 else None)
    lam = torch.linspace(-0.5, 1.0, pairs, dtype=torch.float64)
    result = retrieval_rewards(batch, lam, how, bank)
    for side in ("query", "target"):
        expected = [
            [loop_reward(batch, bank, lam.tolist(), how, side, p, g) for g in range(rollouts)]
            for p in range(pairs)
        ]
        torch.testing.assert_close(getattr(result, side).reward, torch.tensor(expected, dtype=torch.float64))


def plane(*degrees: float) -> torch.Tensor:
    angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], -1)


def hand_batch(target_ids: list[str]) -> RolloutBatch:
    """Three pairs, two rollouts, in the plane. Query rollout 0 of pair 0 points at 0 degrees.

    Its positives lie at 0 and 60 degrees (cosines 1 and 0.5). Pair 1's targets lie at -60 and 90 (0.5, a tie,
    and 0), pair 2's at 30 and 180 (0.866 and -1).
    """
    return RolloutBatch(
        query_BGd=torch.stack([plane(0, 10), plane(-60, -60), plane(180, 180)]),
        target_BGd=torch.stack([plane(0, 60), plane(-60, 90), plane(30, 180)]),
        teacher_query_Bd=plane(60, -60, 180),
        teacher_target_Bd=plane(0, -60, 180),
        query_saved_BG=torch.full((3, 2), 0.5, dtype=torch.float64),
        target_saved_BG=torch.full((3, 2), 0.5, dtype=torch.float64),
        tasks=["x"] * 3,
        target_ids=target_ids,
    )


def first_query_parts(target_ids: list[str], negatives: int | None = 1) -> tuple[float, float, float]:
    how = RewardSettings(distill_weight=1.0, negative_temperature=0.05, negatives=negatives)
    out = retrieval_rewards(hand_batch(target_ids), torch.full((3,), 2.0, dtype=torch.float64), how).query
    return float(out.recall[0, 0]), float(out.margin[0, 0]), float(out.reward[0, 0])


def test_hand_computed_tie_and_duplicates() -> None:
    # All different: the positive at 0.5 is behind 0.866, so one of two positives is in the top two.
    # margin = (1 + 0.5) / 2 - 0.8660; reward = 0.5 (margin + 2 * 0.5) + cos 60.
    margin = 0.75 - math.sqrt(0.75)
    assert first_query_parts(["a", "b", "c"]) == pytest.approx((0.5, margin, 0.5 * (margin + 1) + 0.5))
    # Pair 2 is a duplicate of pair 0: only pair 1 is left, whose 0.5 ties with the positive and goes first.
    assert first_query_parts(["a", "b", "a"]) == pytest.approx((0.5, 0.25, 0.5 * 1.25 + 0.5))
    # Pair 1 is the duplicate: 0.866 is still ahead of the second positive.
    assert first_query_parts(["a", "a", "c"]) == pytest.approx((0.5, margin, 0.5 * (margin + 1) + 0.5))
    # Everything is a duplicate: nothing is ahead, and there is no negative to subtract.
    assert first_query_parts(["a", "a", "a"]) == pytest.approx((1.0, 0.75, 0.75 + 1 + 0.5))


def test_duplicates_are_masked_for_target_rollouts_too() -> None:
    batch = hand_batch(["a", "b", "a"])
    # The target rollout of pair 0 at 60 degrees; queries of pair 2 (its duplicate) moved onto it.
    stolen = dataclasses.replace(
        batch,
        query_BGd=torch.stack([plane(0, 10), plane(-60, -60), plane(60, 60)]),
        target_ids=["a", "b", "c"],
    )
    lam = torch.zeros(3, dtype=torch.float64)
    assert float(retrieval_rewards(stolen, lam, SETTINGS).target.recall[0, 1]) == 0.0
    masked = dataclasses.replace(stolen, target_ids=["a", "b", "a"])
    assert float(retrieval_rewards(masked, lam, SETTINGS).target.recall[0, 1]) == 1.0


def constant_batch(dtype: torch.dtype, dimension: int = 257) -> RolloutBatch:
    one = torch.nn.functional.normalize(
        torch.randn(dimension, generator=torch.Generator().manual_seed(0)), dim=0
    )
    one = one.to(dtype)
    return RolloutBatch(
        one.expand(7, 8, -1).contiguous(),
        one.expand(7, 8, -1).contiguous(),
        one.expand(7, -1).contiguous(),
        one.expand(7, -1).contiguous(),
        torch.ones(7, 8, dtype=dtype),
        torch.ones(7, 8, dtype=dtype),
        ["x"] * 7,
        [str(row) for row in range(7)],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_collapsed_embedder_has_recall_zero(dtype: torch.dtype) -> None:
    batch = constant_batch(dtype)
    jitter = 2e-7 * torch.randn(batch.query_BGd.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for queries in (batch.query_BGd, batch.query_BGd + jitter):
        out = retrieval_rewards(dataclasses.replace(batch, query_BGd=queries), torch.ones(7), SETTINGS)
        for side in (out.query, out.target):
            assert float(side.recall.abs().max()) == 0.0
            assert float(side.teacher_recall.abs().max()) == 0.0
            torch.testing.assert_close(side.reward, SETTINGS.distill_weight * side.cosine)


def test_a_collapsed_and_cheap_policy_earns_less_than_full_compute() -> None:
    good = make_batch(3)
    full = dataclasses.replace(
        good,
        teacher_target_Bd=good.teacher_query_Bd,
        query_BGd=good.teacher_query_Bd[:, None].expand_as(good.query_BGd),
        target_BGd=good.teacher_query_Bd[:, None].expand_as(good.query_BGd),
        query_saved_BG=torch.zeros_like(good.query_saved_BG),
        target_saved_BG=torch.zeros_like(good.query_saved_BG),
    )
    same = full.query_BGd[:1].expand_as(full.query_BGd)
    cheap = dataclasses.replace(
        full,
        query_BGd=same,
        target_BGd=same,
        query_saved_BG=torch.ones_like(good.query_saved_BG),
        target_saved_BG=torch.ones_like(good.query_saved_BG),
    )
    lam = torch.full((5,), 3.0, dtype=torch.float64)
    paid = retrieval_rewards(cheap, lam, SETTINGS)
    honest = retrieval_rewards(full, lam, SETTINGS)
    assert float(paid.query.reward.max()) < float(honest.query.reward.min())
    assert float(paid.target.reward.max()) < float(honest.target.reward.min())


def test_teacher_recall_counts_bank_rows_once_and_batch_rows_once_a_rollout() -> None:
    batch = hand_batch(["a", "b", "c"])
    # Teacher query of pair 0 at 60 degrees, teacher targets at 0, -60, 180: its own is best, recall 1.
    lam = torch.zeros(3, dtype=torch.float64)
    assert float(retrieval_rewards(batch, lam, SETTINGS).query.teacher_recall[0]) == 1.0
    # One nearer bank row takes one of the two places, a nearer target of the batch (two rollouts) takes both.
    bank = TeacherBank(plane(90), plane(60), ["x"], ["z"])
    assert float(retrieval_rewards(batch, lam, SETTINGS, bank).query.teacher_recall[0]) == 0.5
    nearer = dataclasses.replace(batch, teacher_target_Bd=plane(0, 60, 180))
    assert float(retrieval_rewards(nearer, lam, SETTINGS).query.teacher_recall[0]) == 0.0


def test_bank_masks_other_tasks_and_the_own_target() -> None:
    batch = hand_batch(["a", "b", "c"])
    lam = torch.zeros(3, dtype=torch.float64)
    plain = retrieval_rewards(batch, lam, SETTINGS)
    for task, target_id in (("other", "z"), ("x", "a")):
        banked = retrieval_rewards(batch, lam, SETTINGS, TeacherBank(plane(5), plane(5), [task], [target_id]))
        torch.testing.assert_close(banked.query.reward[0], plain.query.reward[0])
        torch.testing.assert_close(banked.target.reward[0], plain.target.reward[0])
    harder = retrieval_rewards(batch, lam, SETTINGS, TeacherBank(plane(5), plane(5), ["x"], ["z"]))
    assert float(harder.query.margin[0, 0]) < float(plain.query.margin[0, 0])


def test_recall_with_fewer_negatives_than_rollouts() -> None:
    positives = torch.tensor([[0.1, 0.9, 0.5]])
    assert recall_at_g(positives, torch.tensor([[0.6]])).item() == pytest.approx(2 / 3)
    assert recall_at_g(positives, torch.zeros(1, 0)).item() == 1.0


@pytest.mark.parametrize("negatives", [0, 21])
def test_more_negatives_than_the_gallery_has(negatives: int) -> None:
    how = dataclasses.replace(SETTINGS, negatives=negatives)
    with pytest.raises(ConfigError, match=rf"reward.negatives={negatives} but a gallery has 12"):
        retrieval_rewards(make_batch(0), torch.zeros(5), how)
    check_negatives(12, pairs=5, rollouts=3, bank_size=0)
    check_negatives(20, pairs=5, rollouts=3, bank_size=8)


def test_no_negatives_at_all() -> None:
    with pytest.raises(ConfigError, match="pairs_per_batch"):
        retrieval_rewards(make_batch(0, pairs=1), torch.zeros(1), SETTINGS)


@pytest.mark.parametrize("field", ["query_BGd", "target_BGd", "teacher_target_Bd", "query_saved_BG"])
def test_nan_is_named(field: str) -> None:
    batch = make_batch(0)
    broken = getattr(batch, field).clone()
    broken[3].view(-1)[1] = float("nan")
    with pytest.raises(CollapseError, match=r"batch pair 3 \(task b, target id t3\)"):
        retrieval_rewards(dataclasses.replace(batch, **{field: broken}), torch.zeros(5), SETTINGS)


def test_float32_agrees_with_float64() -> None:
    batch = make_batch(11)
    bank = make_bank(11)
    lam = torch.full((5,), 0.4, dtype=torch.float64)
    single = RolloutBatch(
        **{
            field.name: value.float()
            if isinstance(value := getattr(batch, field.name), torch.Tensor)
            else value
            for field in dataclasses.fields(batch)
        }
    )
    exact: RetrievalRewards = retrieval_rewards(batch, lam, SETTINGS, bank)
    close = retrieval_rewards(single, lam, SETTINGS, bank)
    assert close.query.reward.dtype == torch.float32
    torch.testing.assert_close(close.query.reward.double(), exact.query.reward, atol=2e-6, rtol=0)
