"""The evaluation from configuration to evaluation.json, on a tiny random embedder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rlcompute import evaluation
from rlcompute.backbones import load_backbone
from rlcompute.config import Config
from rlcompute.data.schema import Pair
from rlcompute.decision import ROUTE, Full
from rlcompute.encoder import encode
from rlcompute.errors import CheckpointError, ConfigError, DataError
from rlcompute.metrics import gallery_ranks, ranking_metrics
from rlcompute.policies.checkpoint import Gates, save_gates
from rlcompute.policies.gates import init_heads
from rlcompute.policies.ste_expert_skip import ExpertSkip
from rlcompute.policies.ste_gates import StraightThroughGates
from rlcompute.policies.ste_pruner import TokenPruner
from tests.pairs import write_small_pairs
from tests.tiny import write_tiny_checkpoint

PER_MODALITY, GALLERY = 24, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, a file of pairs, and gates: some of either kind that save, and some that route everything."""
    root = tmp_path_factory.mktemp("evaluation")
    write_tiny_checkpoint(root / "tiny")
    write_small_pairs(root / "test.parquet", PER_MODALITY + 3)
    backbone = load_backbone(root / "tiny")
    generator = torch.Generator().manual_seed(0)
    mean = torch.zeros(backbone.num_layers, backbone.hidden_size)
    heads = init_heads(
        mean, torch.ones(backbone.num_layers), skip=0.2, drop=0.1, late_skip_bias=2.0, droppable="all"
    )
    noise = torch.randn(heads.weight_N3F.shape, generator=generator)
    save(root / "gates", replace(heads, weight_N3F=heads.weight_N3F + 0.3 * noise), backbone.hash)
    routing = torch.zeros_like(heads.weight_N3F)
    routing[:, ROUTE, -1] = 9.0
    save(root / "all_route", replace(heads, weight_N3F=routing), backbone.hash)
    save(root / "foreign", heads, "0" * 64)
    pruner = TokenPruner(0, backbone.num_layers, backbone.hidden_size)
    skip = ExpertSkip(backbone.num_layers, backbone.hidden_size)
    for gate in (pruner, skip):
        gate.heads.weight_nd.data.normal_(generator=generator)
    save(root / "straight", StraightThroughGates([pruner, skip]), backbone.hash)
    return root


def save(folder: Path, gates: Gates, backbone_hash: str) -> None:
    folder.mkdir()
    save_gates(folder, gates, {"path": "somewhere", "family": "qwen3_5_moe", "hash": backbone_hash}, {})


def make_config(folder: Path, **evaluation_keys: Any) -> Config:
    keys = {
        "pairs_per_modality": PER_MODALITY,
        "gallery": GALLERY,
        "batch_size": 20,
        "bootstrap_samples": 100,
        "timing_pairs": 2,
    }
    return Config.model_validate(
        {
            "run": {"name": "test"},
            "data": {"train": "unused.parquet", "test": str(folder / "test.parquet")},
            "backbone": {"path": str(folder / "tiny")},
            "evaluation": keys | evaluation_keys,
        }
    )


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    return evaluation.run(make_config(folder), folder / "gates", folder / "out")


def by_name(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in result["policies"]}


def test_the_file_has_exactly_the_documented_keys(folder: Path, result: dict[str, Any]) -> None:
    content = json.loads((folder / "out" / "evaluation.json").read_text())
    assert content == result
    assert set(content) == {"suite", "backbone", "gates", "policies"}
    assert content["gates"] == str(folder / "gates")
    assert [entry["name"] for entry in content["policies"]] == ["full", "gates", "random", "uniform_topk"]
    for entry in content["policies"]:
        assert set(entry) == {
            *("name", "parameters", "mean_recall_at_1", "delta_vs_full", "modalities", "flops"),
            *("queries_per_second", "speedup", "conversion", "experts_per_token", "layers_run"),
        }
        assert set(entry["delta_vs_full"]) == {"mean", "ci95"}
        assert list(entry["modalities"]) == ["image", "text"]
        for metrics in entry["modalities"].values():
            assert set(metrics) == {"recall_at_1", "recall_at_10", "ndcg_at_10", "n"}
            assert metrics["n"] == PER_MODALITY
        assert set(entry["flops"]) == {
            *("logical_saved", "executed_saved", "hardware_saved", "lm_executed_saved"),
        }
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["evaluation.json", "evaluation.png"]
    assert Image.open(folder / "out" / "evaluation.png").size[0] > 500


def test_full_is_the_reference(folder: Path, result: dict[str, Any]) -> None:
    full = by_name(result)["full"]
    assert full["delta_vs_full"] == {"mean": 0.0, "ci95": [0.0, 0.0]}
    assert set(full["flops"].values()) == {0.0}
    assert full["speedup"] == 1.0
    assert full["conversion"] is None
    top_k = load_backbone(folder / "tiny").top_k
    assert (full["experts_per_token"], full["layers_run"]) == (top_k, 1.0)
    assert by_name(result)["uniform_topk"]["experts_per_token"] < top_k


