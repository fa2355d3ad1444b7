"""A few random pairs, a tiny checkpoint and a configuration around them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rlcompute.config import Config
from rlcompute.data import Pair, Side, write_pairs
from tests.tiny import write_tiny_checkpoint


def png(rng: np.random.Generator, height: int, width: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


def make_pairs(per_task: int, seed: int = 0, prefix: str = "") -> list[Pair]:
    """Pairs of an image task and a video task, ids not in the order of the file."""
    rng = np.random.default_rng(seed)
    pairs = []
    for number in range(per_task):
        image = Side(images=(png(rng, 32, 48),))
        clip = Side(video=tuple(png(rng, 32, 32) for _ in range(3)))
        query = Side(instruction="find it", text=f"number {number} {'x' * int(rng.integers(0, 6))}")
        pairs.append(Pair(f"{prefix}v{number:02d}", "video", "video", f"{prefix}clip{number}", query, clip))
        pairs.append(
            Pair(f"{prefix}i{number:02d}", "image", "image", f"{prefix}picture{number}", query, image)
        )
    return pairs


def write_inputs(folder: Path, per_task: int = 6) -> None:
    """Checkpoint, training and test pairs under ``folder``."""
    write_tiny_checkpoint(folder / "checkpoint")
    write_pairs(folder / "train.parquet", make_pairs(per_task))
    write_pairs(folder / "test.parquet", make_pairs(2, seed=1, prefix="test-"))


def make_config(folder: Path, runs: Path, name: str, **sections: dict[str, Any]) -> Config:
    """Four pairs a batch in two micro-batches, three rollouts; ``sections`` override keys."""
    values: dict[str, dict[str, Any]] = {
        "run": {"name": name, "dir": str(runs)},
        "backbone": {"path": str(folder / "checkpoint")},
        "data": {"train": str(folder / "train.parquet"), "test": str(folder / "test.parquet")},
        "reward": {"target_flops_saved": 0.3},
        "policy": {"init_skip": 0.3, "init_drop": 0.2},
        "grpo": {
            "iterations": 10,
            "pairs_per_batch": 4,
            "rollouts": 3,
            "micro_batch_pairs": 2,
            "checkpoint_every": 5,
        },
        "ray": {"num_workers": 1, "stage_timeout_s": 60.0},
        "logging": {"images_every": 1000, "overlay_inputs": 0},
        "evaluation": {"pairs_per_modality": 2, "gallery": 2},
    }
    for section, keys in sections.items():
        values[section] = values.get(section, {}) | keys
    return Config.model_validate(values)
