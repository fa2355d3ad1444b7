"""The command's work from configuration to checkpoint, on a tiny random embedder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from rlcompute.backbones import load_backbone
from rlcompute.config import Config
from rlcompute.decision import Full
from rlcompute.embedder import make_rows
from rlcompute.encoder import encode
from rlcompute.errors import ConfigError
from rlcompute.policies.expert_pruning import RECORD, kept_experts
from rlcompute.policies.expert_statistics import ExpertStatistics
from rlcompute.policy_calibration import PolicyCalibrator
from rlcompute.prune_experts import prune, sample_rows
from tests.inputs import relative_error, transformers_embedding
from tests.pairs import write_small_pairs
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prune")
    write_tiny_checkpoint(root / "tiny")
    write_small_pairs(root / "train.parquet", 6)
    return root


def make_config(folder: Path, **calibration: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "test"},
            "data": {"train": str(folder / "train.parquet"), "test": "unused.parquet"},
            "backbone": {"path": str(folder / "tiny")},
            "calibration": {"pairs_per_modality": 4, "dir": str(folder / "calibration")} | calibration,
        }
    )


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, str]:
    return dict(prune(make_config(folder), "reap", 5, folder / "out"))


@pytest.mark.usefixtures("rows")
def test_the_checkpoint_keeps_what_the_calibration_says(folder: Path) -> None:
    config = make_config(folder)
    calibration = PolicyCalibrator(config).calibration
    kept_NE = kept_experts(calibration.statistics, "reap", 5, top_k=3)
    record = json.loads((folder / "out" / RECORD).read_text())
    assert record["kept_experts"] == kept_NE.tolist()
    assert record["saliency"] == "reap"
    assert record["calibration"] == calibration.sample
    routers = AutoModel.from_pretrained(folder / "out").language_model.layers
    originals = AutoModel.from_pretrained(folder / "tiny").language_model.layers
    for layer, original, kept_E in zip(routers, originals, kept_NE, strict=True):
        assert torch.equal(layer.mlp.gate.weight, original.mlp.gate.weight[kept_E])
        assert torch.equal(layer.mlp.experts.down_proj, original.mlp.experts.down_proj[kept_E])


@pytest.mark.usefixtures("rows")
def test_the_checkpoint_embeds_by_itself(folder: Path) -> None:
    backbone = load_backbone(folder / "out")
    picture = np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8)
    (side,) = make_rows(texts=["a moon"], images=[picture])
    x = backbone.preprocessor(side)
    stock = transformers_embedding(AutoModel.from_pretrained(folder / "out").eval(), x)
    ours = encode(backbone, *backbone.pack(backbone.embed_inputs([x])), Full()).embeddings_Sd
    assert relative_error(ours, stock[None]) < 1e-5
    assert backbone.num_experts == 5


def test_memory_before_and_after(folder: Path, rows: dict[str, str]) -> None:
    def size(name: str) -> int:
        return sum(x.numel() * 4 for x in AutoModel.from_pretrained(folder / name).parameters())

    before, after = size("tiny"), size("out")
    assert rows["weights"].startswith(f"{before:,} bytes ({before / 2**20:.1f} MiB) before, {after:,} bytes")
    assert rows["weights"].endswith(f" after, {after / before:.1%} of it")
    assert rows["routed experts and routers"].endswith("62.5% of it")  # 5 of 8
    assert rows["checkpoint"] == f"{folder / 'out'}: 5 of 8 routed experts a layer, by reap"
    assert Path(rows["calibration"]).parent == folder / "calibration"


def test_visits_of_every_layer(rows: dict[str, str]) -> None:
    # Two sides of four image and four text pairs.
    assert rows["layer 3"].startswith("16 <emb> tokens only; visits of an expert: least ")
    assert "<emb>" not in rows["layer 2"]
    assert [name for name in rows if name.startswith("layer")] == [f"layer {n}" for n in range(4)]


def test_visit_counts_by_hand() -> None:
    zeros = ExpertStatistics.zeros(("image", "text"), 2, 4)
    zeros.tokens_GN.copy_(torch.tensor([[1000, 2], [500, 3]]))
    zeros.visits_GNE.copy_(
        torch.tensor([[[800, 100, 60, 40], [2, 0, 0, 0]], [[300, 150, 50, 0], [0, 3, 0, 0]]])
    )
    rows = dict(sample_rows(zeros, torch.tensor([[0, 1], [0, 2]])))
    assert rows == {
        "sample": "1,000 tokens of image pairs, 500 tokens of text pairs",
        "layer 0": "1,500 tokens; visits of an expert: least 40, median 180; never visited: 0 of 4, of them kept: 0",
        "layer 1": (
            "5 <emb> tokens only; visits of an expert: least 0, median 1; never visited: 2 of 4, of them kept: 1"
        ),
    }


@pytest.mark.parametrize(
    ("saliency", "experts", "message"),
    [
        ("magic", 5, "saliency 'magic' does not exist"),
        ("reap", 2, "cannot keep 2 experts a layer"),
        ("reap", 9, "cannot keep 9 experts a layer"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    saliency: str, experts: int, message: str, folder: Path, tmp_path: Path
) -> None:
    config = make_config(folder, dir=str(tmp_path / "calibration"))
    with pytest.raises(ConfigError, match=message):
        prune(config, saliency, experts, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_refused_first(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("mine")
    config = make_config(folder, dir=str(tmp_path / "calibration"))
    with pytest.raises(ConfigError, match="is not an empty folder"):
        prune(config, "reap", 5, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "out"]
