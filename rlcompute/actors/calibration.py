"""Calibration batches on Ray Data: one actor, backbone and CPU thread for each of ``calibration.workers``.

A row of the data set is one batch of pairs, so that what is packed together does not depend on the workers; results
come back in the order of the batches.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import ray.data
import torch
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError
from safetensors.torch import load, save

from rlcompute.actors.cluster import ray_session
from rlcompute.backbones import load_configured
from rlcompute.config import Config
from rlcompute.data import Pair
from rlcompute.errors import StageTimeoutError, WorkerError
from rlcompute.policies.expert_statistics import ExpertStatistics
from rlcompute.policy_calibration import BatchResult, measure_batch
from rlcompute.progress import ProgressReporter

STAGE = "calibration"
LOSSES = "losses_NM"
STOP_S = 5.0
"""How long Ray Data may take to stop its workers before they are killed."""

_Row = dict[str, Any]


def measure_batches(config: Config, batches: Sequence[Sequence[Pair]]) -> list[BatchResult]:
    """Measure every batch on the workers.

    Args:
        config: of the command; ``ray`` says which cluster, and how long no batch may be finished.
        batches: pairs that are executed together.

    Returns:
        The batches' results, in their order.

    Raises:
        ConfigError: the cluster cannot be joined, or is too small.
        StageTimeoutError: no batch was finished for ``ray.stage_timeout_s``.
        WorkerError: a worker raised.
    """
    with ray_session(_with_workers(config)):
        return _collect(config, batches)


class _Runner:
    """Runs Ray Data in a process of its own.

    Ray Data has no deadline, and its actors and threads can outlive a caller that gives up. They belong to this actor,
    and die with it.
    """

    def run(self, config: Config, batches: list[list[Pair]]) -> Iterator[_Row]:
        """Yields results as they come."""
        context = DataContext.get_current()
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        rows = [{"number": number, "pairs": pairs} for number, pairs in enumerate(batches)]
        dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            _Worker,
            batch_size=1,
            batch_format="numpy",
            compute=ActorPoolStrategy(size=config.calibration.workers),
            num_cpus=1,
            num_gpus=1 if config.backbone.device == "cuda" else 0,
            fn_constructor_args=(config,),
        )
        try:
            yield from dataset.iter_rows()
        finally:
            # Ray Data stops its workers in a thread.
            for thread in threading.enumerate():
                if thread.name.startswith("StreamingExecutor"):
                    thread.join(STOP_S)


class _Worker:
    """Measures batches with a backbone of its own."""

    def __init__(self, config: Config) -> None:
        torch.set_num_threads(1)
        self._backbone = load_configured(config)

    def __call__(self, rows: _Row) -> _Row:
        results = [measure_batch(self._backbone, list(pairs)) for pairs in rows["pairs"]]
        # Bytes and strings are columns that Arrow knows.
        return {
            "number": rows["number"],
            "tensors": [save({LOSSES: x.losses_NM, **x.statistics.tensors()}) for x in results],
            "modalities": [",".join(x.statistics.modalities) for x in results],
        }


def _with_workers(config: Config) -> Config:
    """The configuration whose ``ray.num_workers`` are those of calibration, for the cluster's size."""
    return config.model_copy(
        update={"ray": config.ray.model_copy(update={"num_workers": config.calibration.workers})}
    )


def _collect(config: Config, batches: Sequence[Sequence[Pair]]) -> list[BatchResult]:
    """Results in the order of the batches, as long as one comes at least every ``ray.stage_timeout_s`` seconds."""
    timeout_s = config.ray.stage_timeout_s
    results: dict[int, BatchResult] = {}
    runner: Any = ray.remote(num_cpus=0)(_Runner).remote()
    running = runner.run.options(num_returns="streaming").remote(config, [list(batch) for batch in batches])
    try:
        with ProgressReporter("calibrating", sum(map(len, batches)), unit="pair") as progress:
            while len(results) < len(batches):
                ready, _ = ray.wait([running], timeout=timeout_s)
                if not ready:
                    raise StageTimeoutError(
                        f"stage {STAGE!r}: no batch was finished for {timeout_s:g} s. If the stage is just slow, raise "
                        "ray.stage_timeout_s; otherwise see Ray's worker logs"
                    )
                row = ray.get(next(running))
                tensors = load(row["tensors"])
                statistics = ExpertStatistics.from_tensors(row["modalities"].split(","), tensors)
                results[row["number"]] = BatchResult(tensors[LOSSES], statistics)
                progress.advance(len(batches[row["number"]]))
    except RayError as error:
        raise WorkerError(f"stage {STAGE!r}: a calibration worker raised:\n{error}") from error
    finally:
        # Ray may lose the CPU of a worker that is stopped in the very moment in which its owner dies.
        ray.wait([running.completed()], timeout=STOP_S)
        ray.kill(runner)
    return [results[number] for number in range(len(batches))]
