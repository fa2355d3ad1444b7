"""One row of a benchmark table, and how it is derived from a timing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlcompute.benchmark.timing import Timing


@dataclass(frozen=True)
class Row:
    """One measured variant.

    Attributes:
        table: number of the table, ``i`` to ``vi``.
        row: what varies down the table, such as ``keep 0.5``.
        variant: what is compared, such as ``packed``.
        seconds_median, seconds_iqr: over the timed rounds.
        flops: executed FLOPs of the whole pass (language model), or of the operation alone in table iii.
        speedup: seconds of the reference over seconds of this row, the median over the rounds that timed both.
        flops_saved: share of the reference's FLOPs, 0..1.
        conversion: share of the wall-clock saved over share of the FLOPs saved.
        extra: more columns for the text table; not part of ``benchmark.json``.
    """

    table: str
    row: str
    variant: str
    seconds_median: float
    seconds_iqr: float
    flops: float | None = None
    speedup: float | None = None
    flops_saved: float | None = None
    conversion: float | None = None
    extra: Mapping[str, str] = field(default_factory=dict)


SMALLEST_SAVING = 0.005
"""Below this share of FLOPs saved a conversion is a quotient of noise, and undefined."""


def compared(
    table: str,
    row: str,
    variant: str,
    timing: Timing,
    flops: float,
    reference: Timing,
    reference_flops: float,
    extra: Mapping[str, str] | None = None,
) -> Row:
    """A row with speed-up, FLOPs saved and conversion against a reference."""
    saved = 1.0 - flops / reference_flops
    speedup = timing.speedup_over(reference)
    saved_s = 1.0 - 1.0 / speedup
    return Row(
        table=table,
        row=row,
        variant=variant,
        seconds_median=timing.median,
        seconds_iqr=timing.iqr,
        flops=flops,
        speedup=speedup,
        flops_saved=saved,
        conversion=saved_s / saved if saved > SMALLEST_SAVING else None,
        extra={**(extra or {}), "rounds": str(len(timing.samples))},
    )
