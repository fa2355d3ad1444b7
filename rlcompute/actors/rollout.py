"""Rollout workers: RLlib env runners that each hold one frozen backbone.

Every method that the driver calls answers with a :class:`~rlcompute.actors.messages.Reply` and never raises: RLlib
would swallow the exception, restart the process and try again.
"""

from __future__ import annotations

import functools
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import torch
from ray.rllib.core import COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO
from transformers.utils import logging as transformers_logging

from rlcompute.actors.cluster import quieten_ray
from rlcompute.actors.engine import RolloutEngine
from rlcompute.actors.failure import stack_file, write_stacks_on_signal
from rlcompute.actors.learner import GateModule
from rlcompute.actors.messages import GradientRequest, MicroBatch, Reply
from rlcompute.backbones import load_configured
from rlcompute.data.schema import Pair, Side
from rlcompute.environment import process_memory_bytes
from rlcompute.memory import keep_freed_memory

NEVER_SYNCED = -1

Work = Callable[["RolloutWorker", Any], Any]


def _answering(work: Work) -> Callable[..., Reply]:
    """Turns a method for one task into one for a call with many, which reports what it raises."""

    @functools.wraps(work)
    def answer(self: RolloutWorker, *, tasks: Mapping[int, Any], weights_version: int | None = None) -> Reply:
        if weights_version is not None and weights_version != self.weights_version:
            return self.reply(stale=True)
        try:
            results = {number: work(self, task) for number, task in tasks.items()}
        except Exception:
            return self.reply(failure=traceback.format_exc())
        return self.reply(
            results={number: result for number, result in results.items() if result is not None}
        )

    return answer


class RolloutWorker(EnvRunner):  # type: ignore[misc]  # ray is not typed
    """Runs rollouts of micro-batches and keeps their score statistics for the second phase."""

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        quieten_ray()
        transformers_logging.disable_progress_bar()
        super().__init__(config=config, **kwargs)
        # One thread: there is a worker for every core, and a sum's last bits must not depend on the machine.
        torch.set_num_threads(1)
        keep_freed_memory()
        write_stacks_on_signal(stack_file(Path(self.config.log_folder), self.worker_index))
        self.weights_version = NEVER_SYNCED
        self._engine: RolloutEngine | None = None
        self.make_module()

    @property
    def engine(self) -> RolloutEngine:
        """The backbone and its rollouts; loaded when first needed, so that a failure is reported, not swallowed."""
        if self._engine is None:
            settings = self.config.settings
            backbone = load_configured(settings, self.config.backbone_folder)
            self._engine = RolloutEngine(backbone, settings)
        return self._engine

    @_answering
    def start(self, task: None) -> str:
        """Loads the backbone and returns its hash."""
        return self.engine.backbone.hash

    @_answering
    def calibrate(self, pairs: list[Pair]) -> Any:
        """See :meth:`RolloutEngine.calibrate`."""
        return self.engine.calibrate(pairs)

    @_answering
    def embed_teacher(self, pairs: list[Pair]) -> Any:
        """See :meth:`RolloutEngine.full_embeddings`."""
        return self.engine.full_embeddings(pairs)

    @_answering
    def sample(self, batch: MicroBatch) -> Any:
        """Phase 1; see :meth:`RolloutEngine.sample`."""
        return self.engine.sample(batch, self.module.heads())

    @_answering
    def gradients(self, request: GradientRequest) -> Any:
        """Phase 3; see :meth:`RolloutEngine.gradient`. A micro-batch that this process did not sample has no result."""
        return self.engine.gradient(request)

    @_answering
    def overlay(self, side: Side) -> Any:
        """See :meth:`RolloutEngine.overlay`."""
        return self.engine.overlay(side, self.module.heads())

    def reply(self, **content: Any) -> Reply:
        """A reply that says where it comes from."""
        return Reply(
            worker=self.worker_index,
            host=socket.gethostname(),
            pid=os.getpid(),
            resident_bytes=process_memory_bytes(),
            **content,
        )

    def make_module(self) -> None:
        """Builds the gate module; its values arrive by weight sync."""
        spec = self.config.get_rl_module_spec(spaces=self.get_spaces(), inference_only=True)
        self.module: GateModule = spec.build()

    def get_spaces(self) -> dict[str, Any]:
        """Spaces of the module; RLlib asks for them although nothing here has an environment."""
        spaces = (self.config.observation_space, self.config.action_space)
        return {INPUT_ENV_SPACES: spaces, DEFAULT_MODULE_ID: spaces}

    def assert_healthy(self) -> None:
        """RLlib's check after construction."""
        assert self.module is not None

    def get_metrics(self) -> dict[str, Any]:
        """Nothing: metrics travel with the replies."""
        return {}

    def get_state(
        self, components: Any = None, *, not_components: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Module state and version of the weights."""
        return {COMPONENT_RL_MODULE: self.module.get_state(), WEIGHTS_SEQ_NO: self.weights_version}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes over weights. Older ones too: whether they are the right ones is checked by each call."""
        if COMPONENT_RL_MODULE not in state:
            return
        module_state = state[COMPONENT_RL_MODULE]
        if isinstance(module_state, ray.ObjectRef):
            module_state = ray.get(module_state)
        self.module.set_state(module_state.get(DEFAULT_MODULE_ID, module_state))
        self.weights_version = state[WEIGHTS_SEQ_NO]

    def stop(self) -> None:
        """Nothing to release."""
