"""The embedded default: a small real embedder of the Qwen3.5-MoE family and the pairs to train and test gates on."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""Folder of the committed demo embedder, a transformers checkpoint that loads offline."""
