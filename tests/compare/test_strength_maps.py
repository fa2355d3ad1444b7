"""Maps of packed inputs against transformers' own forward of each input alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcompute.backbones import load_backbone
from rlcompute.compare.strength_maps import input_maps, mixer_layers
from rlcompute.decision import Full
from rlcompute.encoder import encode
from tests.inputs import every_modality, transformers_embedding
from tests.tiny import write_tiny_checkpoint

ATTENTION_LAST = ("linear_attention", "full_attention", "linear_attention", "full_attention")
DELTA_LAST = ("full_attention", "linear_attention", "linear_attention")


@pytest.fixture(scope="module", params=[ATTENTION_LAST, DELTA_LAST], ids=["attention_last", "delta_last"])
def backbone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), request.param))


class StockMaps:
    """What transformers' layers compute, caught in their own forward with the attention map in the open."""

    def __init__(self, model: Any) -> None:
        self.logits: list[Tensor] = []
        self.attention_HLL: list[Tensor] = []
        for layer in model.language_model.layers:
            if layer.block_type == "full_attention":
                layer.self_attn.register_forward_hook(
                    lambda module, args, output: self.attention_HLL.append(output[1][0])
                )
            else:
                layer.linear_attn.in_proj_b.register_forward_hook(
                    lambda module, args, output: self.logits.append(output[0])
                )


def test_maps_equal_those_of_the_stock_forward(backbone: Any, tmp_path: Path) -> None:
    inputs = every_modality(backbone.preprocessor)
    maps = input_maps(backbone, backbone.embed_inputs(inputs))
    stock = load_backbone(backbone.path).model
    stock.set_attn_implementation("eager")
    caught = StockMaps(stock)
    for x, own in zip(inputs, maps, strict=True):
        caught.logits.clear()
        caught.attention_HLL.clear()
        transformers_embedding(stock, x)
        strength = [logits.sigmoid().mean(-1)[:-1] for logits in caught.logits]
        emb = [probs[:, -1].mean(0)[:-1] for probs in caught.attention_HLL]
        received = [probs.sum(1).mean(0)[:-1] for probs in caught.attention_HLL]
        np.testing.assert_allclose(own.strength_BL, torch.stack(strength), atol=1e-5)
        np.testing.assert_allclose(own.emb_attention_AL, torch.stack(emb), atol=1e-5)
        np.testing.assert_allclose(own.received_attention_AL, torch.stack(received), atol=1e-4)
        assert len(own.modality_L) == len(x.input_ids) - 1


def test_watching_leaves_the_backbone_as_it_was(backbone: Any) -> None:
    inputs = backbone.embed_inputs(every_modality(backbone.preprocessor))
    layers = list(backbone.layers)
    before = encode(backbone, *backbone.pack(inputs), Full()).embeddings_Sd
    input_maps(backbone, inputs)
    assert all(a is b for a, b in zip(layers, backbone.layers, strict=True))
    torch.testing.assert_close(encode(backbone, *backbone.pack(inputs), Full()).embeddings_Sd, before)


def test_layers_are_told_apart(backbone: Any) -> None:
    strength, attention = mixer_layers(backbone)
    assert sorted((*strength, *attention)) == list(range(backbone.num_layers))
    assert all(backbone.layers[layer].is_attention for layer in attention)
