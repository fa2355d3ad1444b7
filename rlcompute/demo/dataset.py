"""Write the demo's parquet files: seeded, and with the same pixels on every machine.

The split of a combination of concepts, the pool of combinations and each pair's drawing depend only on the seed, the
split, the modality and the pair's index, so a smaller file is a prefix of a larger one.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import numpy as np
from PIL import Image

from rlcompute.data.schema import Pair, Side, write_pairs
from rlcompute.demo.compose import COMPOSERS, VIDEO_FPS, Sample
from rlcompute.demo.splits import MODALITIES, Modality, Split, plan_pool
from rlcompute.errors import ConfigError

INSTRUCTIONS: dict[Modality, str] = {
    "image": "find the image",
    "video": "find the video",
    "visdoc": "find the page",
    "text": "find the translation",
}
"""What each task's query starts with."""

_PNG_LEVEL = 3


def write_demo(
    out_dir: str | Path, *, train_per_task: int, test_per_task: int, final_per_task: int, seed: int = 0
) -> dict[Split, Path]:
    """Compose ``train.parquet``, ``test.parquet`` and ``final.parquet``, each with all four tasks.

    Args:
        out_dir: folder, made if missing.
        train_per_task: pairs a task for training.
        test_per_task: held-out pairs a task to tune and report with, at most 2,000.
        final_per_task: held-out pairs a task that no tuning looks at, at most 2,000.
        seed: of all draws.

    Returns:
        The files written by split; a split of no pairs has none.

    Raises:
        ConfigError: a count is negative, or larger than the number of combinations that can be told apart.
    """
    counts: dict[Split, int] = {"train": train_per_task, "test": test_per_task, "final": final_per_task}
    if min(counts.values()) < 0 or not any(counts.values()):
        raise ConfigError(f"pairs a task must not be negative, and not all zero: got {counts}")
    files = {}
    for split, count in counts.items():
        if count:
            files[split] = Path(out_dir) / f"{split}.parquet"
            write_pairs(
                files[split],
                [pair for modality in MODALITIES for pair in demo_pairs(seed, split, modality, count)],
            )
    return files


def demo_pairs(seed: int, split: Split, modality: Modality, count: int) -> Iterator[Pair]:
    """The first ``count`` pairs of a pool, in order; no target answers another pair's query."""
    for index, combination in enumerate(plan_pool(seed, split, modality, count)):
        entropy = np.random.SeedSequence([seed, crc32(f"{split}/{modality}/draw".encode()), index])
        sample = COMPOSERS[modality](np.random.default_rng(entropy), combination)
        identity = f"{split}-{modality}-{index:05d}"
        yield Pair(
            id=identity,
            task=f"demo_{modality}",
            modality=modality,
            target_id=identity,
            query=Side(instruction=INSTRUCTIONS[modality], text=sample.query),
            target=_target_side(sample),
        )


def _target_side(sample: Sample) -> Side:
    if sample.frames is None:
        return Side(text=sample.text)
    encoded = tuple(_png(frame) for frame in sample.frames)
    return Side(images=encoded) if len(encoded) == 1 else Side(video=encoded, video_fps=VIDEO_FPS)


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=_PNG_LEVEL)
    return buffer.getvalue()
