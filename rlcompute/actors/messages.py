"""What driver and rollout workers say to each other; plain data, a few arrays per micro-batch.

Shape legend: 2 sides (query, target), B pairs of a micro-batch, G rollouts, N layers, M token modalities, d embedding
size, R decisions of a micro-batch's rollouts, F gate features (hidden size + 1), L tokens of one input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlcompute.data.schema import Pair

SIDES = ("query", "target")

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class MicroBatch:
    """The unit of execution: the pairs that one worker packs and runs at once.

    Its content fixes every number that comes of it, so it does not matter which worker runs it, or how often.
    The rows travel with it: workers need no access to the data files.
    """

    iteration: int
    index: int
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class Rollouts:
    """Phase 1: what the driver needs to reward a micro-batch.

    Attributes:
        embeddings_2BGd: float32, unit norm.
        executed_2BG: float64, FLOPs of the language model, gates included.
        full_2B: float64, the same of full compute.
        charged_2BG, charged_full_2B: float64, both in the currency of ``compute.cost``.
        vision_2B: float64, FLOPs of the vision tower, spent once per input.
        entered_N: int64, tokens that went through each layer's mixer, over all rollouts.
        actions_NM3: int64, decisions in each layer by token modality (text, image, video) and action.
        seconds: time that the worker spent on this micro-batch.
    """

    embeddings_2BGd: Array
    executed_2BG: Array
    full_2B: Array
    charged_2BG: Array
    charged_full_2B: Array
    vision_2B: Array
    entered_N: Array
    actions_NM3: Array
    seconds: float


@dataclass(frozen=True)
class GradientRequest:
    """Phase 3: the weights of a micro-batch's rollouts in the batch's loss.

    Attributes:
        advantages_2BG: float64.
        ship_decisions: send the recorded decisions instead of their gradient (several updates per batch).
    """

    iteration: int
    index: int
    advantages_2BG: Array
    ship_decisions: bool


@dataclass(frozen=True)
class Decisions:
    """Phase 4, several updates: every decision of a micro-batch, ordered by layer.

    Attributes:
        features_RF: float32, inputs of the gate heads, ending in 1.
        layers_R, actions_R, rollouts_R: int64, the layer, the action taken and the rollout (0 .. 2BG-1) it belongs to.
        may_drop_R: bool, whether DROP was among the choices.
        logprobs_R: float32, log-probability of the action when it was taken.
    """

    features_RF: Array
    layers_R: Array
    actions_R: Array
    rollouts_R: Array
    may_drop_R: Array
    logprobs_R: Array


@dataclass(frozen=True)
class Normaliser:
    """Constants that centre and scale the gate heads' inputs: mean float32 [N,d], scale float32 [N]."""

    mean: Array
    scale: Array


@dataclass(frozen=True)
class Overlay:
    """Greedy execution of one input.

    Attributes:
        dropped_at_L: int64, the layer that dropped each token; -1 if it was kept.
        modality_L: int8, text, image or video.
        grid_thw: int64 [n,3], patches along time, height and width of each image and then of the video.
        saved: share of the language model's FLOPs.
    """

    dropped_at_L: Array
    modality_L: Array
    grid_thw: Array
    saved: float


@dataclass(frozen=True)
class Reply:
    """A worker's answer to one call.

    Attributes:
        worker: index of the worker.
        results: by task number. A task that is missing lost its state with an earlier life of the worker.
        failure: traceback of the worker's exception, if it raised.
        stale: the worker's weights were not the ones that the driver asked for; nothing was executed.
        host, pid, resident_bytes: where the worker runs, and its memory.
    """

    worker: int
    results: Mapping[int, Any] = field(default_factory=dict)
    failure: str | None = None
    stale: bool = False
    host: str = ""
    pid: int = 0
    resident_bytes: int = 0
