"""Statistics of routed experts against one (token, expert) at a time on transformers' own modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5MoeModel

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.errors import CheckpointError
from rlcompute.pack import EmbeddedInput
from rlcompute.policies.expert_statistics import ExpertStatistics, collect
from rlcompute.preprocess import ModelInput
from tests.inputs import every_modality, transformers_embedding
from tests.tiny import write_tiny_checkpoint

GROUPS = ("text", "image", "visdoc", "video", "video", "text")
MODALITIES = ("text", "image", "visdoc", "video")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def backbone(checkpoint: Path) -> Backbone:
    return load_backbone(checkpoint)


@pytest.fixture(scope="module")
def inputs(backbone: Backbone) -> list[ModelInput]:
    return every_modality(backbone.preprocessor)


@pytest.fixture(scope="module")
def embedded(backbone: Backbone, inputs: list[ModelInput]) -> list[EmbeddedInput]:
    return backbone.embed_inputs(inputs)


def assert_same(a: ExpertStatistics, b: ExpertStatistics) -> None:
    assert a.modalities == b.modalities
    for name, tensor in a.tensors().items():
        other = b.tensors()[name]
        assert tensor.dtype == other.dtype
        if tensor.dtype == torch.int64:
            assert torch.equal(tensor, other), name
        else:
            torch.testing.assert_close(tensor, other, rtol=1e-4, atol=1e-5, msg=name)


def expert_inputs(model: Any, x: ModelInput) -> list[Tensor]:
    """What each layer's mixture of experts reads in the stock forward of one input, [L,d]."""
    seen: list[Tensor] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
        for layer in model.language_model.layers
    ]
    transformers_embedding(model, x)
    for hook in hooks:
        hook.remove()
    return seen


@torch.no_grad()
def token_by_token(model: Any, inputs: list[ModelInput]) -> ExpertStatistics:
    text = model.config.text_config
    total = ExpertStatistics.zeros(MODALITIES, text.num_hidden_layers, text.num_experts)
    for group, x in zip(GROUPS, inputs, strict=True):
        g = MODALITIES.index(group)
        for n, x_Ld in enumerate(expert_inputs(model, x)):
            mlp = model.language_model.layers[n].mlp
            # In the last layer only the embedding token's experts run.
            for x_d in x_Ld[-1:] if n == text.num_hidden_layers - 1 else x_Ld:
                logits_1E, weights_1k, ids_1k = mlp.gate(x_d[None])
                total.tokens_GN[g, n] += 1
                total.mass_GNE[g, n] += logits_1E[0].double().softmax(0)
                for weight, e in zip(weights_1k[0].tolist(), ids_1k[0], strict=True):
                    out_1d = mlp.experts(x_d[None], e.view(1, 1), torch.ones(1, 1))
                    norm = float(out_1d.double().norm())
                    total.visits_GNE[g, n, e] += 1
                    total.norm_GNE[g, n, e] += norm
                    total.square_GNE[g, n, e] += norm**2
                    total.weighted_GNE[g, n, e] += weight * norm
    return total


def test_equals_one_token_and_expert_at_a_time(
    backbone: Backbone, checkpoint: Path, inputs: list[ModelInput], embedded: list[EmbeddedInput]
) -> None:
    model = Qwen3_5MoeModel.from_pretrained(checkpoint).eval()
    assert_same(collect(backbone, embedded, GROUPS, batch_size=4), token_by_token(model, inputs))


def test_every_token_is_counted_once_and_in_the_last_layer_emb_alone(
    backbone: Backbone, embedded: list[EmbeddedInput]
) -> None:
    statistics = collect(backbone, embedded, GROUPS, batch_size=3)
    for g, modality in enumerate(MODALITIES):
        mine = [x.length for x, group in zip(embedded, GROUPS, strict=True) if group == modality]
        assert statistics.tokens_GN[g].tolist() == [sum(mine)] * (backbone.num_layers - 1) + [len(mine)]
    assert torch.equal(statistics.visits_GNE.sum(-1), backbone.top_k * statistics.tokens_GN)
    torch.testing.assert_close(statistics.mass_GNE.sum(-1), statistics.tokens_GN.double())


@pytest.mark.parametrize("batch_size", [1, 6])
def test_packing_does_not_matter(backbone: Backbone, embedded: list[EmbeddedInput], batch_size: int) -> None:
    reference = collect(backbone, embedded, GROUPS, batch_size=4)
    assert_same(collect(backbone, embedded, GROUPS, batch_size=batch_size), reference)


def test_parts_add_up_to_the_whole(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    parts = [collect(backbone, embedded[i : i + 2], GROUPS[i : i + 2], batch_size=2) for i in (0, 2, 4)]
    assert parts[0].modalities != parts[1].modalities
    total = parts[0] + parts[1] + parts[2]
    assert_same(total, collect(backbone, embedded, GROUPS, batch_size=2))
    assert int(parts[0].tokens_GN.sum()) < int(total.tokens_GN.sum())  # the terms stay as they were


def test_half_precision_is_summed_in_double(checkpoint: Path, inputs: list[ModelInput]) -> None:
    backbone = load_backbone(checkpoint, dtype="bfloat16")
    statistics = collect(backbone, backbone.embed_inputs(inputs), GROUPS, batch_size=6)
    torch.testing.assert_close(
        statistics.mass_GNE.sum(-1), statistics.tokens_GN.double(), rtol=1e-12, atol=0.0
    )
    assert bool((statistics.weighted_GNE <= statistics.norm_GNE).all())


def test_tensors_go_and_come_back(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    statistics = collect(backbone, embedded, GROUPS, batch_size=6)
    again = ExpertStatistics.from_tensors(MODALITIES, statistics.tensors() | {"scales_NM": torch.zeros(2)})
    assert again.modalities == MODALITIES
    assert all(torch.equal(x, again.tensors()[name]) for name, x in statistics.tensors().items())


def test_tensors_that_do_not_fit_are_refused() -> None:
    good = ExpertStatistics.zeros(MODALITIES, 2, 4).tensors()
    missing = {name: x for name, x in good.items() if name != "mass_GNE"}
    with pytest.raises(CheckpointError, match="without mass_GNE: calibrate again"):
        ExpertStatistics.from_tensors(MODALITIES, missing)
    for name, bad in (
        ("norm_GNE", torch.zeros(4, 2, 3, dtype=torch.float64)),
        ("tokens_GN", torch.zeros(4, 3, dtype=torch.int64)),
        ("square_GNE", torch.zeros(4, 2, 4)),
        ("visits_GNE", torch.zeros(8, dtype=torch.int64)),
    ):
        with pytest.raises(CheckpointError, match=r"does not fit.*calibrate again"):
            ExpertStatistics.from_tensors(MODALITIES, good | {name: bad})
    with pytest.raises(CheckpointError, match="3 modalities"):
        ExpertStatistics.from_tensors(MODALITIES[:3], good)


def test_wrong_arguments(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    with pytest.raises(ValueError, match="6 inputs but 5 groups"):
        collect(backbone, embedded, GROUPS[:5], batch_size=2)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        collect(backbone, embedded, GROUPS, batch_size=0)
    with pytest.raises(ValueError, match="different backbones"):
        ExpertStatistics.zeros(("text",), 2, 4) + ExpertStatistics.zeros(("text",), 2, 8)
