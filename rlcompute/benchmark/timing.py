"""A stopwatch for comparisons: all variants in one process, interleaved, with their spread.

Each round runs every variant once, in an order that rotates from round to round, so that whatever else the
machine does, and whatever one variant leaves in the caches for the next, falls on all of them alike.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

Clock = Callable[[], float]
Variant = Callable[[], object]

MIN_ROUNDS = 3
MAX_ROUNDS = 30


@dataclass(frozen=True)
class Timing:
    """Seconds of one variant, one figure for each round."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.samples))

    @property
    def iqr(self) -> float:
        """Distance between the quartiles: half of all rounds lie inside it."""
        low, high = np.percentile(self.samples, [25, 75])
        return float(high - low)

    def speedup_over(self, reference: Timing) -> float:
        """How many times as fast as ``reference``.

        The median of the rounds' own ratios, because a machine's speed drifts from round to round; the ratio of the
        medians where the two were not timed in the same rounds.
        """
        if len(self.samples) != len(reference.samples):
            return reference.median / self.median
        return float(np.median(np.array(reference.samples) / np.array(self.samples)))


def synchronize(device: torch.device) -> None:
    """Lets the device finish, so that the clock reads what it should."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps the garbage collector out of the timed region."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def rounds_within(budget_s: float, round_s: float) -> int:
    """Rounds of ``round_s`` seconds that fit, within ``MIN_ROUNDS`` to ``MAX_ROUNDS``."""
    return int(min(MAX_ROUNDS, max(MIN_ROUNDS, budget_s // max(round_s, 1e-9))))


def interleaved(
    variants: Mapping[str, Variant],
    *,
    budget_s: float,
    device: torch.device,
    clock: Clock = time.perf_counter,
) -> dict[str, Timing]:
    """Times variants side by side.

    A first round warms up and tells how many rounds fit into the budget; it is not counted.

    Args:
        variants: what to run, by name.
        budget_s: wall-clock seconds for all rounds together, the warm-up included. ``MIN_ROUNDS`` are run
            whatever it says.
        device: waited for before and after each run.
        clock: monotonic seconds.

    Returns:
        Timings by name, in the order of ``variants``.
    """
    names = list(variants)
    samples: dict[str, list[float]] = {name: [] for name in names}

    def run(name: str) -> float:
        synchronize(device)
        start = clock()
        variants[name]()
        synchronize(device)
        return clock() - start

    with torch.no_grad(), no_collection():
        warm_up_s = sum(run(name) for name in names)
        for number in range(rounds_within(budget_s - warm_up_s, warm_up_s)):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                samples[name].append(run(name))
    return {name: Timing(tuple(seconds)) for name, seconds in samples.items()}


class Stopwatch:
    """Time by component of one run, nested components excluded from the one around them.

    On a GPU every border between components waits for the device: the shares are right, while the sum is
    longer than the run without a stopwatch, which overlaps launches and work.
    """

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._device, self._clock = device, clock
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, component: str) -> Iterator[None]:
        """Charges what happens inside to ``component``."""
        self._switch()
        self._open.append(component)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def _switch(self) -> None:
        synchronize(self._device)
        now = self._clock()
        if self._open:
            component = self._open[-1]
            self.seconds[component] = self.seconds.get(component, 0.0) + now - self._since
        self._since = now
