"""Arguments of the command line, before any command runs."""

from __future__ import annotations

import pytest

from rlcompute.cli import parse_arguments


def test_overrides_may_stand_on_both_sides_of_options() -> None:
    parts = ["train", "grpo.lr=0.25", "--config", "x.yaml", "run.seed=1", "--resume", "run.seed=2"]
    arguments = parse_arguments(parts)
    assert arguments.overrides == ["grpo.lr=0.25", "run.seed=1", "run.seed=2"]
    assert arguments.resume


def test_overrides_of_two_calls_do_not_mix() -> None:
    parse_arguments(["train", "--config", "x.yaml", "--resume", "a.b=1"])
    assert parse_arguments(["train", "--config", "x.yaml"]).overrides == []


@pytest.mark.parametrize(
    "parts",
    [
        ["train", "--config", "x", "--wrong"],
        ["train", "--config", "x", "--wrong", "a.b=1"],
        ["doctor", "a.b=1"],
        ["data", "check", "pairs.parquet", "a.b=1"],
    ],
)
def test_unknown_arguments_are_refused(parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_arguments(parts)
    assert stopped.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err
