"""Gates with an adapter beside them: whatever runs them runs the adapted backbone, and full compute the plain one."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlcompute import evaluation
from rlcompute.backbones import load_backbone, lora
from rlcompute.backbones.base import Backbone
from rlcompute.compare.run import points
from rlcompute.data.schema import Pair, read_pairs
from rlcompute.decision import ROUTE, Full
from rlcompute.embedder import AdaptiveEmbedder
from rlcompute.encoder import encode
from rlcompute.errors import ConfigError
from rlcompute.export import export_gates
from rlcompute.held_out import ranks_by_modality, read_sample
from rlcompute.metrics import ranking_metrics
from rlcompute.policies.checkpoint import save_gates
from rlcompute.policies.gates import init_heads
from tests.compare.measured import make_config
from tests.pairs import write_small_pairs
from tests.tiny import write_tiny_checkpoint

pytest.importorskip("peft")

PER_MODALITY = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, pairs, and gates that route everything: without an adapter, and with one that changes a lot."""
    root = tmp_path_factory.mktemp("adapted")
    write_tiny_checkpoint(root / "tiny", ("linear_attention", "full_attention"))
    write_small_pairs(root / "test.parquet", PER_MODALITY)
    backbone = load_backbone(root / "tiny")
    mean, scale = torch.zeros(backbone.num_layers, backbone.hidden_size), torch.ones(backbone.num_layers)
    heads = init_heads(mean, scale, skip=0.2, drop=0.1, late_skip_bias=0.0, droppable="all")
    weight_N3F = torch.zeros_like(heads.weight_N3F)
    weight_N3F[:, ROUTE, -1] = 9.0
    names = {"path": str(root / "tiny"), "family": backbone.family, "hash": backbone.hash}
    for name in ("plain", "adapted"):
        (root / name).mkdir()
        save_gates(root / name, replace(heads, weight_N3F=weight_N3F), names, {})
    adapter = lora.attach(backbone, rank=2, alpha=8, targets=("attention", "experts", "vision"), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for factor in adapter.parameters():
            factor.add_(0.5 * torch.randn(factor.shape, generator=generator))
    adapter.save(root / "adapted" / lora.FOLDER)
    return root


def embed_all(backbone: Backbone, pairs: list[Pair]) -> np.ndarray:
    """Full compute of queries, then of targets, [2P,d]."""
    sides = [pair.query for pair in pairs] + [pair.target for pair in pairs]
    inputs = backbone.embed_inputs([backbone.preprocessor(side) for side in sides])
    return encode(backbone, *backbone.pack(inputs), Full()).embeddings_Sd.numpy()


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """Ranks by modality under full compute, of the backbone as it is and of the adapted one."""
    config = make_config(folder, folder / "unused")
    pairs = read_sample(config)
    flat = [pair for group in pairs.values() for pair in group]
    ranks = {}
    for name, adapter in (("plain", None), ("adapted", folder / "adapted" / lora.FOLDER)):
        embeddings_Sd = embed_all(load_backbone(folder / "tiny", adapter=adapter), flat)
        ranks[name] = ranks_by_modality(embeddings_Sd, pairs, config.evaluation.gallery)
    assert any((ranks["plain"][name] != ranks["adapted"][name]).any() for name in pairs)
    return ranks


def test_embedder(folder: Path) -> None:
    pairs = read_pairs(folder / "test.parquet").pairs
    plain, adapted = (
        embed_all(load_backbone(folder / "tiny", adapter=adapter), pairs)[: len(pairs)]
        for adapter in (None, folder / "adapted" / lora.FOLDER)
    )
    assert np.abs(plain - adapted).max() > 0.05
    rows = [pair.query for pair in pairs]
    for name, full_compute, wanted in (
        ("adapted", False, adapted),
        ("adapted", True, plain),
        ("plain", False, plain),
    ):
        embedder = AdaptiveEmbedder.from_pretrained(folder / name, full_compute=full_compute)
        np.testing.assert_allclose(embedder.encode(rows=rows), wanted, atol=5e-5)


def test_evaluation(folder: Path, tmp_path: Path, expected: dict[str, dict[str, np.ndarray]]) -> None:
    config = make_config(folder, tmp_path)
    content = evaluation.run(config, folder / "adapted", tmp_path / "out")
    entries = {entry["name"]: entry for entry in content["policies"]}
    # The gates route everything, so their random control does too, on the weights that it shares with them.
    for name, weights in (("full", "plain"), ("gates", "adapted"), ("random", "adapted")):
        for modality, ranks_P in expected[weights].items():
            assert entries[name]["modalities"][modality] == pytest.approx(vars(ranking_metrics(ranks_P)))
    assert entries["gates"]["flops"]["logical_saved"] == 0.0


def test_comparison(folder: Path, tmp_path: Path, expected: dict[str, dict[str, np.ndarray]]) -> None:
    gates = shutil.copytree(folder / "adapted", tmp_path / "gates")
    config, policies = make_config(folder, tmp_path / "cache"), ["full", f"gates:path={gates}"]
    full, adapted = points(config, policies, [])
    for point, weights in ((full, "plain"), (adapted, "adapted")):
        for modality, ranks_P in expected[weights].items():
            np.testing.assert_array_equal(point.ranks[modality], ranks_P)
    shutil.rmtree(gates / lora.FOLDER)
    (without,) = points(
        config, policies[1:], []
    )  # other weights: what was measured with the adapter does not count
    for modality, ranks_P in expected["plain"].items():
        np.testing.assert_array_equal(without.ranks[modality], ranks_P)


def test_comparison_refuses_rules_of_the_backbone_without_the_adapter(folder: Path, tmp_path: Path) -> None:
    config = make_config(folder, tmp_path)
    for rule in ("prune_experts:experts=4,saliency=man", "modes:skip=0.3"):
        with pytest.raises(ConfigError, match=rf"trained with the adapter.*{rule.partition(':')[0]} belongs"):
            points(config, [f"{rule}+gates:path={folder / 'adapted'}"], [])


def test_export_carries_the_adapter(folder: Path, tmp_path: Path) -> None:
    config = make_config(folder, tmp_path)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(tmp_path)})})
    checkpoint = config.run.folder / "checkpoints" / "step_000001"
    shutil.copytree(folder / "adapted", checkpoint)
    (checkpoint / "COMPLETE").touch()
    out = export_gates(config)
    for name in (lora.CONFIG, lora.TENSORS):
        assert (out / lora.FOLDER / name).read_bytes() == (checkpoint / lora.FOLDER / name).read_bytes()
    assert "adapter" in (out / "README.md").read_text()


def test_without_peft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"rlcompute\[lora\]"):
        AdaptiveEmbedder.from_pretrained(folder / "adapted")
    AdaptiveEmbedder.from_pretrained(folder / "plain")
