"""Shared set-up: one torch thread, no model hub, and a tiny random checkpoint."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the source tree."""
    return REPOSITORY
