"""The reward of a real embedder that drops everything it may, against the same embedder at full compute."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcompute.backbones import load_backbone
from rlcompute.decision import Decision, Full, Policy, Signals
from rlcompute.demo import CHECKPOINT
from rlcompute.demo.dataset import demo_pairs
from rlcompute.demo.splits import MODALITIES
from rlcompute.encoder import encode
from rlcompute.envs.reward import RewardSettings, RolloutBatch, retrieval_rewards
from rlcompute.flops import FlopModel
from rlcompute.pack import Pack

ROLLOUTS = 2


class DropsAll:
    gate_flops_per_token = 0.0

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        return Decision(drop_T=torch.ones(len(x_Td), dtype=torch.bool))


def test_dropping_everything_earns_less_than_full_compute() -> None:
    backbone = load_backbone(CHECKPOINT)
    pairs = [pair for modality in MODALITIES for pair in demo_pairs(0, "test", modality, 4)]
    inputs = backbone.embed_inputs(
        [backbone.preprocessor(getattr(pair, side)) for side in ("query", "target") for pair in pairs]
    )
    flops = FlopModel(backbone)
    full_2B = flops.full(torch.tensor([x.length for x in inputs])).view(2, -1)

    def run(policy: Policy) -> tuple[Tensor, Tensor]:
        encoded = encode(backbone, *backbone.pack(inputs), policy)
        saved_2B = 1.0 - flops.executed(encoded.trace).view(2, -1) / full_2B
        return encoded.embeddings_Sd.view(2, len(pairs), -1), saved_2B

    teacher_2Bd, _ = run(Full())

    def earned(policy: Policy) -> tuple[float, float]:
        embeddings_2Bd, saved_2B = run(policy)
        batch = RolloutBatch(
            query_BGd=embeddings_2Bd[0][:, None].expand(-1, ROLLOUTS, -1),
            target_BGd=embeddings_2Bd[1][:, None].expand(-1, ROLLOUTS, -1),
            teacher_query_Bd=teacher_2Bd[0],
            teacher_target_Bd=teacher_2Bd[1],
            query_saved_BG=saved_2B[0][:, None].expand(-1, ROLLOUTS).float(),
            target_saved_BG=saved_2B[1][:, None].expand(-1, ROLLOUTS).float(),
            tasks=[pair.task for pair in pairs],
            target_ids=[pair.target_id for pair in pairs],
        )
        rewards = retrieval_rewards(batch, torch.ones(len(pairs)), RewardSettings(0.5, 0.05))
        reward = torch.stack([rewards.query.reward, rewards.target.reward])
        return float(reward.mean()), float(saved_2B.mean())

    (full_reward, full_saved), (drop_reward, drop_saved) = earned(Full()), earned(DropsAll())
    assert full_saved == 0.0 and drop_saved > 0.6
    assert drop_reward < 0.6 * full_reward
