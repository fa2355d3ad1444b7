"""Table vi: a GRPO iteration against its bare rollout forwards, with one worker and with two.

The quick start's batch on the demo checkpoint, with gates that are held where they save about half of the language
model's FLOPs. `rollout forwards` is the time that the workers spend in the sampled forwards of an iteration, divided
by their number; `iteration` is the whole of it: dispatch, rewards, gradients, update and new weights as well. `phases`
are those of the driver; in `sample` it waits for the slower worker. Speed-ups are against one worker.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rlcompute.actors.cluster import ray_session
from rlcompute.actors.grpo_train import Trainer, check
from rlcompute.benchmark.bench import Bench
from rlcompute.benchmark.rows import Row
from rlcompute.benchmark.timing import Timing, no_collection
from rlcompute.config import (
    BackboneConfig,
    Config,
    ControllerConfig,
    DataConfig,
    GRPOSettings,
    KernelsConfig,
    PolicyConfig,
    RayConfig,
    RunConfig,
)
from rlcompute.demo.dataset import write_demo
from rlcompute.errors import ConfigError
from rlcompute.runlog import RunLog

TABLE = "vi"
WORKERS = (1, 2)
PAIRS_PER_TASK = 64
WARM_UP = 8
"""Iterations that are not counted: after them most inputs are in the workers' caches."""
MIN_ITERATIONS, MAX_ITERATIONS = 10, 100
PHASES = ("sample", "score", "gradient", "update")
FORWARDS, ITERATION = "rollout forwards", "iteration"


def measure(bench: Bench) -> list[Row]:
    """Rows of the table.

    Raises:
        ConfigError: the geometry is not the demo, whose pairs it trains on.
    """
    if bench.geometry.text is not None:
        raise ConfigError("table vi trains on the demo's pairs: ask for it with geometry demo")
    with TemporaryDirectory() as folder, ExitStack() as stack:
        files = write_demo(
            Path(folder), train_per_task=PAIRS_PER_TASK, test_per_task=1, final_per_task=0, seed=bench.seed
        )
        configs = {n: _config(bench, Path(folder), files, n) for n in WORKERS}
        stack.enter_context(ray_session(_config(bench, Path(folder), files, sum(WORKERS))))
        trainers = {}
        for n, config in configs.items():
            log = stack.enter_context(RunLog(config, completed=0))
            trainers[n] = Trainer(config, check(config, resume=False), log)
            stack.callback(trainers[n].stop)
            trainers[n].start()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in training
        stack.callback(torch.set_num_threads, threads)
        return _rows(_iterate(trainers, bench.budget_s))


def _config(bench: Bench, folder: Path, files: Mapping[Any, Path], workers: int) -> Config:
    return Config(
        run=RunConfig(name=f"workers_{workers}", dir=str(folder / "runs"), seed=bench.seed),
        backbone=BackboneConfig.model_validate({"dtype": bench.dtype, "device": bench.device}),
        kernels=KernelsConfig.model_validate(bench.kernels),
        data=DataConfig(train=str(files["train"]), test=str(files["test"])),
        # What the quick start's gates have come to save by the end of its training.
        policy=PolicyConfig(init_skip=0.25, init_drop=0.1),
        controller=ControllerConfig(ramp_fraction=0.0),
        # Learning rates too small to move the gates; all work is done.
        grpo=GRPOSettings(lr=1e-12, bias_lr=1e-12, iterations=WARM_UP + MAX_ITERATIONS),
        ray=RayConfig(num_workers=workers),
    )


def _iterate(trainers: dict[int, Trainer], budget_s: float) -> dict[int, list[dict[str, float]]]:
    """The logged figures of every counted iteration, the runs taking turns."""
    logged: dict[int, list[dict[str, float]]] = {n: [] for n in trainers}
    end = None
    with no_collection():
        for iteration in range(WARM_UP + MAX_ITERATIONS):
            if iteration == WARM_UP:
                end = time.perf_counter() + budget_s
            if iteration >= WARM_UP + MIN_ITERATIONS and end is not None and time.perf_counter() > end:
                break
            for n, trainer in trainers.items():
                trainer.algorithm.train()
                if iteration >= WARM_UP:
                    logged[n].append(trainer.algorithm.last.metrics)
    return logged


def _rows(logged: dict[int, list[dict[str, float]]]) -> list[Row]:
    keys = {FORWARDS: "timing/worker_sample_s", ITERATION: "timing/iteration_s"}
    timings = {
        (n, variant): Timing(tuple(figures[key] for figures in iterations))
        for n, iterations in logged.items()
        for variant, key in keys.items()
    }
    rows = []
    for (n, variant), timing in timings.items():
        ratios = Timing(
            tuple(
                whole / forwards
                for whole, forwards in zip(timing.samples, timings[n, FORWARDS].samples, strict=True)
            )
        )
        saved = Timing(tuple(figures["compute/lm_saved"] for figures in logged[n]))
        rows.append(
            Row(
                table=TABLE,
                row=f"{n} worker{'s' if n > 1 else ''}",
                variant=variant,
                seconds_median=timing.median,
                seconds_iqr=timing.iqr,
                speedup=timings[min(logged), variant].median / timing.median,
                extra={
                    "against the forwards": f"{ratios.median:.3f} ± {ratios.iqr / 2:.3f}",
                    "LM FLOPs saved": f"{saved.median:.1%}",
                    "phases": _phases(logged[n]) if variant == ITERATION else "",
                    "rounds": str(len(timing.samples)),
                },
            )
        )
    return rows


def _phases(logged: list[dict[str, float]]) -> str:
    """Median milliseconds of each."""
    medians = {
        phase: Timing(tuple(figures[f"timing/{phase}_s"] for figures in logged)).median for phase in PHASES
    }
    return ", ".join(f"{phase} {1e3 * seconds:.0f} ms" for phase, seconds in medians.items())
