"""The gradient kept during a rollout against autograd of the written loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.encoder import encode
from rlcompute.envs.advantages import group_advantages
from rlcompute.policies.draws import as_keys, rollout_key
from rlcompute.policies.gates import GateHeads, SampledGates, calibrate, init_heads
from rlcompute.policies.grpo import (
    behaviour_log_probs,
    gradient_from_statistic,
    grpo_loss,
    recorded_log_probs,
)
from tests.inputs import every_modality
from tests.tiny import write_tiny_checkpoint

GROUP = 4
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def random_heads(backbone: Backbone, droppable: str, dtype: torch.dtype) -> GateHeads:
    inputs = backbone.embed_inputs(every_modality(backbone.preprocessor))
    mean, scale = calibrate(backbone, inputs)
    heads = init_heads(mean, scale, skip=0.2, drop=0.2, late_skip_bias=0.5, droppable=droppable)  # type: ignore[arg-type]
    noise = torch.randn(heads.weight_N3F.shape, generator=torch.Generator().manual_seed(1))
    return replace(heads, weight_N3F=heads.weight_N3F + 0.2 * noise).to(dtype=dtype)


def rollouts(backbone: Backbone, heads: GateHeads, record: bool) -> SampledGates:
    inputs = backbone.embed_inputs(every_modality(backbone.preprocessor))
    repeated = [x for x in inputs for _ in range(GROUP)]
    keys = as_keys([rollout_key(0, 3, str(i), "query", g) for i in range(len(inputs)) for g in range(GROUP)])
    policy = SampledGates(heads, keys, temperature=TEMPERATURE, record=record)
    encode(backbone, *backbone.pack(repeated), policy)
    return policy


def autograd_gradient(heads: GateHeads, recorded: SampledGates, advantages_S: Tensor) -> Tensor:
    n = len(advantages_S)
    weight = heads.weight_N3F.clone().requires_grad_()
    log_probs = recorded_log_probs(weight, recorded.records, n, TEMPERATURE)
    behaviour = behaviour_log_probs(recorded.records, n)
    assert torch.allclose(log_probs, behaviour, atol=1e-5)
    grpo_loss(log_probs, behaviour, advantages_S, clip_epsilon=0.2).backward()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("droppable", ["all", "visual"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_kept_statistic_gives_the_losss_gradient(
    backbone: Backbone, droppable: str, dtype: torch.dtype, tolerance: float
) -> None:
    heads = random_heads(backbone, droppable, dtype)
    kept, recorded = rollouts(backbone, heads, record=False), rollouts(backbone, heads, record=True)
    assert int((torch.cat([r.actions_T for r in recorded.records]) == 2).sum()) > 10
    n = len(kept.decisions_S)
    rewards = torch.randn(n // GROUP, GROUP, generator=torch.Generator().manual_seed(2))
    advantages = group_advantages(rewards, normalization="group", clip=3.0).flatten()
    expected = autograd_gradient(heads, recorded, advantages.to(dtype)).double()
    shipped = gradient_from_statistic(kept.statistic_SN3F, advantages, kept.decisions_S) / n
    assert float((shipped - expected).norm() / expected.norm()) <= tolerance


def test_equal_rewards_give_exactly_zero(backbone: Backbone) -> None:
    heads = random_heads(backbone, "all", torch.float32)
    kept = rollouts(backbone, heads, record=False)
    rewards = torch.full((len(kept.decisions_S) // GROUP, GROUP), 0.3)
    advantages = group_advantages(rewards, normalization="group", clip=3.0).flatten()
    gradient = gradient_from_statistic(kept.statistic_SN3F, advantages, kept.decisions_S)
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_clip_stops_the_gradient_of_a_rollout_that_moved_too_far() -> None:
    behaviour = torch.zeros(4, dtype=torch.float64)
    log_probs = torch.tensor([0.5, -0.5, 0.5, -0.5], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    loss = grpo_loss(log_probs, behaviour, advantages, clip_epsilon=0.2)
    up, down = torch.tensor(0.5).double().exp(), torch.tensor(-0.5).double().exp()
    assert float(loss.detach()) == pytest.approx(float(-(1.2 + down - up - 0.8) / 4))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert gradient.tolist() == pytest.approx([0.0, float(-down / 4), float(up / 4), 0.0])
