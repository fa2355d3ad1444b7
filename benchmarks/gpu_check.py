"""Checks every kernel backend that this machine's device accepts, then measures tables i to v of the benchmark.

    python benchmarks/gpu_check.py --out gpu_check.md

Takes less than four minutes on a GPU, and needs neither a network nor Ray. Without a GPU it runs on the CPU, Triton
kernels in Triton's interpreter, on small sizes. Whatever fails is recorded and the rest goes on; the exit code is 1
if anything failed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

DTYPES = (torch.float32, torch.bfloat16)
TABLES = ("i", "ii", "iii", "iv", "v")
MEASURED_ON = ("- geometry:", "- batches:", "- dtype:", "- kernels:")
PARITY_BUDGET_S = 100.0
TABLES_BUDGET_S = {"cuda": 75.0, "cpu": 20.0}
VERSIONS = (
    "rlcompute",
    "torch",
    "transformers",
    "triton",
    "flash-attn",
    "flash-linear-attention",
    "sonic-moe",
)


@dataclass(frozen=True)
class Checked:
    """Parity of one backend in one dtype.

    Attributes:
        op, backend, dtype: what was checked.
        passed, total: cases.
        error: largest error of the cases that were computed.
        tolerance: largest error allowed.
        seconds: wall-clock, compilation included.
        remarks: cases that failed, were declined or not reached, and why.
    """

    op: str
    backend: str
    dtype: str
    passed: int
    total: int
    error: float
    tolerance: float
    seconds: float
    remarks: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.passed == self.total


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check; 0 if everything passed."""
    options = _parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        # Triton reads this when it is imported, which nothing above does.
        os.environ["TRITON_INTERPRET"] = "1"
        _mend_interpreter()
        torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    start = time.perf_counter()
    lines = ["# Kernel check", "", *_say(_conditions(device))]
    lines += ["", "## Parity", "", *_say(_not_accepted(device)), ""]
    checked = list(_parity(device, start + PARITY_BUDGET_S))
    lines += _parity_table(checked)
    failed = [f"parity of {c.op} {c.backend} {c.dtype}" for c in checked if not c.ok]
    for table, text, problem in _tables(device, options.tables, options.budget_s):
        lines += ["", text]
        failed += [f"table {table}: {problem}"] if problem else []
    seconds = time.perf_counter() - start
    outcome = "failed: " + "; ".join(failed) if failed else "everything passed"
    lines += ["", *_say([f"Finished after {seconds:.0f} s; {outcome}."])]
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if failed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check kernel backends on this machine and time them.")
    parser.add_argument("--out", type=Path, help="markdown file to write the results to")
    parser.add_argument(
        "--tables",
        default=",".join(TABLES),
        help=f"tables to measure (default: {','.join(TABLES)}; '' for none)",
    )
    parser.add_argument("--budget-s", type=float, help="seconds of timed rounds in all (default: 75, CPU 20)")
    return parser.parse_args(arguments)


def _say(lines: Sequence[str]) -> Sequence[str]:
    for line in lines:
        print(line, flush=True)
    return lines


def _mend_interpreter() -> None:
    """Triton's interpreter computes bfloat16 only after mending."""
    if importlib.util.find_spec("triton") is not None:
        from rlcompute.kernels.triton_interpreter import enable_bf16

        enable_bf16()


def _conditions(device: torch.device) -> list[str]:
    from rlcompute import environment

    facts = environment.machine()
    named = "cpu"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        named = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}, "
        named += f"CUDA {torch.version.cuda}"
    found = environment.package_versions(VERSIONS).items()
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in found)
    return [
        f"- device: {named}",
        f"- host: {facts['processor']}, {facts['cores']} cores usable, Python {facts['python']}",
        f"- versions: {versions}",
    ]


def _not_accepted(device: torch.device) -> list[str]:
    """Backends that run in no dtype here, and why."""
    from rlcompute.kernels import registry

    lines = []
    for op in registry.PROVIDERS:
        by_dtype = [registry.refusals(op, device, dtype) for dtype in DTYPES]
        for name, reason in by_dtype[-1].items():
            if all(reasons[name] is not None for reasons in by_dtype):
                lines.append(f"- not here: {op} {name}: {reason}")
    return lines


def _parity(device: torch.device, deadline: float) -> Iterator[Checked]:
    """Every backend that accepts the device, in every dtype that it accepts."""
    from rlcompute.kernels import registry

    with _untuned(), _one_thread():
        for op in registry.PROVIDERS:
            for dtype in DTYPES:
                for backend, reason in registry.refusals(op, device, dtype).items():
                    if reason is None:
                        checked = _check(op, backend, device, dtype, deadline)
                        _say([_parity_row(checked)])
                        yield checked


