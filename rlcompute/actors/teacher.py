"""Full-compute embeddings of all training pairs, computed once by the workers and cached on disk.

Shape legend: M pairs, d embedding size.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlcompute.actors.dispatch import WorkerPool
from rlcompute.config import Config
from rlcompute.data.schema import Pair, Side
from rlcompute.envs.reward import TeacherBank
from rlcompute.progress import ProgressReporter

CHUNK_PAIRS = 16
"""Pairs embedded in one pack. The chunks are cut from the sorted ids, so that every run computes the same bits."""
CHUNKS_PER_CALL = 4


def teacher_bank(config: Config, pairs: Sequence[Pair], backbone_hash: str, pool: WorkerPool) -> TeacherBank:
    """The bank of all training pairs, from the cache if this backbone has embedded the same rows before.

    Args:
        config: the run's configuration.
        pairs: training pairs, sorted by id; row m of the bank is pair m.
        backbone_hash: hash of the backbone that embeds them.
        pool: the workers.
    """
    path = cache_path(config, pairs, backbone_hash)
    tensors = _load(path)
    if tensors is None:
        tensors = _compute(pairs, pool)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        save_file(tensors, partial)
        partial.replace(path)
    return TeacherBank(
        query_Md=tensors["query"],
        target_Md=tensors["target"],
        tasks=[pair.task for pair in pairs],
        target_ids=[pair.target_id for pair in pairs],
    )


def cache_path(config: Config, pairs: Sequence[Pair], backbone_hash: str) -> Path:
    """File of the cached embeddings: named by all that they depend on."""
    digest = hashlib.sha256()
    digest.update(
        json.dumps([backbone_hash, config.backbone.dtype, config.data.max_tokens, CHUNK_PAIRS]).encode()
    )
    for pair in pairs:
        digest.update(pair.id.encode() + b"\0" + _content_digest(pair.query) + _content_digest(pair.target))
    return Path(config.run.dir) / ".cache" / "teacher" / f"{digest.hexdigest()[:32]}.safetensors"


def _content_digest(side: Side) -> bytes:
    """SHA-256 of everything that is embedded of one side."""
    digest = hashlib.sha256(json.dumps([side.instruction, side.text, side.video_fps]).encode())
    for blobs in (side.images, side.video):
        digest.update(len(blobs).to_bytes(8, "little"))
        for blob in blobs:
            digest.update(hashlib.sha256(blob).digest())
    return digest.digest()


def _load(path: Path) -> dict[str, torch.Tensor] | None:
    """Cached tensors; None if there are none. A damaged file is computed again."""
    if not path.is_file():
        return None
    try:
        return load_file(path)
    except SafetensorError:
        path.unlink()
        return None


def _compute(pairs: Sequence[Pair], pool: WorkerPool) -> dict[str, torch.Tensor]:
    chunks = {start: list(pairs[start : start + CHUNK_PAIRS]) for start in range(0, len(pairs), CHUNK_PAIRS)}
    with ProgressReporter("full-compute embeddings", len(pairs), unit="pair") as progress:
        done = pool.scatter(
            "teacher embeddings",
            "embed_teacher",
            chunks,
            tasks_per_call=CHUNKS_PER_CALL,
            progress=lambda starts: progress.advance(sum(len(chunks[start]) for start in starts)),
        )
    joined_2Md = np.concatenate([done[start].result for start in chunks], axis=1)
    query_Md, target_Md = torch.from_numpy(joined_2Md).unbind(0)
    return {"query": query_Md.contiguous(), "target": target_Md.contiguous()}
