"""Group-relative advantages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcompute.envs.advantages import group_advantages
from rlcompute.errors import ConfigError

NORMALIZATIONS = ["group", "batch"]


def test_group_normalisation_by_hand() -> None:
    rewards = torch.tensor([[1.0, 2.0, 3.0], [5.0, 5.0, 8.0]])
    out = group_advantages(rewards, "group", clip=10)
    torch.testing.assert_close(out[0], torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64), atol=2e-4, rtol=0)
    spread = 3**0.5
    expected = torch.tensor([-1.0, -1.0, 2.0], dtype=torch.float64) / spread
    torch.testing.assert_close(out[1], expected, atol=2e-4, rtol=0)


def test_batch_normalisation_keeps_small_groups_small() -> None:
    rewards = torch.tensor([[0.0, 2.0], [0.0, 0.02]])
    out = group_advantages(rewards, "batch", clip=10)
    torch.testing.assert_close(out[0] / 100, out[1])


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.77])
@pytest.mark.parametrize("rollouts", [2, 3, 7])
def test_equal_rewards_give_exactly_zero(normalization: str, value: float, rollouts: int) -> None:
    rewards = torch.full((2, rollouts), value)
    rewards[1, 0] += 1.0
    out = group_advantages(rewards, normalization, clip=3)
    assert torch.count_nonzero(out[0]) == 0
    assert torch.count_nonzero(out[1]) > 0
    noisy = rewards.clone()
    noisy[0, 0] += 2e-7
    assert torch.count_nonzero(group_advantages(noisy, normalization, clip=3)[0]) == 0


@settings(max_examples=40, deadline=None)
@given(
    rewards=st.lists(st.lists(st.floats(-5, 5, width=32), min_size=4, max_size=4), min_size=1, max_size=4),
    shift=st.floats(-3, 3),
    normalization=st.sampled_from(NORMALIZATIONS),
)
def test_sums_to_zero_ignores_the_level_and_is_clipped(
    rewards: list[list[float]], shift: float, normalization: str
) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    out = group_advantages(values, normalization, clip=100)
    torch.testing.assert_close(out.sum(1), torch.zeros(len(values), dtype=torch.float64), atol=1e-9, rtol=0)
    clipped = group_advantages(values, normalization, clip=0.5)
    torch.testing.assert_close(clipped, out.clamp(-0.5, 0.5))
    spread = values.amax(1) - values.amin(1)
    if bool((spread > 1e-5).all()):
        torch.testing.assert_close(
            group_advantages(values + shift, normalization, 100), out, atol=1e-6, rtol=1e-6
        )


def test_errors() -> None:
    with pytest.raises(ConfigError, match="rollouts=1"):
        group_advantages(torch.zeros(3, 1), "group", 3)
    with pytest.raises(ConfigError, match="advantage_normalization"):
        group_advantages(torch.zeros(3, 2), "median", 3)  # type: ignore[arg-type]
