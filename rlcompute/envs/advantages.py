"""Group-relative advantages (spec §3): how much better a rollout was than the others of the same input."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlcompute.errors import ConfigError

MIN_SPREAD = 1e-6
"""A group whose rewards differ by no more than this has nothing to teach: float32 noise must not be
standardised into full-size advantages."""
DAMPING = 1e-4
"""Added to the standard deviation, so that nearly equal groups weigh less."""


def group_advantages(rewards_NG: Tensor, normalization: Literal["group", "batch"], clip: float) -> Tensor:
    """Centres rewards inside each group and divides them by a standard deviation.

    Args:
        rewards_NG: float [N, G], rewards of G rollouts of each of N inputs.
        normalization: ``group`` divides by the group's own (sample) standard deviation, ``batch`` by that of
            all centred rewards together, which keeps groups with small differences small.
        clip: advantages are limited to [-clip, clip].

    Returns:
        float64 [N, G]; a group of equal rewards gives exactly 0.

    Raises:
        ConfigError: fewer than two rollouts a group, or an unknown normalization.
    """
    if rewards_NG.shape[1] < 2:
        raise ConfigError(
            f"grpo.rollouts={rewards_NG.shape[1]}: a group needs at least 2 rollouts to compare"
        )
    rewards = rewards_NG.double()
    centred = rewards - rewards.mean(1, keepdim=True)
    if normalization == "group":
        deviation = rewards.std(1, keepdim=True)
    elif normalization == "batch":
        deviation = centred.square().mean().sqrt()
    else:
        raise ConfigError(f"grpo.advantage_normalization={normalization!r}: use group or batch")
    flat_N1 = (rewards.amax(1, keepdim=True) - rewards.amin(1, keepdim=True)) <= MIN_SPREAD
    return torch.where(flat_N1, 0.0, centred / (deviation + DAMPING)).clamp(-clip, clip)
