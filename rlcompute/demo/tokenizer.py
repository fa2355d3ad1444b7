"""The demo embedder's tokenizer: byte-level BPE trained on the demo's own names and sentences.

The training text is composed from pinned packages only, so the tokenizer is the same on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX, Qwen3_5Tokenizer

from rlcompute.demo.compose import COMPOSERS
from rlcompute.demo.concepts import concepts
from rlcompute.demo.dataset import INSTRUCTIONS
from rlcompute.demo.splits import MODALITIES, draw_combination
from rlcompute.preprocess import EMB_TOKEN

VOCABULARY = 4096
_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    EMB_TOKEN,
)
_SENTENCES_PER_MODALITY = 3000
_NAME_WEIGHT = 20
"""Names are repeated so that they become one or two tokens; sentences alone would favour the templates."""


def training_text() -> Iterator[str]:
    """All names in all languages, instructions, timestamps and composed training sentences."""
    for concept in concepts():
        for name in concept.names.values():
            for _ in range(_NAME_WEIGHT):
                yield f"{name} {name}"
    for instruction in INSTRUCTIONS.values():
        yield from [f"{instruction}\n"] * _NAME_WEIGHT
    for tenth in range(100):
        yield f"<{tenth / 10:.1f} seconds>"
    rng = np.random.default_rng(5)
    for modality in MODALITIES:
        for _ in range(_SENTENCES_PER_MODALITY):
            sample = COMPOSERS[modality](rng, draw_combination(rng, modality, "train"))
            yield sample.query
            if sample.text is not None:
                yield sample.text


def train_tokenizer(vocabulary: int = VOCABULARY) -> Qwen3_5Tokenizer:
    """Train and wrap as an ordinary transformers tokenizer with the family's special tokens and ``<|emb|>``."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(training_text(), trainer)
    model = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen3_5Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
            "emb_token": EMB_TOKEN,
        },
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    return tokenizer
