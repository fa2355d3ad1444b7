"""Points with chosen figures, and configurations over a tiny checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlcompute.compare.points import Point
from rlcompute.config import Config
from rlcompute.policies.checkpoint import HEADS, METHODS


def make_point(resolved: str, saved: float, ranks: dict[str, list[int]], **changed: Any) -> Point:
    """Saves a share of 100 FLOPs a modality; the vision tower costs 50 more."""
    count = len(ranks)
    full_G, spent_G = np.full(count, 100.0), np.full(count, 100.0 * (1.0 - saved))
    counts_NG = np.full((2, count), 10)
    fields: dict[str, Any] = {
        "spec": resolved,
        "resolved": resolved,
        "budget": None,
        "knob": None,
        "top_k": 2,
        "num_experts": 8,
        "ranks": {name: np.array(values) for name, values in ranks.items()},
        "executed_G": spent_G,
        "logical_G": spent_G + 1.0,
        "hardware_G": spent_G + 2.0,
        "full_executed_G": full_G,
        "full_logical_G": full_G + 1.0,
        "full_hardware_G": full_G + 2.0,
        "vision_G": np.full(count, 50.0),
        "full_vision_G": np.full(count, 50.0),
        "entered_NG": counts_NG,
        "decided_NG": counts_NG,
        "survived_NG": counts_NG,
        "rows_NG": 2 * counts_NG,
        "bypassed_NG": 0 * counts_NG,
        "method": METHODS[HEADS] if "gates" in resolved else None,
        "speedup": 1.0,
        "speedup_low": 0.9,
        "speedup_high": 1.1,
        "inputs_per_second": 10.0,
    }
    return Point(**fields | changed)


def make_config(folder: Path, cache: Path, **compare: Any) -> Config:
    """``folder`` holds a checkpoint ``tiny`` and ``test.parquet``."""
    return Config.model_validate(
        {
            "run": {"name": "test"},
            "data": {"train": str(folder / "train.parquet"), "test": str(folder / "test.parquet")},
            "backbone": {"path": str(folder / "tiny")},
            "evaluation": {
                "pairs_per_modality": 12,
                "gallery": 12,
                "batch_size": 20,
                "bootstrap_samples": 100,
                "timing_pairs": 2,
            },
            "compare": {"cache": str(cache)} | compare,
        }
    )
