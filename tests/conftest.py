"""Shared set-up: one torch thread, no model hub, and a tiny random checkpoint."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Triton reads this when it is imported, which no import above does.
    os.environ.setdefault("TRITON_INTERPRET", "1")
collect_ignore_glob = [] if find_spec("triton") else ["kernels/test_*triton*.py"]
# CI runs the same examples each time, so that a red run means a changed program; everyone else explores.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the source tree."""
    return REPOSITORY
