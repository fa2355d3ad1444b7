"""Interleaving, statistics and exclusive times, on a clock that only moves when told to."""

from __future__ import annotations

import gc

import pytest
import torch

from rlcompute.benchmark.timing import MAX_ROUNDS, MIN_ROUNDS, Stopwatch, Timing, interleaved, rounds_within

CPU = torch.device("cpu")


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def test_every_round_runs_every_variant_in_a_rotating_order() -> None:
    clock, calls = FakeClock(), []

    def variant(name: str, seconds: float) -> None:
        calls.append(name)
        clock.pass_by(seconds)

    variants = {
        "a": lambda: variant("a", 1.0),
        "b": lambda: variant("b", 2.0),
        "c": lambda: variant("c", 3.0),
    }
    timings = interleaved(variants, budget_s=6.0 * 5, device=CPU, clock=clock)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab" + "abc"  # the first is the warm-up
    assert list(timings) == ["a", "b", "c"]
    assert timings["b"].samples == (2.0,) * 4


def test_the_warm_up_does_not_count() -> None:
    clock = FakeClock()
    seconds = iter([50.0, 1.0, 2.0, 4.0])
    timings = interleaved({"x": lambda: clock.pass_by(next(seconds))}, budget_s=0.0, device=CPU, clock=clock)
    assert timings["x"].samples == (1.0, 2.0, 4.0)
    assert timings["x"].median == 2.0


def test_quartiles() -> None:
    timing = Timing((1.0, 2.0, 3.0, 4.0, 100.0))
    assert timing.median == 3.0
    assert timing.iqr == 2.0


@pytest.mark.parametrize(
    ("budget", "one", "rounds"),
    [(0.0, 1.0, MIN_ROUNDS), (7.5, 1.0, 7), (1e6, 1.0, MAX_ROUNDS), (1.0, 0.0, MAX_ROUNDS)],
)
def test_rounds_fit_the_budget(budget: float, one: float, rounds: int) -> None:
    assert rounds_within(budget, one) == rounds


def test_the_garbage_collector_stays_out_and_comes_back() -> None:
    seen = []
    interleaved({"x": lambda: seen.append(gc.isenabled())}, budget_s=0.0, device=CPU, clock=FakeClock())
    assert not any(seen)
    assert gc.isenabled()


def test_nested_components_are_excluded_from_the_one_around_them() -> None:
    clock = FakeClock()
    watch = Stopwatch(CPU, clock)
    clock.pass_by(9.0)  # nobody at work
    with watch("outer"):
        clock.pass_by(1.0)
        with watch("inner"):
            clock.pass_by(2.0)
            with watch("outer"):
                clock.pass_by(4.0)
        clock.pass_by(8.0)
    assert watch.seconds == {"outer": 13.0, "inner": 2.0}
