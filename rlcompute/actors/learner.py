"""The trainable side on RLlib: a module that holds the gate heads, and a learner that takes a shipped gradient.

On policy the workers have already computed the exact gradient of the loss (spec §3), so the learner's loss is the
surrogate ``<weights, gradient>``, whose gradient it is. With several updates per batch the recorded decisions are
shipped instead and the learner evaluates the clipped objective itself.

Shape legend: N layers, F gate features (d + 1), d hidden size, R decisions, S rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from torch import Tensor

from rlcompute.actors.messages import Array, Decisions
from rlcompute.errors import CheckpointError, RlcomputeError
from rlcompute.policies.gates import NUM_ACTIONS, GateHeads, RecordedLayer
from rlcompute.policies.grpo import behaviour_log_probs, grpo_loss, recorded_log_probs

ITERATION, UPDATE = "iteration", "update"
"""Keys of the iteration, and of the update within its batch, among the timesteps given to the learner."""
GRADIENT = "gradient"
MAX_LOG_PROB_DIFFERENCE = 1e-5
"""Largest difference, before the first update of a batch, between a rollout's mean log-probability and the one that it
was sampled with. A larger one means that learner and workers do not run the same policy."""
ADAM_BETAS = (0.9, 0.99)
ADAM_EPS = 1e-11
"""Far below the gradient of a single weight, which is averaged over very many decisions."""
DECAY_FROM, DECAY_TO = 0.5, 0.1
"""Up to this share of the run the learning rate stays, then it falls linearly to this share of itself."""
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def learning_rate_factor(iteration: int, iterations: int) -> float:
    """What both learning rates are multiplied by in ``iteration`` (from 0)."""
    past = max(0.0, iteration / iterations - DECAY_FROM) / (1.0 - DECAY_FROM)
    return 1.0 - (1.0 - DECAY_TO) * past


def gradient_batch(gradient_N3F: Array) -> MultiAgentBatch:
    """The learner's batch of one on-policy update: the gradient of the loss, rounded to float32 here and only here."""
    flat = gradient_N3F.astype(np.float32).reshape(1, -1)
    return MultiAgentBatch({DEFAULT_MODULE_ID: SampleBatch({GRADIENT: flat})}, env_steps=1)


def decision_batch(parts: Sequence[Decisions], advantages: Sequence[Array]) -> MultiAgentBatch:
    """The learner's batch of several clipped updates.

    Args:
        parts: recorded decisions of the micro-batches, in order.
        advantages: advantages of each micro-batch's rollouts, in the order of its rollout numbers.
    """
    offsets = np.cumsum([0, *(len(a) for a in advantages)])
    columns = {
        "features": [part.features_RF for part in parts],
        "layers": [part.layers_R for part in parts],
        "actions": [part.actions_R for part in parts],
        "rollouts": [part.rollouts_R + offset for part, offset in zip(parts, offsets, strict=False)],
        "may_drop": [part.may_drop_R for part in parts],
        "logprobs": [part.logprobs_R for part in parts],
        "advantages": [a[part.rollouts_R] for part, a in zip(parts, advantages, strict=True)],
    }
    batch = SampleBatch({name: np.concatenate(values) for name, values in columns.items()})
    return MultiAgentBatch({DEFAULT_MODULE_ID: batch}, env_steps=len(batch))


class GateModule(TorchRLModule):  # type: ignore[misc]  # ray is not typed
    """The gate heads as an RLlib module.

    ``model_config`` has ``num_layers``, ``hidden_size``, ``droppable`` and ``temperature``. Weights and biases are two
    parameters because their learning rates differ. The normaliser travels with them as buffers, so that one weight
    sync gives a restarted worker all that it needs.
    """

    def setup(self) -> None:
        """Creates the parameters; their values come from :meth:`load_heads`."""
        n, d = self.model_config["num_layers"], self.model_config["hidden_size"]
        self.weight = torch.nn.Parameter(torch.zeros(n, NUM_ACTIONS, d))
        self.bias = torch.nn.Parameter(torch.zeros(n, NUM_ACTIONS))
        self.register_buffer("mean", torch.zeros(n, d))
        self.register_buffer("scale", torch.ones(n))

    @torch.no_grad()
    def load_heads(self, heads: GateHeads) -> None:
        """Takes over the values of ``heads``."""
        self.weight.copy_(heads.weight_N3F[..., :-1])
        self.bias.copy_(heads.weight_N3F[..., -1])
        self.mean.copy_(heads.mean_Nd)
        self.scale.copy_(heads.scale_N)

    def heads(self) -> GateHeads:
        """A detached copy of the current heads."""
        weight_N3F = self._weight_N3F().detach().clone()
        return GateHeads(weight_N3F, self.mean.clone(), self.scale.clone(), self.model_config["droppable"])

    def _weight_N3F(self) -> Tensor:
        return torch.cat([self.weight, self.bias[..., None]], dim=-1)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        weight_N3F = self._weight_N3F()
        if GRADIENT in batch:
            return {"surrogate": (weight_N3F.flatten() * batch[GRADIENT].sum(0)).sum()}
        rollouts_R = batch["rollouts"].long()
        # Every rollout decides about its <emb> token in every layer, so none is absent.
        advantages_S = weight_N3F.new_zeros(int(rollouts_R.max()) + 1).index_copy(
            0, rollouts_R, batch["advantages"]
        )
        records, temperature = self._records(batch), self.model_config["temperature"]
        return {
            "advantages": advantages_S,
            "log_probs": recorded_log_probs(weight_N3F, records, len(advantages_S), temperature),
            "behaviour_log_probs": behaviour_log_probs(records, len(advantages_S)),
        }

    def _records(self, batch: dict[str, Any]) -> list[RecordedLayer]:
        """The shipped decisions by layer."""
        return [
            RecordedLayer(
                features_TF=batch["features"][rows],
                actions_T=batch["actions"][rows].long(),
                log_probs_T=batch["logprobs"][rows],
                segment_ids_T=batch["rollouts"][rows].long(),
                may_drop_T=batch["may_drop"][rows].bool(),
            )
            for rows in (batch["layers"] == layer for layer in range(self.model_config["num_layers"]))
        ]


