"""Train the demo embedder from nothing: ``python -m rlcompute.demo.recipe --out DIR --minutes 60 --threads 2``.

1. Tokenizer: byte-level BPE over the demo's names and sentences.
2. Model: the Qwen3.5-MoE architecture in small, with an initialisation that a small model can learn from
   (:func:`rlcompute.demo.model.initialise`).
3. Stage 0: the vision tower alone learns to put visual tokens near the embedding of the name of what they show.
4. Stage 1: contrastive training on all four modalities, single concepts first.

The output is a transformers checkpoint in bfloat16. Every few minutes it is saved and evaluated on held-out pairs, with
the rounded weights. The learning rate follows the wall clock, so a slower machine trains less, not longer.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import Qwen3_5MoeModel

from rlcompute.demo.batches import Batch, BatchStream
from rlcompute.demo.checkpoint import save_checkpoint
from rlcompute.demo.forward import use_shortcuts
from rlcompute.demo.model import build_model, image_processor
from rlcompute.demo.recall import held_out_recall
from rlcompute.demo.splits import Modality
from rlcompute.demo.stages import align_vision, train_contrastive
from rlcompute.demo.tokenizer import train_tokenizer
from rlcompute.preprocess import Preprocessor

_BATCH = 64
_SINGLES_FACTOR = 2
"""Single concepts make short sequences: more of them fit a step, and bring more negatives."""
_MIX: dict[Modality, float] = {"image": 0.3, "video": 0.3, "visdoc": 0.25, "text": 0.15}
_VISUAL_MIX: dict[Modality, float] = {"image": 0.25, "video": 0.25, "visdoc": 0.5}
_STAGE_0_SHARE = 0.06
_MARK_SECONDS = 300.0

_log = logging.getLogger("rlcompute.demo.recipe")


def _batches(
    preprocessor: Preprocessor, seed: int, stream: int, mix: dict[Modality, float], size: int, single: bool
) -> Iterator[Batch]:
    """Batches composed ahead in a worker process."""
    dataset = BatchStream(preprocessor, seed=(seed, stream), size=size, mix=mix, single=single)
    return iter(DataLoader(dataset, batch_size=None, num_workers=1, prefetch_factor=6))


def train(out: Path, *, minutes: float, seed: int) -> None:
    """Run the recipe and leave a checkpoint folder at ``out``, with ``recall.json`` beside the weights."""
    tokenizer = train_tokenizer()
    preprocessor = Preprocessor(tokenizer, image_processor())
    model = build_model(tokenizer, seed)
    use_shortcuts(model)
    _log.info("%.2f million parameters", sum(p.numel() for p in model.parameters()) / 1e6)

    def save_and_evaluate() -> None:
        started = time.monotonic()
        rounded: Qwen3_5MoeModel = copy.deepcopy(model).to(torch.bfloat16).float()
        recall = held_out_recall(rounded, preprocessor)
        save_checkpoint(out, model, preprocessor)
        (out / "recall.json").write_text(json.dumps(recall, indent=1) + "\n", encoding="utf-8")
        _log.info("saved; held-out recall@1 %s (%.0f s)", recall, time.monotonic() - started)

    seconds = minutes * 60
    visual = _batches(preprocessor, seed, 0, _VISUAL_MIX, _BATCH // 2, single=False)
    align_vision(model, preprocessor, visual, seconds * _STAGE_0_SHARE, _log.info)
    del visual  # stops its worker process
    train_contrastive(
        model,
        _batches(preprocessor, seed, 1, _MIX, _BATCH * _SINGLES_FACTOR, single=True),
        _batches(preprocessor, seed, 2, _MIX, _BATCH, single=False),
        seconds * (1 - _STAGE_0_SHARE),
        _log.info,
        save_and_evaluate,
        _MARK_SECONDS,
    )
    save_and_evaluate()


def main(arguments: list[str]) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m rlcompute.demo.recipe", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall-clock minutes of training")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch threads")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the batches' worker processes are forked
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    _log.setLevel(logging.INFO)
    train(options.out, minutes=options.minutes, seed=options.seed)


if __name__ == "__main__":
    main(sys.argv[1:])
