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
from torch import Tensor

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
    embeddings_2Md = read_embeddings(path)
    if embeddings_2Md is None:
        embeddings_2Md = _compute(pairs, pool)
        write_embeddings(path, embeddings_2Md)
    query_Md, target_Md = embeddings_2Md.unbind(0)
    return TeacherBank(
        query_Md=query_Md.contiguous(),
        target_Md=target_Md.contiguous(),
        tasks=[pair.task for pair in pairs],
        target_ids=[pair.target_id for pair in pairs],
    )


def chunks_of(pairs: Sequence[Pair]) -> dict[int, list[Pair]]:
    """The packs in which pairs are embedded, by the place of their first pair."""
    return {start: list(pairs[start : start + CHUNK_PAIRS]) for start in range(0, len(pairs), CHUNK_PAIRS)}


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


def read_embeddings(path: Path) -> Tensor | None:
    """Cached embeddings float32 [2,M,d]; None if there are none. A damaged file is computed again."""
    if not path.is_file():
        return None
    try:
        tensors = load_file(path)
    except SafetensorError:
        path.unlink(missing_ok=True)
        return None
    return torch.stack([tensors["query"], tensors["target"]])


def write_embeddings(path: Path, embeddings_2Md: Tensor) -> None:
    """Caches embeddings; a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    query_Md, target_Md = embeddings_2Md.unbind(0)
    save_file({"query": query_Md.contiguous(), "target": target_Md.contiguous()}, partial)
    partial.replace(path)


def _compute(pairs: Sequence[Pair], pool: WorkerPool) -> Tensor:
    chunks = chunks_of(pairs)
    with ProgressReporter("full-compute embeddings", len(pairs), unit="pair") as progress:
        done = pool.scatter(
            "teacher embeddings",
            "embed_teacher",
            chunks,
            tasks_per_call=CHUNKS_PER_CALL,
            progress=lambda starts: progress.advance(sum(len(chunks[start]) for start in starts)),
        )
    return torch.from_numpy(np.concatenate([done[start].result for start in chunks], axis=1))