class GRPOLearner(TorchLearner):  # type: ignore[misc]  # ray is not typed
    """Adam on the gate heads, weights and biases at their own learning rates."""

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Registers one optimiser per parameter; learning rates are set before each update."""
        module = self._module[module_id]
        for name in ("weight", "bias"):
            parameter = getattr(module, name)
            optimizer = torch.optim.Adam([parameter], betas=ADAM_BETAS, eps=ADAM_EPS)
            self.register_optimizer(
                module_id=module_id, optimizer_name=name, optimizer=optimizer, params=[parameter]
            )

    def before_gradient_based_update(self, *, timesteps: Mapping[str, int]) -> None:
        """Sets the learning rates of the coming update from its iteration, so that a resumed run needs no state."""
        settings = self.config.settings.grpo
        factor = learning_rate_factor(timesteps[ITERATION], settings.iterations)
        self._is_first_update = timesteps[UPDATE] == 0
        for name, rate in (("weight", settings.lr), ("bias", settings.bias_lr)):
            for group in self._adam(name).param_groups:
                group["lr"] = rate * factor

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: Mapping[str, Any], fwd_out: Mapping[str, Any]
    ) -> Tensor:
        """The loss to minimise: the surrogate of a shipped gradient, or the clipped objective of spec §3."""
        if "surrogate" in fwd_out:
            surrogate: Tensor = fwd_out["surrogate"]
            return surrogate
        if self._is_first_update:
            _check_on_policy(fwd_out["log_probs"], fwd_out["behaviour_log_probs"])
        return grpo_loss(
            fwd_out["log_probs"],
            fwd_out["behaviour_log_probs"],
            fwd_out["advantages"],
            self.config.settings.grpo.clip_epsilon,
        )

    def load_heads(self, heads: GateHeads) -> None:
        """Takes over the values of ``heads``."""
        self._gates().load_heads(heads)

    def heads(self) -> GateHeads:
        """A copy of the current heads."""
        return self._gates().heads()

    def policy_metrics(self) -> dict[str, float]:
        """Sizes of the heads and current learning rates, by tag."""
        rates = {name: float(self._adam(name).param_groups[0]["lr"]) for name, _ in self._parameters()}
        return {
            "policy/weight_norm": float(self._gates().weight.detach().norm()),
            "policy/bias_norm": float(self._gates().bias.detach().norm()),
            "policy/lr": rates["weight"],
            "policy/bias_lr": rates["bias"],
        }

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Copies of Adam's moments and step counts by ``parameter.name``; empty before the first update."""
        return {
            f"{name}.{moment}": self._adam(name).state[parameter][moment].detach().clone()
            for name, parameter in self._parameters()
            for moment in MOMENTS
            if parameter in self._adam(name).state
        }

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Continues from saved :meth:`optimizer_tensors`.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
        """
        for name, parameter in self._parameters():
            shapes = {"exp_avg": parameter.shape, "exp_avg_sq": parameter.shape, "step": torch.Size([])}
            for moment, shape in shapes.items():
                key = f"{name}.{moment}"
                if key not in tensors or tensors[key].shape != shape:
                    found = tuple(tensors[key].shape) if key in tensors else "missing"
                    raise CheckpointError(
                        f"optimiser state {key!r} is {found}, expected shape {tuple(shape)}"
                    )
            self._adam(name).state[parameter] = {m: tensors[f"{name}.{m}"].clone() for m in shapes}

    def _gates(self) -> GateModule:
        module: GateModule = self._module[DEFAULT_MODULE_ID]
        return module

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [("weight", self._gates().weight), ("bias", self._gates().bias)]

    def _adam(self, name: str) -> torch.optim.Adam:
        optimizer: torch.optim.Adam = self.get_optimizer(module_id=DEFAULT_MODULE_ID, optimizer_name=name)
        return optimizer


def _check_on_policy(log_probs_S: Tensor, behaviour_log_probs_S: Tensor) -> None:
    """Raises if the learner's policy is not the one that the workers sampled with."""
    difference = float((log_probs_S.detach() - behaviour_log_probs_S).abs().max())
    if not difference <= MAX_LOG_PROB_DIFFERENCE:
        raise RlcomputeError(
            f"before the first update of a batch the learner's log-probabilities differ from the workers' by up to "
            f"{difference:.2e} (limit {MAX_LOG_PROB_DIFFERENCE:g}): they do not run the same policy, so the clipped "
            "ratio would be wrong. Check that workers and driver run the same versions of rlcompute and torch"
        )
