"""Pictures for TensorBoard: what the policy does in each layer, and which patches it drops from a few inputs.

Shape legend: N layers, M token modalities, t, h, w temporal, vertical and horizontal merged patches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlcompute.actors.messages import SIDES, Array, Overlay
from rlcompute.config import Config
from rlcompute.data.images import decode_image
from rlcompute.data.schema import Pair, Side
from rlcompute.pack import TEXT
from rlcompute.plots import Picture, action_fractions, dropped_patches


@dataclass(frozen=True)
class _Subject:
    """One side that is drawn again and again as training goes on."""

    name: str
    side: Side


class Pictures:
    """Adds up actions and draws them, with overlays of the same inputs, every ``logging.images_every`` iterations."""

    def __init__(self, config: Config, pairs: Sequence[Pair]) -> None:
        self._every = config.logging.images_every
        self._last = config.iterations
        self._subjects = _choose(pairs, config.logging.overlay_inputs)
        self._actions_NM3: Array | None = None

    @property
    def sides(self) -> list[Side]:
        """The inputs that are drawn each time."""
        return [subject.side for subject in self._subjects]

    def due(self, completed: int) -> bool:
        """Whether it is time to draw after iteration ``completed``."""
        return completed % self._every == 0 or completed == self._last

    def add(self, actions_NM3: Array) -> None:
        """Counts the decisions of an iteration, by layer, token modality and action."""
        self._actions_NM3 = actions_NM3 if self._actions_NM3 is None else self._actions_NM3 + actions_NM3

    def forget(self) -> None:
        """Drops what was added since the last pictures: those iterations run again."""
        self._actions_NM3 = None

    def draw(self, overlays: Sequence[Overlay]) -> dict[str, Picture]:
        """Pictures by tag, of what was added since the last ones; ``overlays`` are those of :attr:`sides`."""
        assert self._actions_NM3 is not None
        actions_NM3, self._actions_NM3 = self._actions_NM3, None
        pictures = {"actions/by_layer": action_fractions(actions_NM3)}
        for subject, overlay in zip(self._subjects, overlays, strict=True):
            pictures[f"overlays/{subject.name}"] = draw_overlay(
                subject.side, overlay, len(actions_NM3), subject.name
            )
        return pictures


def draw_overlay(side: Side, overlay: Overlay, num_layers: int, name: str) -> Picture:
    """The first image of a side, or else its video, with dropped patches shaded by layer."""
    grid = overlay.grid_thw
    dropped_at = overlay.dropped_at_L[overlay.modality_L != TEXT]
    merge = math.isqrt(int(grid.prod(1).sum()) // len(dropped_at))
    t, h, w = int(grid[0, 0]), int(grid[0, 1]) // merge, int(grid[0, 2]) // merge
    blobs = side.images[:1] or side.video
    frames = [decode_image(blob, name) for blob in blobs]
    frames_per_patch = -(-len(frames) // t)
    shown = [frames[step * frames_per_patch] for step in range(t)]
    title = f"{name}: {overlay.saved:.0%} of the language model's FLOPs saved"
    return dropped_patches(shown, dropped_at[: t * h * w].reshape(t, h, w), num_layers, title)


def _choose(pairs: Sequence[Pair], count: int) -> list[_Subject]:
    """The first visual sides, one of each task in turn; ``pairs`` are sorted by id."""
    by_task: dict[str, list[_Subject]] = {}
    for pair in pairs:
        for side_name in SIDES:
            side: Side = getattr(pair, side_name)
            members = by_task.setdefault(pair.task, [])
            if (side.images or side.video) and len(members) < count:
                members.append(_Subject(f"{pair.task} {pair.id} {side_name}", side))
    rounds = [
        [by_task[task][turn] for task in sorted(by_task) if turn < len(by_task[task])]
        for turn in range(count)
    ]
    return [subject for members in rounds for subject in members][:count]
