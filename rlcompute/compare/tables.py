"""``compare.json`` as markdown and for the terminal, with the columns of the paper's Table 6."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

_COMPUTE = (
    "LM",
    "executed",
    "logical",
    "hardware",
    "experts a token",
    "layers run",
    "speed-up [range]",
    "conversion",
)
_NOTES = (
    "Recall@1 in points of 100, in brackets the difference from full compute; the mean's interval is a paired 95 % "
    "bootstrap over queries. FLOPs saved in %, vision tower included but in LM. Experts a token: routed experts that "
    "ran, mean over layers and the tokens left there. Layers run: % of tokens and layers that were not bypassed. "
    "Speed-up over full compute, timed in the same rounds; in brackets the slowest and the fastest round. Conversion: "
    "% of time saved for each % of executed FLOPs saved."
)


def markdown(content: dict[str, Any], pictures: Sequence[str]) -> str:
    """``compare.md``, which shows the pictures of these names in its own folder."""
    modalities = _modalities(content)
    heading = ["policy", "budget", *modalities, "mean [95 % interval]", *_COMPUTE]
    rows = [[f"`{_name(x)}`", _budget(x), *_recalls(x), _mean(x), *_compute(x)] for x in content["points"]]
    lines = [f"# Policies compared\n\n{content['suite']}; {content['backbone']}\n"]
    lines += _markdown_table(heading, rows)
    lines += [f"\n{_NOTES}\n", "## The place of the learned policies\n"]
    lines += [f"- {line}" for line in places(content)]
    if content["not_reached"]:
        lines += ["\n## Out of reach\n", *(f"- {line}" for line in not_reached(content))]
    if pictures:
        lines += ["\n## Pictures\n", *(f"![{name}]({name})" for name in pictures)]
    return "\n".join(lines) + "\n"


def terminal(content: dict[str, Any]) -> Group:
    """What was kept, what was saved, and what follows."""
    modalities = _modalities(content)
    accuracy = _table("Recall@1, points of 100 (difference from full compute)")
    for heading in ("mean [95 % interval]", *modalities):
        accuracy.add_column(heading, justify="right", no_wrap=True)
    compute = _table("Saved, % of full compute (vision tower included but in LM), and time")
    for heading in _COMPUTE:
        compute.add_column(heading, justify="right", no_wrap=True)
    for x in content["points"]:
        accuracy.add_row(_name(x), _budget(x), _mean(x), *_recalls(x))
        compute.add_row(_name(x), _budget(x), *_compute(x))
    told = [content["suite"], content["backbone"]]
    after = ["The place of the learned policies", *places(content)]
    if content["not_reached"]:
        after += ["", "Out of reach", *not_reached(content)]
    return Group("\n".join(told), accuracy, compute, "\n".join(after))


def places(content: dict[str, Any]) -> list[str]:
    """A sentence for every budget and group of learned policies, whoever is ahead."""
    lines = []
    for budget in sorted(set(content["budgets"])):
        held = [x for x in content["leads"] if x["budget"] == budget]
        lines += [_place(x) for x in held]
        if not held:
            lines.append(f"At {100 * budget:g} %: no learned policy, or no rule, saves that much.")
    return lines


def not_reached(content: dict[str, Any]) -> list[str]:
    """A sentence for every policy whose knob does not reach a budget."""
    return [
        f"{x['policy']} at {100 * x['budget']:g} %: saves {100 * x['least']:.1f} to {100 * x['most']:.1f} %."
        for x in content["not_reached"]
    ]


def _place(lead: dict[str, Any]) -> str:
    verdict = {
        "ahead": "the learned policy is ahead",
        "behind": "the rule is ahead",
        "level": "no difference that the sample shows",
    }[lead["verdict"]]
    members = f", mean of {lead['members']}" if lead["members"] > 1 else ""
    return (
        f"At {100 * lead['budget']:g} %: {lead['group']} ({lead['method']}{members}), saves "
        f"{100 * lead['saved']:.1f} %, recall@1 {lead['recall_at_1']:.2f}; the best rule, {lead['rule']}, "
        f"saves {100 * lead['rule_saved']:.1f} %, {lead['rule_recall_at_1']:.2f}. "
        f"Lead {lead['lead']:+.2f} [{lead['low']:+.2f}, {lead['high']:+.2f}]: "
        f"{verdict}."
    )


def _modalities(content: dict[str, Any]) -> list[str]:
    return list(content["points"][0]["modalities"])


def _name(x: dict[str, Any]) -> str:
    return str(x["resolved"])


def _budget(x: dict[str, Any]) -> str:
    return "" if x["budget"] is None else f"{100 * x['budget']:g} %"


def _recalls(x: dict[str, Any]) -> list[str]:
    return [f"{m['recall_at_1']:.1f} ({m['delta_recall_at_1']:+.1f})" for m in x["modalities"].values()]


def _mean(x: dict[str, Any]) -> str:
    delta = x["delta_vs_full"]
    low, high = delta["ci95"]
    return f"{x['mean_recall_at_1']:.1f} ({delta['mean']:+.2f} [{low:+.2f}, {high:+.2f}])"


def _compute(x: dict[str, Any]) -> list[str]:
    keys = ("lm_executed_saved", "executed_saved", "logical_saved", "hardware_saved")
    low, high = x["speedup_range"]
    return [
        *(f"{100 * x['flops'][key]:.1f}" for key in keys),
        f"{x['experts_per_token']:.2f}",
        f"{100 * x['layers_run']:.0f} %",
        f"{x['speedup']:.2f} [{low:.2f}, {high:.2f}]",
        "-" if x["conversion"] is None else f"{100 * x['conversion']:.0f} %",
    ]


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("policy", overflow="fold", max_width=72)
    table.add_column("budget", justify="right", no_wrap=True)
    return table


def _markdown_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(heading) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (heading, rule, *rows)]
