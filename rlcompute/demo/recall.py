"""Recall of the demo embedder on held-out pairs, for the training log."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Qwen3_5MoeModel

from rlcompute.demo.batches import build_batch
from rlcompute.demo.compose import COMPOSERS
from rlcompute.demo.forward import embed
from rlcompute.demo.splits import MODALITIES, Modality, plan_pool
from rlcompute.preprocess import Preprocessor

_GALLERY = 500
_CHUNK = 100
_SEED = 1


@torch.no_grad()
def held_out_recall(model: Qwen3_5MoeModel, preprocessor: Preprocessor) -> dict[Modality, float]:
    """Recall@1 in points of 100 for 500 test pairs a modality in one gallery; ties count against the model."""
    result: dict[Modality, float] = {}
    for modality in MODALITIES:
        rng = np.random.default_rng(_SEED)
        samples = [COMPOSERS[modality](rng, c) for c in plan_pool(_SEED, "test", modality, _GALLERY)]
        queries, targets = [], []
        for start in range(0, _GALLERY, _CHUNK):
            batch = build_batch(preprocessor, modality, samples[start : start + _CHUNK])
            queries.append(F.normalize(embed(model, batch.query), dim=-1))
            targets.append(F.normalize(embed(model, batch.target), dim=-1))
        scores = torch.cat(queries) @ torch.cat(targets).T
        rivals = (scores >= scores.diag()[:, None]).sum(1) - 1
        result[modality] = round((rivals == 0).float().mean().item() * 100, 2)
    return result
