"""Train the demo embedder from nothing: ``python -m rlcompute.demo.recipe --out DIR --minutes 60 --threads 2``.

1. Tokenizer: byte-level BPE over the demo's names and sentences.
2. Model: the Qwen3.5-MoE architecture in small, with an initialisation that a small model can learn from
   (:func:`rlcompute.demo.model.initialise`).
3. Stage 0: names of one thing in several languages are moved close together; then the vision tower alone learns to
   put visual tokens near the embedding of the name of what they show.
4. Stage 1: contrastive training on all four modalities, single concepts first.

``--start DIR`` continues from a checkpoint of this recipe: only names are aligned again, and single concepts left out.

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
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import Qwen3_5MoeModel

from rlcompute.demo.batches import BatchStream
from rlcompute.demo.checkpoint import save_checkpoint
from rlcompute.demo.forward import use_shortcuts
from rlcompute.demo.model import build_model, image_processor
from rlcompute.demo.recall import held_out_recall
from rlcompute.demo.splits import MODALITIES, Modality
from rlcompute.demo.stages import HardestFirst, align_names, align_vision, train_contrastive
from rlcompute.demo.tokenizer import train_tokenizer
from rlcompute.preprocess import Preprocessor

_BATCH = 64
_SINGLES_FACTOR = 2
"""Single concepts make short sequences: more of them fit a step, and bring more negatives."""
_VISUAL: tuple[Modality, ...] = ("image", "video", "visdoc")
_STAGE_0_SHARE = 0.06
_SINGLES_SHARE = 0.25
_MARK_SECONDS = 900.0

_log = logging.getLogger("rlcompute.demo.recipe")


def _batches(
    preprocessor: Preprocessor,
    modalities: Sequence[Modality],
    *,
    seed: int,
    stream: int,
    size: int,
    single: bool,
) -> HardestFirst:
    """Batches composed ahead, in one worker process for each modality."""
    loaders = {}
    for number, modality in enumerate(modalities):
        entropy = (seed, stream, number)
        dataset = BatchStream(preprocessor, seed=entropy, size=size, modality=modality, single=single)
        loaders[modality] = iter(DataLoader(dataset, batch_size=None, num_workers=1, prefetch_factor=3))
    return HardestFirst(loaders, seed)


def train(out: Path, *, minutes: float, seed: int, start: Path | None = None) -> None:
    """Run the recipe and leave a checkpoint folder at ``out``, with ``recall.json`` beside the weights."""
    tokenizer = train_tokenizer()
    preprocessor = Preprocessor(tokenizer, image_processor())
    torch.manual_seed(seed)
    model = (
        build_model(tokenizer)
        if start is None
        else Qwen3_5MoeModel.from_pretrained(start, dtype=torch.float32)
    )
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
    align_names(model, preprocessor, _log.info)
    if start is None:
        visual = _batches(preprocessor, _VISUAL, seed=seed, stream=0, size=_BATCH // 2, single=False)
        align_vision(model, preprocessor, visual, seconds * _STAGE_0_SHARE, _log.info)
        del visual  # stops its worker process
        seconds *= 1 - _STAGE_0_SHARE
    singles = None
    if start is None:
        size = _BATCH * _SINGLES_FACTOR
        singles = _batches(preprocessor, MODALITIES, seed=seed, stream=1, size=size, single=True)
    train_contrastive(
        model,
        singles,
        _batches(
            preprocessor, MODALITIES, seed=seed, stream=2 if start is None else 3, size=_BATCH, single=False
        ),
        seconds,
        _log.info,
        save_and_evaluate,
        _MARK_SECONDS,
        _SINGLES_SHARE,
    )
    save_and_evaluate()


def main(arguments: list[str]) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        prog="python -m rlcompute.demo.recipe", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall-clock minutes of training")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch threads")
    parser.add_argument("--start", type=Path, help="checkpoint folder of this recipe to continue from")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the batches' worker processes are forked
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    _log.setLevel(logging.INFO)
    train(options.out, minutes=options.minutes, seed=options.seed, start=options.start)


if __name__ == "__main__":
    main(sys.argv[1:])