def test_figures_fit_each_other(result: dict[str, Any]) -> None:
    entries = by_name(result)
    for entry in entries.values():
        recalls = [x["recall_at_1"] for x in entry["modalities"].values()]
        assert entry["mean_recall_at_1"] == pytest.approx(np.mean(recalls))
        delta = entry["delta_vs_full"]
        assert delta["mean"] == pytest.approx(entry["mean_recall_at_1"] - entries["full"]["mean_recall_at_1"])
        assert delta["ci95"][0] <= delta["mean"] <= delta["ci95"][1]
        assert entry["speedup"] == pytest.approx(
            entry["queries_per_second"] / entries["full"]["queries_per_second"]
        )
        saved = entry["flops"]["executed_saved"]
        if saved > 0:
            # The vision tower cannot be saved, so the whole forward saves a smaller share than the model
            # alone.
            assert saved < entry["flops"]["lm_executed_saved"]
            assert entry["conversion"] == pytest.approx((1 - 1 / entry["speedup"]) / saved)
    assert entries["gates"]["flops"]["executed_saved"] > 0.05
    spent = {name: 1 - entries[name]["flops"]["lm_executed_saved"] for name in ("random", "gates")}
    assert spent["random"] == pytest.approx(spent["gates"], rel=0.015)


def test_straight_through_gates_are_measured_like_others(folder: Path, tmp_path: Path) -> None:
    config = make_config(folder, policies=["gates", "random"])
    content = evaluation.run(config, folder / "straight", tmp_path)
    entries = by_name(content)
    assert list(entries) == ["gates", "random"]
    spent = [1 - entry["flops"]["lm_executed_saved"] for entry in entries.values()]
    assert spent[0] < 0.95
    assert spent[1] == pytest.approx(spent[0], rel=0.015)
    assert json.loads((tmp_path / "evaluation.json").read_text())["gates"] == str(folder / "straight")


def test_accuracy_of_full_compute_equals_embedding_pair_by_pair(folder: Path, result: dict[str, Any]) -> None:
    backbone = load_backbone(folder / "tiny")
    pairs = write_small_pairs(folder / "again.parquet", PER_MODALITY + 3)

    def embed(rows: list[Pair], side: str) -> np.ndarray:
        inputs = [backbone.preprocessor(getattr(pair, side)) for pair in rows]
        alone = [encode(backbone, *backbone.pack(backbone.embed_inputs([x])), Full()) for x in inputs]
        return torch.cat([x.embeddings_Sd for x in alone]).numpy()

    for modality in ("image", "text"):
        rows = [pair for pair in pairs if pair.modality == modality][:PER_MODALITY]
        ranks = gallery_ranks(
            embed(rows, "query"), embed(rows, "target"), [p.target_id for p in rows], GALLERY
        )
        expected = ranking_metrics(ranks)
        measured = by_name(result)["full"]["modalities"][modality]
        assert measured == pytest.approx(vars(expected))


def test_gates_that_route_everything_equal_full_compute_at_their_own_cost(
    folder: Path, tmp_path: Path
) -> None:
    config = make_config(folder, policies=["gates"])
    (entry,) = evaluation.run(config, folder / "all_route", tmp_path)["policies"]
    assert entry["delta_vs_full"]["mean"] == 0.0
    assert -0.05 < entry["flops"]["lm_executed_saved"] < 0.0
    assert entry["flops"]["logical_saved"] == 0.0
    assert entry["conversion"] is None


def test_a_sample_smaller_than_asked_is_used_and_said(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(folder, pairs_per_modality=40, gallery=20, policies=["full"])
    (entry,) = evaluation.run(config, None, tmp_path)["policies"]
    assert entry["modalities"]["text"]["n"] == 20
    assert "27 text pairs, not 40: evaluating on 20, in galleries of 20" in caplog.text


@pytest.mark.parametrize(
    ("keys", "gates", "error", "message"),
    [
        ({"policies": ["full", "random"]}, "gates", ConfigError, "add gates"),
        ({}, None, ConfigError, "but there are none"),
        ({}, "foreign", CheckpointError, "belong to backbone"),
        ({}, "nowhere", CheckpointError, "nowhere"),
    ],
)
def test_errors_leave_nothing_behind(
    folder: Path,
    tmp_path: Path,
    keys: dict[str, Any],
    gates: str | None,
    error: type[Exception],
    message: str,
) -> None:
    out = tmp_path / "out"
    with pytest.raises(error, match=message):
        evaluation.run(make_config(folder, **keys), folder / gates if gates else None, out)
    assert not out.exists()


def test_a_file_without_pairs(folder: Path, tmp_path: Path) -> None:
    write_small_pairs(folder / "empty.parquet", 0)
    config = make_config(folder, policies=["full"])
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"test": str(folder / "empty.parquet")})}
    )
    with pytest.raises(DataError, match=r"empty\.parquet"):
        evaluation.run(config, None, tmp_path)
