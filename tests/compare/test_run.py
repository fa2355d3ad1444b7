"""The comparison from configuration to files: what is measured, kept, measured again, and refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rlcompute.compare import curves
from rlcompute.compare import run as run_module
from rlcompute.compare import suite as suite_module
from rlcompute.compare.contenders import Prepared
from rlcompute.compare.points import Point, Speed
from rlcompute.compare.run import points, run
from rlcompute.compare.suite import Suite
from rlcompute.config import Config
from rlcompute.errors import CheckpointError, ConfigError, DataError
from tests.compare.measured import make_config
from tests.pairs import write_small_pairs

POLICIES = ["uniform_topk:k=1", "random_prune:layer=0,keep=*", "beta_skip:share=*"]
BUDGETS = [0.1, 0.15, 0.9]


@pytest.fixture(autouse=True, scope="module")
def one_round() -> Iterator[None]:
    """What the clock says of tiny models matters to nobody."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite_module, "ROUNDS", 1)
        yield


@pytest.fixture(scope="module")
def finished(
    suite_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Config, Path, dict[str, Any]]:
    """A configuration, the folder of its results, and what was returned."""
    root = tmp_path_factory.mktemp("finished")
    policies = [*POLICIES, f"gates:path={suite_folder}/gates_*"]
    config = make_config(suite_folder, root / "cache", policies=policies, budgets=BUDGETS)
    return config, root / "out", run(config, root / "out")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Policies as they are measured, instead of taken from the cache."""
    seen: list[str] = []
    original = Suite.point

    def point(self: Suite, resolved: str, *rest: Any) -> Point:
        seen.append(resolved)
        return original(self, resolved, *rest)

    monkeypatch.setattr(Suite, "point", point)
    return seen


def entries(content: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((x["policy"], x) for x in content["points"])


def test_files(finished: tuple[Config, Path, dict[str, Any]], suite_folder: Path) -> None:
    _, out, content = finished
    assert json.loads((out / "compare.json").read_text()) == content
    assert [x["kind"] for x in content["points"]].count("learned") == 2
    first = content["points"][0]
    assert (first["policy"], first["kind"], first["delta_vs_full"]) == (
        "full",
        "full",
        {"mean": 0.0, "ci95": [0.0, 0.0]},
    )
    for name in ("budget_curves.png", "firing_rates.png"):
        assert Image.open(out / name).size[0] > 300
    text = (out / "compare.md").read_text()
    for _, x in entries(content):
        assert f"`{x['resolved']}`" in text
    assert text.count("Lead ") == len(content["leads"]) > 0
    assert "At 90 %: no learned policy, or no rule, saves that much." in text


def test_budgets_are_met_over_all_inputs_or_said_to_be_out_of_reach(
    finished: tuple[Config, Path, dict[str, Any]],
) -> None:
    content = finished[2]
    solved = [x for _, x in entries(content) if x["budget"] is not None]
    assert {x["policy"] for x in solved} == set(POLICIES[1:])
    for x in solved:
        assert x["flops"]["lm_executed_saved"] == pytest.approx(x["budget"], abs=0.01)
        assert f"{x['knob']:.6g}" in x["resolved"]
    missed = {(x["policy"], x["budget"]) for x in content["not_reached"]}
    assert {(policy, 0.9) for policy in POLICIES[1:]} <= missed
    for x in content["not_reached"]:
        assert x["least"] <= x["most"] < x["budget"]
    assert len(solved) + len(missed) == 2 * len(BUDGETS)


def test_members_of_a_pattern_are_one_group(
    finished: tuple[Config, Path, dict[str, Any]], suite_folder: Path
) -> None:
    content, pattern = finished[2], f"gates:path={suite_folder}/gates_*"
    members = [x["resolved"] for policy, x in entries(content) if policy == pattern]
    assert members == [f"gates:path={suite_folder}/gates_{seed}" for seed in (0, 1)]
    assert all((lead["group"], lead["members"]) == (pattern, 2) for lead in content["leads"])


def test_gates_of_both_methods_meet_a_budget_and_are_judged_side_by_side(
    finished: tuple[Config, Path, dict[str, Any]], suite_folder: Path, tmp_path: Path
) -> None:
    patterns = {
        "GRPO": f"gates:path={suite_folder}/gates_?,shift=*",
        "straight-through": f"gates:path={suite_folder}/straight,shift=*",
    }
    config = changed(
        finished[0], "compare", policies=("uniform_topk:k=1", *patterns.values()), budgets=(0.15,)
    )
    content = run(config, tmp_path)
    for method, pattern in patterns.items():
        found = [x for policy, x in entries(content) if policy == pattern]
        assert len(found) == (2 if method == "GRPO" else 1)
        for x in found:
            assert (x["method"], x["kind"], x["budget"]) == (method, "learned", 0.15)
            assert x["resolved"] == pattern.replace(
                "gates_?", x["resolved"].split("/")[-1].split(",")[0]
            ).replace("*", f"{x['knob']:.6g}")
            assert x["flops"]["lm_executed_saved"] == pytest.approx(0.15, abs=0.01)
    assert [(x["method"], x["group"], x["members"]) for x in content["leads"]] == [
        ("GRPO", f"{patterns['GRPO']} at 15 %", 2),
        ("straight-through", f"{patterns['straight-through']} at 15 %", 1),
    ]
    text = (tmp_path / "compare.md").read_text()
    assert "(GRPO, mean of 2)" in text and "(straight-through)" in text


def test_a_shift_of_zero_is_no_shift(
    finished: tuple[Config, Path, dict[str, Any]], suite_folder: Path
) -> None:
    path = f"gates:path={suite_folder}/gates_0"
    plain, shifted = points(finished[0], [path, f"{path},shift=0"], [])
    assert plain.resolved == path
    assert shifted.lm_saved == plain.lm_saved
    for modality, ranks_P in plain.ranks.items():
        np.testing.assert_array_equal(shifted.ranks[modality], ranks_P)


def test_a_second_run_reads_no_inputs(
    finished: tuple[Config, Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _, content = finished

    def refuse(self: Suite) -> None:
        raise AssertionError("the inputs were read again")

    monkeypatch.setattr(Suite, "pairs", property(refuse))
    monkeypatch.setattr(curves, "pictures", lambda *arguments: {})
    assert run(config, tmp_path) == content


def test_times_belong_to_a_device(
    finished: tuple[Config, Path, dict[str, Any]], measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[str] = []
    original = Suite.speed

    def speed(self: Suite, prepared: Prepared, source: str) -> Speed:
        timed.append(prepared.contender.name)
        return original(self, prepared, source)

    monkeypatch.setattr(Suite, "speed", speed)
    points(finished[0], POLICIES[:1], [])
    assert timed == []
    monkeypatch.setattr(run_module, "device_name", lambda device: "another one")
    points(finished[0], POLICIES[:1], [])
    assert timed == POLICIES[:1]
    assert measured == []


def test_points_are_those_asked_for_in_order(finished: tuple[Config, Path, dict[str, Any]]) -> None:
    config = finished[0]
    asked = [POLICIES[2], " uniform_topk: k=1", POLICIES[1]]
    found = points(config, asked, [0.15, 0.9, 0.1])
    assert [(x.spec, x.budget) for x in found] == [
        *((asked[0], budget) for budget in (0.15, 0.1)),
        (asked[1], None),
        *((asked[2], budget) for budget in (0.15, 0.1)),
    ]
    assert points(config, [POLICIES[1]], []) == []


def test_an_interrupted_comparison_goes_on(
    finished: tuple[Config, Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    measured: list[str],
) -> None:
    config, _, content = finished
    settings = config.compare.model_copy(update={"cache": str(tmp_path / "cache")})
    fresh = config.model_copy(update={"compare": settings})
    counting = Suite.point
    monkeypatch.setattr(curves, "pictures", lambda *arguments: {})

    def interrupt(self: Suite, resolved: str, *rest: Any) -> Point:
        if len(measured) == 3:
            raise KeyboardInterrupt
        return counting(self, resolved, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Suite, "point", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(fresh, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    again = run(fresh, tmp_path / "out")
    assert len(measured) == len(set(measured)) == len({x["resolved"] for _, x in entries(content)})
    for (_, before), (_, after) in zip(entries(content), entries(again), strict=True):
        for key in ("resolved", "flops", "modalities", "delta_vs_full", "drop_rate", "skip_rate"):
            assert after[key] == before[key]


def changed(config: Config, section: str, **values: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


@pytest.mark.slow
def test_whatever_a_measurement_depends_on_makes_it_anew(
    suite_folder: Path, tmp_path: Path, measured: list[str]
) -> None:
    folder = tmp_path / "suite"
    shutil.copytree(suite_folder, folder)
    policies = ["full", "random_prune:layer=1,keep=0.5", f"gates:path={folder}/gates_0"]
    config = make_config(folder, tmp_path / "cache")

    def measured_by(config: Config) -> list[str]:
        measured.clear()
        points(config, policies, [])
        return list(measured)

    every = [x.resolved for x in points(config, policies, [])]
    assert measured_by(config) == []
    assert measured_by(changed(config, "evaluation", bootstrap_samples=7)) == []
    assert measured_by(changed(config, "run", name="other")) == []
    assert measured_by(changed(config, "evaluation", gallery=6)) == every
    assert measured_by(changed(config, "evaluation", pairs_per_modality=6, gallery=6)) == every
    assert measured_by(changed(config, "evaluation", batch_size=7)) == every
    assert measured_by(changed(config, "evaluation", timing_pairs=4)) == every
    assert measured_by(changed(config, "data", max_tokens=16)) == every
    assert measured_by(changed(config, "backbone", dtype="bfloat16")) == every
    assert measured_by(changed(config, "run", seed=1)) == ["random_prune:layer=1,keep=0.5"]

    shutil.copytree(suite_folder / "gates_1", folder / "gates_0", dirs_exist_ok=True)
    assert measured_by(config) == [f"gates:path={folder}/gates_0"]
    write_small_pairs(folder / "test.parquet", 12, seed=1)
    assert measured_by(config) == every
    weights = folder / "tiny" / "preprocessor_config.json"
    weights.write_text(weights.read_text() + "\n")
    policies.pop()  # the gates know the backbone by its hash
    assert measured_by(config) == every[:2]
    assert measured_by(config) == []


def test_kernels_are_part_of_the_key(suite_folder: Path, tmp_path: Path) -> None:
    comparison = run_module.Comparison(make_config(suite_folder, tmp_path))
    assert comparison.setting["kernels"]["experts"] == "torch"


def test_a_damaged_entry_stops_the_comparison(
    finished: tuple[Config, Path, dict[str, Any]], tmp_path: Path
) -> None:
    config = finished[0]
    shutil.copytree(config.compare.cache, tmp_path / "cache")
    for path in (tmp_path / "cache").glob("*.npz"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"damaged cache entry .*; delete it"):
        points(changed(config, "compare", cache=str(tmp_path / "cache")), ["full"], [])


@pytest.mark.parametrize(
    ("policies", "budgets", "error", "message"),
    [
        (["uniform_topc:k=1"], [0.3], ConfigError, "did you mean 'uniform_topk'"),
        (["full"], [0.3, 1.2], ConfigError, r"1.2 is outside \[0, 1\]"),
        (["full"], [float("nan")], ConfigError, r"nan is outside"),
        (["gates:path=nowhere/*"], [0.3], ConfigError, "no folder matches"),
        (["gates:path=nowhere"], [0.3], CheckpointError, "nowhere"),
        (["beta_prune:layer=77,keep=0.5"], [0.3], ConfigError, "layer"),
    ],
)
def test_wrong_policies_and_budgets(
    suite_folder: Path,
    tmp_path: Path,
    policies: list[str],
    budgets: list[float],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        points(make_config(suite_folder, tmp_path), policies, budgets)


def test_a_test_file_without_pairs(suite_folder: Path, tmp_path: Path) -> None:
    write_small_pairs(tmp_path / "empty.parquet", 0)
    config = changed(make_config(suite_folder, tmp_path), "data", test=str(tmp_path / "empty.parquet"))
    with pytest.raises(DataError, match=r"empty\.parquet"):
        points(config, ["full"], [])


def test_no_test_file(suite_folder: Path, tmp_path: Path) -> None:
    config = changed(make_config(suite_folder, tmp_path), "data", test=str(tmp_path / "gone.parquet"))
    with pytest.raises(DataError, match=r"gone\.parquet is not a file"):
        points(config, ["full"], [])


def test_the_sample_estimates_the_saving_of_all_inputs(
    finished: tuple[Config, Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With fewer inputs than there are, ratios by stratum still come near the saving over all of them."""
    monkeypatch.setattr("rlcompute.compare.suite.SOLVER_INPUTS", 16)
    monkeypatch.setattr(run_module, "SOLVER_INPUTS", 16)
    config = changed(finished[0], "compare", cache=str(tmp_path))
    (point,) = points(config, ["random_prune:layer=0,keep=*"], [0.15])
    assert point.lm_saved == pytest.approx(0.15, abs=0.02)
    assert np.isfinite(point.speedup)
