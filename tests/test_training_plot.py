"""The picture of a straight-through run: lines where there are metrics, and a mean over what is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlcompute.config_loading import load_config
from rlcompute.runlog import RunLog
from rlcompute.training_plot import moving_average, rates_over_training

DROPPED, SKIPPED = (188, 75, 81), (244, 162, 89)


def rows(count: int, **metrics: Any) -> list[dict[str, Any]]:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return [{"iteration": i + 1, "compute/lm_saved": 0.3} | named for i in range(count)]


def area(picture: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((np.abs(picture.astype(int) - colour).max(-1) <= 3).sum())


def test_a_metric_has_a_line_and_a_missing_one_has_none() -> None:
    picture = rates_over_training(rows(20, rate__token_pruner__keep=0.4))
    assert picture.dtype == np.uint8
    assert area(picture, DROPPED) > 200
    assert area(picture, SKIPPED) == 0
    none = rates_over_training(rows(20, rate__token_pruner__keep=None))
    assert area(none, DROPPED) == 0


def test_what_is_kept_is_drawn_as_what_is_dropped() -> None:
    def height(kept: float) -> float:
        """Median row of the line, from the top; the legend stands to the right of all lines."""
        picture = rates_over_training(
            rows(20, rate__token_pruner__keep=kept, rate__expert_skip__skip=0.01, rate__layer_skip__skip=0.99)
        )
        colours = np.abs(picture[:, : picture.shape[1] // 2].astype(int) - DROPPED).max(-1)
        return float(np.median(np.nonzero(colours <= 3)[0]))

    assert height(0.1) < height(0.5) < height(0.9)


def test_every_unit_has_its_panel() -> None:
    heights = [
        rates_over_training(content).shape[0]
        for content in (
            rows(5),
            rows(5, recall__mean=0.9),
            rows(5, recall__mean=0.9, rate__halt_beta__layers=6.0),
            rows(5, recall__mean=0.9, rate__null_experts__real=2.0),
        )
    ]
    assert heights[0] < heights[1] < heights[2] == heights[3]


def test_a_run_of_one_iteration() -> None:
    assert rates_over_training(rows(1, recall__mean=1.0)).shape[2] == 3


def test_a_run_draws_them_beside_its_metrics_and_a_new_one_clears_them(tmp_path: Path) -> None:
    config = load_config(None, ["run.name=r", f"run.dir={tmp_path}", "data.train=a", "data.test=b"])
    with RunLog(config) as log:
        for kept in (1.0, 0.5, float("nan")):
            log.record({"rate/token_pruner/keep": kept, "compute/lm_saved": 0.2})
        log.draw_rates()
    assert Image.open(log.folder.rates).size[0] > 500
    events = EventAccumulator(str(log.folder.tensorboard)).Reload()
    assert [event.step for event in events.Images("rates/over_training")] == [3]
    with RunLog(config):
        assert not log.folder.rates.exists()


def test_moving_average() -> None:
    values = np.array([1.0, 3.0, np.nan, 5.0, np.nan, np.nan, np.nan])
    expected = [1.0, 2.0, 3.0, 5.0, 5.0, np.nan, np.nan]
    assert moving_average(values, 2) == pytest.approx(expected, nan_ok=True)
    assert moving_average(values, 0) == pytest.approx(values, nan_ok=True)
