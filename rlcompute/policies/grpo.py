"""The GRPO objective of spec §3, and its exact gradient without replaying the backbone.

Loss over n rollouts: ``-1/n sum_i min(r_i A_i, clip(r_i, 1-eps, 1+eps) A_i)``, where log pi_i is the sum of the
log-probabilities of the decisions that rollout i took, divided by their count, and r_i = exp(log pi_i - log
pi_i of the behaviour policy). On policy r_i = 1, and the gradient is ``-1/n sum_i A_i/count_i * statistic_i``.

Shape legend: S rollouts (segments), N layers, T decisions, F features, 3 actions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlcompute.decision import DROP, ROUTE, SKIP
from rlcompute.policies.gates import RecordedLayer


def gradient_from_statistic(statistic_SN3F: Tensor, advantages_S: Tensor, decisions_S: Tensor) -> Tensor:
    """Gradient of ``-sum_i A_i log pi_i`` on policy, float64 [N,3,F]; divide by n for the loss's mean.

    Args:
        statistic_SN3F: gradient of each rollout's summed log-probability, from a sampling policy.
        advantages_S: group advantages.
        decisions_S: decisions that each rollout took.
    """
    weight_S = -advantages_S.double() / decisions_S.double()
    return torch.tensordot(weight_S, statistic_SN3F.double(), dims=1)


def recorded_log_probs(
    weight_N3F: Tensor, records: Sequence[RecordedLayer], num_rollouts: int, temperature: float
) -> Tensor:
    """Mean log-probability of the recorded actions under ``weight_N3F``, [S]; differentiable in the weights."""
    total_S = weight_N3F.new_zeros(num_rollouts)
    count_S = torch.zeros(num_rollouts, dtype=weight_N3F.dtype, device=weight_N3F.device)
    for weight_3F, layer in zip(weight_N3F, records, strict=True):
        logits_T3 = layer.features_TF.to(weight_3F.dtype) @ weight_3F.t() / temperature
        drop_T = logits_T3[:, DROP].masked_fill(~layer.may_drop_T, -torch.inf)
        log_probs_T3 = torch.stack([logits_T3[:, ROUTE], logits_T3[:, SKIP], drop_T], dim=1).log_softmax(
            dim=1
        )
        taken_T = log_probs_T3.gather(1, layer.actions_T[:, None])[:, 0]
        total_S = total_S.index_add(0, layer.segment_ids_T, taken_T)
        count_S = count_S.index_add(0, layer.segment_ids_T, torch.ones_like(taken_T))
    return total_S / count_S


def behaviour_log_probs(records: Sequence[RecordedLayer], num_rollouts: int) -> Tensor:
    """Mean log-probability of the recorded actions when they were taken, [S]."""
    first = records[0].log_probs_T
    total_S, count_S = first.new_zeros(num_rollouts), first.new_zeros(num_rollouts)
    for layer in records:
        total_S.index_add_(0, layer.segment_ids_T, layer.log_probs_T)
        count_S.index_add_(0, layer.segment_ids_T, torch.ones_like(layer.log_probs_T))
    return total_S / count_S


def grpo_loss(
    log_probs_S: Tensor, behaviour_log_probs_S: Tensor, advantages_S: Tensor, clip_epsilon: float
) -> Tensor:
    """The clipped objective above, a scalar to minimise."""
    ratio_S = (log_probs_S - behaviour_log_probs_S).exp()
    clipped_S = ratio_S.clamp(1 - clip_epsilon, 1 + clip_epsilon)
    return -torch.minimum(ratio_S * advantages_S, clipped_S * advantages_S).mean()
