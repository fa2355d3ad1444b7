"""Small files of pairs for tests."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from rlcompute.data.schema import Pair, Side, write_pairs


def png(rng: np.random.Generator, height: int, width: int) -> bytes:
    """A noisy picture, encoded."""
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def write_small_pairs(path: Path, per_modality: int, seed: int = 0) -> list[Pair]:
    """Image and text pairs, interleaved; every fifth text pair repeats the target of the one before it."""
    rng = np.random.default_rng(seed)
    pairs = []
    for row in range(per_modality):
        picture = Side(images=(png(rng, 48, 64),))
        pairs.append(Pair(f"image-{row}", "pictures", "image", f"i{row}", Side(text=f"thing {row}"), picture))
        name = row - 1 if row % 5 == 4 else row
        words = Side(text=f"{name} words and {name} more")
        pairs.append(Pair(f"text-{row}", "words", "text", f"t{name}", Side(text=f"words {name}"), words))
    write_pairs(path, pairs)
    return pairs
