"""The recipe's parts: batches, labels, losses, initialisation, and a run in miniature."""

from __future__ import annotations

import math
from collections import Counter
from itertools import repeat
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rlcompute.demo import CHECKPOINT, recall, recipe, stages
from rlcompute.demo.batches import BatchStream, build_batch, token_labels
from rlcompute.demo.compose import COMPOSERS, Box, Sample
from rlcompute.demo.concepts import SYMBOLS
from rlcompute.demo.dataset import demo_pairs
from rlcompute.demo.model import build_model
from rlcompute.demo.splits import MODALITIES, draw_combination, plan_pool
from rlcompute.preprocess import Preprocessor


@pytest.fixture(scope="module")
def preprocessor() -> Preprocessor:
    return Preprocessor.from_pretrained(CHECKPOINT)


@pytest.mark.parametrize("modality", MODALITIES)
def test_training_sequences_equal_served_ones(preprocessor: Preprocessor, modality) -> None:
    pairs = list(demo_pairs(0, "test", modality, 3))
    served = [(preprocessor(pair.query), preprocessor(pair.target)) for pair in pairs]
    samples = []
    for index, combination in enumerate(plan_pool(0, "test", modality, 3)):
        entropy = np.random.SeedSequence([0, crc32(f"test/{modality}/draw".encode()), index])
        samples.append(COMPOSERS[modality](np.random.default_rng(entropy), combination))
    trained = build_batch(preprocessor, modality, samples)
    for side, inputs in enumerate((trained.query, trained.target)):
        for row, pair in enumerate(served):
            length = int(inputs.last_B[row]) + 1
            assert torch.equal(inputs.ids_BL[row, :length], pair[side].input_ids)
    if modality != "text":
        assert torch.equal(trained.target.patches, torch.cat([target.patches for _, target in served]))


def test_streams_repeat_by_seed(preprocessor: Preprocessor) -> None:
    first, again, other = (
        next(iter(BatchStream(preprocessor, seed=(0, n), size=4, modality="text", single=False)))
        for n in (1, 1, 2)
    )
    assert torch.equal(first.query.ids_BL, again.query.ids_BL)
    assert (
        first.query.ids_BL.shape != other.query.ids_BL.shape
        or (first.query.ids_BL != other.query.ids_BL).any()
    )


def test_interchangeable_targets_are_marked(preprocessor: Preprocessor) -> None:
    rng = np.random.default_rng(0)
    one, two = (COMPOSERS["text"](rng, draw_combination(rng, "text", "train")) for _ in range(2))
    batch = build_batch(preprocessor, "text", [one, two, one])
    assert batch.same_BB.tolist() == [[True, False, True], [False, True, False], [True, False, True]]
    assert torch.allclose(batch.asked_BC.sum(1), torch.ones(3))
    assert set(batch.asked_BC[0].nonzero().flatten().tolist()) == set(one.asked)


def test_labels_follow_the_boxes() -> None:
    sample = Sample(
        (3, 9),
        "",
        "",
        np.zeros((2, 32, 48, 3), np.uint8),
        boxes=((Box(3, 0, 16, 16, 32), Box(9, 16, 0, 8, 8)),),
    )
    nothing = len(SYMBOLS)
    assert token_labels(sample, 16).tolist() == [nothing, 3, 3, nothing, nothing, nothing]


def test_contrastive_loss_ignores_interchangeable_targets(preprocessor: Preprocessor) -> None:
    rng = np.random.default_rng(0)
    one, two = (COMPOSERS["text"](rng, draw_combination(rng, "text", "train")) for _ in range(2))
    batch = build_batch(preprocessor, "text", [one, two, one])
    query, target = torch.randn(3, 8), torch.randn(3, 8)
    scores = (F.normalize(query, dim=1) @ F.normalize(target, dim=1).T * 5).tolist()
    rivals = {0: [0, 1], 1: [0, 1, 2], 2: [1, 2]}
    rows = [math.log(sum(math.exp(scores[i][j]) for j in rivals[i])) - scores[i][i] for i in range(3)]
    columns = [math.log(sum(math.exp(scores[j][i]) for j in rivals[i])) - scores[i][i] for i in range(3)]
    loss = stages._contrastive_loss(query, target, batch, torch.tensor(5.0))
    assert loss.item() == pytest.approx((sum(rows) + sum(columns)) / 6, rel=1e-4)


def test_concept_loss_is_zero_for_the_asked_distribution() -> None:
    asked = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    assert stages._concept_loss((asked + 1e-12).log(), asked).item() == pytest.approx(0, abs=1e-5)
    assert stages._concept_loss(torch.zeros(2, 3), asked).item() == pytest.approx(
        (math.log(1.5) + math.log(3)) / 2
    )


def test_hard_modalities_are_drawn_more_often() -> None:
    mix = stages.HardestFirst({"image": repeat("easy"), "text": repeat("hard")}, seed=0)  # type: ignore[dict-item]
    for _ in range(50):
        mix.report("image", 0.04)
        mix.report("text", 3.2)
    drawn = Counter(mix.draw() for _ in range(900))
    assert drawn["hard"] / drawn["easy"] == pytest.approx(math.sqrt(3.2 / 0.05), rel=0.35)


def test_initialisation_lets_the_state_remember(preprocessor: Preprocessor) -> None:
    torch.manual_seed(0)
    model = build_model(preprocessor.tokenizer)
    for layer in model.language_model.layers:
        if hasattr(layer, "linear_attn"):
            mixer = layer.linear_attn
            step = F.softplus(mixer.dt_bias)
            assert (step >= 0.00099).all()
            assert (step <= 0.101).all()
            assert (mixer.A_log.exp() * step <= 0.81).all(), "a token must not erase the state"
    scale = model.language_model.layers[0].mlp.experts.gate_up_proj.std().item()
    assert scale == pytest.approx(0.8 * 128**-0.5, rel=0.02)


def test_names_of_a_concept_end_up_together(preprocessor: Preprocessor) -> None:
    torch.manual_seed(0)
    model = build_model(preprocessor.tokenizer)
    lines: list[str] = []
    stages.align_names(model, preprocessor, lines.append)
    table = model.get_input_embeddings().weight
    english, german = (
        stages._name_anchors(table, stages._name_tokens(preprocessor, language)) for language in ("en", "de")
    )
    assert ((german @ english.T).argmax(1) == torch.arange(len(SYMBOLS))).float().mean() > 0.95
    assert len(lines) == 1


@pytest.mark.slow
def test_recipe_in_miniature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preprocessor: Preprocessor
) -> None:
    monkeypatch.setattr(recipe, "train_tokenizer", lambda: preprocessor.tokenizer)
    monkeypatch.setattr(recipe, "_BATCH", 8)
    monkeypatch.setattr(recall, "_GALLERY", 8)
    recipe.train(tmp_path / "first", minutes=0.1, seed=0)
    recipe.train(tmp_path / "second", minutes=0.05, seed=0, start=tmp_path / "first")
    assert {path.name for path in (tmp_path / "first").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "recall.json",
    }
    first, second = (Preprocessor.from_pretrained(tmp_path / name) for name in ("first", "second"))
    assert first.emb_token_id == second.emb_token_id == preprocessor.emb_token_id
