"""Phase 2: from the rollouts of a whole batch to advantages, with the controller and what there is to log.

Shape legend: 2 sides (query, target), B pairs of the batch, G rollouts, N layers, M token modalities, d embedding size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlcompute.actors.messages import Array, Rollouts
from rlcompute.config import Config
from rlcompute.data.schema import Pair
from rlcompute.decision import ACTION_NAMES
from rlcompute.envs.advantages import group_advantages
from rlcompute.envs.collapse import CollapseMonitor, HealthSigns
from rlcompute.envs.controller import ControllerSettings, LambdaController
from rlcompute.envs.reward import (
    DirectionReward,
    RetrievalRewards,
    RewardSettings,
    RolloutBatch,
    TeacherBank,
    retrieval_rewards,
)
from rlcompute.pack import MODALITY_NAMES


@dataclass(frozen=True)
class Scored:
    """What phase 2 makes of a batch.

    Attributes:
        advantages_2BG: float64.
        saved: share saved over the batch, both sides, of the language model's cost in the currency of ``compute.cost``.
        recall, teacher_recall: mean recall@G by task.
        survivors, reward_spread: see :class:`HealthSigns`.
        actions_NM3: int64, decisions by layer, token modality and action.
        metrics: scalars by tag.
    """

    advantages_2BG: Array
    saved: float
    recall: dict[str, float]
    teacher_recall: dict[str, float]
    survivors: float
    reward_spread: float
    actions_NM3: Array
    metrics: dict[str, float]


class Scorer:
    """Rewards batches against the teacher bank and steers lambda_s."""

    def __init__(self, config: Config, bank: TeacherBank, ids: Sequence[str]) -> None:
        """Args:
        config: the run's configuration.
        bank: full-compute embeddings of all training pairs.
        ids: the pair of each row of the bank.
        """
        self._config = config
        self._bank = bank
        self._row_of = {identity: row for row, identity in enumerate(ids)}
        reward, controller = config.reward, config.controller
        self._settings = RewardSettings(reward.distill_weight, reward.negative_temperature, reward.negatives)
        self.controller = LambdaController(
            ControllerSettings(
                target_flops_saved=reward.target_flops_saved,
                recall_floor=reward.recall_floor,
                iterations=config.grpo.iterations,
                **controller.model_dump(),
            )
        )
        self.monitor = CollapseMonitor()

    def score(self, pairs: Sequence[Pair], parts: Sequence[Rollouts]) -> Scored:
        """Rewards and advantages of a batch, from its micro-batches in order."""
        embeddings = torch.from_numpy(np.concatenate([part.embeddings_2BGd for part in parts], axis=1))
        executed_2BG = np.concatenate([part.executed_2BG for part in parts], axis=1)
        full_2B = np.concatenate([part.full_2B for part in parts], axis=1)
        charged_2BG = np.concatenate([part.charged_2BG for part in parts], axis=1)
        charged_full_2B = np.concatenate([part.charged_full_2B for part in parts], axis=1)
        saved_2BG = torch.from_numpy(1.0 - charged_2BG / charged_full_2B[..., None])
        rows = torch.tensor([self._row_of[pair.id] for pair in pairs])
        tasks = [pair.task for pair in pairs]
        batch = RolloutBatch(
            query_BGd=embeddings[0],
            target_BGd=embeddings[1],
            teacher_query_Bd=self._bank.query_Md[rows],
            teacher_target_Bd=self._bank.target_Md[rows],
            query_saved_BG=saved_2BG[0],
            target_saved_BG=saved_2BG[1],
            tasks=tasks,
            target_ids=[pair.target_id for pair in pairs],
        )
        bank = self._bank if self._config.reward.bank else None
        rewards = retrieval_rewards(batch, self.controller.lambdas(tasks), self._settings, bank)
        grpo = self._config.grpo
        by_group = torch.cat([rewards.query.reward, rewards.target.reward])
        advantages = group_advantages(by_group, grpo.advantage_normalization, grpo.advantage_clip)
        recall, teacher_recall = (
            _by_task(rewards, "recall", tasks),
            _by_task(rewards, "teacher_recall", tasks),
        )
        saved = _saved(charged_2BG, charged_full_2B)
        actions_NM3 = np.sum([part.actions_NM3 for part in parts], axis=0)
        metrics = {
            "compute/lm_saved": _saved(executed_2BG, full_2B),
            "compute/lm_saved_query": _saved(executed_2BG[0], full_2B[0]),
            "compute/lm_saved_target": _saved(executed_2BG[1], full_2B[1]),
            "compute/total_saved": _total_saved(executed_2BG, full_2B, parts),
            **_task_savings(executed_2BG, full_2B, tasks),
            **_reward_metrics(rewards),
            **{f"recall/{task}": value for task, value in recall.items()},
            **{f"recall/full_{task}": value for task, value in teacher_recall.items()},
            **_action_metrics(actions_NM3),
        }
        if self._config.compute.cost != "flops":
            metrics["compute/charged_saved"] = saved
        spread = float((by_group.amax(1) - by_group.amin(1)).max())
        return Scored(
            advantages_2BG=advantages.view(2, len(pairs), grpo.rollouts).numpy(),
            saved=saved,
            recall=recall,
            teacher_recall=teacher_recall,
            survivors=_survivors(parts, 2 * len(pairs) * grpo.rollouts),
            reward_spread=spread,
            actions_NM3=actions_NM3,
            metrics=metrics,
        )

    def check_health(self, iteration: int, scored: Scored, gradient_norm: float) -> None:
        """Raises CollapseError if the policy has collapsed; call before the update."""
        self.monitor.update(
            iteration,
            HealthSigns(
                survivors=scored.survivors,
                reward_spread=scored.reward_spread,
                recall=_mean(scored.recall),
                teacher_recall=_mean(scored.teacher_recall),
                gradient_norm=gradient_norm,
            ),
        )

    def finish(self, scored: Scored) -> dict[str, float]:
        """Moves the controller on and returns its metrics; call after the update."""
        self.controller.update(scored.saved, scored.recall, scored.teacher_recall)
        return self.controller.metrics()


def _mean(values: Mapping[str, float]) -> float:
    return sum(values.values()) / len(values)


def _by_task(rewards: RetrievalRewards, field: str, tasks: Sequence[str]) -> dict[str, float]:
    """Mean of one field over both directions, by task."""
    query: Tensor = getattr(rewards.query, field)
    target: Tensor = getattr(rewards.target, field)
    means_B = (
        torch.stack([x.reshape(len(tasks), -1).double().mean(1) for x in (query, target)]).mean(0).tolist()
    )
    grouped: dict[str, list[float]] = {}
    for task, value in zip(tasks, means_B, strict=True):
        grouped.setdefault(task, []).append(value)
    return {task: sum(values) / len(values) for task, values in sorted(grouped.items())}


def _saved(cost_G: Array, full: Array) -> float:
    """Share of the cost of full compute [...] that its rollouts' cost [..., G] leaves."""
    return float(1.0 - cost_G.sum() / (full.sum() * cost_G.shape[-1]))


