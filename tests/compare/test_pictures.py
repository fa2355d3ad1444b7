"""Pictures of the comparison: panels, lines and labels are those of the points, and nothing overlaps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlcompute.backbones import load_backbone
from rlcompute.compare import pictures, strength_pictures
from rlcompute.compare.pictures import (
    COMBINED,
    EXPERTS,
    PANELS,
    SKIPPING,
    TOKENS,
    TOP_K,
    CurvePoint,
    RateCurve,
    budget_curves,
    firing_rates,
    line_name,
    panel_of,
)
from rlcompute.compare.strength_study import StrengthStudy, study
from rlcompute.plots import render
from rlcompute.policies.rules import LEARNED, RULES, parse
from tests.inputs import every_modality
from tests.tiny import write_tiny_checkpoint

Draw = Callable[[], Any]

GRPO, STRAIGHT = PANELS[-2:]


@pytest.fixture
def figure_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Draw], Figure]:
    """The figure that a picture was rendered from, for its axes, after a look at the picture itself."""
    kept: list[Figure] = []

    def keep(figure: Figure) -> Any:
        kept.append(figure)
        return render(figure)

    for module in (pictures, strength_pictures):
        monkeypatch.setattr(module, "render", keep)

    def draw(picture: Draw) -> Figure:
        pixels = picture()
        assert pixels.dtype == np.uint8
        assert pixels.shape[2] == 3
        return kept.pop()

    return draw


def point(panel: str, policy: str, saved: float, recall: float, **more: Any) -> CurvePoint:
    return CurvePoint(panel, policy, saved, recall, recall - 1.0, recall + 1.5, **more)


def every_panel() -> list[CurvePoint]:
    return [
        point(TOP_K, "uniform_topk", 20.0, 80.0),
        point(TOP_K, "uniform_topk", 10.0, 82.0),
        point(TOKENS, "attention_prune layer 3 emb", 30.0, 79.0),
        *(point(SKIPPING, f"a rule with a long name, number {n}", 20.0, 70.0 + n) for n in range(9)),
        point(EXPERTS, "prune_experts reap", 0.0, 77.0, experts=8),
        point(EXPERTS, "prune_experts reap", 0.0, 60.0, experts=4),
        point(COMBINED, "uniform_topk k 2 + beta_prune layer 4", 40.0, 75.0),
        *(point(GRPO, "gates", 45.0 + n, 78.0 + n, joined=False) for n in range(3)),
        *(point(STRAIGHT, f"gates {n}", 45.0 + n, 78.0 + n, joined=False) for n in range(30)),
    ]


def lines(axes: Axes) -> dict[str, Any]:
    """Data lines by label: of error bars the first child."""
    return {str(container.get_label()): container.lines[0] for container in axes.containers}


def labels(axes: Axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


def test_curves_have_the_panels_lines_and_labels_of_their_points(
    figure_of: Callable[[Draw], Figure],
) -> None:
    figure = figure_of(lambda: budget_curves(every_panel(), full_recall=84.0, num_experts=16, title="x"))
    assert [axes.get_title() for axes in figure.axes] == list(PANELS)
    top_k, _, skipping, experts, combined, grpo, straight = figure.axes
    assert lines(top_k)["uniform_topk"].get_xydata().tolist() == [[10.0, 82.0], [20.0, 80.0]]
    assert lines(experts)["prune_experts reap"].get_xydata().tolist() == [[4.0, 60.0], [8.0, 77.0]]
    assert "experts kept in a layer, of 16" in experts.get_xlabel()
    assert experts.xaxis_inverted()
    assert lines(grpo)["gates"].get_linestyle() == "None"
    assert lines(top_k)["uniform_topk"].get_linestyle() != "None"
    assert "% of the language model's" in combined.get_xlabel()
    for learned in (combined, grpo, straight):
        assert "the other panels" in labels(learned)
    assert all("full compute" in labels(axes) for axes in figure.axes)
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    for axes, names in ((skipping, 9), (straight, 30)):
        assert len({(x.get_color(), x.get_marker()) for x in lines(axes).values()}) == names


def test_curves_leave_out_panels_without_points(figure_of: Callable[[Draw], Figure]) -> None:
    points = [point(TOKENS, "beta_prune layer 4", 30.0, 79.0), point(GRPO, "gates", 30.0, 79.5)]
    figure = figure_of(lambda: budget_curves(points, full_recall=80.0, num_experts=16, title="x"))
    assert [axes.get_title() for axes in figure.axes] == [TOKENS, GRPO]


def test_what_lies_too_deep_stands_on_the_lower_edge(figure_of: Callable[[Draw], Figure]) -> None:
    points = [point(TOKENS, "random_prune layer 4", saved, recall) for saved, recall in ((30, 79), (65, 20))]
    figure = figure_of(lambda: budget_curves(points, full_recall=80.0, num_experts=16, title="x"))
    bottom = figure.axes[0].get_ylim()[0]
    assert bottom == 70.0
    (triangles,) = figure.axes[0].collections[-1:]
    assert np.asarray(triangles.get_offsets()).tolist() == [[65.0, bottom]]


def test_nothing_overlaps_in_the_curves(figure_of: Callable[[Draw], Figure]) -> None:
    figure = figure_of(
        lambda: budget_curves(every_panel(), full_recall=84.0, num_experts=16, title="x " * 100)
    )
    boxes = [axes.get_window_extent() for axes in figure.axes]
    boxes += [legend.get_window_extent() for axes in figure.axes if (legend := axes.get_legend())]
    boxes += [axes.xaxis.label.get_window_extent() for axes in figure.axes]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    width, height = figure.canvas.get_width_height()
    assert all(x.x0 >= 0 and x.y0 >= 0 and x.x1 <= width and x.y1 <= height for x in boxes)


def test_firing_rates_have_a_column_a_policy_and_a_line_a_modality(
    figure_of: Callable[[Draw], Figure],
) -> None:
    drop = np.array([0.0, 0.5, 0.25, np.nan])
    curves = [
        RateCurve(policy, modality, drop, 1.0 - drop)
        for policy in ("gates", "beta_prune layer 4 keep 0.5")
        for modality in ("image", "text")
    ]
    figure = figure_of(lambda: firing_rates(curves, "x"))
    assert len(figure.axes) == 4
    dropped, skipped = figure.axes[0], figure.axes[1]
    assert dropped.get_title() == "gates"
    assert "tokens dropped" in dropped.get_ylabel()
    assert "expert rows left out" in skipped.get_ylabel()
    assert [line.get_label() for line in dropped.lines] == ["image", "text"]
    np.testing.assert_array_equal(dropped.lines[0].get_ydata(), drop)
    np.testing.assert_array_equal(skipped.lines[0].get_ydata(), 1.0 - drop)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["image", "text"]


def test_every_rule_has_a_panel() -> None:
    for name, parameters in RULES.items():
        required = {key: "1" for key, x in parameters.items() if x.default is None and not x.optional}
        text = name + (
            ":" + ",".join(f"{key}={value}" for key, value in required.items()) if required else ""
        )
        method = "GRPO" if name in LEARNED else None
        assert panel_of(parse(text), method) in (PANELS if name != "full" else [None])
    assert panel_of(parse("uniform_topk:k=2+beta_prune:layer=4,keep=*")) == COMBINED
    assert panel_of(parse("gates:path=a"), "GRPO") == GRPO
    assert panel_of(parse("gates:path=a+beta_prune:layer=4,keep=.5"), "straight-through") == STRAIGHT


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("uniform_topk:k=2", "uniform_topk"),
        ("beta_prune:layer=4,keep=*", "beta_prune layer 4"),
        ("beta_prune:layer=4,keep=.5", "beta_prune layer 4"),
        ("attention_prune:layer=3,keep=*,source=emb", "attention_prune layer 3 emb"),
        ("otsu_beta:min_variation=.4", "otsu_beta min_variation 0.4"),
        ("prune_experts:experts=8", "prune_experts reap"),
        ("gates:path=runs/a/export", "gates"),
        ("modes:skip=*+beta_prune:layer=4,keep=.5", "modes + beta_prune layer 4 keep 0.5"),
    ],
)
def test_a_line_is_named_by_what_its_points_share(text: str, name: str) -> None:
    assert line_name(parse(text)) == name


@pytest.fixture(scope="module")
def tiny_study(tmp_path_factory: pytest.TempPathFactory) -> StrengthStudy:
    backbone = load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))
    inputs = backbone.embed_inputs(every_modality(backbone.preprocessor)[:4])
    return study(backbone, inputs, ["text", "image", "visdoc", "video"])


def test_strength_pictures_have_their_panels(
    figure_of: Callable[[Draw], Figure], tiny_study: StrengthStudy
) -> None:
    against = figure_of(lambda: strength_pictures.strength_and_attention(tiny_study))
    assert len(against.axes) == 4
    assert [x.get_text().split("\n")[0] for x in against.axes[0].get_xticklabels()] == list(tiny_study.inputs)
    assert [x.get_text().split("\n")[0] for x in against.axes[1].get_xticklabels()] == [
        "image",
        "video",
        "visdoc",
    ]
    depth = figure_of(lambda: strength_pictures.strength_by_layer(tiny_study))
    assert set(lines(depth.axes[0])) == set(tiny_study.inputs)
    image = tiny_study.find("mean", "strength", "image", "all", (2,))
    assert image is not None
    assert lines(depth.axes[0])["image"].get_xydata()[1].tolist() == [2.0, image.mean]
    assert len(lines(depth.axes[1])) == 3
    stability = figure_of(lambda: strength_pictures.strength_stability(tiny_study))
    assert [x.get_text().split("\n")[0] for x in stability.axes[2].get_xticklabels()] == ["video"]
    for figure in (against, depth, stability):
        boxes = [axes.get_window_extent() for axes in figure.axes]
        boxes += [legend.get_window_extent() for axes in figure.axes if (legend := axes.get_legend())]
        assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
