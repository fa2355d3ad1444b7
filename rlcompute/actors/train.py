"""The main job: trains gates by the configured method on Ray and exports them."""

from __future__ import annotations

from pathlib import Path

from rlcompute.config import Config


def run(config: Config, *, resume: bool) -> Path:
    """Trains, or continues, the run that ``config`` describes, and exports its gates.

    Args:
        config: the run's configuration; ``run.method`` says how to train.
        resume: continue from the latest complete checkpoint.

    Returns:
        The run folder.

    Raises:
        ConfigError, DataError, CheckpointError: found before anything is started or written.
        StageTimeoutError, WorkerError, CollapseError: training failed; ``failure.json`` has the first cause.
    """
    if config.run.method == "ste":
        from rlcompute.actors import ste_train

        return ste_train.run(config, resume=resume)
    from rlcompute.actors import grpo_train

    return grpo_train.run(config, resume=resume)
