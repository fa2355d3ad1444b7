"""Claims and what was found, as a table, as JSON and as a page to read."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from rlcompute.compare.claims_model import Claim, Figure, Finding

VERDICTS = ("agrees", "disagrees", "undecided")
_COLOURS = {"agrees": "green", "disagrees": "red", "undecided": "yellow"}
READ_WITH_CARE = (
    "A verdict is that of the rule beside the claim. The rules were written before anything was measured; two of them, "
    "on what is dropped first and on attention from <emb>, were made stricter after a first look. Differences of "
    "recall@1 are paired, query by query, with a 95 % bootstrap interval of the mean over modalities; clocks are "
    "interleaved, and their interval is that of the rounds. With this many claims one or two intervals miss by chance.",
    "The paper measures models of 35 and 122 billion parameters on two large benchmarks. A small backbone on an easy "
    "suite can contradict a sentence about them or lend it weight; it cannot settle it.",
)


@dataclass(frozen=True)
class Result:
    """A claim and what was found."""

    claim: Claim
    finding: Finding


def content(facts: Mapping[str, str], results: Sequence[Result]) -> dict[str, Any]:
    """What ``claims.json`` holds.

    Args:
        facts: what was measured on, in words.
        results: in the claims' order.
    """
    return {"facts": dict(facts), "claims": [_entry(result) for result in results]}


def _entry(result: Result) -> dict[str, Any]:
    claim, finding = result.claim, result.finding
    return {
        "id": claim.id,
        "statement": claim.statement,
        "paper": claim.paper,
        "measured": claim.measured,
        "rule": claim.rule,
        "verdict": finding.judgement.verdict,
        "reason": finding.judgement.reason,
        "figures": [_figure(x) for x in finding.figures],
    }


def _figure(figure: Figure) -> dict[str, Any]:
    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "name": figure.name,
        "value": number(figure.value),
        "ci95": [number(figure.low), number(figure.high)],
        "unit": figure.unit,
        "text": str(figure),
    }


def table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """The terminal's table: one row a claim."""
    found = Table(title="The paper's claims at this scale", show_lines=True)
    for name, ratio in (("claim", 4), ("the paper", 4), ("verdict", 2), ("here", 6)):
        found.add_column(name, ratio=ratio, overflow="fold")
    for entry in entries:
        colour = _COLOURS[entry["verdict"]]
        verdict = f"[{colour}]{entry['verdict']}[/{colour}]"
        found.add_row(entry["statement"], entry["paper"], verdict, _escaped(entry["reason"]))
    found.caption = summary(entries)
    return found


def _escaped(text: str) -> str:
    """Intervals in brackets are not rich's markup."""
    return text.replace("[", r"\[")


def summary(entries: Sequence[Mapping[str, Any]]) -> str:
    """How many claims have which verdict."""
    counts = Counter(entry["verdict"] for entry in entries)
    return f"{len(entries)} claims: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)


def markdown(found: Mapping[str, Any]) -> str:
    """The page ``claims.md``."""
    entries = found["claims"]
    lines = ["# The paper's claims at this scale", ""]
    lines += [f"- {name}: {value}" for name, value in found["facts"].items()]
    lines += ["", f"{summary(entries)}.", ""]
    lines += [line for paragraph in READ_WITH_CARE for line in (paragraph, "")]
    lines += ["| claim | the paper | verdict | here |", "|---|---|---|---|"]
    lines += [
        f"| [{entry['id']}](#{entry['id']}) | {_cell(entry['paper'])} | {entry['verdict']} | {_cell(entry['reason'])} |"
        for entry in entries
    ]
    for entry in entries:
        lines += [
            *("", f"## {entry['id']}", "", entry["statement"], ""),
            f"- paper: {entry['paper']}",
            f"- measured here: {entry['measured']}",
            f"- rule: {entry['rule']}",
            f"- **{entry['verdict']}**: {entry['reason']}",
            *(f"- {figure['text']}" for figure in entry["figures"]),
        ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """The verticals of |x| would end a markdown table's cell."""
    return text.replace("|", r"\|")


def write(folder: Path, found: Mapping[str, Any]) -> None:
    """Writes ``claims.json`` and ``claims.md``, each all or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "claims.json": json.dumps(found, indent=1, allow_nan=False, ensure_ascii=False) + "\n",
        "claims.md": markdown(found),
    }
    for name, text in texts.items():
        part = folder / f"{name}.part"
        part.write_text(text, encoding="utf-8")
        os.replace(part, folder / name)