def _check(op: str, backend: str, device: torch.device, dtype: torch.dtype, deadline: float) -> Checked:
    """Case by case, so that one that crashes does not hide the others."""
    from rlcompute.benchmark import parity
    from rlcompute.benchmark.parity_problems import PROBLEMS

    interpreted = device.type == "cpu" and backend == "triton"
    cases = [case for case, make in PROBLEMS[op].items() if not (interpreted and make().long)]
    remarks = ["long segments left out: interpreted"] if len(cases) < len(PROBLEMS[op]) else []
    start, passed, error, tolerance = time.perf_counter(), 0, 0.0, 0.0
    for place, case in enumerate(cases):
        if time.perf_counter() > deadline:
            remarks.append(f"time is up: {len(cases) - place} cases not reached")
            break
        try:
            (result,) = parity.check(op, backend, device, dtype, [case])
        except Exception as problem:
            remarks.append(f"{case}: {_short(problem)}")
            continue
        passed, tolerance = passed + result.passed, result.tolerance
        if result.refusal is not None:
            remarks.append(f"{case}: declined")
        else:
            error = max(error, result.error)
        if not result.passed:
            remarks.append(f"{case}: error {result.error:.1e}")
    seconds = time.perf_counter() - start
    name = str(dtype).removeprefix("torch.")
    return Checked(op, backend, name, passed, len(cases), error, tolerance, seconds, tuple(remarks))


@contextmanager
def _one_thread() -> Iterator[None]:
    """The references are made of tiny operations, which threads only slow down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _untuned() -> Iterator[None]:
    """One configuration for each Triton kernel: tuning would spend minutes on widths that no model has."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime.autotuner import Autotuner

    tuned = Autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        configurations, self.configs = self.configs, self.configs[:1]
        try:
            return tuned(self, *args, **kwargs)
        finally:
            self.configs = configurations

    Autotuner.run = run
    try:
        yield
    finally:
        Autotuner.run = tuned


def _parity_table(checked: Sequence[Checked]) -> list[str]:
    lines = ["| operation | backend | dtype | cases passed | largest error | allowed | seconds | remarks |"]
    return [*lines, "|---|---|---|---|---|---|---|---|", *(_parity_row(c) for c in checked)]


def _parity_row(c: Checked) -> str:
    verdict = "" if c.ok else "FAILED, "
    return (
        f"| {c.op} | {c.backend} | {c.dtype} | {verdict}{c.passed} of {c.total} | {c.error:.1e} | {c.tolerance:.0e} "
        f"| {c.seconds:.1f} | {'; '.join(c.remarks)} |"
    )


def _tables(
    device: torch.device, chosen: str, budget_s: float | None
) -> Iterator[tuple[str, str, str | None]]:
    """(table, its text, what went wrong), each measured on its own."""
    from rlcompute.benchmark import run
    from rlcompute.benchmark.geometry import find

    on_gpu = device.type == "cuda"
    small = replace(find("demo"), inputs=4, mixed_inputs=4, mixed_range=(16, 128), expert_tokens=(512, 1024))
    tables = [table for table in chosen.split(",") if table]
    seconds = TABLES_BUDGET_S[device.type] if budget_s is None else budget_s
    for table in tables:
        problem = None
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(
                    geometry=find("qwen3_5_35b_a3b") if on_gpu else small,
                    out=Path(folder),
                    tables=[table],
                    device=device.type,
                    dtype="bfloat16" if on_gpu else "float32",
                    budget_s=seconds / len(tables),
                )
            except Exception as error:
                problem = _short(error)
                text = f"## Table {table}\n\nFAILED: {problem}"
            else:
                text = _section((Path(folder) / "benchmark.md").read_text(encoding="utf-8"))
        print(f"\n{text}", flush=True)
        gc.collect()  # the table's model, before the next one is built
        yield table, text, problem


def _section(report: str) -> str:
    """The table of a report with one table and what it was measured on, without links to pictures."""
    conditions, heading, table = report.partition("## Table")
    kept = [line for line in conditions.splitlines() if line.startswith(MEASURED_ON)]
    title, *lines = (heading + table).splitlines()
    lines = [line for line in lines if not line.startswith("![")]
    return "\n".join([title, "", *kept, *lines]).rstrip()


def _short(error: Exception) -> str:
    """An exception in one line that a table cell can hold."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).replace("|", "/")
    return text if len(text) <= 300 else text[:300] + "…"


if __name__ == "__main__":
    sys.exit(main())
