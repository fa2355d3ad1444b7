"""The shipped gradient and the clipped mode, through RLlib's learner, against autograd of the written loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SPACES

from rlcompute.actors.algorithm_config import GRPOConfig
from rlcompute.actors.engine import RolloutEngine
from rlcompute.actors.learner import (
    ADAM_BETAS,
    ADAM_EPS,
    ITERATION,
    UPDATE,
    GRPOLearner,
    decision_batch,
    gradient_batch,
    learning_rate_factor,
)
from rlcompute.actors.messages import Decisions, GradientRequest, MicroBatch
from rlcompute.backbones.base import Backbone
from rlcompute.config import Config
from rlcompute.errors import CheckpointError, RlcomputeError
from rlcompute.policies.gates import GateHeads, RecordedLayer
from rlcompute.policies.grpo import behaviour_log_probs, grpo_loss, recorded_log_probs
from tests.actors.tiny_run import make_config, make_pairs

LAYERS, HIDDEN = 4, 32


def random_heads() -> GateHeads:
    generator = torch.Generator().manual_seed(0)
    weight = 0.3 * torch.randn(LAYERS, 3, HIDDEN + 1, generator=generator)
    mean = 0.1 * torch.randn(LAYERS, HIDDEN, generator=generator)
    return GateHeads(weight, mean, torch.full((LAYERS,), 0.8), "all")


def make_learner(config: Config) -> GRPOLearner:
    rllib = GRPOConfig.of_run(
        config, backbone_folder=Path(), num_layers=LAYERS, hidden_size=HIDDEN, log_folder=Path()
    )
    spaces = (rllib.observation_space, rllib.action_space)
    learner = rllib.build_learner(env=None, spaces={INPUT_ENV_SPACES: spaces, DEFAULT_MODULE_ID: spaces})
    learner.build()
    learner.load_heads(random_heads())
    return learner


def rollouts(backbone: Backbone, config: Config, **request: Any) -> tuple[list[Any], list[np.ndarray]]:
    """What two micro-batches ship, and their advantages."""
    engine = RolloutEngine(backbone, config)
    pairs = make_pairs(3)
    shipped, advantages = [], []
    for index in range(2):
        batch = MicroBatch(4, index, tuple(pairs[2 * index : 2 * index + 2]))
        engine.sample(batch, random_heads())
        weights = np.random.default_rng(index).normal(size=(2, 2, config.grpo.rollouts))
        shipped.append(engine.gradient(GradientRequest(4, index, weights, **request)))
        advantages.append(weights)
    return shipped, advantages


def update(learner: GRPOLearner, batch: Any, iteration: int = 0, number: int = 0) -> None:
    learner.update(
        batch=batch,
        timesteps={"num_env_steps_sampled_lifetime": 0, ITERATION: iteration, UPDATE: number},
    )


@pytest.fixture
def single(inputs: Path, tmp_path: Path) -> Config:
    return make_config(inputs, tmp_path, "single")


@pytest.fixture
def several(inputs: Path, tmp_path: Path) -> Config:
    return make_config(inputs, tmp_path, "several", grpo={"updates_per_batch": 3})


def recorded(parts: list[Decisions]) -> list[RecordedLayer]:
    """All decisions by layer, built here from the shipped columns."""
    offset, layers = 0, []
    for layer in range(LAYERS):
        offset, columns = 0, []
        for part in parts:
            rows = part.layers_R == layer
            columns.append(
                [
                    torch.tensor(part.features_RF[rows]),
                    torch.tensor(part.actions_R[rows]),
                    torch.tensor(part.logprobs_R[rows]),
                    torch.tensor(part.rollouts_R[rows] + offset),
                    torch.tensor(part.may_drop_R[rows]),
                ]
            )
            offset += int(part.rollouts_R.max()) + 1
        layers.append(RecordedLayer(*(torch.cat(column) for column in zip(*columns, strict=True))))
    return layers


def loss_gradient(config: Config, parts: list[Decisions], advantages: list[np.ndarray]) -> torch.Tensor:
    """Autograd of the written GRPO loss in float64 on the recorded decisions."""
    layers = [replace(x, features_TF=x.features_TF.double()) for x in recorded(parts)]
    advantages_S = torch.tensor(np.concatenate([a.ravel() for a in advantages]))
    weight = random_heads().weight_N3F.double().requires_grad_()
    now = recorded_log_probs(weight, layers, len(advantages_S), config.policy.temperature)
    grpo_loss(now, now.detach(), advantages_S, config.grpo.clip_epsilon).backward()
    assert weight.grad is not None
    return weight.grad


def test_shipped_gradient_is_the_loss_gradient(backbone: Backbone, single: Config, several: Config) -> None:
    gradients, advantages = rollouts(backbone, single, ship_decisions=False)
    parts, _ = rollouts(backbone, several, ship_decisions=True)
    shipped = torch.tensor(sum(gradients)) / sum(a.size for a in advantages)
    expected = loss_gradient(single, parts, advantages)
    assert shipped.dtype == torch.float64
    assert float((shipped - expected).norm() / expected.norm()) < 1e-5


def test_an_update_is_adam_on_the_shipped_gradient(single: Config) -> None:
    learner = make_learner(single)
    heads = random_heads()
    weight = torch.nn.Parameter(heads.weight_N3F[..., :-1].clone())
    bias = torch.nn.Parameter(heads.weight_N3F[..., -1].clone())
    adam = torch.optim.Adam(
        [{"params": [weight], "lr": 0.005}, {"params": [bias], "lr": 0.05}], betas=ADAM_BETAS, eps=ADAM_EPS
    )
    for iteration in range(3):
        gradient = 1e-3 * np.random.default_rng(iteration).normal(size=(LAYERS, 3, HIDDEN + 1))
        update(learner, gradient_batch(gradient), iteration)
        exact = torch.tensor(gradient, dtype=torch.float32)
        weight.grad, bias.grad = exact[..., :-1], exact[..., -1]
        adam.step()
    after = learner.heads()
    assert torch.equal(after.weight_N3F, torch.cat([weight, bias[..., None]], -1))
    assert torch.equal(after.mean_Nd, heads.mean_Nd)


def test_optimiser_state_continues_exactly(single: Config) -> None:
    gradients = [
        gradient_batch(np.random.default_rng(i).normal(size=(LAYERS, 3, HIDDEN + 1))) for i in range(8)
    ]
    straight = make_learner(single)
    for iteration, batch in enumerate(gradients):
        update(straight, batch, iteration)
    first, second = make_learner(single), make_learner(single)
    for iteration in range(5):
        update(first, gradients[iteration], iteration)
    second.load_heads(first.heads())
    second.load_optimizer_tensors(first.optimizer_tensors())
    for iteration in range(5, 8):
        update(second, gradients[iteration], iteration)
    assert torch.equal(second.heads().weight_N3F, straight.heads().weight_N3F)


def test_missing_optimiser_state_is_refused(single: Config) -> None:
    learner = make_learner(single)
    update(learner, gradient_batch(np.ones((LAYERS, 3, HIDDEN + 1))))
    tensors = learner.optimizer_tensors()
    del tensors["bias.exp_avg_sq"]
    with pytest.raises(CheckpointError, match=r"'bias.exp_avg_sq' is missing"):
        learner.load_optimizer_tensors(tensors)


def test_first_of_several_updates_is_the_on_policy_one(
    backbone: Backbone, single: Config, several: Config
) -> None:
    gradients, advantages = rollouts(backbone, single, ship_decisions=False)
    parts, _ = rollouts(backbone, several, ship_decisions=True)
    batch = decision_batch(parts, [a.ravel() for a in advantages])
    clipped, direct = make_learner(several), make_learner(single)
    update(clipped, batch)
    update(direct, gradient_batch(sum(gradients) / sum(a.size for a in advantages)))
    moment = direct.optimizer_tensors()["weight.exp_avg"]
    difference = clipped.optimizer_tensors()["weight.exp_avg"] - moment
    assert float(difference.norm() / moment.norm()) < 1e-4


def test_later_updates_follow_the_clipped_loss(backbone: Backbone, several: Config) -> None:
    parts, advantages = rollouts(backbone, several, ship_decisions=True)
    flat = [a.ravel() for a in advantages]
    learner = make_learner(several)
    update(learner, decision_batch(parts, flat))
    moved = learner.heads().weight_N3F.requires_grad_()
    before = learner.optimizer_tensors()["weight.exp_avg"]
    update(learner, decision_batch(parts, flat), number=1)
    layers = recorded(parts)
    advantages_S = torch.tensor(np.concatenate(flat), dtype=torch.float32)
    loss = grpo_loss(
        recorded_log_probs(moved, layers, len(advantages_S), 1.0),
        behaviour_log_probs(layers, len(advantages_S)),
        advantages_S,
        several.grpo.clip_epsilon,
    )
    loss.backward()
    assert moved.grad is not None
    expected = ADAM_BETAS[0] * before + (1 - ADAM_BETAS[0]) * moved.grad[..., :-1]
    torch.testing.assert_close(learner.optimizer_tensors()["weight.exp_avg"], expected, rtol=1e-4, atol=1e-9)


def test_off_policy_rollouts_abort_before_the_first_update(backbone: Backbone, several: Config) -> None:
    parts, advantages = rollouts(backbone, several, ship_decisions=True)
    wrong = [replace(part, logprobs_R=part.logprobs_R + np.float32(3e-5)) for part in parts]
    learner = make_learner(several)
    before = learner.heads().weight_N3F
    with pytest.raises(RlcomputeError, match="do not run the same policy"):
        update(learner, decision_batch(wrong, [a.ravel() for a in advantages]))
    assert torch.equal(learner.heads().weight_N3F, before)


def test_learning_rate_falls_to_a_tenth_over_the_second_half() -> None:
    factors = [learning_rate_factor(i, 100) for i in range(101)]
    assert factors[:51] == [1.0] * 51
    assert factors[75] == pytest.approx(0.55)
    assert factors[100] == pytest.approx(0.1)
