"""The committed embedder: an ordinary checkpoint, small, offline, and made by this recipe's parts."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3_5MoeModel

from rlcompute.demo import CHECKPOINT
from rlcompute.demo.batches import build_batch
from rlcompute.demo.compose import COMPOSERS
from rlcompute.demo.forward import embed, use_shortcuts
from rlcompute.demo.splits import MODALITIES, plan_pool
from rlcompute.demo.tokenizer import train_tokenizer
from rlcompute.preprocess import Preprocessor


@pytest.fixture(scope="module")
def model() -> Qwen3_5MoeModel:
    return AutoModel.from_pretrained(CHECKPOINT, local_files_only=True, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def preprocessor() -> Preprocessor:
    return Preprocessor.from_pretrained(CHECKPOINT)


def batch(preprocessor: Preprocessor, modality, count: int, seed: int = 11):
    rng = np.random.default_rng(seed)
    return build_batch(
        preprocessor,
        modality,
        [COMPOSERS[modality](rng, c) for c in plan_pool(seed, "final", modality, count)],
    )


def test_it_is_small_and_of_the_family(model: Qwen3_5MoeModel) -> None:
    assert type(model) is Qwen3_5MoeModel
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 12_000_000
    assert 4e6 < sum(p.numel() for p in model.parameters()) < 5e6
    text = model.config.text_config
    assert (text.num_hidden_layers, text.hidden_size, text.num_experts, text.num_experts_per_tok) == (
        8,
        128,
        16,
        4,
    )
    assert [i for i, kind in enumerate(text.layer_types) if kind == "full_attention"] == [3, 7]


def test_it_loads_without_torchvision_or_network() -> None:
    program = (
        "import sys, torch; sys.modules['torchvision'] = None\n"
        "from rlcompute.demo import CHECKPOINT\n"
        "from rlcompute.preprocess import Preprocessor\n"
        "from transformers import AutoModel\n"
        "Preprocessor.from_pretrained(CHECKPOINT); AutoModel.from_pretrained(CHECKPOINT, local_files_only=True)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_tokenizer_and_image_parameters(preprocessor: Preprocessor, model: Qwen3_5MoeModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)
    assert len(tokenizer) == model.config.text_config.vocab_size == 4096
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == model.config.image_token_id
    assert tokenizer.convert_tokens_to_ids("<|video_pad|>") == model.config.video_token_id
    assert tokenizer("<|emb|>").input_ids == [preprocessor.emb_token_id]
    sentence = "die katze übt, 12.5 €: ½ naïve 漢字 🦊"
    assert tokenizer.decode(tokenizer(sentence).input_ids) == sentence
    assert Qwen2VLImageProcessorPil.from_pretrained(CHECKPOINT).patch_size == 8


@pytest.mark.slow
def test_tokenizer_is_what_the_recipe_trains(preprocessor: Preprocessor) -> None:
    trained = train_tokenizer()
    assert trained.get_vocab() == preprocessor.tokenizer.get_vocab()
    text = "find the page\nauf dem alten marktplatz kann man <0.5 seconds> wolf kaufen"
    assert trained(text).input_ids == preprocessor.tokenizer(text).input_ids


@pytest.mark.parametrize("modality", MODALITIES)
def test_training_forward_equals_transformers(preprocessor: Preprocessor, modality) -> None:
    plain, fast = (
        AutoModel.from_pretrained(CHECKPOINT, local_files_only=True, dtype=torch.float32).eval()
        for _ in range(2)
    )
    use_shortcuts(fast)
    target = batch(preprocessor, modality, 3).target
    with torch.no_grad():
        ours = embed(fast, target)
        for row in range(3):
            ids = target.ids_BL[row : row + 1, : int(target.last_B[row]) + 1]
            arguments = {}
            if modality != "text":
                kind = "videos" if modality == "video" else "images"
                grid = target.grid_thw[row : row + 1]
                size = int(grid.prod())
                name = "video" if modality == "video" else "image"
                arguments = {
                    f"pixel_values{'_videos' if kind == 'videos' else ''}": target.patches[
                        row * size : (row + 1) * size
                    ],
                    f"{name}_grid_thw": grid,
                    "mm_token_type_ids": (ids == plain.config.image_token_id).int()
                    + 2 * (ids == plain.config.video_token_id).int(),
                }
            theirs = plain(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **arguments)
            torch.testing.assert_close(ours[row], theirs.last_hidden_state[0, -1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("modality", MODALITIES)
def test_it_retrieves_held_out_pairs(model: Qwen3_5MoeModel, preprocessor: Preprocessor, modality) -> None:
    pairs = batch(preprocessor, modality, 24)
    use_shortcuts(model)
    with torch.no_grad():
        query, target = (F.normalize(embed(model, side), dim=-1) for side in (pairs.query, pairs.target))
    found = ((query @ target.T).argmax(1) == torch.arange(24)).float().mean()
    assert found >= 0.9
