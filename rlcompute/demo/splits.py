"""Which combinations of concepts are for training, which for testing, and pools of pairs that can be told apart.

Every concept is seen in training; the combinations of the test and the final split are not. A combination
belongs to a split by a hash of its concept numbers, so the three splits are disjoint whatever is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from zlib import crc32

import numpy as np

from rlcompute.demo.concepts import SYMBOLS
from rlcompute.errors import ConfigError

Split = Literal["train", "test", "final"]
Modality = Literal["image", "video", "visdoc", "text"]
MODALITIES: tuple[Modality, ...] = ("image", "video", "visdoc", "text")

_HELD_OUT_PERCENT = 18
"""Share of test and of final: 18 % of the 12,720 pairs of 160 concepts leaves room for pools of 2,000."""
_PAGE_LINES = 4
_ATTEMPTS_PER_PAIR = 400


@dataclass(frozen=True)
class Combination:
    """The concepts of one pair.

    Attributes:
        asked: concept numbers that the query names, in the order of naming (a page's first one is its title).
        shown: all concept numbers in the target, in the order of appearance.
    """

    asked: tuple[int, ...]
    shown: tuple[int, ...]


def split_of(asked: tuple[int, ...]) -> Split:
    """The split that a set of asked concepts belongs to, whatever their order."""
    bucket = crc32(bytes(sorted(asked))) % 100
    if bucket < _HELD_OUT_PERCENT:
        return "test"
    return "final" if bucket < 2 * _HELD_OUT_PERCENT else "train"


def draw_combination(rng: np.random.Generator, modality: Modality, split: Split) -> Combination:
    """Draw one combination of the split: 2-3 things in an image, 2 in a video, 5 on a page (3 asked), 3-4 in a text."""
    while True:
        numbers = tuple(int(i) for i in rng.choice(len(SYMBOLS), 1 + _PAGE_LINES, replace=False))
        coin = int(rng.integers(5))
        if modality == "visdoc":
            lines = numbers[1:]
            asked = (numbers[0], *(lines[int(i)] for i in rng.permutation(_PAGE_LINES)[:2]))
            combination = Combination(asked, numbers)
        else:
            count = {"image": 2 if coin < 3 else 3, "video": 2, "text": 3 if coin < 3 else 4}[modality]
            combination = Combination(numbers[:count], numbers[:count])
        if split_of(combination.asked) == split:
            return combination


def plan_pool(seed: int, split: Split, modality: Modality, count: int) -> list[Combination]:
    """The first ``count`` combinations of a pool in which no target also answers another pair's query.

    The list for a smaller ``count`` is a prefix of the list for a larger one.

    Raises:
        ConfigError: the split does not hold that many combinations.
    """
    rng = np.random.default_rng(np.random.SeedSequence([seed, crc32(f"{split}/{modality}/plan".encode())]))
    pool: list[Combination] = []
    taken: dict[int, list[tuple[int, int]]] = {}
    for _ in range(_ATTEMPTS_PER_PAIR * count):
        if len(pool) == count:
            break
        candidate = draw_combination(rng, modality, split)
        asked, shown = (sum(1 << i for i in set(part)) for part in (candidate.asked, candidate.shown))
        # Two pages with different titles never answer the same query, whatever else they list.
        rivals = taken.setdefault(candidate.asked[0] if modality == "visdoc" else -1, [])
        if all(asked & ~other_shown and other_asked & ~shown for other_asked, other_shown in rivals):
            rivals.append((asked, shown))
            pool.append(candidate)
    if len(pool) < count:
        raise ConfigError(
            f"the demo's {split} split has only about {len(pool)} {modality} pairs that can be told apart; "
            f"{count} were asked for: ask for fewer"
        )
    return pool
