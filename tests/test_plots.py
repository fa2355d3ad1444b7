"""Pictures: right size and type, and the pixels say what the data says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rlcompute.plots import (
    AccuracyPoint,
    accuracy_against_compute,
    action_fractions,
    dropped_patches,
    write_png,
)

ROUTE, SKIP, DROP = (42, 111, 151), (244, 162, 89), (188, 75, 81)


def area(picture: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((np.abs(picture.astype(int) - colour).max(-1) <= 3).sum())


def check_picture(picture: np.ndarray) -> None:
    assert picture.dtype == np.uint8
    assert picture.ndim == 3
    assert picture.shape[2] == 3
    assert len(np.unique(picture)) > 10


def test_accuracy_against_compute_grows_with_the_panels() -> None:
    one = [AccuracyPoint("full", "mean", 100.0, 80.0, 80.0, 80.0)]
    many = [
        AccuracyPoint(policy, panel, executed, 80.0 - loss, 79.0 - loss, 81.0 - loss)
        for panel in ("mean", "image", "video", "text")
        for policy, executed, loss in (("full", 100.0, 0.0), ("gates", 70.0, 0.5), ("other", 70.0, 8.0))
    ]
    small, large = accuracy_against_compute(one, "x"), accuracy_against_compute(many, "x")
    check_picture(small)
    check_picture(large)
    assert large.shape[0] > small.shape[0]
    assert large.shape[1] > small.shape[1]


def test_action_fractions_have_the_shares_of_the_counts() -> None:
    counts = np.zeros((4, 3, 3), dtype=np.int64)
    counts[:, 1] = (60, 30, 10)
    picture = action_fractions(counts)
    check_picture(picture)
    # The legend adds the same to each area; antialiased edges take a little off.
    route, skip, drop = (area(picture, colour) for colour in (ROUTE, SKIP, DROP))
    assert (route - skip) / (skip - drop) == pytest.approx(30 / 20, rel=0.15)
    counts[:, 0] = (1, 0, 0)
    both = action_fractions(counts)
    assert both.shape[1] > picture.shape[1]


def test_action_fractions_of_many_layers_and_of_none() -> None:
    assert action_fractions(np.ones((48, 3, 3), dtype=np.int64)).shape[1] < 2500
    assert action_fractions(np.zeros((4, 3, 3), dtype=np.int64)).dtype == np.uint8


def test_dropped_patches_are_tinted_and_survivors_are_not() -> None:
    frame = np.full((32, 64, 3), (10, 200, 30), dtype=np.uint8)
    drops = np.full((1, 2, 4), -1)
    clear = area(dropped_patches([frame], drops, 8, "t"), (10, 200, 30))
    drops[0, :, :2] = 3
    half = area(dropped_patches([frame], drops, 8, "t"), (10, 200, 30))
    drops[0] = 3
    assert half == pytest.approx(clear / 2, rel=0.1)
    assert area(dropped_patches([frame], drops, 8, "t"), (10, 200, 30)) == 0


def test_dropped_patches_tell_layers_apart_and_draw_every_frame() -> None:
    frame = np.full((32, 32, 3), 128, dtype=np.uint8)
    pictures = [dropped_patches([frame], np.full((1, 2, 2), layer), 8, "t") for layer in (0, 5)]
    assert pictures[0].shape == pictures[1].shape
    assert np.abs(pictures[0].astype(int) - pictures[1]).mean() > 10
    five = dropped_patches([frame] * 5, np.zeros((5, 2, 2), dtype=np.int64), 8, "t")
    assert five.shape[0] > pictures[0].shape[0]
    assert five.shape[1] > 3 * pictures[0].shape[1]
    with pytest.raises(ValueError, match="zip"):
        dropped_patches([frame] * 2, np.zeros((1, 2, 2), dtype=np.int64), 8, "t")


def test_write_png_round_trips_and_leaves_nothing_else(tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    write_png(tmp_path / "a.png", picture)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), picture)
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