def _task_savings(executed_2BG: Array, full_2B: Array, tasks: Sequence[str]) -> dict[str, float]:
    """Share of the language model's FLOPs that each task's pairs saved."""
    names = np.array(tasks)
    return {
        f"compute/lm_saved_{task}": _saved(executed_2BG[:, names == task], full_2B[:, names == task])
        for task in sorted(set(tasks))
    }


def _total_saved(executed_2BG: Array, full_2B: Array, parts: Sequence[Rollouts]) -> float:
    """Share of the whole forward's FLOPs saved, vision tower included (it always runs in full)."""
    saved = (full_2B[..., None] - executed_2BG).mean(2).sum()
    vision = sum(part.vision_2B.sum() for part in parts)
    return float(saved / (full_2B.sum() + vision))


def _reward_metrics(rewards: RetrievalRewards) -> dict[str, float]:
    sides: dict[str, DirectionReward] = {"query": rewards.query, "target": rewards.target}
    values = {f"reward/{name}": float(side.reward.mean()) for name, side in sides.items()}
    parts = ("reward", "margin", "cosine", "recall")
    joined = {part: torch.stack([getattr(side, part) for side in sides.values()]) for part in parts}
    values["reward/mean"] = float(joined["reward"].mean())
    values["reward/margin"] = float(joined["margin"].mean())
    values["reward/cosine_to_full"] = float(joined["cosine"].mean())
    values["reward/group_deviation"] = float(joined["reward"].std(-1).mean())
    values["recall/mean"] = float(joined["recall"].mean())
    return values


def _action_metrics(actions_NM3: Array) -> dict[str, float]:
    """Share of each action, over all layers, for all tokens and by token modality."""
    values: dict[str, float] = {}
    for name, counts in (
        ("all", actions_NM3.sum((0, 1))),
        *zip(MODALITY_NAMES, actions_NM3.sum(0), strict=True),
    ):
        if counts.sum():
            shares = counts / counts.sum()
            values |= {
                f"actions/{action}_{name}": float(x) for action, x in zip(ACTION_NAMES, shares, strict=True)
            }
    return values


def _survivors(parts: Sequence[Rollouts], segments: int) -> float:
    """Share of the tokens other than ``<emb>`` that enter the middle layer."""
    entered_N = np.sum([part.entered_N for part in parts], axis=0) - segments
    return float(entered_N[len(entered_N) // 2] / max(1, entered_N[0]))
