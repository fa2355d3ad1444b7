"""RLlib's configuration of a GRPO run."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import gymnasium as gym
import numpy as np
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rlcompute.actors.learner import GateModule, GRPOLearner
from rlcompute.actors.rollout import RolloutWorker
from rlcompute.config import Config
from rlcompute.decision import ACTION_NAMES

HEALTH_PROBE_S = 0.1
"""How long to wait for the ping of a worker that is being restarted, each time work is handed out."""
MAX_RESTARTS = 100


class GRPOConfig(AlgorithmConfig):  # type: ignore[misc]  # ray is not typed
    """What RLlib needs to know of a run; made from the run's own configuration by :meth:`of_run`."""

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class)
        self.settings: Config | None = None
        self.num_layers = 0
        self.hidden_size = 0
        self.backbone_folder = ""
        self.log_folder = ""

    @classmethod
    def of_run(
        cls, settings: Config, *, backbone_folder: Path, num_layers: int, hidden_size: int, log_folder: Path
    ) -> Self:
        """The configuration of a run.

        Args:
            settings: the run's configuration.
            backbone_folder: checkpoint folder, the same path on every node.
            num_layers, hidden_size: of its language model.
            log_folder: where workers write their stacks if asked.
        """
        config = cls()
        config.settings = settings
        config.num_layers, config.hidden_size = num_layers, hidden_size
        config.backbone_folder = str(backbone_folder.resolve())
        config.log_folder = str(log_folder.resolve())
        config.framework("torch")
        config.environment(
            observation_space=gym.spaces.Box(-np.inf, np.inf, (hidden_size,), np.float32),
            action_space=gym.spaces.Discrete(len(ACTION_NAMES)),
        )
        config.env_runners(
            env_runner_cls=RolloutWorker,
            num_env_runners=settings.ray.num_workers,
            num_cpus_per_env_runner=1,
            num_gpus_per_env_runner=1 if settings.backbone.device == "cuda" else 0,
            # The driver must not hold a backbone.
            create_local_env_runner=False,
            # There is no state but the weights, which have a sync of their own.
            merge_env_runner_states=False,
            broadcast_env_runner_states=False,
        )
        config.learners(num_learners=0)
        config.fault_tolerance(
            restart_failed_env_runners=True,
            max_num_env_runner_restarts=MAX_RESTARTS,
            delay_between_env_runner_restarts_s=0.0,
            env_runner_health_probe_timeout_s=HEALTH_PROBE_S,
        )
        config.reporting(min_time_s_per_iteration=None)
        config.debugging(seed=settings.run.seed, log_level="ERROR")
        return config

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """The gate heads."""
        assert self.settings is not None
        return RLModuleSpec(
            module_class=GateModule,
            model_config={
                "num_layers": self.num_layers,
                "hidden_size": self.hidden_size,
                "droppable": self.settings.policy.droppable,
                "temperature": self.settings.policy.temperature,
            },
        )

    def get_default_learner_class(self) -> type[GRPOLearner]:
        """The learner that takes shipped gradients."""
        return GRPOLearner
