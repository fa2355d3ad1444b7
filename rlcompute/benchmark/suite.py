"""Runs the chosen tables and writes the report."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlcompute.benchmark import pictures, report
from rlcompute.benchmark.bench import Bench
from rlcompute.benchmark.geometry import Geometry, find
from rlcompute.benchmark.rows import Row
from rlcompute.errors import ConfigError
from rlcompute.kernels import registry

logger = logging.getLogger(__name__)

TABLES = {
    "i": "rlcompute.benchmark.token_pruning",
    "ii": "rlcompute.benchmark.expert_skipping",
    "iii": "rlcompute.benchmark.expert_tiles",
    "iv": "rlcompute.benchmark.breakdown",
    "v": "rlcompute.benchmark.full_compute",
    "vi": "rlcompute.benchmark.iteration",
}
"""By number, the module whose ``measure(bench: Bench) -> list[Row]`` makes the table; its docstring's first paragraphs
explain it in the report. A module is imported only if its table is asked for."""
DEFAULT_TABLES = tuple(number for number in TABLES if number != "vi")
"""The tables of every geometry, which need no Ray."""
DTYPES = ("float32", "bfloat16")


def run(
    *,
    geometry: str | Geometry,
    out: Path,
    tables: Sequence[str] = DEFAULT_TABLES,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int | None = None,
    budget_s: float = 600.0,
    kernels: Mapping[str, str] | None = None,
    seed: int = 0,
) -> list[Row]:
    """Measures tables and writes ``benchmark.json``, ``benchmark.md`` and pictures.

    Args:
        geometry: a key of :data:`rlcompute.benchmark.geometry.GEOMETRIES`, or one of your own.
        out: folder to write, created if it is not there.
        tables: keys of :data:`TABLES`.
        device, dtype: where and in what precision.
        threads: torch's threads; None leaves them.
        budget_s: seconds of timed rounds, shared equally by the tables. Building the model and checking results come
            on top, and so does a table whose fewest rounds take longer.
        kernels: backends to force, by operation.
        seed: of weights, inputs and random policies.

    Returns:
        All rows.

    Raises:
        BackendError: a forced backend cannot run, or variants that must agree do not.
        ConfigError: an unknown geometry, table or dtype, or a device that is not there.
    """
    unknown = [name for name in tables if name not in TABLES]
    if unknown or not tables:
        raise ConfigError(f"no table {', '.join(unknown) or 'asked for'}; there are {', '.join(TABLES)}")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    geometry = find(geometry) if isinstance(geometry, str) else geometry
    bench = Bench(geometry, device, dtype, budget_s / len(tables), dict(kernels or {}), seed)
    registry.resolve(
        device, getattr(torch, dtype), bench.kernels
    )  # refuses bad backends before anything is built
    chosen = {op: _backend(op, bench) for op in registry.PROVIDERS}
    out.mkdir(parents=True, exist_ok=True)
    measured: dict[str, tuple[str, list[Row]]] = {}
    with _threads(threads):
        facts = report.conditions(device, dtype, chosen)
        for number in TABLES:
            if number in tables:
                module = importlib.import_module(TABLES[number])
                measured[number] = (_explanation(module), _measure(number, module.measure, bench))
    rows = [row for _, table in measured.values() for row in table]
    report.write_json(out / "benchmark.json", rows)
    files = pictures.write(out, {number: table for number, (_, table) in measured.items()}, geometry.name)
    title = f"Benchmark: {geometry.name}"
    facts = {"geometry": geometry.description, "batches": _batches(geometry), **facts}
    (out / "benchmark.md").write_text(report.markdown(title, facts, measured, files), encoding="utf-8")
    return rows


def _measure(number: str, measure: Callable[[Bench], list[Row]], bench: Bench) -> list[Row]:
    start = time.perf_counter()
    rows = measure(bench)
    logger.info("benchmark: table %s took %.0f s", number, time.perf_counter() - start)
    return rows


def _backend(op: str, bench: Bench) -> str:
    return registry.choose(op, bench.device, getattr(torch, bench.dtype), bench.kernels.get(op))


def _batches(geometry: Geometry) -> str:
    shortest, longest = geometry.mixed_range
    mixed = f"{geometry.mixed_inputs} inputs of {shortest} to {longest}"
    return f"{geometry.inputs} inputs of {geometry.length} tokens; in table v also {mixed}"


def _explanation(module: Any) -> str:
    """The module's docstring up to its shape legend, without the table's number."""
    text = str(module.__doc__).partition("Shape legend")[0].strip()
    text = text.partition(": ")[2] if text.startswith("Table") else text
    return text[:1].upper() + text[1:]


@contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
