"""Gates of every kind: through the disk, an export and the embedder, shifted, and where the other kind is wanted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.config import Config
from rlcompute.embedder import AdaptiveEmbedder
from rlcompute.encoder import encode
from rlcompute.errors import CheckpointError
from rlcompute.export import export_gates
from rlcompute.flops import FlopModel
from rlcompute.pack import EmbeddedInput
from rlcompute.policies.checkpoint import Gates, heads_of, load_gates, save_gates, straight_through_of
from rlcompute.policies.gates import GateHeads, calibrate, init_heads
from rlcompute.policies.ste_expert_skip import ExpertSkip
from rlcompute.policies.ste_gates import StraightThroughGates
from rlcompute.policies.ste_layer_skip import LayerSkip
from rlcompute.policies.ste_null_experts import NullExperts, router_floor
from rlcompute.policies.ste_pruner import TokenPruner
from tests.inputs import every_modality
from tests.tiny import write_tiny_checkpoint

KINDS = ("route_skip_drop", "straight_through")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def embedded(backbone: Backbone) -> list[EmbeddedInput]:
    return backbone.embed_inputs(every_modality(backbone.preprocessor))


@pytest.fixture(scope="module")
def trained(backbone: Backbone, embedded: list[EmbeddedInput]) -> dict[str, Gates]:
    """Gates of each kind, by kind, whose decisions differ from token to token."""
    mean, scale = calibrate(backbone, embedded)
    generator = torch.Generator().manual_seed(0)
    heads = init_heads(mean, scale, skip=0.3, drop=0.2, late_skip_bias=0.0, droppable="all")
    noise = torch.randn(heads.weight_N3F.shape, generator=generator)
    layers, d = backbone.num_layers, backbone.hidden_size
    pruner, skip = TokenPruner(1, layers, d), ExpertSkip(layers, d)
    pruner.heads.standardise(mean[1, None], scale[1, None])
    skip.heads.standardise(mean, scale)
    nulls = NullExperts(4, layers, d)
    nulls.start_at(router_floor(backbone, embedded))
    gates = StraightThroughGates([pruner, skip, LayerSkip(2, layers, d), nulls])
    with torch.no_grad():
        for name, weight in gates.named_parameters():
            if "weight" in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
            elif "bias_n" in name:
                weight.mul_(0.2)
    made: tuple[Gates, ...] = (replace(heads, weight_N3F=heads.weight_N3F + 0.3 * noise), gates)
    return {gates.kind: gates for gates in made}


def names(backbone: Backbone) -> dict[str, str]:
    return {"path": str(backbone.path), "family": backbone.family, "hash": backbone.hash}


def write(folder: Path, gates: Gates, backbone: Backbone, **extra: Any) -> Path:
    folder.mkdir(parents=True)
    save_gates(folder, gates, names(backbone), extra)
    return folder


def embeddings(backbone: Backbone, embedded: list[EmbeddedInput], gates: Gates) -> Tensor:
    return encode(backbone, *backbone.pack(embedded), gates.policy()).embeddings_Sd


def executed(backbone: Backbone, embedded: list[EmbeddedInput], gates: Gates) -> float:
    trace = encode(backbone, *backbone.pack(embedded), gates.policy()).trace
    return float(FlopModel(backbone).executed(trace).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_gates_survive_the_disk(
    kind: str,
    trained: dict[str, Gates],
    backbone: Backbone,
    embedded: list[EmbeddedInput],
    tmp_path: Path,
) -> None:
    gates = trained[kind]
    saved = load_gates(write(tmp_path / "gates", gates, backbone, max_tokens=9))
    assert (saved.gates.kind, saved.backbone, saved.extra) == (kind, names(backbone), {"max_tokens": 9})
    assert saved.gates.describe() == gates.describe()
    assert saved.gates.droppable == gates.droppable
    assert saved.gates.summary() == gates.summary()
    for name, tensor in gates.tensors().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(saved.gates.tensors()[name], tensor)
    again = embeddings(backbone, embedded, saved.gates)
    assert torch.equal(again, embeddings(backbone, embedded, gates))
    shifted = embeddings(backbone, embedded, gates.shifted(-20.0))
    assert not torch.allclose(again, shifted, atol=1e-3), "these gates save nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_embeds_what_the_checkpoint_decides_and_says_what_it_is(
    kind: str, trained: dict[str, Gates], backbone: Backbone, tmp_path: Path
) -> None:
    config = Config.model_validate(
        {
            "run": {"name": "r", "dir": str(tmp_path), "method": "grpo" if kind == KINDS[0] else "ste"},
            "data": {"train": "train.parquet", "test": "test.parquet"},
            "backbone": {"path": str(backbone.path)},
            "ste": {"actions": ["token_pruner", "layer_skip"], "prune_keep": 0.35},
        }
    )
    step = write(tmp_path / "r" / "checkpoints" / "step_000007", trained[kind], backbone, iteration=7)
    (step / "COMPLETE").touch()
    folder = export_gates(config)
    for name in ("gates.safetensors", "gate_config.json"):
        assert (folder / name).read_bytes() == (step / name).read_bytes()
    texts = ["a red bicycle", "a cat on a roof", "x"]
    found = AdaptiveEmbedder.from_pretrained(folder).encode(texts)
    expected = AdaptiveEmbedder(backbone, trained[kind].policy()).encode(texts)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    card = (folder / "README.md").read_text()
    for line in trained[kind].summary():
        assert f"- {line}\n" in card
    told = {
        "route_skip_drop": ("trained with rlcompute (GRPO)", "target saving 45% of", "recall floor"),
        "straight_through": (
            "trained with rlcompute (straight-through)",
            "targets: 35% of the visual tokens kept, 20% of the layers from 3 on skipped, seed 0.",
        ),
    }
    for part in told[kind]:
        assert part in card
    assert ("GRPO" in card, "straight-through" in card) == (kind == KINDS[0], kind == KINDS[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_shift_only_ever_saves_more(
    kind: str, trained: dict[str, Gates], backbone: Backbone, embedded: list[EmbeddedInput]
) -> None:
    gates = trained[kind]
    shifts = (-20.0, -2.0, -1.0, -0.3, 0.0, 0.3, 1.0, 2.0, 20.0)
    spent = [executed(backbone, embedded, gates.shifted(shift)) for shift in shifts]
    assert spent == sorted(spent, reverse=True)
    assert len(set(spent)) > len(spent) // 2
    assert spent[shifts.index(0.0)] == executed(backbone, embedded, gates)
    full = float(FlopModel(backbone).full(torch.tensor([x.length for x in embedded])).sum())
    # At the ends nothing is saved, or nothing but what no gate may take is left.
    assert 1.0 <= spent[0] / full < 1.1
    assert spent[-1] / full < 0.5


def test_a_shift_moves_all_that_saves_against_routing(trained: dict[str, Gates]) -> None:
    heads = trained["route_skip_drop"]
    assert isinstance(heads, GateHeads)
    before, after = heads.weight_N3F.clone(), heads.shifted(0.75).weight_N3F
    moved = torch.zeros_like(before)
    moved[:, 1:, -1] = 0.75
    assert torch.allclose(after - before, moved, atol=1e-6)
    assert torch.equal(heads.weight_N3F, before), "the heads themselves are left as they were"


def test_heads_are_written_as_before_there_was_another_kind(
    trained: dict[str, Gates], backbone: Backbone, tmp_path: Path
) -> None:
    folder = write(tmp_path / "gates", trained["route_skip_drop"], backbone, iteration=3)
    assert json.loads((folder / "gate_config.json").read_text()) == {
        "format_version": 1,
        "kind": "route_skip_drop",
        "droppable": "all",
        "backbone": names(backbone),
        "iteration": 3,
    }


def test_each_method_refuses_the_others_gates(
    trained: dict[str, Gates], backbone: Backbone, tmp_path: Path
) -> None:
    saved = {kind: load_gates(write(tmp_path / kind, gates, backbone)) for kind, gates in trained.items()}
    heads, gates = (saved[kind] for kind in KINDS)
    assert heads_of(heads, "a") is heads.gates
    assert straight_through_of(gates, "a") is gates.gates
    with pytest.raises(CheckpointError, match=r"a/b: straight-through trained .* run.method=grpo"):
        heads_of(gates, "a/b")
    with pytest.raises(CheckpointError, match=r"a/b: GRPO trained .* run.method=ste"):
        straight_through_of(heads, "a/b")


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.pop(key)


def setting(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update({key: value})


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (
            "route_skip_drop",
            setting("kind", "fuzzy"),
            "kind 'fuzzy' is not known .* route_skip_drop, straight",
        ),
        ("straight_through", setting("kind", ["straight_through"]), "damaged"),
        ("route_skip_drop", setting("format_version", 7), "format 7 .* not known"),
        ("route_skip_drop", without("droppable"), "damaged .*droppable"),
        ("straight_through", without("gates"), "damaged .*gates"),
        ("straight_through", without("backbone"), "damaged .*backbone"),
        ("straight_through", setting("gates", {"teleport": {}}), "unknown kind of gate 'teleport'"),
        ("straight_through", setting("gates", []), "damaged|do not fit"),
        ("straight_through", setting("backbone", {"path": 1, "family": "x", "hash": "x"}), "not all strings"),
        ("route_skip_drop", setting("kind", "straight_through"), "damaged .*gates"),
    ],
)
def test_damaged_descriptions_are_told(
    kind: str,
    change: Callable[[dict[str, Any]], None],
    message: str,
    trained: dict[str, Gates],
    backbone: Backbone,
    tmp_path: Path,
) -> None:
    folder = write(tmp_path / "gates", trained[kind], backbone)
    config = json.loads((folder / "gate_config.json").read_text())
    change(config)
    (folder / "gate_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message) as raised:
        load_gates(folder)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_other_gates_do_not_fit(
    kind: str, trained: dict[str, Gates], backbone: Backbone, tmp_path: Path
) -> None:
    other = KINDS[1 - KINDS.index(kind)]
    folder, wrong = (write(tmp_path / x, trained[x], backbone) for x in (kind, other))
    (folder / "gates.safetensors").write_bytes((wrong / "gates.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"damaged|do not fit"):
        load_gates(folder)
