"""Save the demo embedder as an ordinary transformers checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import Qwen3_5MoeModel

from rlcompute.preprocess import Preprocessor


def save_checkpoint(folder: Path, model: Qwen3_5MoeModel, preprocessor: Preprocessor) -> None:
    """Write config.json, model.safetensors in bfloat16, the tokenizer's files and preprocessor_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    rounded.save_pretrained(folder)
    preprocessor.tokenizer.save_pretrained(folder)
    preprocessor.image_processor.save_pretrained(folder)
