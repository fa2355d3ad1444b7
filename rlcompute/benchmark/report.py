"""What a benchmark leaves behind: ``benchmark.json``, and ``benchmark.md`` with the tables and what they were
measured on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from rlcompute import environment
from rlcompute.benchmark.rows import Row

FIELDS = (
    "table",
    "row",
    "variant",
    "seconds_median",
    "seconds_iqr",
    "flops",
    "speedup",
    "flops_saved",
    "conversion",
)
"""Keys of every element of ``benchmark.json``."""
_VERSIONS = ("rlcompute", "torch", "transformers", "triton", "flash-attn", "flash-linear-attention")
_NUMBERS: dict[str, Callable[[Row], str]] = {
    "seconds": lambda row: f"{row.seconds_median:.4g}",
    "IQR": lambda row: f"{row.seconds_iqr:.2g}",
    "GFLOPs": lambda row: "" if row.flops is None else f"{row.flops / 1e9:.4g}",
    "speed-up": lambda row: "" if row.speedup is None else f"{row.speedup:.2f}×",
    "FLOPs saved": lambda row: "" if row.flops_saved is None else f"{100 * row.flops_saved:.1f} %",
    "conversion": lambda row: "" if row.conversion is None else f"{row.conversion:.2f}",
}


def conditions(device: str, dtype: str, kernels: Mapping[str, str]) -> dict[str, str]:
    """Device, versions and settings, in words."""
    machine = environment.machine()
    facts = {
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu",
        "processor": f"{machine['processor']}, {machine['cores']} cores usable",
        "dtype": dtype,
        "torch threads": str(torch.get_num_threads()),
        "load before (1 min)": f"{os.getloadavg()[0]:.1f}",
        "kernels": ", ".join(f"{op}={name}" for op, name in kernels.items()),
        "python": str(machine["python"]),
    }
    versions = environment.package_versions(_VERSIONS)
    return {**facts, **{name: version for name, version in versions.items() if version is not None}}


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """The rows as a list of objects with exactly the keys :data:`FIELDS`."""
    objects = [{name: getattr(row, name) for name in FIELDS} for row in rows]
    path.write_text(json.dumps(objects, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def markdown(
    title: str,
    facts: Mapping[str, str],
    tables: Mapping[str, tuple[str, Sequence[Row]]],
    pictures: Iterable[Path],
) -> str:
    """The whole report.

    Args:
        title: first line.
        facts: from :func:`conditions`, and what else holds for all tables.
        tables: by number, its explanation and its rows.
        pictures: files beside the report.
    """
    lines = [f"# {title}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += [
        "",
        "Seconds are medians over interleaved rounds, with the distance between the quartiles (IQR). Conversion is "
        "the share of the wall-clock saved over the share of the FLOPs saved.",
    ]
    for number, (explanation, rows) in tables.items():
        lines += ["", f"## Table {number}", "", explanation, "", *_table(rows)]
    lines += [line for path in pictures for line in ("", f"![{path.stem.replace('_', ' ')}]({path.name})")]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row]) -> list[str]:
    """One markdown table; columns that no row fills are left out."""
    extra = list(dict.fromkeys(name for row in rows for name in row.extra))
    columns: dict[str, Callable[[Row], str]] = {
        "": lambda row: row.row,
        "variant": lambda row: row.variant,
        **_NUMBERS,
    }
    cells = {name: [show(row) for row in rows] for name, show in columns.items()}
    cells |= {name: [row.extra.get(name, "") for row in rows] for name in extra}
    cells = {name: column for name, column in cells.items() if any(column)}
    lines = ["| " + " | ".join(cells) + " |", "|" + "---|" * len(cells)]
    lines += ["| " + " | ".join(line) + " |" for line in zip(*cells.values(), strict=True)]
    return lines
