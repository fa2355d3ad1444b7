"""Measures what the kernel layer is for: FLOPs saved against time saved (``rlcompute benchmark``)."""

from __future__ import annotations

from rlcompute.benchmark.suite import DEFAULT_TABLES, TABLES, run

__all__ = ["DEFAULT_TABLES", "TABLES", "run"]
