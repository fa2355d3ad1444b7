"""A hash that tells one checkpoint from another without reading terabytes.

Weight files are read in up to 1,024 evenly spaced blocks of 64 KiB: a file below 64 MiB is read whole, and of
a larger one at least its header (the names, shapes and places of all tensors) and samples from end to end.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from rlcompute.errors import CheckpointError

_BLOCK = 64 * 1024
_BLOCKS = 1024
_TEXT_FILES = ("config.json", "tokenizer.json", "preprocessor_config.json")


def checkpoint_hash(folder: Path) -> str:
    """SHA-256 hex digest of a transformers checkpoint's configuration, tokenizer, image settings and weights.

    Raises:
        CheckpointError: the folder has no safetensors weights.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise CheckpointError(
            f"{folder}: no *.safetensors weights; save the checkpoint with save_pretrained()"
        )
    digest = hashlib.sha256()
    for path in [folder / name for name in _TEXT_FILES if (folder / name).exists()]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        step = max(_BLOCK, size // _BLOCKS)
        with path.open("rb") as file:
            for offset in range(0, size, step):
                file.seek(offset)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
