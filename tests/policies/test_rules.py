"""How policies are written: what gates' shift means, and what it leaves as it was."""

from __future__ import annotations

import pytest

from rlcompute.errors import ConfigError
from rlcompute.policies.rules import parse


def test_gates_without_a_shift_are_written_as_before() -> None:
    (rule,) = parse("gates:path=runs/a/export").rules
    assert str(rule) == "gates:path=runs/a/export"
    assert dict(rule.values) == {"path": "runs/a/export"}


def test_the_shift_is_a_knob_that_saves_more_the_higher_it_is() -> None:
    spec = parse("gates:path=a, shift=*")
    assert spec.free is not None
    assert (spec.free.rule, spec.free.key, spec.free.saves_more) == ("gates", "shift", "high")
    assert spec.free.low == -spec.free.high < 0
    assert spec.learned
    assert spec.with_free(-1.25).text == "gates:path=a,shift=-1.25"
    assert parse("gates:path=a,shift=-1.25").rules == spec.with_free(-1.25).rules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gates:path=a,shift=99", "outside -20 to 20"),
        ("gates:path=a,shift=nan", "outside"),
        ("gates:path=a,shift=more", "not a number"),
        ("gates:shift=*", "gates needs path"),
        ("gates:path=a,shift=*+modes:skip=*", "only one knob"),
        ("gates:path=a,shfit=1", "did you mean 'shift'"),
    ],
)
def test_wrong_shifts(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)
